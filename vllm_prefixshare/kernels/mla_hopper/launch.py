"""Launch of the MLA kernel for Hopper, and the limits of its plans."""

import functools
import math
from collections.abc import Mapping

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_prefixshare.config import LATENT_SHAPE, AttentionConfig
from vllm_prefixshare.core import IntArray, PieceLimits, PrefixShareError
from vllm_prefixshare.kernels.aot.dispatch import launch
from vllm_prefixshare.kernels.catalog import (
    LATENT_TILE,
    Gpu,
    latent_limits,
    requests_of_a_tile,
)
from vllm_prefixshare.kernels.common.arrays import WORDS, PlanArrays
from vllm_prefixshare.kernels.common.groups import MlaKernelShape
from vllm_prefixshare.kernels.common.launch import score_factors, walk_capacity
from vllm_prefixshare.kernels.common.layout import KvTiling
from vllm_prefixshare.kernels.interface import Capacity, Tensors
from vllm_prefixshare.kernels.mla_hopper.kernel import partial_attention
from vllm_prefixshare.kernels.mla_hopper.layout import latent_layout
from vllm_prefixshare.planning.plan import DecodePlan


def kv_tiling(block_size: int, query_len: int = 1) -> KvTiling:
    """Sizes into which the kernel divides an MLA cache. TMA fetches whole KV tiles where blocks
    are as large: on long prefixes that is 2% faster than by ``config.part_size``, at the price of
    short runs that are padded.
    """
    unit = math.gcd(LATENT_TILE.kv_tile, block_size)
    return KvTiling.of(LATENT_TILE.kv_tile, block_size, query_len)._replace(unit=unit)


def descriptors(cache: torch.Tensor, unit: int) -> tuple[int, TensorDescriptor, TensorDescriptor]:
    """The two views of an MLA cache that TMA reads.

    Args:
        cache: ``[num_blocks, block_size, (1,) 576]`` with blocks a whole number of tokens apart.
        unit: tokens that are fetched at once.

    Returns:
        Tokens between the starts of blocks; descriptors with one row per token, in boxes of
        ``unit`` rows: half of the compressed KV, and the rotated part.

    Raises:
        PrefixShareError: strides that TMA cannot follow.
    """
    num_blocks, block_size = cache.shape[:2]
    block, token = cache.stride()[:2]
    width, rank = LATENT_SHAPE
    if cache.stride(-1) != 1 or block % token or (token * cache.element_size()) % 16:
        raise PrefixShareError(
            f"k_cache has strides {list(cache.stride())}: a token's numbers must be contiguous, "
            "tokens 16-byte aligned, and blocks whole tokens apart."
        )
    shape = [(num_blocks - 1) * (block // token) + block_size, width]
    halves, rope = (
        TensorDescriptor(
            cache, shape, [token, 1], [unit, columns], _layout(columns, cache.element_size())
        )
        for columns in (rank // 2, width - rank)
    )
    return block // token, halves, rope


@functools.cache
def _layout(columns: int, item: int) -> gl.NVMMASharedLayout:
    """Of a box of the cache in shared memory."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, columns * item), element_bitwidth=8 * item, rank=2
    )


@functools.cache
def mla_kernel_shape(num_heads: int, block_size: int, query_len: int) -> MlaKernelShape:
    """Compile-time shape of the kernel for a layer."""
    width, rank = LATENT_SHAPE
    rows = query_len * num_heads
    unit = kv_tiling(block_size).unit
    return MlaKernelShape(
        num_heads, query_len, rank, width - rank, block_size, unit, LATENT_TILE.chunks(rows),
        LATENT_TILE.rows, LATENT_TILE.kv_tile, requests_of_a_tile(rows),
    )  # fmt: skip


def latent_partial_attention(
    fixed: tuple[int, int], plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float
) -> None:
    """Launch the kernel; the executor has checked the arguments.

    The launch depends on shapes only: it may be captured in a CUDA graph.

    Args:
        fixed: number of workers of the plan, maximum number of query tokens of a request.
        plan: the arrays of ``latent_layout`` on the device.
        sm_scale: softmax scale, above 0.
    """
    num_workers, query_len = fixed
    shape = mla_kernel_shape(t.q.shape[1], t.k_cache.shape[1], query_len)
    block_rows, halves, rope = descriptors(t.k_cache, shape.unit)
    # fmt: off
    launch(
        partial_attention, (num_workers * shape.chunks,),
        halves, rope, t.q, t.block_table, t.seq_lens,
        t.seq_lens if t.query_start_loc is None else t.query_start_loc,
        PlanArrays(**plan), t.outputs,
        block_rows, t.block_table.stride(0), t.q.stride(0), t.out.stride(0),
        score_factors(0.0, sm_scale)[0], t.extras,
        SHAPE=shape,
        CONSUMER_REGS=224,
        PRODUCER_REGS=56,
        num_warps=LATENT_TILE.warps,
        launch_pdl=True,
    )
    # fmt: on


class LatentHopperKernel:
    """``kernels.mla_hopper.kernel``, for compute capability 9.0."""

    name = "mla_hopper"
    starts_merging = True

    def __init__(self, attention: AttentionConfig, query_len: int, gpu: Gpu) -> None:
        self.query_len = query_len
        self.limits = latent_limits(attention, query_len, gpu)
        self.row_tiles = LATENT_TILE.chunks(query_len * attention.num_qo_heads)
        self.tiling = kv_tiling(attention.block_size, query_len)

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """As ``interface.Kernel.layout``."""
        return latent_layout(plan, self.tiling, self.limits.max_tile_requests)._asdict()

    def capacity(self, num_reqs: int, pieces: PieceLimits | None = None) -> Capacity:
        """As ``interface.Kernel.capacity``, for KV ranges of up to 64k tokens."""
        long = self.tiling._replace(long=1024)
        room = walk_capacity(num_reqs, self.limits, long, pieces)
        tiles = room.max_tiles + self.limits.num_workers  # an empty work queue has an empty tile
        slots = dict.fromkeys(
            ("slot_row", "slot_partial", "slot_end"), tiles * self.limits.max_tile_requests
        )
        return room._replace(sizes={**room.sizes, "tile_info": tiles * WORDS, **slots})

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """As ``interface.Kernel.launch``."""
        latent_partial_attention((self.limits.num_workers, self.query_len), plan, t, sm_scale)
