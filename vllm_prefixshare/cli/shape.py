"""The options that name an attention shape: those of a model, or numbers."""

import argparse
from dataclasses import replace
from pathlib import Path

from vllm_prefixshare.cli.model import MAX_HEADS, attention_shape, layer_kinds, read_config
from vllm_prefixshare.config import CACHE_DTYPES, DTYPES, FP8, FP8_CACHES, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin.eligibility.layer import USUAL_BLOCK

#: no model's blocks are larger: a number must not make a command take all memory
MAX_BLOCK_SIZE = 1 << 16


def add_shape_arguments(command: argparse.ArgumentParser, block_size: int | None) -> None:
    """The attention shape, as a model or as numbers.

    Args:
        block_size: what the option has where it is left out; None is vLLM's own on a GPU.
    """
    command.add_argument("--model", type=Path, help="checkpoint folder (no name on the hub)")
    command.add_argument("--num-qo-heads", type=int, default=32)
    command.add_argument("--num-kv-heads", type=int, default=8)
    command.add_argument("--head-dim", type=int, default=128)
    command.add_argument("--block-size", type=int, default=block_size)
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def add_cache_argument(command: argparse.ArgumentParser) -> None:
    """The type of the KV cache, under vLLM's name."""
    command.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="as for vLLM, such as fp8; auto: as the model's config.json says",
    )


def check_cache_argument(args: argparse.Namespace) -> None:
    """Raise ``PrefixShareError`` if vLLM does not know the type of KV cache."""
    if args.kv_cache_dtype not in CACHE_DTYPES:
        raise PrefixShareError(
            f"--kv-cache-dtype must be one of {', '.join(CACHE_DTYPES)}, got {args.kv_cache_dtype}."
        )


def check_block_size(args: argparse.Namespace) -> None:
    """Raise ``PrefixShareError`` if blocks are larger than any model's."""
    if args.block_size is not None and args.block_size > MAX_BLOCK_SIZE:
        raise PrefixShareError(
            f"--block-size must be at most {MAX_BLOCK_SIZE}, got {args.block_size}."
        )


def attention_of(args: argparse.Namespace) -> AttentionConfig:
    """The attention shape named by ``--model``, or by its numbers.

    Raises:
        PrefixShareError: a number is out of range, or the model cannot be read.
    """
    check_block_size(args)
    block_size = USUAL_BLOCK if args.block_size is None else args.block_size
    if args.model is None:
        if args.num_qo_heads > MAX_HEADS:
            raise PrefixShareError(
                f"--num-qo-heads must be at most {MAX_HEADS}, got {args.num_qo_heads}."
            )
        return AttentionConfig(
            args.num_qo_heads, args.num_kv_heads, args.head_dim, block_size, args.dtype
        )
    return attention_shape(args.model, read_config(args.model), block_size, args.dtype)


def cached_attention_of(args: argparse.Namespace) -> AttentionConfig:
    """``attention_of``, with the KV cache that vLLM would give it under ``--kv-cache-dtype``.

    Raises:
        PrefixShareError: as ``attention_of``, or no layer with such a cache would be served.
    """
    attention = attention_of(args)
    cache: str | None = args.kv_cache_dtype
    if cache == "auto" and args.model is not None:
        cache = layer_kinds(args.model, read_config(args.model))[0].kv_cache_dtype
    if cache in ("auto", attention.dtype):
        return attention
    if cache not in FP8_CACHES:
        raise PrefixShareError(
            f"layers with a KV cache of type {cache} keep vLLM's own backend, so there is nothing "
            f"to do here: name --kv-cache-dtype {attention.dtype} or fp8."
        )
    # vLLM quantises the queries, too
    return replace(attention, kv_dtype=FP8, query_dtype=FP8)
