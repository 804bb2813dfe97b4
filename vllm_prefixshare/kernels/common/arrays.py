"""The arrays that the portable kernel and the MLA kernel walk, their sizes, and the words of a work
tile in ``tile_info``.

FIRST_RUN, END_RUN: KV ranges of whole KV tiles. FIRST_PART: first of the parts that share KV tiles.
PLANNED_KV_TILES, NEW_KV_TILES: number of KV tiles of planned parts, and of parts for tokens that
come after the plan.
"""

from typing import Any, NamedTuple

FIRST_SLOT, NUM_REQS, FIRST_RUN, END_RUN, FIRST_PART, PLANNED_KV_TILES, NEW_KV_TILES = range(7)
WORDS = 8  # per tile: 32 bytes, a sector of memory
#: ``slot_end`` of a request whose tokens since the plan belong to another tile
FAR = 1 << 30


class PlanArrays(NamedTuple):
    """One value per array of a plan: the int32 array on the host or the device, or its size.

    work_indptr, merge_indptr: ``[num_workers + 1]``, ``[num_reqs + 1]`` as in the plan.
    tile_info: ``[num_tiles, WORDS]``.
    slot_row, slot_partial: ``[num_slots]`` batch row and partial result (-1: the output itself)
        of each request of each tile.
    slot_end: ``[num_slots]`` token at which the request's part for new tokens begins.
    run_row, run_start, run_end, run_readers: ``[num_runs]`` batch row, tokens, and
        ``reader_start | reader_end << 16`` among the tile's requests.
    part_row, part_pos, part_readers: ``[num_parts]`` batch row, first token, readers.
    """

    work_indptr: Any
    tile_info: Any
    slot_row: Any
    slot_partial: Any
    slot_end: Any
    run_row: Any
    run_start: Any
    run_end: Any
    run_readers: Any
    part_row: Any
    part_pos: Any
    part_readers: Any
    merge_indptr: Any


def sizes(
    num_workers: int, num_tiles: int, num_slots: int, num_runs: int, num_parts: int, num_reqs: int
) -> PlanArrays:
    """Entries of each array."""
    slots, runs, parts = [num_slots] * 3, [num_runs] * 4, [num_parts] * 3
    counts = num_workers + 1, num_tiles * WORDS, *slots, *runs, *parts, num_reqs + 1
    return PlanArrays._make(counts)
