"""A plan in the layout of the Hopper kernel: a few int32 arrays to copy to the device."""

import numpy as np

from vllm_prefixshare.config import AttentionConfig, part_size
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.kernels.geometry import HOPPER
from vllm_prefixshare.kernels.hopper.arrays import (
    LOW_REQS,
    LOW_RUNS,
    NEXT_TILE,
    NUM_REQS,
    NUM_RUNS,
    OUTPUT,
    PARTIAL,
    PLAIN_START,
    RESULTS,
    WIDE_RUNS,
    WORDS,
    PlanArrays,
)
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.utils.numba_cache import compiled

#: minimum tokens that the kernel fetches at once, a divisor of the block size
MIN_PIECE = 16
MAX_HEAD_DIM = 256
#: Maximum KV ranges of a tile whose first KV tile is copied before its slots are found: the copy
#: waits for block ids, which delays the search. More than 16 were not timed.
PLAIN_RUNS = 16


def kv_tile(head_dim: int) -> int:
    """Tokens that one iteration of the kernel's inner loop multiplies."""
    return 64 if head_dim > 128 else 128


def hopper_serves(attention: AttentionConfig, capability: tuple[int, int]) -> bool:
    """Whether the Hopper kernel can serve this shape on this compute capability."""
    return (
        capability[0] == 9
        and attention.head_dim <= MAX_HEAD_DIM
        and attention.block_size % MIN_PIECE == 0
        and "alibi" not in attention.features
        # queries and cache are both quantised or neither; TMA rows are multiples of 16 bytes
        and attention.kv_dtype == attention.query_dtype
        and not (attention.kv_dtype and attention.head_dim % 16)
    )


def linked_layout(
    plan: DecodePlan,
    rows_per_request: int,
    max_slots: int,
    max_runs: int,
    tile_tokens: int = 128,
) -> PlanArrays:
    """The arrays that the Hopper kernel walks, all int32.

    All entries have fixed places, so that a starting CTA finds its first tile, requests and KV
    ranges in one round trip to memory instead of three: the first tile of work queue ``w`` is tile
    ``w``, without ranges if the queue is empty, and each tile names the next one of its queue.

    The rows of a tile are a low and a high half of 64. Each half takes half of the tile's requests
    (or half of the rows, if one request has more than 64), so that both have work. A tile may hold
    the private parts of its first requests only, so its requests are rotated as a ring until the
    halves read about as many tokens. If all requests fit into the low half, it takes them all where
    both halves would read more than half of the KV tiles and hinder each other, or where that makes
    fewer KV tiles, because ranges of one kind are padded together.

    Args:
        rows_per_request: query rows of one request on one KV head.
        max_slots, max_runs: places of every tile for its requests and its KV ranges.
        tile_tokens: tokens of a KV tile.

    Raises:
        PrefixShareError: a tile has more requests or KV ranges than places.
    """
    _require_room("requests", plan.tile_req_indptr, "max_tile_requests", max_slots)
    _require_room("runs", plan.tile_run_indptr, "max_tile_runs", max_runs)
    lengths = plan.run_lengths(plan.planned_seq_lens)
    at_once = part_size(plan.block_size)
    info, slots, runs = link_tiles(
        plan.work_indptr,
        plan.tile_req_indptr,
        plan.tile_run_indptr,
        (plan.tile_req_indices, plan.partial_indices),
        (plan.run_row, plan.run_kv_start, plan.run_kv_end),
        plan.run_reader_start,
        plan.run_reader_end,
        -(-lengths // at_once),
        tile_tokens // at_once,
        HOPPER.half_rows // rows_per_request,
        max_slots,
        max_runs,
    )
    return PlanArrays._make((info, *slots, *runs, plan.merge_indptr))


def _require_room(what: str, indptr: IntArray, name: str, limit: int) -> None:
    count = int(np.diff(indptr).max(initial=0))
    if count > limit:
        raise PrefixShareError(
            f"a tile of the plan has {count} {what} and the kernel takes {limit}: "
            f"plan with {name}={limit} in PlannerConfig."
        )


@compiled
def _kind(start: int, end: int, half: int) -> int:
    """Which halves read a KV range of readers ``[start, end)``: 0 both, 1 the low, 2 the high one.
    ``half``: requests in the low half.
    """
    return 0 if start < half < end else 1 if start < half else 2


@compiled
def first_request(
    num_reqs: int, half: int, starts: IntArray, ends: IntArray, pieces: IntArray
) -> int:
    """The request that comes first when the requests of a tile are rotated so that the busier half
    reads a minimum. Rotation keeps the readers of a KV range neighbours if they do not span the
    turn.

    Args:
        half: requests in the low half.
        starts, ends, pieces: readers and number of pieces of each KV range.
    """
    across = np.zeros(num_reqs + 1, np.int64)  # pieces of ranges that are read on both sides
    before = np.zeros(num_reqs + 1, np.int64)  # pieces of ranges that begin before a request
    for run in range(len(starts)):
        if ends[run] - starts[run] < num_reqs:
            read = max(1, pieces[run])
            across[starts[run] + 1] += read
            across[ends[run]] -= read
            before[starts[run] + 1] += read
    across = np.cumsum(across)
    before = np.cumsum(before)
    best = 0
    min_pieces = before[num_reqs] + 1
    for first in range(num_reqs):
        if across[first]:
            continue
        end = first + half
        if end < num_reqs:
            both = across[end]
            low = before[end] - before[first] - both
        else:
            both = across[end - num_reqs]
            low = before[num_reqs] - before[first] + before[end - num_reqs] - both
        busier = both + max(low, before[num_reqs] - low - both)
        if busier < min_pieces:
            best = first
            min_pieces = busier
    return best


@compiled
def link_tiles(
    work_indptr: IntArray,
    req_indptr: IntArray,
    run_indptr: IntArray,
    reqs: tuple[IntArray, IntArray],
    runs: tuple[IntArray, IntArray, IntArray],
    run_reader_start: IntArray,
    run_reader_end: IntArray,
    run_pieces: IntArray,
    tile_pieces: int,
    half_requests: int,
    max_slots: int,
    max_runs: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """The arrays of ``linked_layout`` except ``merge_indptr``.

    Args:
        reqs: tile_req_indices and partial_indices of a plan.
        runs: run_row, run_kv_start and run_kv_end of a plan.
        run_pieces: pieces (``part_size``) of each KV range, at the planned lengths; tile_pieces: of
            a KV tile.
        half_requests: requests that fit into half a tile; 0 if both halves share one request.

    Returns:
        tile_info ``[num_tiles, WORDS]``; slot_row and slot_partial ``[2, num_tiles, max_slots]``;
        run_row, run_kv_start, run_kv_end and run_readers ``[4, num_tiles, max_runs]``.
    """
    num_workers = len(work_indptr) - 1
    used = len(req_indptr) - 1
    idle = 0
    for w in range(num_workers):
        idle += work_indptr[w] == work_indptr[w + 1]
    num_tiles = used + idle
    all_wide = half_requests == 0
    info = np.zeros((num_tiles, WORDS), np.int32)
    slots = np.zeros((2, num_tiles, max_slots), np.int32)
    out = np.zeros((4, num_tiles, max_runs), np.int32)
    free = num_workers
    next_of_kind = np.zeros(3, np.int64)  # wide, low half only, high half only
    for w in range(num_workers):
        place = w
        for tile in range(work_indptr[w], work_indptr[w + 1]):
            if tile > work_indptr[w]:
                info[place, NEXT_TILE] = free + 1
                place = free
                free = free + 1
            first_req = req_indptr[tile]
            num_reqs = req_indptr[tile + 1] - req_indptr[tile]
            first_run = run_indptr[tile]
            last_run = run_indptr[tile + 1]
            half = (num_reqs + 1) // 2
            starts = run_reader_start[first_run:last_run].copy()
            ends = run_reader_end[first_run:last_run].copy()
            first = first_request(num_reqs, half, starts, ends, run_pieces[first_run:last_run])
            for run in range(len(starts)):
                readers = ends[run] - starts[run]
                if readers < num_reqs:
                    starts[run] = (starts[run] - first) % num_reqs
                    ends[run] = starts[run] + readers
            for slot in range(num_reqs):
                req = first_req + (first + slot) % num_reqs
                slots[0, place, slot] = reqs[0][req]
                slots[1, place, slot] = reqs[1][req]
                info[place, RESULTS] |= PARTIAL if reqs[1][req] >= 0 else OUTPUT
            if num_reqs <= half_requests:
                pieces = np.zeros(3, np.int64)
                for run in range(len(starts)):
                    pieces[_kind(starts[run], ends[run], half)] += run_pieces[first_run + run]
                kv_tiles = (pieces + tile_pieces - 1) // tile_pieces
                in_one = (pieces.sum() + tile_pieces - 1) // tile_pieces
                if 2 * kv_tiles[0] > kv_tiles.sum() or in_one < kv_tiles.sum():
                    half = num_reqs
            wide = low = 0
            for run in range(len(starts)):
                kind = 0 if all_wide else _kind(starts[run], ends[run], half)
                wide += kind == 0
                low += kind == 1
            next_of_kind[0] = 0
            next_of_kind[1] = wide
            next_of_kind[2] = wide + low
            wide_pieces = first_pieces = 0
            for run in range(len(starts)):
                kind = 0 if all_wide else _kind(starts[run], ends[run], half)
                at = next_of_kind[kind]
                next_of_kind[kind] += 1
                for k in range(3):
                    out[k, place, at] = runs[k][first_run + run]
                out[3, place, at] = starts[run] | ends[run] << 16
                if kind == 0:
                    wide_pieces += run_pieces[first_run + run]
                if at == 0:
                    first_pieces = run_pieces[first_run + run]
            num_runs = len(starts)
            # a pair of narrow KV tiles comes before a single wide one
            in_order = wide == 0 or wide == num_runs or wide_pieces > tile_pieces
            if num_runs <= PLAIN_RUNS and in_order and first_pieces >= tile_pieces:
                info[place, RESULTS] |= PLAIN_START
            info[place, NUM_REQS] = num_reqs
            info[place, NUM_RUNS] = num_runs
            info[place, WIDE_RUNS] = wide
            info[place, LOW_RUNS] = low
            info[place, LOW_REQS] = half
    return info, slots, out
