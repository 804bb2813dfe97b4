"""A plan as the GPU kernels read it: a few int32 arrays, ready to be copied to the device."""

import numpy as np

from vllm_prefixshare.planning.linked_tiles import link_tiles
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.scheduler import longest_first
from vllm_prefixshare.planning.windows import HALF_ROWS
from vllm_prefixshare.types import IntArray, PrefixShareError


def linked_layout(
    plan: DecodePlan, rows_per_request: int, max_slots: int, max_runs: int
) -> dict[str, IntArray]:
    """The arrays that the Hopper kernel walks, all int32.

    Everything lies at fixed places, so that a thread block that starts cold finds its first
    tile, requests and runs in one round trip to memory instead of three: the first tile of
    worker ``w`` is tile ``w``, without runs if the worker is idle, and each tile names the next
    one of its worker.

    The rows of a tile are a low and a high half of 64. Each takes half of the tile's requests
    (or half of the rows, if one request has more than 64), so that both have work.

    Args:
        rows_per_request: query rows of one request on one KV head.
        max_slots, max_runs: places that every tile has for its requests and its runs.

    Returns:
        tile_info: ``[num_tiles, 8]``: num_reqs, num_runs, wide_runs, low_runs, 1 + next tile (0:
            none), requests of the low half, 0, 0. The runs of a tile are sorted: first the wide
            ones, which both halves read, then those of the low half, then those of the high.
        slot_row, slot_partial: ``[num_tiles, max_slots]`` batch row and partial result (-1: the
            output itself) of each request of each tile.
        run_row, run_kv_start, run_kv_end: ``[num_tiles, max_runs]`` as in the plan.
        run_readers: ``[num_tiles, max_runs]`` ``first | last << 16``: readers among the tile's
            requests.
        merge_indptr: as in the plan.

    Raises:
        PrefixShareError: a tile has more requests or runs than there are places.
    """
    _require_room("requests", plan.tile_req_indptr, "max_tile_requests", max_slots)
    _require_room("runs", plan.tile_run_indptr, "max_tile_runs", max_runs)
    info, slots, runs = link_tiles(
        plan.work_indptr,
        plan.tile_req_indptr,
        plan.tile_run_indptr,
        (plan.tile_req_indices, plan.partial_indices),
        (plan.run_row, plan.run_kv_start, plan.run_kv_end),
        plan.run_first,
        plan.run_last,
        rows_per_request > HALF_ROWS,  # the only request of a tile is in both halves
        max_slots,
        max_runs,
    )
    return {
        "tile_info": info,
        "slot_row": slots[0],
        "slot_partial": slots[1],
        "run_row": runs[0],
        "run_kv_start": runs[1],
        "run_kv_end": runs[2],
        "run_readers": runs[3],
        "merge_indptr": plan.merge_indptr,
    }


def _require_room(what: str, indptr: IntArray, name: str, limit: int) -> None:
    most = int(np.diff(indptr).max(initial=0))
    if most > limit:
        raise PrefixShareError(
            f"a tile of the plan has {most} {what} and the kernel takes {limit}: "
            f"plan with {name}={limit} in PlannerConfig."
        )


def layout_by_size(
    plan: DecodePlan, rows_per_request: int, tile_sizes: list[tuple[int, int]]
) -> dict[str, IntArray]:
    """The arrays that the portable kernel walks, all int32. It is launched once per Q tile size.

    Every tile goes to the smallest size that holds its query rows (the largest where none
    does: such a kernel walks the rows in pieces). A launch has thread blocks of its own, so
    the tiles of a size are scheduled anew, longest first, over that size's workers.

    Args:
        rows_per_request: query rows of one request on one KV head.
        tile_sizes: ``(rows, workers)`` of each size, ascending.

    Returns:
        work_indptr_<rows>: ``[workers + 1]`` for every size, tiles of each worker.
        tile_info: ``[num_tiles, 8]``: slot_start, num_reqs, run_start, num_runs, 0, 0, 0, 0.
            Sizes and workers follow one another, and so do the runs of their tiles.
        slot_row, slot_partial: ``[num_slots]`` batch row and partial result (-1: the output
            itself) of each request of each tile.
        run_row, run_kv_start, run_kv_end: ``[num_runs]`` as in the plan.
        run_readers: ``[num_runs]`` ``first | last << 16``: readers among the tile's requests.
        merge_indptr: ``[num_reqs + 1]`` as in the plan.
    """
    num_reqs, num_runs = np.diff(plan.tile_req_indptr), np.diff(plan.tile_run_indptr)
    size_of = np.searchsorted([rows for rows, _ in tile_sizes[:-1]], num_reqs * rows_per_request)
    layout: dict[str, IntArray] = {}
    orders, done = [], 0
    for size, (rows, workers) in enumerate(tile_sizes):
        tiles = np.flatnonzero(size_of == size)
        order, indptr, _ = longest_first(plan.tile_cost[tiles], workers)
        layout[f"work_indptr_{rows}"] = (indptr + done).astype(np.int32)
        orders.append(tiles[order])
        done += len(tiles)
    tiles = np.concatenate(orders)
    num_runs = num_runs[tiles]
    info = layout["tile_info"] = np.zeros((len(tiles), 8), np.int32)
    info[:, 0], info[:, 1] = plan.tile_req_indptr[tiles], num_reqs[tiles]
    info[:, 2], info[:, 3] = np.cumsum(num_runs) - num_runs, num_runs
    runs = np.repeat(plan.tile_run_indptr[tiles] - info[:, 2], num_runs) + np.arange(plan.num_runs)
    return {
        **layout,
        "slot_row": plan.tile_req_indices,
        "slot_partial": plan.partial_indices,
        "run_row": plan.run_row[runs],
        "run_kv_start": plan.run_kv_start[runs],
        "run_kv_end": plan.run_kv_end[runs],
        "run_readers": (plan.run_first | plan.run_last << 16)[runs],
        "merge_indptr": plan.merge_indptr,
    }
