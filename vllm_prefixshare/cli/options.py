"""Options that several commands have, and what they stand for."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_prefixshare.config import DTYPES, FP8, FP8_CACHES, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind, layer_kinds
from vllm_prefixshare.vllm_plugin.eligibility.layer import USUAL_BLOCK

#: The attention shape without options, as in Llama-3.1-8B.
DEFAULT_SHAPE = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of texts, and adds its default to the help of each option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, "", argparse.SUPPRESS) or isinstance(default, bool):
            return action.help
        return f"{action.help} (default: %(default)s)"


def add_model_argument(command: argparse.ArgumentParser) -> None:
    """The checkpoint."""
    command.add_argument(
        "--model", type=Path, help="checkpoint folder (no name on the hub); needs vLLM"
    )


def add_shape_arguments(command: argparse.ArgumentParser, block_size: str) -> None:
    """The attention shape, as a model or as numbers. Options that are left out are None; see
    ``DEFAULT_SHAPE``.

    Args:
        block_size: describes the block size where the option is left out.
    """

    def add(name: str, meaning: str, default: object, **options: Any) -> None:
        command.add_argument(name, help=f"{meaning} (default: {default})", **options)

    shape = DEFAULT_SHAPE
    add_model_argument(command)
    add("--num-qo-heads", "query heads of a layer", shape["num_qo_heads"], type=int)
    add("--num-kv-heads", "KV heads of a layer", shape["num_kv_heads"], type=int)
    add("--head-dim", "width of a head", shape["head_dim"], type=int)
    add("--block-size", "tokens of a KV block", block_size, type=int)
    add("--dtype", "of the model", shape["dtype"], choices=DTYPES)


def shape_option(args: argparse.Namespace, name: str) -> Any:
    """The value of an option of ``DEFAULT_SHAPE``, given or not."""
    value = getattr(args, name)
    return DEFAULT_SHAPE[name] if value is None else value


def add_cache_argument(command: argparse.ArgumentParser) -> None:
    """The type of the KV cache, under vLLM's name."""
    command.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="as for vLLM, such as fp8; auto: as the model's config.json says",
    )


def check_range(args: argparse.Namespace, option: str, low: int, high: int) -> None:
    """Raise ``PrefixShareError`` if the number of an option is below ``low`` or above ``high``.

    Args:
        option: without dashes; it may be left out.
    """
    value = getattr(args, option.replace("-", "_"))
    if value is not None and not low <= value <= high:
        raise PrefixShareError(f"--{option} must be from {low} to {high}, got {value}.")


def attention_of(
    args: argparse.Namespace, block_size: int = USUAL_BLOCK, mla_reason: str | None = None
) -> AttentionConfig:
    """The attention shape named by ``--model``, or by its numbers, with the KV cache that vLLM
    would give it under ``--kv-cache-dtype``, where the command has that option.

    Args:
        block_size: without ``--block-size``.
        mla_reason: why the command takes no model with MLA.

    Raises:
        PrefixShareError: a number is out of range, the model cannot be read or has MLA, or no
            layer with such a cache would be served.
    """
    if args.block_size is not None:
        block_size = args.block_size
    cache: str = getattr(args, "kv_cache_dtype", "auto")
    if args.model is None:
        heads = shape_option(args, "num_qo_heads")
        shape = heads, shape_option(args, "num_kv_heads"), shape_option(args, "head_dim")
    else:
        layer = _attention_layer(args.model, mla_reason)
        shape = layer.num_heads, layer.num_kv_heads, layer.head_size
        if cache == "auto" and "kv_cache_dtype" in args:
            cache = layer.kv_cache_dtype or "auto"
    attention = AttentionConfig(*shape, block_size, shape_option(args, "dtype"))
    if cache in ("auto", attention.dtype):
        return attention
    if cache not in FP8_CACHES:
        raise PrefixShareError(
            f"layers with a KV cache of type {cache} keep vLLM's own backend, so there is nothing "
            f"to do here: name --kv-cache-dtype {attention.dtype} or fp8."
        )
    # vLLM quantises the queries, too
    return replace(attention, kv_dtype=FP8, query_dtype=FP8)


def _attention_layer(folder: Path, mla_reason: str | None) -> LayerKind:
    """The first kind of layers with attention."""
    layer = next((kind for kind in layer_kinds(folder) if kind.attention), None)
    path = folder / "config.json"
    if layer is None:
        raise PrefixShareError(f"{path} has no layer with attention: name another model.")
    if layer.use_mla:
        reason = mla_reason or "whose shape only 'doctor' and 'estimate' know"
        raise PrefixShareError(
            f"{path} has multi-head latent attention, {reason}: name another model."
        )
    return layer
