"""CPU_ATTN's own kernel outside an engine, timed for a cost table's unshared requests."""

from collections.abc import Callable

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from vllm_prefixshare.config import MIN_HEAD_DIM, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.profiling.cpu_table import UnsharedTimer, median_seconds
from vllm_prefixshare.vllm_plugin.backends.cpu.backend import kernel_isa


def check_shape(attention: AttentionConfig) -> None:
    """Refuse a layer that CPU_ATTN has no kernel for; its own checks end in a RuntimeError.

    Raises:
        PrefixShareError: naming the block sizes or head_dims that it takes.
    """
    a = attention
    head_dims = [n for n in CPUAttentionBackend.get_supported_head_sizes() if n >= MIN_HEAD_DIM]
    if a.head_dim not in head_dims:
        raise PrefixShareError(
            f"vLLM's CPU_ATTN has no kernel for a head_dim of {a.head_dim}: name one of "
            f"{', '.join(map(str, head_dims))}."
        )
    isa = _get_attn_isa(getattr(torch, a.dtype), a.block_size, a.head_dim)
    multiple = 16 if isa == "vec16" else 32
    if a.block_size % multiple:
        raise PrefixShareError(
            f"vLLM's CPU_ATTN has no kernel for blocks of {a.block_size} tokens: name a "
            f"--block-size that is a multiple of {multiple}."
        )


def cpu_attn_call(
    attention: AttentionConfig,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], None]:
    """One layer of CPU_ATTN over requests with one query each, ready to be called.

    Args:
        q, out: ``[num_reqs, num_qo_heads, head_dim]``.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]``, see ``cache_views``.
        block_table: int32 ``[num_reqs, max_blocks]``. seq_lens: int32 ``[num_reqs]``.
    """
    a = attention
    dtype = getattr(torch, a.dtype)
    isa = kernel_isa(_get_attn_isa(dtype, a.block_size, a.head_dim))
    halves = kv_cache.view(len(kv_cache), a.num_kv_heads, 2 * a.block_size, a.head_dim)
    k_cache, v_cache = halves.chunk(2, dim=2)
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=a.num_qo_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        seq_lens=seq_lens,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )

    def layer() -> None:
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=k_cache,
            value_cache=v_cache,
            output=out,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=a.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
            dynamic_causal=None,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )

    return layer


def cpu_attn_timer(attention: AttentionConfig) -> UnsharedTimer:
    """Times one layer of CPU_ATTN over requests that share nothing, one query each."""
    a = attention
    dtype = getattr(torch, a.dtype)

    def seconds(requests: int, kv_len: int) -> float:
        blocks = -(-kv_len // a.block_size)
        shape = (requests * blocks, a.num_kv_heads, a.block_size, 2 * a.head_dim)
        cache = torch.randn(shape).to(dtype)
        lens = torch.full((requests,), kv_len, dtype=torch.int32)
        table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
        q = torch.randn(requests, a.num_qo_heads, a.head_dim).to(dtype)
        return median_seconds(cpu_attn_call(a, q, cache, table, lens, torch.empty_like(q)))

    return seconds
