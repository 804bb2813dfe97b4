"""DecodePlan: what a kernel walks, as named integer arrays, and the schedule of its work tiles.

A plan stays right while its sequences grow: shared runs are whole, filled blocks, and each
request has one open run that reads to its length at the time the kernel runs.
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np

from vllm_prefixshare.core import (
    OPEN_END,
    RUN_KV_END,
    RUN_KV_START,
    RUN_READER_END,
    RUN_READER_START,
    RUN_ROW,
    FloatArray,
    IntArray,
    WorkTiles,
)
from vllm_prefixshare.utils.numba_cache import compiled


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """Work for one batch; all arrays int32 unless said otherwise.

    Tiles, sorted by worker:
        work_indptr: ``[num_workers + 1]`` tiles of each worker.
        tile_cost: ``[num_tiles]`` float64, estimated microseconds.
        tile_req_indptr: ``[num_tiles + 1]`` into tile_req_indices.
        tile_req_indices: batch rows whose queries the tile holds.
        tile_run_indptr: ``[num_tiles + 1]`` into the run arrays.
    Runs, ``[num_runs]``:
        run_row: batch row whose block table entries name the blocks (any reader would do).
        run_kv_start, run_kv_end: tokens; the end is OPEN_END for a request's last run.
        run_reader_start, run_reader_end: readers, as positions within the tile's requests.
    Partial results:
        partial_indices: parallel to tile_req_indices: row of partial_out and partial_lse,
            or -1 where the request has one tile only and is written directly.
        merge_indptr: ``[num_reqs + 1]`` partial rows to merge into each request.
    planned_seq_lens: ``[num_reqs]`` minimum lengths that the plan serves; except with
        ``batch_invariant`` also those that it was balanced for.
    """

    num_reqs: int
    block_size: int
    work_indptr: IntArray
    tile_cost: FloatArray
    tile_req_indptr: IntArray
    tile_req_indices: IntArray
    tile_run_indptr: IntArray
    run_row: IntArray
    run_kv_start: IntArray
    run_kv_end: IntArray
    run_reader_start: IntArray
    run_reader_end: IntArray
    partial_indices: IntArray
    merge_indptr: IntArray
    planned_seq_lens: IntArray

    def __repr__(self) -> str:
        lengths = self.run_lengths(self.planned_seq_lens).astype(np.int64)
        uses = int(lengths @ (self.run_reader_end - self.run_reader_start))
        return (
            f"DecodePlan({self.num_reqs} requests, blocks of {self.block_size} tokens; "
            f"{self.num_tiles} work tiles in {self.num_workers} work queues, {self.num_partials} "
            f"partial results; share factor {uses / max(1, int(lengths.sum())):.2f})"
        )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.work_indptr) - 1

    @property
    def num_tiles(self) -> int:
        """Number of work tiles."""
        return len(self.tile_req_indptr) - 1

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self.run_row)

    @property
    def num_partials(self) -> int:
        """Number of partial results."""
        return int(self.merge_indptr[-1])

    @property
    def worker_us(self) -> FloatArray:
        """``[num_workers]`` estimated microseconds of each worker's tiles."""
        until = np.concatenate([[0.0], np.cumsum(self.tile_cost)])
        loads: FloatArray = np.diff(until[self.work_indptr])
        return loads

    @property
    def imbalance(self) -> float:
        """Estimated load of the busiest worker over the mean load of all; 1 is balanced."""
        loads = self.worker_us
        total = float(loads.sum())
        return float(loads.max()) * self.num_workers / total if total else 1.0

    def balanced_growth(self, us_per_token: float, factor: float) -> float:
        """By how many tokens every request may grow until the busiest worker takes ``factor`` times
        as long as it would if the new tokens were spread over all workers.

        A request's new tokens are all read in one tile, whatever the others read of the request.

        Args:
            us_per_token: microseconds of a token that one request reads.
        """
        tiles = self.work_indptr, self.tile_cost, self.tile_run_indptr
        return _balanced_growth(*tiles, self.run_kv_end, us_per_token, factor)

    @property
    def shares(self) -> bool:
        """Whether some KV is read once for several requests."""
        return bool(np.count_nonzero(self.run_reader_end - self.run_reader_start > 1))

    @property
    def shared_rows(self) -> IntArray:
        """Batch rows that read some KV together with another row, ascending."""
        low = np.repeat(self.tile_req_indptr[:-1], np.diff(self.tile_run_indptr))
        several = np.flatnonzero(self.run_reader_end - self.run_reader_start > 1)
        read = [
            self.tile_req_indices[
                low[r] + self.run_reader_start[r] : low[r] + self.run_reader_end[r]
            ]
            for r in several
        ]
        return np.unique(np.concatenate(read)) if read else np.zeros(0, np.int32)

    def run_lengths(self, seq_lens: IntArray) -> IntArray:
        """``[num_runs]`` tokens that each run reads when the requests have ``seq_lens``."""
        end = np.where(self.run_kv_end == OPEN_END, seq_lens[self.run_row], self.run_kv_end)
        return np.maximum(end - self.run_kv_start, 0)

    def fits(self, max_tiles: int, max_runs: int, max_partials: int) -> bool:
        """Whether there are no more tiles, runs and partial results than these."""
        return (
            self.num_tiles <= max_tiles
            and self.num_runs <= max_runs
            and self.num_partials <= max_partials
        )

    def kv_tokens_read(self, seq_lens: IntArray) -> int:
        """KV tokens that this plan reads; a per-request kernel reads ``seq_lens.sum()``."""
        return int(self.run_lengths(seq_lens).sum())


@compiled
def _balanced_growth(
    work_indptr: IntArray,
    tile_cost: FloatArray,
    tile_run_indptr: IntArray,
    run_kv_end: IntArray,
    us_per_token: float,
    factor: float,
) -> float:
    num_workers = len(work_indptr) - 1
    load = np.zeros(num_workers)
    growing = np.zeros(num_workers)
    for worker in range(num_workers):
        for tile in range(work_indptr[worker], work_indptr[worker + 1]):
            load[worker] += tile_cost[tile]
            for run in range(tile_run_indptr[tile], tile_run_indptr[tile + 1]):
                growing[worker] += run_kv_end[run] == OPEN_END  # of one request each
    max_load = factor * load.max()
    even = factor * growing.mean()
    tokens = np.inf
    for worker in range(num_workers):
        if growing[worker] > even:
            tokens = min(tokens, (max_load - load[worker]) / (growing[worker] - even))
    return tokens / us_per_token


@compiled
def longest_first(
    costs: FloatArray, num_workers: int, about_equal: float = 0.0
) -> tuple[IntArray, IntArray, float]:
    """Assign work tiles to workers: longest first, to the least loaded (FlashForge 5.1). This
    finishes within 4/3 of the best assignment of the same tiles (Graham).

    Args:
        costs: ``[num_tiles]`` microseconds.
        about_equal: tiles whose costs differ by less than this part of the largest keep their
            order.

    Returns:
        order: ``[num_tiles]`` int32 tile indices, worker by worker, longest first within one.
        work_indptr: ``[num_workers + 1]`` int32 range of ``order`` that each worker walks.
        finish: load of the busiest worker, microseconds.
    """
    work_indptr = np.zeros(num_workers + 1, np.int32)
    if not len(costs):
        return np.zeros(0, np.int32), work_indptr, 0.0
    step = about_equal * costs.max()
    keys = -np.rint(costs / step) if step > 0.0 else -costs
    by_cost = np.argsort(keys, kind="mergesort")  # stable
    worker_of = np.empty(len(costs), np.int32)
    loads = [(0.0, worker) for worker in range(num_workers)]  # a heap
    for tile in by_cost:
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + costs[tile], worker))
        worker_of[tile] = worker
        work_indptr[worker + 1] += 1
    work_indptr = np.cumsum(work_indptr).astype(np.int32)
    place = work_indptr.copy()
    order = np.empty(len(costs), np.int32)
    for tile in by_cost:
        order[place[worker_of[tile]]] = tile
        place[worker_of[tile]] += 1
    return order, work_indptr, max(loads)[0]


def build_plan(
    tiles: WorkTiles, num_workers: int, block_size: int, seq_lens: IntArray
) -> DecodePlan:
    """Make the plan of ``tiles``, and schedule them where no worker is given yet.

    Args:
        tiles: together covering every token of every request once.
        seq_lens: ``[num_reqs]`` lengths the tiles were made for.
    """
    # partial results are numbered and merged in the divider's order, whatever the schedule
    partial, merge_indptr = _number_partials(tiles.rows, len(seq_lens))
    if tiles.worker is None:
        order, work_indptr, _ = longest_first(tiles.cost, num_workers)
        partial = partial[_permuted(tiles.row_indptr, order)[1]]
        tiles = _in_order(tiles, order)
    else:
        work_indptr = np.searchsorted(tiles.worker, np.arange(num_workers + 1)).astype(np.int32)
    runs = np.ascontiguousarray(tiles.runs.T)
    return DecodePlan(
        num_reqs=len(seq_lens),
        block_size=block_size,
        work_indptr=work_indptr,
        tile_cost=tiles.cost,
        tile_req_indptr=tiles.row_indptr,
        tile_req_indices=tiles.rows,
        tile_run_indptr=tiles.run_indptr,
        run_row=runs[RUN_ROW],
        run_kv_start=runs[RUN_KV_START],
        run_kv_end=runs[RUN_KV_END],
        run_reader_start=runs[RUN_READER_START],
        run_reader_end=runs[RUN_READER_END],
        partial_indices=partial,
        merge_indptr=merge_indptr,
        planned_seq_lens=np.array(seq_lens, np.int32),
    )


def through_the_shortest(plan: DecodePlan) -> DecodePlan:
    """The plan with each run read through the block table row of its shortest reader. Sliding
    windows of longer readers begin later, and their rows may have lost the blocks before them.
    """
    tiles = plan.tile_req_indptr, plan.tile_req_indices, plan.tile_run_indptr
    readers = plan.run_reader_start, plan.run_reader_end
    return replace(plan, run_row=_shortest_readers(*tiles, *readers, plan.planned_seq_lens))


@compiled
def _shortest_readers(
    req_indptr: IntArray,
    requests: IntArray,
    run_indptr: IntArray,
    reader_start: IntArray,
    reader_end: IntArray,
    seq_lens: IntArray,
) -> IntArray:
    shortest = np.empty(len(reader_start), np.int32)
    for tile in range(len(req_indptr) - 1):
        for run in range(run_indptr[tile], run_indptr[tile + 1]):
            best = requests[req_indptr[tile] + reader_start[run]]
            for reader in range(reader_start[run] + 1, reader_end[run]):
                other = requests[req_indptr[tile] + reader]
                if seq_lens[other] < seq_lens[best]:
                    best = other
            shortest[run] = best
    return shortest


def _in_order(tiles: WorkTiles, order: IntArray) -> WorkTiles:
    row_indptr, slots = _permuted(tiles.row_indptr, order)
    run_indptr, runs = _permuted(tiles.run_indptr, order)
    return WorkTiles(row_indptr, tiles.rows[slots], run_indptr, tiles.runs[runs], tiles.cost[order])


def _permuted(indptr: IntArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """The indptr of the ranges in another order, and the old index of each of their entries."""
    counts = np.diff(indptr)[order]
    new = np.zeros_like(indptr)
    np.cumsum(counts, out=new[1:])
    return new, np.arange(new[-1]) + np.repeat(indptr[order] - new[:-1], counts)


@compiled
def _number_partials(rows: IntArray, num_reqs: int) -> tuple[IntArray, IntArray]:
    """Partial result of each slot, and each request's range of them, in the order of tiles."""
    tiles_of = np.zeros(num_reqs, np.int32)
    for row in rows:
        tiles_of[row] += 1
    merge_indptr = np.zeros(num_reqs + 1, np.int32)
    for r in range(num_reqs):
        merge_indptr[r + 1] = merge_indptr[r] + (tiles_of[r] if tiles_of[r] > 1 else 0)
    following = merge_indptr[:-1].copy()
    partial = np.full(len(rows), -1, np.int32)
    for slot, row in enumerate(rows):
        if tiles_of[row] > 1:
            partial[slot] = following[row]
            following[row] += 1
    return partial, merge_indptr
