"""What a checkpoint's ``config.json`` says about its attention layers."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_prefixshare.cli.families import (
    LEFT_OUT,
    OTHER_NAMES,
    as_plain,
    family,
    for_full,
    for_sliding,
    has_alibi,
    has_mm_prefix,
    has_sinks,
    latent_rank_field,
    layers_field,
    own_fields,
    value_field,
)
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.utils.trusted_files import read_text
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec

#: Largest ``config.json`` that is read, and numbers that no model reaches: a hostile file must not
#: make a command take all memory.
MAX_BYTES = 1 << 20
MAX_HEADS, MAX_LAYERS, MAX_KINDS = 4096, 4096, 64
#: Fields with the number of KV heads, the first of them that vLLM finds.
KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


def read_config(folder: Path) -> dict[str, Any]:
    """The fields that describe the text model in ``folder/config.json``, with those that it names
    otherwise or leaves out; ``whole_model_type``, of which the text model may be a part;
    ``quantization_config`` from ``hf_quant_config.json``, where ModelOpt before 0.31 has it, if
    vLLM would read that.

    Raises:
        PrefixShareError: a file is missing, cannot be read, or is not an object.
    """
    path = folder / "config.json"
    try:
        whole = _object(path)
        # a multimodal model keeps them one level down, and one that speaks two
        config = {**whole, **(whole.get("thinker_config") or {})}
        config = {**config, **(config.get("text_config") or {})}
        for theirs, name in OTHER_NAMES.items():
            if theirs in config:
                config.setdefault(name, config[theirs])
        config = {**LEFT_OUT.get(family(config), {}), **config}
        config["whole_model_type"] = whole.get("model_type")
        beside = folder / "hf_quant_config.json"
        if whole.get("quantization_config") is None and beside.is_file():
            path = beside
            config["quantization_config"] = _object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise PrefixShareError(
            f"{folder} is no folder with a config.json: name the folder of a checkpoint (names on "
            "the Hugging Face hub are not looked up)."
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise PrefixShareError(f"{path} does not describe a model ({e}).") from None
    return config


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or too long.
    """
    if path.is_fifo():
        raise ValueError("it is a pipe")  # to open it would wait for a writer
    found = json.loads(read_text(path, MAX_BYTES))
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def attention_shape(
    folder: Path, config: dict[str, Any], block_size: int, dtype: str
) -> AttentionConfig:
    """The shape of the model's attention layers.

    Raises:
        PrefixShareError: a field is missing or out of range, the layers have latents (MLA), or
            ``AttentionConfig`` does not take the shape.
    """
    if config.get(latent_rank_field(config)):
        raise PrefixShareError(
            f"{folder / 'config.json'} has multi-head latent attention, whose shape only "
            "'doctor' and 'estimate' know: leave out --model."
        )
    try:
        heads = _heads(config)
    except (ValueError, TypeError) as e:
        path = folder / "config.json"
        raise PrefixShareError(f"{path} does not describe a model ({e}).") from None
    return AttentionConfig(*heads, block_size, dtype)


@dataclass(frozen=True, kw_only=True)
class LayerKind(LayerSpec):
    """Layers of one kind. num_heads, num_kv_heads: of the model, on all GPUs, until ``on_one_gpu``.
    kv_cache_dtype: as vLLM takes it where no other is asked for. use_batch_invariant, use_dcp: of
    the engine, not of the model.

    count: how many there are. attention: whether they have a KV cache.
    """

    name: str
    count: int
    attention: bool = True


def layer_kinds(
    folder: Path, config: dict[str, Any], release: Version | None = None
) -> list[LayerKind]:
    """The kinds of layers of a model, in the order of their first layer.

    Args:
        release: vLLM's, whose code makes the layers; None for the newest.

    Raises:
        PrefixShareError: a field has another type, or is out of range.
    """
    try:
        own = own_fields(config)
        counts = Counter((name, own.get(i, ())) for i, name in enumerate(_layer_types(config)))
        if len(counts) > MAX_KINDS:
            raise ValueError(f"it has {len(counts)} kinds of layers, more than {MAX_KINDS}")
        return [
            _layer_kind(config, name, fields, n, release) for (name, fields), n in counts.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        path = folder / "config.json"
        raise PrefixShareError(f"{path} does not describe a model ({e}).") from None


def _number(config: dict[str, Any], name: str, most: int = 1 << 20) -> int:
    """The field ``name``, an integer from 0 to ``most``; 0 if it is missing or null.

    Raises:
        ValueError: it is something else.
    """
    value = config.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= most:
        # as Python writes it: a text may have codes for the terminal
        raise ValueError(f"{name} must be an integer up to {most}, not {ascii(value)[:40]}")
    return value


def _kv_heads(config: dict[str, Any]) -> int:
    """KV heads as vLLM counts them; 0, for one for each query head, if the file does not say.

    Raises:
        ValueError: a field is something else than a number of heads.
    """
    # Falcon, StarCoder; later Falcons ignore it
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    inner = config.get("attn_config")  # MPT, DBRX
    if isinstance(inner, dict) and "kv_n_heads" in inner:
        return _number(inner, "kv_n_heads", MAX_HEADS)
    return next(filter(None, (_number(config, name, MAX_HEADS) for name in KV_HEADS)), 0)


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim of attention without latents.

    Raises:
        ValueError: one is missing or out of range.
    """
    config = as_plain(config)
    heads = _number(config, "num_attention_heads", MAX_HEADS)
    if not heads:
        raise ValueError("it has no num_attention_heads")
    kv_heads = _kv_heads(config) or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    head_dim = _number(config, "head_dim") or _number(config, "hidden_size_per_head")
    head_dim = head_dim or _number(config, "hidden_size") // heads
    if not head_dim:
        raise ValueError("it has no head_dim and no hidden_size")
    return heads, kv_heads, head_dim


def _layer_types(config: dict[str, Any]) -> list[str]:
    """A name for each layer, in the words of transformers' ``layer_types``."""
    field, attentions = layers_field(config)
    count = attentions * _number(config, field, MAX_LAYERS)
    # Nemotron-H, for which transformers 5 saves no number
    count = count or min(MAX_LAYERS, len(config.get("layers_block_type") or ()))
    if not count:
        raise ValueError("it has no num_hidden_layers")
    if listed := config.get("layer_types"):
        # hybrid models with one kind of attention call it so
        names = ["full_attention" if name == "attention" else str(name) for name in listed]
        return names[:count]
    if slides := config.get("hybrid_layer_pattern"):  # MiMo-V2
        return ["sliding_attention" if x == 1 else "full_attention" for x in slides[:count]]
    if (attends := _attending_layers(config, count)) is not None:
        return ["full_attention" if there else "linear_attention" for there in attends]
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    every = {
        "linear_attention": _number(config, "full_attention_interval", MAX_LAYERS),
        "sliding_attention": window and _number(config, "sliding_window_pattern", MAX_LAYERS),
        # Llama 4: layers with positions see their chunk
        "chunked_attention": _number(config, "attention_chunk_size")
        and (_number(config, "no_rope_layer_interval", MAX_LAYERS) or 4),
    }
    for name, n in every.items():
        if n:
            return [name if (i + 1) % n else "full_attention" for i in range(count)]
    if window and "use_sliding_window" in config:  # Qwen2: the first layers see everything
        full = min(count, _number(config, "max_window_layers"))
        return ["full_attention"] * full + ["sliding_attention"] * (count - full)
    return ["sliding_attention" if window else "full_attention"] * count


def _attending_layers(config: dict[str, Any], count: int) -> list[bool] | None:
    """Which of ``count`` layers have attention, for hybrid models that say so in words of their
    own; None for the others.
    """
    if linear := config.get("linear_attn_config"):  # Kimi Linear, which counts layers from 1
        others = set(linear["kda_layers"])
        return [i + 1 not in others for i in range(count)]
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H: M is Mamba, - an MLP
        return [kind == "*" for kind in pattern[:count]]
    if kinds := config.get("attn_type_list"):  # MiniMax-01
        return [kind == 1 for kind in kinds[:count]]
    if kinds := config.get("layers_block_type"):  # Zamba 2: hybrid layers have both
        there = ("attention", "full_attention", "hybrid")
        return [kind in there for kind in kinds[:count]]
    if (places := config.get("attn_layer_indices")) is not None:  # Bamba
        found = set(places)
        return [i in found for i in range(count)]
    if every := _number(config, "attn_layer_period", MAX_LAYERS):  # Jamba
        first = _number(config, "attn_layer_offset", MAX_LAYERS)
        return [i % every == first for i in range(count)]
    return None


def _layer_kind(
    config: dict[str, Any],
    name: str,
    own: tuple[tuple[str, Any], ...],
    count: int,
    release: Version | None,
) -> LayerKind:
    is_full, is_sliding = name == "full_attention", name == "sliding_attention"
    if is_sliding:
        config = for_sliding(config)
    elif is_full:
        config = for_full(config)
    config = config | dict(own)
    attention = name in ("full_attention", "sliding_attention", "chunked_attention")
    latent = _number(config, latent_rank_field(config))
    if attention and not latent:
        heads, kv_heads, head_dim = _heads(config)
    else:
        heads = _number(config, "num_attention_heads", MAX_HEADS) or 1
        kv_heads = _kv_heads(config) or heads
        head_dim = latent + _number(config, "qk_rope_head_dim")
    window = _number(config, "sliding_window") if is_sliding else 0
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if not dtype.isidentifier():
        raise ValueError(f"dtype must be the name of a type, not {ascii(dtype)[:40]}")
    return LayerKind(
        name=name.replace("_", " "),
        count=count,
        head_size=head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        # vLLM runs float32 checkpoints in 16 bits unless told otherwise
        dtype="bfloat16" if dtype.endswith("float32") else dtype,
        attention=attention,
        use_mla=latent > 0,
        use_sparse="index_topk" in config,
        has_sink=has_sinks(config, is_sliding),
        has_sliding_window=is_sliding,
        use_mm_prefix=has_mm_prefix(config, release),
        chunked=name == "chunked_attention",
        logits_soft_cap=bool(config.get("attn_logit_softcapping")),
        alibi=has_alibi(config),
        sliding_window=window or None,
        kv_cache_dtype=_kv_cache_dtype(config, is_latent=latent > 0),
        kv_lora_rank=latent,
        value_size=_number(config, value_field(config)),
    )


def _kv_cache_dtype(config: dict[str, Any], is_latent: bool) -> str:
    """What vLLM makes of ``--kv-cache-dtype auto``: the type that the checkpoint was quantised for,
    or "auto" for the model's own.
    """
    quantised = dict(config.get("quantization_config") or {})
    method, scheme = str(quantised.get("quant_method")), quantised.get("kv_cache_scheme")
    inner = quantised.get("quantization")
    # ModelOpt names no method in a file of its own; vLLM knows it so
    if isinstance(inner, dict) and inner.get("quant_algo") is not None:
        producer = dict(quantised.get("producer") or {}).get("name")
        if producer == "modelopt" or "modelopt_quant_config" in inner:
            method = "modelopt"
    if method == "compressed-tensors":  # vLLM's layers with latents do not look at it
        return "fp8" if scheme and not is_latent else "auto"
    if not method.startswith("modelopt"):
        return "auto"
    inner = dict(quantised.get("quantization") or quantised)
    found = inner.get("kv_cache_scheme") or scheme
    found = found or inner.get("kv_cache_quant_algo") or quantised.get("kv_cache_quant_algo")
    if isinstance(found, dict):
        static = found.get("dynamic") is False
        bits = found.get("num_bits") if found.get("type") == "float" else None
        found = "fp8" if bits == 8 and static else "nvfp4" if bits == 4 else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(found).lower(), "auto")
