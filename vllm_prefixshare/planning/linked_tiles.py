"""Writing the tiles of a plan to fixed places: the compiled part of ``executors.layout``."""

import numpy as np

from vllm_prefixshare.planning.compiled import compiled
from vllm_prefixshare.types import IntArray


@compiled
def link_tiles(
    work_indptr: IntArray,
    req_indptr: IntArray,
    run_indptr: IntArray,
    reqs: tuple[IntArray, IntArray],
    runs: tuple[IntArray, IntArray, IntArray],
    run_first: IntArray,
    run_last: IntArray,
    all_wide: bool,
    max_slots: int,
    max_runs: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """The arrays of ``linked_layout``, but for ``merge_indptr``.

    Args:
        reqs: tile_req_indices and partial_indices of a plan.
        runs: run_row, run_kv_start and run_kv_end of a plan.
        all_wide: both halves read every run.

    Returns:
        tile_info ``[num_tiles, 8]``; slot_row and slot_partial ``[2, num_tiles, max_slots]``;
        run_row, run_kv_start, run_kv_end and run_readers ``[4, num_tiles, max_runs]``.
    """
    num_workers, used = len(work_indptr) - 1, len(req_indptr) - 1
    idle = 0
    for w in range(num_workers):
        idle += work_indptr[w] == work_indptr[w + 1]
    num_tiles = used + idle
    info = np.zeros((num_tiles, 8), np.int32)
    slots = np.zeros((2, num_tiles, max_slots), np.int32)
    out = np.zeros((4, num_tiles, max_runs), np.int32)
    free = num_workers
    next_of_kind = np.zeros(3, np.int64)  # wide, low half only, high half only
    for w in range(num_workers):
        place = w
        for tile in range(work_indptr[w], work_indptr[w + 1]):
            if tile > work_indptr[w]:
                info[place, 4] = free + 1
                place, free = free, free + 1
            begin, end = req_indptr[tile], req_indptr[tile + 1]
            for k in range(2):
                slots[k, place, : end - begin] = reqs[k][begin:end]
            half = (end - begin + 1) // 2
            first_run, last_run = run_indptr[tile], run_indptr[tile + 1]
            wide = low = 0
            for run in range(first_run, last_run):
                is_wide = all_wide or run_first[run] < half < run_last[run]
                wide += is_wide
                low += not is_wide and run_first[run] < half
            next_of_kind[0], next_of_kind[1], next_of_kind[2] = 0, wide, wide + low
            for run in range(first_run, last_run):
                first, last = run_first[run], run_last[run]
                kind = 0 if all_wide or first < half < last else 1 if first < half else 2
                at = next_of_kind[kind]
                next_of_kind[kind] += 1
                for k in range(3):
                    out[k, place, at] = runs[k][run]
                out[3, place, at] = first | last << 16
            info[place, 0], info[place, 1] = end - begin, last_run - first_run
            info[place, 2], info[place, 3], info[place, 5] = wide, low, half
    return info, slots, out
