"""The executor for vLLM's CPU platform: native where it can be, torch everywhere else. Both
work on CPU_ATTN's own KV cache."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.native import NativeExecutor, NativeStep, NativeUnavailableError
from vllm_prefixshare.kernels.cpu.torch import TorchExecutor, TorchStep
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import IntArray

CpuStep: TypeAlias = TorchStep | NativeStep


class CpuExecutor(Protocol):
    """``prepare`` once per step, ``run`` once per layer.

    name: "native" or "torch"; cost tables are kept apart by it.
    """

    name: str

    def prepare(
        self,
        plan: DecodePlan,
        block_table: IntArray,
        seq_lens: IntArray,
        query_start_loc: IntArray,
        rows: IntArray | None = None,
    ) -> Any: ...

    def run(
        self,
        step: Any,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor: ...


class TorchOnPackedCache:
    """``TorchExecutor`` on a cache that holds K and V packed."""

    name = "torch"

    def __init__(self, attention: AttentionConfig) -> None:
        self._executor = TorchExecutor(attention.num_kv_heads, attention.gqa_group_size)
        self.prepare = self._executor.prepare

    def run(
        self,
        step: TorchStep,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        """As ``NativeExecutor.run``, in any dtype."""
        return self._executor.run(step, q, *cache_views(kv_cache), out, sm_scale)


def cpu_executor(
    attention: AttentionConfig, log: Callable[[str], None] | None = None
) -> CpuExecutor:
    """The fastest executor that this machine and shape allow.

    Args:
        log: is told why the native one is not used.
    """
    try:
        if attention.dtype != "bfloat16":
            raise NativeUnavailableError(f"it computes in bfloat16, not {attention.dtype}")
        return NativeExecutor(
            attention.num_kv_heads,
            attention.gqa_group_size,
            attention.head_dim,
            attention.block_size,
        )
    except NativeUnavailableError as e:
        if log is not None:
            log(f"Shared decode runs in torch operators; the native executor is out: {e}.")
        return TorchOnPackedCache(attention)


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
