"""A plan as the portable kernel reads it: a few int32 arrays, ready to be copied to the device."""

import numpy as np

from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.scheduler import longest_first
from vllm_prefixshare.records import IntArray


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
