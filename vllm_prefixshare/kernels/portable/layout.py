"""A plan as the portable kernel reads it: a few int32 arrays, ready to be copied to the device."""

import math
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import OPEN_END, FloatArray, IntArray

#: ``slot_end`` of a request whose tokens since the plan belong to another tile
FAR = 1 << 30


class Grid(NamedTuple):
    """How the kernel cuts KV, in tokens.

    kv_tile: what one step of a loop reads.
    unit: what has one batch row and one interval of readers; it divides kv_tile and blocks.
    own_queries: tokens at the end of each request that its queries see in part only.
    """

    kv_tile: int
    unit: int
    own_queries: int

    @classmethod
    def of(cls, kv_tile: int, block_size: int, query_len: int) -> "Grid":
        own = query_len if query_len > 1 else 0
        return cls(kv_tile, math.gcd(kv_tile, block_size), own)


def walk_layout(
    plan: DecodePlan, rows_per_request: int, tile_sizes: list[tuple[int, int]], grid: Grid
) -> dict[str, IntArray]:
    """The arrays that the portable kernel walks, all int32. It is launched once per Q tile size.

    Every tile goes to the smallest size that holds its query rows (the largest where none
    does: such a kernel walks the rows in pieces). The largest size has the workers that the
    plan was made for, and keeps their tiles; the tiles of a smaller size, which has workers of
    its own, are spread over them, longest first.

    A tile is a list of entries, each a number of KV tiles that follow one another. An entry
    has ``kv_tile / unit`` parts, each with a batch row, a first token and readers of its own:
    first the entries that every request of the tile reads whole, then the others, then those
    of the tokens that come after the plan: one unit of each request a step, as many steps as
    the longest has grown by.

    Args:
        rows_per_request: query rows of one request on one KV head.
        tile_sizes: ``(rows, workers)`` of each size, ascending.

    Returns:
        work_indptr_<rows>: ``[workers + 1]`` for every size, tiles of each worker.
        tile_info: ``[num_tiles, 8]``: first slot; requests; first entry, first that needs a
            mask, first of tokens since the plan, end of the entries; KV tiles without a mask,
            with one. Sizes and workers follow one another.
        slot_row, slot_partial: ``[num_slots]`` batch row and partial result (-1: the output
            itself) of each request of each tile.
        slot_end: ``[num_slots]`` token after which the request's entry of new tokens begins.
        entry_steps: ``[num_entries + 1]`` KV tiles; 0 for new tokens.
        entry_row, entry_pos, entry_readers: ``[num_entries + 1, kv_tile / unit]`` of each
            part: batch row, first token, and ``first | last << 16`` among the tile's requests.
        merge_indptr: ``[num_reqs + 1]`` as in the plan.
    """
    sizes = np.array(tile_sizes, np.int32).reshape(-1, 2)
    order, indptr = _schedule(
        plan.work_indptr, plan.tile_req_indptr, plan.tile_cost, sizes, rows_per_request
    )
    info, slot_end, steps, parts = _entries(
        order,
        plan.tile_req_indptr,
        plan.tile_req_indices,
        plan.tile_run_indptr,
        (plan.run_row, plan.run_kv_start, plan.run_kv_end, plan.run_first, plan.run_last),
        plan.planned_seq_lens,
        grid,
    )
    begin = np.concatenate([[0], np.cumsum(sizes[:, 1] + 1)])
    return {
        **{f"work_indptr_{r}": indptr[begin[i] : begin[i + 1]] for i, (r, _) in enumerate(sizes)},
        "tile_info": info,
        "slot_row": plan.tile_req_indices,
        "slot_partial": plan.partial_indices,
        "slot_end": slot_end,
        "entry_steps": steps,
        "entry_row": parts[0],
        "entry_pos": parts[1],
        "entry_readers": parts[2],
        "merge_indptr": plan.merge_indptr,
    }


@compiled
def _schedule(
    work_indptr: IntArray,
    req_indptr: IntArray,
    cost: FloatArray,
    sizes: IntArray,
    rows_per_request: int,
) -> tuple[IntArray, IntArray]:
    """Tiles in the order in which the launches walk them, and the ``work_indptr`` of each
    size, one after the other."""
    num_tiles = len(cost)
    size_of = np.zeros(num_tiles, np.int32)
    for t in range(num_tiles):
        rows = (req_indptr[t + 1] - req_indptr[t]) * rows_per_request
        while size_of[t] < len(sizes) - 1 and sizes[size_of[t], 0] < rows:
            size_of[t] += 1
    order = np.empty(num_tiles, np.int32)
    indptr = np.empty(sizes[:, 1].sum() + len(sizes), np.int32)
    by_cost = np.argsort(-cost, kind="mergesort")
    done = at = 0
    for size in range(len(sizes)):
        workers = sizes[size, 1]
        worker_of = np.full(num_tiles, -1, np.int32)
        if size == len(sizes) - 1 and len(work_indptr) - 1 == workers:
            for w in range(workers):
                worker_of[work_indptr[w] : work_indptr[w + 1]] = w
            walk = np.arange(num_tiles)
        else:
            walk = by_cost
            load = np.zeros(workers)
            for t in walk:
                if size_of[t] == size:
                    worker = np.argmin(load)
                    worker_of[t] = worker
                    load[worker] += cost[t]
        count = np.zeros(workers + 1, np.int32)
        for t in range(num_tiles):
            if size_of[t] == size:
                count[worker_of[t] + 1] += 1
        count[0] = done
        begin = np.cumsum(count).astype(np.int32)
        indptr[at : at + workers + 1] = begin
        for t in walk:
            if size_of[t] == size:
                w = worker_of[t]
                order[begin[w]] = t
                begin[w] += 1
                done += 1
        at += workers + 1
    return order, indptr


@compiled
def _entries(
    order: IntArray,
    req_indptr: IntArray,
    rows: IntArray,
    run_indptr: IntArray,
    runs: tuple[IntArray, IntArray, IntArray, IntArray, IntArray],
    planned: IntArray,
    grid: Grid,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """tile_info, slot_end, entry_steps, and ``[3, num_entries + 1, parts]`` row, pos and
    readers."""
    run_row, run_start, run_end, run_first, run_last = runs
    kv_tile, unit = grid.kv_tile, grid.unit
    parts = kv_tile // unit
    # a run has at most one entry without a mask, one with, what is left, and its new tokens
    most = 4 * len(run_row) + 1
    steps = np.zeros(most, np.int32)
    out = np.zeros((3, most, parts), np.int32)
    info = np.zeros((len(order), 8), np.int32)
    slot_end = np.full(len(rows), FAR, np.int32)
    count = 0
    for place, t in enumerate(order):
        slots, num_reqs = req_indptr[t], req_indptr[t + 1] - req_indptr[t]
        info[place, 0], info[place, 1], info[place, 2] = slots, num_reqs, count
        for masked in range(2):
            info[place, 2 + masked] = count
            used, mixed = parts, 0  # parts taken of the entry that short runs share
            for r in range(run_indptr[t], run_indptr[t + 1]):
                row, start, end = run_row[r], run_start[r], run_end[r]
                if end == OPEN_END:
                    end = max(start, -(-planned[row] // unit) * unit)
                readers = run_first[r] | run_last[r] << 16
                plain = 0
                if run_first[r] == 0 and run_last[r] == num_reqs:
                    seen = end
                    if run_last[r] - run_first[r] == 1:
                        seen = min(end, planned[row] - grid.own_queries)
                    plain = max(0, seen - start) // kv_tile
                if masked:
                    start += plain * kv_tile
                    whole = (end - start) // kv_tile
                else:
                    whole = plain
                if whole:
                    steps[count] = whole
                    info[place, 6 + masked] += whole
                    for i in range(parts):
                        out[0, count, i], out[1, count, i] = row, start + i * unit
                        out[2, count, i] = readers
                    count += 1
                if not masked:
                    continue
                for pos in range(start + whole * kv_tile, end, unit):
                    if used == parts:
                        used, mixed = 0, count
                        steps[count] = 1
                        info[place, 7] += 1
                        count += 1
                    out[0, mixed, used], out[1, mixed, used] = row, pos
                    out[2, mixed, used] = readers
                    used += 1
        info[place, 4] = count
        used = parts
        for r in range(run_indptr[t], run_indptr[t + 1]):
            if run_end[r] == OPEN_END:
                row = run_row[r]
                end = max(run_start[r], -(-planned[row] // unit) * unit)
                slot_end[slots + run_first[r]] = end
                if used == parts:
                    used = 0
                    count += 1
                out[0, count - 1, used], out[1, count - 1, used] = row, end
                out[2, count - 1, used] = run_first[r] | run_last[r] << 16
                used += 1
        info[place, 5] = count
    return info, slot_end, steps[: count + 1], out[:, : count + 1].copy()
