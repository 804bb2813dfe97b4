"""Launch of the Hopper kernel: its compile-time shape and its tensor descriptors."""

from collections.abc import Mapping
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray, PieceLimits, PrefixShareError
from vllm_prefixshare.kernels.aot.dispatch import launch
from vllm_prefixshare.kernels.catalog import Gpu, hopper_limits, hopper_shape
from vllm_prefixshare.kernels.common.launch import plan_limits, scale_strides, score_factors
from vllm_prefixshare.kernels.hopper.arrays import PlanArrays, sizes
from vllm_prefixshare.kernels.hopper.kernel import partial_attention
from vllm_prefixshare.kernels.hopper.layout import linked_layout
from vllm_prefixshare.kernels.interface import Capacity, Tensors
from vllm_prefixshare.planning.plan import DecodePlan


@cache
def kv_layout(padded_dim: int, item: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a KV block with elements of ``item`` bytes."""
    width = min(128, padded_dim * item)
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * item, rank=2)


class CacheView:
    """A KV cache as the 2-D tensor descriptor that TMA reads.

    Args:
        cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with any strides that keep
            a token's head contiguous and blocks a whole number of tokens apart: NHD and HND,
            K and V apart or interleaved.
        padded_dim: ``head_dim`` rounded up to a power of two.
        piece: tokens that are fetched at once.

    Raises:
        PrefixShareError: strides that TMA cannot follow.
    """

    def __init__(self, name: str, cache: torch.Tensor, padded_dim: int, piece: int) -> None:
        num_blocks, block_size, heads, head_dim = cache.shape
        block, token, head, one = cache.stride()
        by_rows = heads > 1 and head >= token and head % token == 0
        if (
            one != 1
            or block % token
            or (token * cache.element_size()) % 16
            or (heads > 1 and not by_rows and head * heads > token)
        ):
            raise PrefixShareError(
                f"{name} has strides {list(cache.stride())}: the head dimension must be "
                "contiguous, tokens 16-byte aligned, and blocks whole tokens apart."
            )
        self.block_rows = block // token
        self.head_rows = head // token if by_rows else 0
        self.head_cols = 0 if by_rows else head
        rows = (num_blocks - 1) * self.block_rows + (heads - 1) * self.head_rows + block_size
        cols = head_dim if by_rows or heads == 1 else (heads - 1) * head + head_dim
        self.descriptor = TensorDescriptor(
            cache, [rows, cols], [token, 1], [piece, padded_dim],
            kv_layout(padded_dim, cache.element_size()),
        )  # fmt: skip


class HopperKernel:
    """``kernels.hopper.kernel``, for compute capability 9.0."""

    name = "hopper"
    starts_merging = True

    def __init__(self, attention: AttentionConfig, query_len: int, gpu: Gpu) -> None:
        self.shape = hopper_shape(attention, query_len)
        self.limits = hopper_limits(attention, query_len, gpu)
        self.row_tiles = self.shape.chunks

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """As ``interface.Kernel.layout``."""
        shape = self.shape
        return linked_layout(
            plan, shape.rows, shape.max_tile_requests, shape.max_tile_runs, shape.kv_tile
        )._asdict()

    def capacity(self, num_reqs: int, pieces: PieceLimits | None = None) -> Capacity:
        """As ``interface.Kernel.capacity``."""
        limits = self.limits
        max_tiles, max_partials = plan_limits(num_reqs, limits, pieces)
        places = max_tiles + limits.num_workers  # an idle work queue has a tile, too
        room = sizes(places, limits.max_tile_requests, limits.max_tile_runs, num_reqs)
        return Capacity(max_tiles, places * limits.max_tile_runs, max_partials, room._asdict())

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """As ``interface.Kernel.launch``."""
        shape = self.shape
        k_view = CacheView("k_cache", t.k_cache, shape.padded_dim, shape.piece)
        v_view = CacheView("v_cache", t.v_cache, shape.padded_dim, shape.piece)
        qk_scale, cap_rate = score_factors(t.extras.soft_cap, sm_scale)
        small = shape.num_qo_heads == shape.num_kv_heads  # 128 requests: more runs to hold
        launch(
            partial_attention,
            (self.limits.num_workers * shape.chunks * shape.num_kv_heads,),
            k_view.descriptor,
            v_view.descriptor,
            t.q,
            t.block_table,
            t.seq_lens,
            t.query_start_loc,
            PlanArrays(**plan),
            t.outputs,
            t.seq_lens if t.tree_mask is None else t.tree_mask,
            0 if t.tree_mask is None else t.tree_mask.stride(0),
            t.block_table.stride(0),
            t.q.stride(0),
            t.out.stride(0),
            k_view.block_rows,
            k_view.head_rows,
            k_view.head_cols,
            qk_scale,
            cap_rate,
            t.extras,
            *scale_strides(t.extras),
            SHAPE=shape,
            TREE=t.tree_mask is not None,
            CONSUMER_REGS=208 if small else 216,
            PRODUCER_REGS=88 if small else 72,
            num_warps=4,
            launch_pdl=True,
        )
