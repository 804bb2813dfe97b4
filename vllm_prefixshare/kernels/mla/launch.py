"""Launching the kernel for latent KV caches: size of its Q tile, limits of a plan, what Triton
needs to know beside the tensors.
"""

import math
from collections.abc import Mapping

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.contract import Capacity, Gpu, Tensors
from vllm_prefixshare.kernels.launching import launch
from vllm_prefixshare.kernels.mla.kernel import partial_attention
from vllm_prefixshare.kernels.portable.arrays import PlanArrays, sizes
from vllm_prefixshare.kernels.portable.launch import QTile
from vllm_prefixshare.kernels.portable.layout import Grid, max_parts_of, walk_layout
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import IntArray

LOG2E = 1.4426950408889634


def q_tile(gpu: Gpu) -> QTile:
    """The Q tile for a GPU: as many rows as registers hold outputs of 512 numbers for, and as many
    tokens as shared memory has room for twice. 64 rows spill on every GPU.
    """
    return QTile(32, 32 if gpu.shared_memory >= 160 << 10 else 16, 8, 2, 1)


def latent_partial_attention(
    tile: QTile, num_workers: int, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float
) -> None:
    """Launch; the arguments have been checked by the executor.

    The launch depends on shapes only: it may be captured in a CUDA graph.

    Args:
        num_workers: that the plan was made for.
        plan: the arrays of ``portable.arrays`` on the device.
        sm_scale: softmax scale, above 0.
    """
    num_heads, width = t.q.shape[1:]
    rank, block_size = t.out.shape[-1], t.k_cache.shape[1]
    arrays = PlanArrays(**plan)
    chunks = tile.chunks(num_heads)
    launch(
        partial_attention,
        (num_workers * chunks,),
        t.q,
        t.k_cache,
        t.block_table,
        t.seq_lens,
        *arrays[:-1],
        t.partial_out,
        t.partial_lse,
        t.out,
        t.out_lse,
        t.k_cache.stride(0),
        t.k_cache.stride(1),
        t.block_table.stride(0),
        t.q.stride(0),
        t.out.stride(0),
        sm_scale * LOG2E,
        HEADS=num_heads,
        LATENT=rank,
        ROPE=width - rank,
        BLOCK_SIZE=block_size,
        UNIT=math.gcd(block_size, tile.kv_tile),
        CHUNKS=chunks,
        Q_TILE_SIZE=tile.rows,
        KV_TILE_SIZE=tile.kv_tile,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


class LatentKernel:
    """``kernels.mla.kernel``, for every NVIDIA GPU from compute capability 8.0 on."""

    name, divider = "mla", "depth_first"

    def __init__(self, attention: AttentionConfig, query_len: int, gpu: Gpu) -> None:
        self.tile = q_tile(gpu)
        rows = attention.num_qo_heads
        self.num_workers = self.tile.num_workers(gpu.multi_processor_count, 1, rows)
        self.max_tile_requests = max(1, self.tile.rows // rows)
        self.max_tile_runs = 1 << 30
        self.row_tiles = self.tile.chunks(rows)
        self.grid = Grid.of(self.tile.kv_tile, attention.block_size, query_len)

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """As ``contract.Kernel.layout``."""
        return walk_layout(plan, self.grid)._asdict()

    def capacity(self, num_reqs: int) -> Capacity:
        """As ``contract.Kernel.capacity``; see ``PortableKernel.capacity``."""
        max_tiles = num_reqs + 2 * self.num_workers
        max_partials = 2 * self.num_workers * self.max_tile_requests
        max_runs = 2 * num_reqs + max_tiles
        max_parts = max_parts_of(self.grid, max_runs, max_tiles)
        slots = num_reqs + max_partials
        room = sizes(self.num_workers, max_tiles, slots, max_runs, max_parts, num_reqs)
        return Capacity(max_tiles, max_runs, max_partials, room._asdict())

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """As ``contract.Kernel.launch``."""
        latent_partial_attention(self.tile, self.num_workers, plan, t, sm_scale)
