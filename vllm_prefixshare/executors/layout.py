"""A plan as the GPU kernels read it: a few int32 arrays, ready to be copied to the device."""

import numpy as np

from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.scheduler import longest_first
from vllm_prefixshare.types import IntArray

#: query rows of one consumer warpgroup; a tile of 128 rows is a low and a high half
HALF_ROWS = 64


def device_layout(plan: DecodePlan, rows_per_request: int) -> dict[str, IntArray]:
    """The arrays that a kernel walks, all int32.

    Args:
        rows_per_request: query rows of one request on one KV head.

    Returns:
        work_indptr: ``[num_workers + 1]`` tiles of each worker.
        tile_info: ``[num_tiles, 8]``: slot_start, num_reqs, run_start, num_runs, wide_runs,
            low_runs, 0, 0. The runs of a tile are sorted: first the wide ones, which both
            halves of its rows read, then those of the low half, then those of the high half.
        slot_row, slot_partial: ``[num_slots]`` batch row and partial result (-1: the output
            itself) of each request of each tile.
        run_row, run_kv_start, run_kv_end: ``[num_runs]`` as in the plan.
        run_readers: ``[num_runs]`` ``first | last << 16``: readers among the tile's requests.
        merge_indptr: ``[num_reqs + 1]`` as in the plan.
    """
    num_tiles, runs_per_tile = plan.num_tiles, np.diff(plan.tile_run_indptr)
    low = plan.run_first * rows_per_request < HALF_ROWS
    high = plan.run_last * rows_per_request > HALF_ROWS
    # wide 0, low half only 1, high half only 2
    kind = np.where(low & high, 0, np.where(low, 1, 2))
    key = 3 * np.repeat(np.arange(num_tiles), runs_per_tile) + kind
    runs_per_kind = np.bincount(key, minlength=3 * num_tiles).reshape(num_tiles, 3)
    run_row, start, end = plan.run_row, plan.run_kv_start, plan.run_kv_end
    readers = plan.run_first | plan.run_last << 16
    if np.any(key[1:] < key[:-1]):
        order = np.argsort(key, kind="stable")
        run_row, start, end, readers = run_row[order], start[order], end[order], readers[order]

    tile_info = np.zeros((num_tiles, 8), np.int32)
    tile_info[:, 0] = plan.tile_req_indptr[:-1]
    tile_info[:, 1] = np.diff(plan.tile_req_indptr)
    tile_info[:, 2] = plan.tile_run_indptr[:-1]
    tile_info[:, 3] = runs_per_tile
    tile_info[:, 4:6] = runs_per_kind[:, :2]
    return {
        "work_indptr": plan.work_indptr,
        "tile_info": tile_info,
        "slot_row": plan.tile_req_indices,
        "slot_partial": plan.partial_indices,
        "run_row": run_row,
        "run_kv_start": start,
        "run_kv_end": end,
        "run_readers": readers,
        "merge_indptr": plan.merge_indptr,
    }


def layout_by_size(
    plan: DecodePlan, rows_per_request: int, tile_sizes: list[tuple[int, int]]
) -> dict[str, IntArray]:
    """The arrays of ``device_layout`` for a kernel that is launched once per Q tile size.

    Every tile goes to the smallest size that holds its query rows (the largest where none
    does: such a kernel walks the rows in pieces). A launch has thread blocks of its own, so
    the tiles of a size are scheduled anew, longest first, over that size's workers.

    Args:
        tile_sizes: ``(rows, workers)`` of each size, ascending.

    Returns:
        as ``device_layout``, with ``work_indptr_<rows>`` ``[workers + 1]`` for every size in
        place of ``work_indptr``. They all index one ``tile_info``, sorted to suit, and the runs
        follow one another in the same order.
    """
    layout = device_layout(plan, rows_per_request)
    del layout["work_indptr"]
    limits = [rows for rows, _ in tile_sizes[:-1]]
    size_of = np.searchsorted(limits, layout["tile_info"][:, 1] * rows_per_request)
    orders, done = [], 0
    for size, (rows, workers) in enumerate(tile_sizes):
        tiles = np.flatnonzero(size_of == size)
        order, indptr, _ = longest_first(plan.tile_cost[tiles], workers)
        layout[f"work_indptr_{rows}"] = (indptr + done).astype(np.int32)
        orders.append(tiles[order])
        done += len(tiles)
    info = layout["tile_info"] = layout["tile_info"][np.concatenate(orders)]
    old_start, counts = info[:, 2].copy(), info[:, 3]
    info[:, 2] = np.cumsum(counts) - counts
    runs = np.repeat(old_start - info[:, 2], counts) + np.arange(plan.num_runs)
    for name in ("run_row", "run_kv_start", "run_kv_end", "run_readers"):
        layout[name] = layout[name][runs]
    return layout


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
        tile_info: ``[num_tiles, 8]``: num_reqs, num_runs, wide_runs, low_runs, next tile (-1:
            none), requests of the low half, 0, 0. The runs of a tile are sorted: first the wide
            ones, which both halves read, then those of the low half, then those of the high.
        slot_row, slot_partial: ``[num_tiles, max_slots]`` batch row and partial result (-1: the
            output itself) of each request of each tile.
        run_row, run_kv_start, run_kv_end: ``[num_tiles, max_runs]`` as in the plan.
        run_readers: ``[num_tiles, max_runs]`` ``first | last << 16``: readers among the tile's
            requests.
        merge_indptr: as in the plan.
    """
    per_worker = np.diff(plan.work_indptr)
    is_first = np.zeros(plan.num_tiles, bool)
    is_first[plan.work_indptr[:-1][per_worker > 0]] = True
    place = plan.num_workers + np.cumsum(~is_first) - 1
    place[is_first] = np.flatnonzero(per_worker)

    num_reqs, num_runs = np.diff(plan.tile_req_indptr), np.diff(plan.tile_run_indptr)
    half = (num_reqs + 1) // 2
    tile_of_run = np.repeat(np.arange(plan.num_tiles), num_runs)
    wide_tile = rows_per_request > HALF_ROWS  # its only request is in both halves
    low = wide_tile | (plan.run_first < half[tile_of_run])
    high = wide_tile | (plan.run_last > half[tile_of_run])
    key = 3 * tile_of_run + np.where(low & high, 0, np.where(low, 1, 2))
    order = np.argsort(key, kind="stable")

    num_tiles = plan.num_workers + int((~is_first).sum())
    tile_info = np.zeros((num_tiles, 8), np.int32)
    tile_info[:, 4] = -1
    tile_info[place, 0] = num_reqs
    tile_info[place, 1] = num_runs
    tile_info[place, 2:4] = np.bincount(key, minlength=3 * plan.num_tiles).reshape(-1, 3)[:, :2]
    follows = np.flatnonzero(~is_first)
    tile_info[place[follows - 1], 4] = place[follows]
    tile_info[place, 5] = half

    def at_places(values: IntArray, indptr: IntArray, count: IntArray, room: int) -> IntArray:
        out = np.zeros((num_tiles, room), np.int32)
        to = np.repeat(place * room - indptr[:-1], count) + np.arange(len(values))
        out.reshape(-1)[to] = values
        return out

    def of_requests(values: IntArray) -> IntArray:
        return at_places(values, plan.tile_req_indptr, num_reqs, max_slots)

    def of_runs(values: IntArray) -> IntArray:
        return at_places(values[order], plan.tile_run_indptr, num_runs, max_runs)

    return {
        "tile_info": tile_info,
        "slot_row": of_requests(plan.tile_req_indices),
        "slot_partial": of_requests(plan.partial_indices),
        "run_row": of_runs(plan.run_row),
        "run_kv_start": of_runs(plan.run_kv_start),
        "run_kv_end": of_runs(plan.run_kv_end),
        "run_readers": of_runs(plan.run_first | plan.run_last << 16),
        "merge_indptr": plan.merge_indptr,
    }
