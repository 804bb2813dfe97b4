"""The arrays that the Hopper kernel walks, their sizes, and the words of a work tile in
``tile_info``.

NEXT_TILE: 1 + the next tile of the work queue, 0 if there is none. LOW_REQS: requests of the low
half. RESULTS: PARTIAL if any request of the tile has a partial result, plus OUTPUT if any has none,
plus PLAIN_START if there are few KV ranges and the first KV tile is the start of the first one.
"""

from typing import Any, NamedTuple

NUM_REQS, NUM_RUNS, WIDE_RUNS, LOW_RUNS, NEXT_TILE, LOW_REQS, RESULTS = range(7)
PARTIAL, OUTPUT, PLAIN_START = 1, 2, 4
WORDS = 8  # per tile: 32 bytes, a sector of memory


class PlanArrays(NamedTuple):
    """One value per array of a plan: the int32 array on the host or the device, or its size.

    tile_info: ``[num_tiles, WORDS]``. The KV ranges of a tile are sorted: first wide ranges, which
        both halves read, then ranges of the low half, then of the high half.
    slot_row, slot_partial: ``[num_tiles, max_slots]`` batch row and partial result (-1: the
        output itself) of each request of each tile.
    run_row, run_kv_start, run_kv_end: ``[num_tiles, max_runs]`` as in the plan.
    run_readers: ``[num_tiles, max_runs]`` ``reader_start | reader_end << 16`` among the tile's
        requests. Unused places hold zeros in all four, because the kernel reads them too.
    merge_indptr: ``[num_reqs + 1]`` as in the plan.
    """

    tile_info: Any
    slot_row: Any
    slot_partial: Any
    run_row: Any
    run_kv_start: Any
    run_kv_end: Any
    run_readers: Any
    merge_indptr: Any


def sizes(num_tiles: int, max_slots: int, max_runs: int, num_reqs: int) -> PlanArrays:
    """Entries of each array; ``num_tiles`` includes the tiles of empty work queues."""
    slots, runs = num_tiles * max_slots, num_tiles * max_runs
    return PlanArrays(num_tiles * WORDS, slots, slots, runs, runs, runs, runs, num_reqs + 1)
