"""A plan as lists of KV ranges and parts, which the portable kernel and the MLA kernel read."""

import math
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.config import part_size
from vllm_prefixshare.core import OPEN_END, IntArray
from vllm_prefixshare.kernels.common.arrays import (
    END_RUN,
    FAR,
    FIRST_PART,
    FIRST_RUN,
    FIRST_SLOT,
    NEW_KV_TILES,
    NUM_REQS,
    PLANNED_KV_TILES,
    WORDS,
    PlanArrays,
)
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.utils.numba_cache import compiled


class KvTiling(NamedTuple):
    """Sizes into which a kernel divides KV, in tokens.

    kv_tile: tokens that one step of a loop reads.
    unit: tokens of a part, which has one batch row and one interval of readers; divides kv_tile and
        blocks.
    own_queries: tokens at the end of each request that its queries see in part only.
    long: minimum number of KV tiles of a run that is read in a separate loop.
    """

    kv_tile: int
    unit: int
    own_queries: int
    long: int = 4

    @classmethod
    def of(cls, kv_tile: int, block_size: int, query_len: int) -> "KvTiling":
        """The portable kernel's tiling for a KV tile, a block size and a number of query tokens."""
        own = query_len if query_len > 1 else 0
        return cls(kv_tile, math.gcd(kv_tile, part_size(block_size)), own)


@compiled
def max_parts_of(tiling: KvTiling, num_runs: int, num_tiles: int) -> int:
    """Maximum number of parts that ``walk_layout`` writes: per run less than ``long`` KV tiles, its
    queries and a part for new tokens; per tile two lists of whole KV tiles.
    """
    per_tile = tiling.kv_tile // tiling.unit
    per_run = tiling.long * per_tile + (tiling.kv_tile + tiling.own_queries) // tiling.unit + 3
    return per_run * num_runs + (2 * per_tile * num_tiles)


def walk_layout(plan: DecodePlan, tiling: KvTiling) -> PlanArrays:
    """The plan as ``PlanArrays``, all int32.

    The KV of a tile is listed in two forms: whole KV tiles of long ranges as runs, all other tokens
    as parts of one unit, which fill KV tiles that several ranges share. The last of these KV tiles
    are for the tokens after the plan: a part for each request, repeated one unit further on until
    the longest request is done.
    """
    info, slot_end, runs, parts = _runs_and_parts(
        plan.tile_req_indptr,
        plan.tile_req_indices,
        plan.tile_run_indptr,
        (
            plan.run_row,
            plan.run_kv_start,
            plan.run_kv_end,
            plan.run_reader_start,
            plan.run_reader_end,
        ),
        plan.planned_seq_lens,
        tiling,
    )
    slots = plan.tile_req_indices, plan.partial_indices, slot_end
    arrays = plan.work_indptr, info, *slots, *runs, *parts, plan.merge_indptr
    return PlanArrays._make(arrays)


@compiled
def _runs_and_parts(
    req_indptr: IntArray,
    rows: IntArray,
    run_indptr: IntArray,
    runs: tuple[IntArray, IntArray, IntArray, IntArray, IntArray],
    planned: IntArray,
    tiling: KvTiling,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """tile_info, slot_end, ``[4, num_runs]`` and ``[3, num_parts]`` of ``walk_layout``."""
    run_row, run_start, run_end, run_reader_start, run_reader_end = runs
    kv_tile = tiling.kv_tile
    unit = tiling.unit
    num_tiles = len(req_indptr) - 1
    per_tile = kv_tile // unit
    long = np.empty((4, len(run_row)), np.int32)
    parts = np.zeros((3, max_parts_of(tiling, len(run_row), num_tiles)), np.int32)
    info = np.zeros((num_tiles, WORDS), np.int32)
    slot_end = np.full(len(rows), FAR, np.int32)
    num_long = num_parts = 0
    for t in range(num_tiles):
        slots = req_indptr[t]
        info[t, FIRST_SLOT] = slots
        info[t, NUM_REQS] = req_indptr[t + 1] - slots
        info[t, FIRST_RUN] = num_long
        info[t, FIRST_PART] = num_parts
        begun = num_parts
        for r in range(run_indptr[t], run_indptr[t + 1]):
            row = run_row[r]
            start = run_start[r]
            end = run_end[r]
            if end == OPEN_END:
                end = max(start, -(-planned[row] // unit) * unit)
            readers = run_reader_start[r] | run_reader_end[r] << 16
            seen = end  # by every query of the readers
            if run_reader_end[r] - run_reader_start[r] == 1:
                seen = min(end, planned[row] - tiling.own_queries)
            whole = (seen - start) // kv_tile
            if whole >= tiling.long:
                long[0, num_long] = row
                long[1, num_long] = start
                start += whole * kv_tile
                long[2, num_long] = start
                long[3, num_long] = readers
                num_long += 1
            for pos in range(start, end, unit):
                parts[0, num_parts] = row
                parts[1, num_parts] = pos
                parts[2, num_parts] = readers
                num_parts += 1
        info[t, END_RUN] = num_long
        steps = -(-(num_parts - begun) // per_tile)
        info[t, PLANNED_KV_TILES] = steps
        num_parts = begun = begun + steps * per_tile  # padding of the last one has no readers
        for r in range(run_indptr[t], run_indptr[t + 1]):
            if run_end[r] == OPEN_END:
                row = run_row[r]
                end = max(run_start[r], -(-planned[row] // unit) * unit)
                slot_end[slots + run_reader_start[r]] = end
                parts[0, num_parts] = row
                parts[1, num_parts] = end
                parts[2, num_parts] = run_reader_start[r] | run_reader_end[r] << 16
                num_parts += 1
        steps = -(-(num_parts - begun) // per_tile)
        info[t, NEW_KV_TILES] = steps
        num_parts = begun + steps * per_tile
    return info, slot_end, long[:, :num_long].copy(), parts[:, :num_parts].copy()
