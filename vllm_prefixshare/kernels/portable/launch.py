"""Launch of the portable kernel: size of its Q tile, limits of a plan, compile-time arguments."""

import math
from collections.abc import Mapping
from functools import cache

import torch

from vllm_prefixshare.config import AttentionConfig, part_size
from vllm_prefixshare.core import IntArray, PieceLimits
from vllm_prefixshare.kernels.aot.dispatch import launch, power_of_two
from vllm_prefixshare.kernels.catalog import Gpu, QTile, portable_limits, q_tile, shifts_bits
from vllm_prefixshare.kernels.common.arrays import PlanArrays
from vllm_prefixshare.kernels.common.groups import PortableShape, Strides
from vllm_prefixshare.kernels.common.launch import scale_strides, score_factors, walk_capacity
from vllm_prefixshare.kernels.common.layout import KvTiling, walk_layout
from vllm_prefixshare.kernels.interface import Capacity, Tensors
from vllm_prefixshare.kernels.portable.kernel import partial_attention
from vllm_prefixshare.planning.plan import DecodePlan


@cache
def portable_shape(
    tile: QTile,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    query_len: int,
    window: int | None,
) -> PortableShape:
    """Compile-time shape of the kernel for a layer. heads: query heads, KV heads."""
    columns = min(tile.columns, power_of_two(head_dim))
    unit = math.gcd(tile.kv_tile, part_size(block_size))
    chunks = tile.chunks(query_len * heads[0] // heads[1])
    return PortableShape(
        *heads, head_dim, columns, block_size, unit, query_len, window or 0, chunks,
        tile.rows, tile.kv_tile, tile.stages, tile.hoist,
    )  # fmt: skip


def portable_partial_attention(
    tile: QTile,
    num_workers: int,
    query_len: int,
    plan: Mapping[str, torch.Tensor],
    t: Tensors,
    sm_scale: float,
    sliding_window: int | None = None,
) -> None:
    """Launch the kernel; the executor has checked the arguments.

    The launch depends on shapes only: it may be captured in a CUDA graph.

    Args:
        num_workers: number of workers that the plan was made for.
        query_len: maximum number of query tokens of a request.
        plan: the arrays of ``common.arrays`` on the device.
        sm_scale: softmax scale, above 0.
        sliding_window: as in ``AttentionConfig``.
    """
    block_size, num_kv_heads = t.k_cache.shape[1:3]
    heads = t.q.shape[1], num_kv_heads
    shape = portable_shape(tile, heads, t.q.shape[2], block_size, query_len, sliding_window)
    block, token, head = t.k_cache.stride()[:3]
    qk_scale, cap_rate = score_factors(t.extras.soft_cap, sm_scale)
    launch(
        partial_attention,
        (num_workers * shape.chunks * num_kv_heads,),
        t.q,
        t.k_cache,
        t.v_cache,
        t.block_table,
        t.seq_lens,
        t.seq_lens if t.query_start_loc is None else t.query_start_loc,
        t.seq_lens if t.tree_mask is None else t.tree_mask,
        PlanArrays(**plan),
        t.outputs,
        Strides(block, token, head, t.q.stride(0), t.out.stride(0)),
        t.block_table.stride(0),
        0 if t.tree_mask is None else t.tree_mask.stride(0),
        qk_scale,
        cap_rate,
        t.extras,
        *scale_strides(t.extras),
        SHAPE=shape,
        RAGGED=query_len > 1 and t.query_start_loc is not None,
        TREE=t.tree_mask is not None,
        num_warps=tile.warps,
    )


class PortableKernel:
    """``kernels.portable.kernel``, for every NVIDIA GPU from compute capability 8.0 on."""

    name = "portable"
    starts_merging = False

    def __init__(self, attention: AttentionConfig, query_len: int, gpu: Gpu) -> None:
        self.query_len = query_len
        self.sliding_window = attention.sliding_window
        quantised = attention.kv_dtype is not None
        self.takes_bits = quantised and shifts_bits(gpu)
        self.limits = portable_limits(attention, query_len, gpu)
        self.tile = q_tile(attention.head_dim, gpu, quantised)
        self.row_tiles = self.tile.chunks(query_len * attention.gqa_group_size)
        self.tiling = KvTiling.of(self.tile.kv_tile, attention.block_size, query_len)

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """As ``interface.Kernel.layout``."""
        return walk_layout(plan, self.tiling)._asdict()

    def capacity(self, num_reqs: int, pieces: PieceLimits | None = None) -> Capacity:
        """As ``interface.Kernel.capacity``."""
        return walk_capacity(num_reqs, self.limits, self.tiling, pieces)

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """As ``interface.Kernel.launch``."""
        if self.takes_bits:
            q = t.q.view(torch.uint8) if t.q.element_size() == 1 else t.q
            caches = t.k_cache.view(torch.uint8), t.v_cache.view(torch.uint8)
            t = t._replace(q=q, k_cache=caches[0], v_cache=caches[1])
        fixed = self.tile, self.limits.num_workers, self.query_len
        portable_partial_attention(*fixed, plan, t, sm_scale, self.sliding_window)
