"""Choosing the executor for vLLM's CPU platform: the native one where it can run, else torch.

Both work on CPU_ATTN's own KV cache.
"""

from collections.abc import Callable

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.native_executor import NativeExecutor, NativeUnavailableError
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.interface import Executor


def cpu_executor(attention: AttentionConfig, log: Callable[[str], None] | None = None) -> Executor:
    """The fastest executor that this machine and shape allow.

    Args:
        log: called with one sentence where the native executor cannot run.
    """
    try:
        return NativeExecutor(attention)
    except NativeUnavailableError as e:
        if log is not None:
            log(f"Shared decode runs in torch operators; the native executor is out: {e}.")
        return TorchExecutor(attention)


def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of CPU_ATTN's vector layout as ``[num_blocks, block_size, heads, head_dim]``.

    Args:
        kv_cache: ``[num_blocks, heads, block_size, 2 * head_dim]``. Its memory holds, per
            block and head, K as ``[head_dim, block_size]``, then V as ``[block_size, head_dim]``.
    """
    num_blocks, heads, size, width = kv_cache.shape
    dim = width // 2
    block, head = kv_cache.stride(0), kv_cache.stride(1)
    shape, start = (num_blocks, size, heads, dim), kv_cache.storage_offset()
    k = kv_cache.as_strided(shape, (block, 1, head, size), start)
    v = kv_cache.as_strided(shape, (block, dim, head, 1), start + size * dim)
    return k, v
