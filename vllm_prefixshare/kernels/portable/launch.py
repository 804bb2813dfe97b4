"""Launching the portable kernel: sizes of Q tile, limits of a plan, what Triton needs to know
beside the tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.contract import Capacity, Gpu, Tensors
from vllm_prefixshare.kernels.launching import launch
from vllm_prefixshare.kernels.portable.kernel import partial_attention
from vllm_prefixshare.kernels.portable.layout import layout_by_size
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import IntArray

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class QTile:
    """One launch of the kernel.

    rows: query rows of a tile; a power of two of at least 16.
    kv_tile: tokens that one step of the inner loop multiplies.
    warps, stages: warps of a thread block; KV tiles in flight.
    blocks_per_sm: thread blocks that share a multiprocessor.
    """

    rows: int
    kv_tile: int
    warps: int
    stages: int
    blocks_per_sm: int

    def num_workers(self, multiprocessors: int, num_kv_heads: int, rows_per_request: int) -> int:
        """Workers whose thread blocks fill the GPU."""
        per_worker = num_kv_heads * self.chunks(rows_per_request)
        return max(1, multiprocessors * self.blocks_per_sm // per_worker)

    def chunks(self, rows_per_request: int) -> int:
        """Pieces that a request with more rows than the tile is walked in."""
        return -(-rows_per_request // self.rows)


def q_tiles(head_dim: int, rows_per_request: int, shared_memory: int) -> tuple[QTile, ...]:
    """Sizes of Q tile, ascending.

    Args:
        rows_per_request: query rows of one request on one KV head.
        shared_memory: bytes that a thread block may have.
    """
    large = shared_memory >= 160 << 10  # data-centre GPUs; the others have 99 KiB
    if head_dim > 128:
        sizes = [QTile(16, 32, 4, 2, 2), QTile(64, 32, 8, 2, 1)]
    else:
        sizes = [QTile(16, 64, 2, 2, 4 if large else 2), QTile(128, 64, 8, 3 if large else 2, 1)]
    return tuple(s for s in sizes if s.rows >= rows_per_request) or (sizes[-1],)


def portable_partial_attention(
    tiles: Sequence[tuple[QTile, int]],
    query_len: int,
    plan: Mapping[str, torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
) -> None:
    """Launch every size of Q tile; the arguments have been checked by the executor.

    The launches depend on shapes only: they may be captured in a CUDA graph.

    Args:
        tiles: sizes with their numbers of workers, as the plan was laid out for.
        query_len: most query tokens of a request.
        plan: int32 device arrays of ``portable.layout.layout_by_size``.
        q: ``[num_tokens, num_qo_heads, head_dim]``, bfloat16 or float16.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with the same
            strides, multiples of 8 elements; head_dim contiguous. NHD and HND alike.
        block_table: int32 ``[num_reqs, max_blocks]``.
        seq_lens: int32 ``[num_reqs]``, the queries included.
        query_start_loc: int32 ``[num_reqs + 1]``, read if ``query_len`` is more than 1; then
            ``query_len`` tokens each if None.
        tree_mask: int32 ``[num_tokens, words]``: bit ``j`` of a query token's words says that
            it sees query token ``j`` of its request. Causal order if None.
        partial_out: float32 ``[num_partials * query_len, num_qo_heads, head_dim]``.
        partial_lse: float32 ``[num_partials * query_len, num_qo_heads]``, natural logarithm.
        out: like ``q``.
        sm_scale: softmax scale, above 0.
    """
    num_qo_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    rows_per_request = query_len * num_qo_heads // num_kv_heads
    for tile, num_workers in reversed(tiles):  # the largest tiles take longest
        chunks = tile.chunks(rows_per_request)
        launch(
            partial_attention,
            (num_workers * chunks * num_kv_heads,),
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            seq_lens if query_start_loc is None else query_start_loc,
            seq_lens if tree_mask is None else tree_mask,
            plan[f"work_indptr_{tile.rows}"],
            plan["tile_info"],
            plan["slot_row"],
            plan["slot_partial"],
            plan["run_row"],
            plan["run_kv_start"],
            plan["run_kv_end"],
            plan["run_readers"],
            partial_out,
            partial_lse,
            out,
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            block_table.stride(0),
            q.stride(0),
            out.stride(0),
            0 if tree_mask is None else tree_mask.stride(0),
            sm_scale * LOG2E,
            Q_HEADS=num_qo_heads,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            D=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
            QUERY_LEN=query_len,
            RAGGED=query_len > 1 and query_start_loc is not None,
            TREE=tree_mask is not None,
            CHUNKS=chunks,
            Q_TILE_SIZE=tile.rows,
            KV_TILE_SIZE=tile.kv_tile,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )


class PortableKernel:
    """``kernels.portable.kernel``, for every NVIDIA GPU from compute capability 8.0 on."""

    name, divider = "portable", "flashforge"

    def __init__(self, attention: AttentionConfig, query_len: int, gpu: Gpu) -> None:
        self.rows = query_len * attention.gqa_group_size
        self.query_len = query_len
        tiles = q_tiles(attention.head_dim, self.rows, gpu.shared_memory)
        self.tiles = [
            (
                tile,
                tile.num_workers(gpu.multi_processor_count, attention.num_kv_heads, self.rows),
            )
            for tile in tiles
        ]
        self.num_workers = self.tiles[-1][1]
        self.max_tile_requests = max(1, tiles[-1].rows // self.rows)
        self.max_tile_runs = 1 << 30

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        return layout_by_size(plan, self.rows, [(tile.rows, n) for tile, n in self.tiles])

    def capacity(self, num_reqs: int) -> Capacity:
        # there is no bound for every divider: plans that want more are made anew without
        max_tiles = 2 * num_reqs + 8 * self.num_workers
        max_partials = max_tiles * min(4, self.max_tile_requests)
        max_runs = 4 * max_tiles
        sizes = {f"work_indptr_{tile.rows}": workers + 1 for tile, workers in self.tiles}
        sizes |= {
            "tile_info": max_tiles * 8,
            "slot_row": num_reqs + max_partials,
            "slot_partial": num_reqs + max_partials,
            **dict.fromkeys(("run_row", "run_kv_start", "run_kv_end", "run_readers"), max_runs),
            "merge_indptr": num_reqs + 1,
        }
        return Capacity(max_tiles, max_runs, max_partials, sizes)

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        portable_partial_attention(
            self.tiles,
            self.query_len,
            plan,
            t.q,
            t.k_cache,
            t.v_cache,
            t.block_table,
            t.seq_lens,
            t.query_start_loc,
            t.tree_mask,
            t.partial_out,
            t.partial_lse,
            t.out,
            sm_scale,
        )
