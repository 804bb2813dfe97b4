"""Launch of the portable kernel: size of its Q tile, limits of a plan, compile-time arguments."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from vllm_prefixshare.config import AttentionConfig, part_size
from vllm_prefixshare.core import IntArray, PieceLimits
from vllm_prefixshare.kernels.aot.dispatch import launch, power_of_two
from vllm_prefixshare.kernels.common.arrays import PlanArrays
from vllm_prefixshare.kernels.common.launch import (
    QTile,
    scales_and_strides,
    score_factors,
    walk_capacity,
)
from vllm_prefixshare.kernels.common.layout import KvTiling, walk_layout
from vllm_prefixshare.kernels.geometry import PORTABLE
from vllm_prefixshare.kernels.interface import Capacity, Gpu, Tensors
from vllm_prefixshare.kernels.portable.kernel import partial_attention
from vllm_prefixshare.planning.plan import DecodePlan


def q_tile(head_dim: int, gpu: Gpu, quantised: bool = False) -> QTile:
    """The Q tile for a GPU: two thread blocks on a multiprocessor where it has room for them,
    so that one multiplies while the other computes its softmax.

    A product takes no more columns than there are rows. Else Triton gives each warp all rows and
    some of the columns where it has ``mma`` (not ``wgmma``), and weights and sums pass through
    shared memory.

    Args:
        quantised: the KV cache has one byte per element. Widening takes registers: with ``mma``
            (not ``wgmma``) 64 tokens would spill; more where bits are shifted for it.
    """
    large = gpu.shared_memory >= 160 << 10  # data-centre GPUs; the others have 99 KiB
    stages = 3 if gpu.shared_memory >= 227 << 10 else 2
    if head_dim > 256:  # more rows or tokens spill
        tokens = 32 if large else 16
        tile = QTile(32, tokens, 8, 2, 1, 512) if quantised else QTile(32, tokens, 4, 2, 1)
    elif head_dim > 128:
        if quantised and shifts_bits(gpu):
            tile = QTile(64, 32, 8, 2, 1, 256)
        elif quantised:
            tile = QTile(64, 32, 4, stages, 2)
        else:
            tile = QTile(64, 32, 4, 2, 2) if large else QTile(64, 32, 4, 3, 1)
    elif quantised and stages < 3:
        tile = QTile(64, 32, 4, 3, 2)
    else:
        if gpu.capability[0] in (10, 11) and not quantised and head_dim > 64:
            stages = 2  # products there take some memory: three leave no room for two blocks
        tile = QTile(64, 64, 4, stages, 2) if large else QTile(64, 64, 4, 2, 1)
    return replace(tile, hoist=hoisting(gpu.capability, head_dim))


def shifts_bits(gpu: Gpu) -> bool:
    """Whether Triton has no e4m3 for a GPU, so that the kernel widens the bits."""
    return gpu.capability < (8, 9)


def hoisting(capability: tuple[int, int], head_dim: int) -> int:
    """``QTile.hoist`` for a GPU, by what its code spills (docs/notes/portable-kernel.md). Where
    less is moved, most binaries for Blackwell spill nothing, under any Triton, for up to a
    twentieth more instructions in 12.0's loops over KV tiles; but heads of 256 spill more on 12.0.
    Code for other GPUs would spill more under some Tritons.
    """
    if capability[0] == 12 and 128 < head_dim <= 256:
        return 2
    return {10: 1, 12: 0}.get(capability[0], 2)


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
    num_qo_heads, head_dim = t.q.shape[1:]
    block_size, num_kv_heads = t.k_cache.shape[1:3]
    rows_per_request = query_len * num_qo_heads // num_kv_heads
    chunks = tile.chunks(rows_per_request)
    arrays = PlanArrays(**plan)
    qk_scale, cap_rate = score_factors(t.extras.soft_cap, sm_scale)
    launch(
        partial_attention,
        (num_workers * chunks * num_kv_heads,),
        t.q,
        t.k_cache,
        t.v_cache,
        t.block_table,
        t.seq_lens,
        t.seq_lens if t.query_start_loc is None else t.query_start_loc,
        t.seq_lens if t.tree_mask is None else t.tree_mask,
        arrays.work_indptr,
        arrays.tile_info,
        arrays.slot_row,
        arrays.slot_partial,
        arrays.slot_end,
        arrays.run_row,
        arrays.run_start,
        arrays.run_end,
        arrays.run_readers,
        arrays.part_row,
        arrays.part_pos,
        arrays.part_readers,
        t.partial_out,
        t.partial_lse,
        t.out,
        t.out_lse,
        t.extras.sinks,
        t.extras.alibi_slopes,
        *scales_and_strides(t.extras),
        cap_rate,
        t.k_cache.stride(0),
        t.k_cache.stride(1),
        t.k_cache.stride(2),
        t.block_table.stride(0),
        t.q.stride(0),
        t.out.stride(0),
        0 if t.tree_mask is None else t.tree_mask.stride(0),
        qk_scale,
        Q_HEADS=num_qo_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=min(tile.columns, power_of_two(head_dim)),
        BLOCK_SIZE=block_size,
        UNIT=math.gcd(tile.kv_tile, part_size(block_size)),
        QUERY_LEN=query_len,
        RAGGED=query_len > 1 and t.query_start_loc is not None,
        TREE=t.tree_mask is not None,
        WINDOW=sliding_window or 0,
        CHUNKS=chunks,
        Q_TILE_SIZE=tile.rows,
        KV_TILE_SIZE=tile.kv_tile,
        STAGES=tile.stages,
        HOIST=tile.hoist,
        num_warps=tile.warps,
    )


class PortableKernel:
    """``kernels.portable.kernel``, for every NVIDIA GPU from compute capability 8.0 on."""

    name = "portable"
    divider = "depth_first"
    geometry = PORTABLE
    starts_merging = False

    def __init__(self, attention: AttentionConfig, query_len: int, gpu: Gpu) -> None:
        self.rows = query_len * attention.gqa_group_size
        self.query_len = query_len
        self.sliding_window = attention.sliding_window
        quantised = attention.kv_dtype is not None
        self.takes_bits = quantised and shifts_bits(gpu)
        self.tile = q_tile(attention.head_dim, gpu, quantised)
        self.num_workers = self.tile.num_workers(
            gpu.multi_processor_count, attention.num_kv_heads, self.rows
        )
        self.max_tile_requests = max(1, self.tile.rows // self.rows)
        self.max_tile_runs = 1 << 30
        self.row_tiles = self.tile.chunks(self.rows)
        self.tiling = KvTiling.of(self.tile.kv_tile, attention.block_size, query_len)

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """As ``interface.Kernel.layout``."""
        return walk_layout(plan, self.tiling)._asdict()

    def capacity(self, num_reqs: int, pieces: PieceLimits | None = None) -> Capacity:
        """As ``interface.Kernel.capacity``."""
        return walk_capacity(
            num_reqs,
            self.num_workers,
            self.max_tile_requests,
            self.tiling,
            pieces,
            self.geometry.spread,
        )

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """As ``interface.Kernel.launch``."""
        if self.takes_bits:
            q = t.q.view(torch.uint8) if t.q.element_size() == 1 else t.q
            caches = t.k_cache.view(torch.uint8), t.v_cache.view(torch.uint8)
            t = t._replace(q=q, k_cache=caches[0], v_cache=caches[1])
        fixed = self.tile, self.num_workers, self.query_len
        portable_partial_attention(*fixed, plan, t, sm_scale, self.sliding_window)
