"""A plan in the layout of the MLA kernel."""

import numpy as np

from vllm_prefixshare.core import OPEN_END, IntArray
from vllm_prefixshare.kernels.common.arrays import FAR, FIRST_SLOT, NUM_REQS, WORDS, PlanArrays
from vllm_prefixshare.kernels.common.layout import KvTiling, walk_layout
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.utils.numba_cache import compiled


def latent_layout(plan: DecodePlan, tiling: KvTiling, max_tile_requests: int) -> PlanArrays:
    """``walk_layout`` with parts only, without separate loops over long ranges.

    The first work tile of a work queue has the queue's number, and every tile has room for
    ``max_tile_requests`` requests in the slot arrays, so a CTA knows the places of both before its
    first load. An empty queue has a tile without requests. The following tiles of a queue start at
    ``work_indptr[worker]``.
    """
    ends = plan.run_kv_end
    lengths = [*(ends - plan.run_kv_start)[ends != OPEN_END], *plan.planned_seq_lens, 0]
    arrays = walk_layout(plan, tiling._replace(long=int(max(lengths)) // tiling.kv_tile + 1))
    slots = arrays.slot_row, arrays.slot_partial, arrays.slot_end
    work_indptr, info, row, partial, end = _at_fixed_places(
        arrays.work_indptr, arrays.tile_info, slots, max_tile_requests
    )
    return arrays._replace(
        work_indptr=work_indptr, tile_info=info, slot_row=row, slot_partial=partial, slot_end=end
    )


@compiled
def _at_fixed_places(
    work_indptr: IntArray, info: IntArray, slots: tuple[IntArray, IntArray, IntArray], room: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """``work_indptr``, ``tile_info`` and the slot arrays of ``latent_layout``."""
    num_workers = len(work_indptr) - 1
    held = np.diff(work_indptr)
    num_tiles = num_workers + len(info) - np.count_nonzero(held)
    placed = np.zeros((num_tiles, WORDS), np.int32)
    row = np.zeros(num_tiles * room, np.int32)
    partial = np.full(num_tiles * room, -1, np.int32)
    end = np.full(num_tiles * room, FAR, np.int32)
    rest = np.empty(num_workers + 1, np.int32)
    after = num_workers
    for worker in range(num_workers):
        rest[worker] = after
        at = worker
        for tile in range(work_indptr[worker], work_indptr[worker + 1]):
            placed[at] = info[tile]
            placed[at, FIRST_SLOT] = at * room
            for i in range(info[tile, NUM_REQS]):
                slot = info[tile, FIRST_SLOT] + i
                row[at * room + i] = slots[0][slot]
                partial[at * room + i] = slots[1][slot]
                end[at * room + i] = slots[2][slot]
            if at < num_workers:
                at = after
            else:
                at += 1
        after = max(after, at)
    rest[num_workers] = after
    return rest, placed, row, partial, end
