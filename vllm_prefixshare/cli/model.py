"""What a checkpoint's ``config.json`` says about its attention layers."""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_prefixshare.config import DTYPES, AttentionConfig
from vllm_prefixshare.records import PrefixShareError

#: Model types whose attention is not plain, where the file has no field that says so.
SINKS = {"gpt_oss"}
ALIBI = {"bloom", "mpt", "falcon-rw"}


def add_shape_arguments(command: argparse.ArgumentParser, block_size: int) -> None:
    """The attention shape, as a model or as numbers."""
    command.add_argument("--model", type=Path, help="checkpoint folder to take the shape from")
    command.add_argument("--num-qo-heads", type=int, default=32)
    command.add_argument("--num-kv-heads", type=int, default=8)
    command.add_argument("--head-dim", type=int, default=128)
    command.add_argument("--block-size", type=int, default=block_size)
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def attention_of(args: argparse.Namespace) -> AttentionConfig:
    """The attention shape named by ``--model``, or by its numbers."""
    if args.model is None:
        return AttentionConfig(
            args.num_qo_heads, args.num_kv_heads, args.head_dim, args.block_size, args.dtype
        )
    return attention_shape(args.model, read_config(args.model), args.block_size, args.dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """The fields that describe the text model in ``folder/config.json``.

    Raises:
        PrefixShareError: it cannot be read, or is not an object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        # a multimodal model keeps them one level down
        config = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise PrefixShareError(f"{path} does not describe a model ({e}).") from None
    return config


def attention_shape(
    folder: Path, config: dict[str, Any], block_size: int, dtype: str
) -> AttentionConfig:
    """The shape of the model's attention layers.

    Raises:
        PrefixShareError: a field is missing or out of range.
    """
    try:
        heads = config["num_attention_heads"]
        return AttentionConfig(
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            block_size,
            dtype,
        )
    except (KeyError, TypeError, ZeroDivisionError) as e:
        path = folder / "config.json"
        raise PrefixShareError(f"{path} does not describe a model ({e}).") from None


@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind, with the fields of vLLM's ``AttentionSelectorConfig`` that decide
    whether they are served.

    count: how many there are. attention: whether they have a KV cache. num_heads, num_kv_heads:
    query and KV heads of the model, on all GPUs.
    logits_soft_cap, alibi, sliding_window: what vLLM says to the layer's implementation only.
    sliding_window: tokens that a query sees, its own included; None for all, or if the file does
    not say.
    """

    name: str
    count: int
    head_size: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    attention: bool = True
    use_mla: bool = False
    use_sparse: bool = False
    has_sink: bool = False
    has_sliding_window: bool = False
    chunked: bool = False
    logits_soft_cap: bool = False
    alibi: bool = False
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    attn_type: str = "decoder"


def layer_kinds(config: dict[str, Any]) -> list[LayerKind]:
    """The kinds of layers of a model, in the order of their first layer."""
    return [_layer_kind(config, name, n) for name, n in Counter(_layer_types(config)).items()]


def _layer_types(config: dict[str, Any]) -> list[str]:
    """A name for each layer, in the words of transformers' ``layer_types``."""
    count = int(config.get("num_hidden_layers") or 1)
    if listed := config.get("layer_types"):
        return list(listed)[:count]
    if every := config.get("full_attention_interval"):
        names = ["linear_attention"] * (every - 1) + ["full_attention"]
        return [names[i % every] for i in range(count)]
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    if window and (every := config.get("sliding_window_pattern")):
        names = ["sliding_attention"] * (every - 1) + ["full_attention"]
        return [names[i % every] for i in range(count)]
    if window and "use_sliding_window" in config:  # Qwen2: the first layers see everything
        full = min(count, int(config.get("max_window_layers") or 0))
        return ["full_attention"] * full + ["sliding_attention"] * (count - full)
    return ["sliding_attention" if window else "full_attention"] * count


def _layer_kind(config: dict[str, Any], name: str, count: int) -> LayerKind:
    model_type = str(config.get("model_type", ""))
    is_full = name == "full_attention"
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    if is_full and config.get("global_head_dim"):
        head_dim = config["global_head_dim"]
    if latent := "kv_lora_rank" in config:
        head_dim = config["kv_lora_rank"] + int(config.get("qk_rope_head_dim") or 0)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return LayerKind(
        name=name.replace("_", " "),
        count=count,
        head_size=int(head_dim),
        num_heads=int(heads),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        # vLLM runs float32 checkpoints in 16 bits unless told otherwise
        dtype="bfloat16" if dtype.endswith("float32") else dtype.removeprefix("torch."),
        attention=name in ("full_attention", "sliding_attention", "chunked_attention"),
        use_mla=latent,
        use_sparse="index_topk" in config,
        has_sink=model_type in SINKS,
        has_sliding_window=name == "sliding_attention",
        chunked=name == "chunked_attention",
        logits_soft_cap=bool(config.get("attn_logit_softcapping")),
        alibi=bool(config.get("alibi")) or model_type in ALIBI,
        sliding_window=config.get("sliding_window") if name == "sliding_attention" else None,
    )
