"""The time of CPU_ATTN's own kernel, for the cost table's column of unshared requests."""

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.costs.profile_cpu import UnsharedTimer, median_seconds
from vllm_prefixshare.integration.cpu.backend import kernel_isa


def cpu_attn_timer(attention: AttentionConfig) -> UnsharedTimer:
    """Times one layer of CPU_ATTN over requests that share nothing, one query each."""
    import vllm._C  # noqa: F401  registers the operators

    a = attention
    dtype = getattr(torch, a.dtype)
    isa = kernel_isa(_get_attn_isa(dtype, a.block_size, a.head_dim))

    def seconds(requests: int, kv_len: int) -> float:
        blocks = -(-kv_len // a.block_size)
        cache = torch.randn(requests * blocks, a.num_kv_heads, 2 * a.block_size, a.head_dim)
        k_cache, v_cache = cache.to(dtype).chunk(2, dim=2)
        lens = torch.full((requests,), kv_len, dtype=torch.int32)
        starts = torch.arange(requests + 1, dtype=torch.int32)
        table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
        q = torch.randn(requests, a.num_qo_heads, a.head_dim).to(dtype)
        out = torch.empty_like(q)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=requests,
            num_heads=a.num_qo_heads,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            seq_lens=lens,
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
                seq_lens=lens,
                scale=a.head_dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=table,
                softcap=0.0,
                scheduler_metadata=metadata,
                s_aux=None,
                dynamic_causal=None,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype="auto",
            )

        return median_seconds(layer)

    return seconds
