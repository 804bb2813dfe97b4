"""The divider for kernels that walk runs of KV blocks: one depth-first list, cut to measure.

It is DeFT-Flatten (section 3.3) with costs in place of block counts. In depth-first order
neighbouring requests share the most, so the batch is cut into windows of as many neighbours as
a work tile holds. The runs of KV tokens below a window, root to leaves, follow each other in
preorder: then the readers of any piece of the list are neighbours, too.

There are two ways to cut, and the estimates choose. ``_cut_evenly`` gives each window a whole
number of equal pieces: windows below the same node then read it in step, and what one fetches
from memory the others find in cache. Where the numbers of windows and workers do not suit each
other, ``_cut_through`` lays the windows end to end and cuts them into one part of equal time for
each worker, the target found by bisection (FlashForge's lower bound, section 5.2, with this
cut as its test); a part that reaches into the next window is two tiles.

What a token costs depends on who reads it. A kernel's tile is two halves, each with half of the
requests: a run that both read is bound by arithmetic, one of a single half by memory, because
the halves work side by side. And a run that several windows read comes from memory once.
"""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.costs.cost_table import TileRates
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.dividers.windows import Runs, list_runs
from vllm_prefixshare.records import OPEN_END, FloatArray, IntArray, WorkTiles

#: tokens that a kernel multiplies at once: long runs are cut at multiples of it
KV_TILE = 128
#: A worker may exceed its target by this part of it and this part of a tile's overhead.
SLACK, OVERHEAD_SLACK = 0.02, 0.2
#: bisection ends at this precision
PRECISION = 0.005
#: what windows that read in step are worth, as a part of the finish
IN_STEP = 0.03
#: differences in cost, as a part of the largest, that are not worth leaving their order for
ABOUT_EQUAL = 0.02


class Limits(NamedTuple):
    """What a cut respects, and what it costs in microseconds. overhead: of a tile beside its
    runs; merge: of one partial result of one request; partial_write, merge_launch: as in
    ``TileRates``."""

    num_workers: int
    block_size: int
    max_tile_runs: int
    overhead: float
    merge: float
    partial_write: float
    merge_launch: float

    @classmethod
    def of(cls, problem: DivisionProblem, rates: TileRates) -> "Limits":
        return cls(
            problem.config.num_workers,
            problem.block_size,
            problem.config.max_tile_runs,
            rates.overhead,
            rates.merge * problem.rows_per_request,
            rates.partial_write,
            rates.merge_launch,
        )


class Cut(NamedTuple):
    """A way to cut the list.

    finish: microseconds until the last result is merged.
    tiles: ``[num_tiles, 5]``: worker; run and token in it where the tile begins; where it ends.
    cost: ``[num_tiles]`` microseconds.
    """

    finish: float
    tiles: IntArray
    cost: FloatArray


def depth_first(problem: DivisionProblem) -> WorkTiles:
    """Work tiles, scheduled.

    Windows as large as a tile suit long shared prefixes; where little is shared, smaller ones
    need fewer cuts. So three sizes are tried, and the least estimated finish wins.
    """
    config, forest = problem.config, problem.forest
    rates = problem.rates or TileRates.of(problem.cost)
    nodes = forest.node_start, forest.node_end, forest.node_first, forest.node_last
    tiles = divide(
        forest.request_rows, forest.private_start, *nodes, problem.kv_lens,
        min(config.max_tile_requests, forest.num_reqs), problem.rows_per_request,
        Limits.of(problem, rates), rates.memory, rates.cached,
    )  # fmt: skip
    return WorkTiles(*tiles)


@compiled
def _tile_end(
    runs: Runs, limits: Limits, run: int, done: int, goal: float
) -> tuple[int, int, float]:
    """Where a tile ends that begins at token ``done`` of ``run``, and what it reads costs: at
    about ``goal`` microseconds of the whole list, in whole blocks, where long runs have whole
    KV tiles; at the latest where its window or the room for runs ends."""
    stop = min(runs.window_end[run], run + limits.max_tile_runs)
    begin = runs.before[run] + done * runs.rate[run]
    if goal >= runs.before[stop]:
        return stop, 0, runs.before[stop] - begin
    end = run + np.searchsorted(runs.before[run + 1 : stop], goal, "right")
    block = limits.block_size
    kv_tile = (KV_TILE + block - 1) // block * block
    tokens = (goal - runs.before[end]) / runs.rate[end]
    read = tokens - done if end == run else tokens
    step = kv_tile if read >= 4 * kv_tile else block
    at = int(tokens) // step * step
    if end == run and at <= done:  # a tile reads something
        at = min(done + block, runs.tokens[run])
    cost = runs.before[end] + at * runs.rate[end] - begin
    return (end + 1, 0, cost) if at == runs.tokens[end] else (end, at, cost)


@compiled
def _merging(runs: Runs, limits: Limits, tiles: IntArray) -> float:
    """Microseconds of merging. One program merges all partial results of a request."""
    num_reqs = runs.last[-1]
    tiles_of = np.zeros(num_reqs + 1, np.int32)  # differences between neighbours
    for t in range(len(tiles)):
        _, run, _, end, done = tiles[t]
        tiles_of[runs.first[run]] += 1  # in preorder the first run has the first reader
        tiles_of[runs.last[run : end + (done > 0)].max()] -= 1
    most = np.cumsum(tiles_of).max()
    return limits.merge_launch + most * limits.merge if most > 1 else 0.0


@compiled
def _cut_evenly(runs: Runs, limits: Limits, ends: IntArray, num_tiles: int) -> Cut:
    """Cut each window (which ends before run ``ends[w]``) into equal pieces, about ``num_tiles``
    in all, or leave it whole where windows are as many; give the tiles to the workers, longest
    first (Graham's rule, as in ``scheduler``)."""
    num_windows = len(ends)
    load = np.empty(num_windows)
    pieces = np.ones(num_windows, np.int32)
    for w in range(num_windows):
        load[w] = runs.before[ends[w]] - runs.before[ends[w - 1] if w else 0]
    for _ in range(num_windows, num_tiles):
        longest = np.argmax(load / pieces)
        if load[longest] / (pieces[longest] + 1) < limits.overhead:
            break  # not worth another tile
        pieces[longest] += 1
    room = len(runs.tokens) + pieces.sum()
    tiles, cost = np.empty((room, 5), np.int32), np.empty(room)
    count = run = done = 0
    for w in range(num_windows):
        begun, begin, piece = count, runs.before[run], 1
        while run < ends[w]:
            goal = begin + load[w] * piece / pieces[w] if piece < pieces[w] else np.inf
            tile = tiles[count]
            tile[1], tile[2] = run, done
            run, done, cost[count] = _tile_end(runs, limits, run, done, goal)
            tile[3], tile[4] = run, done
            cost[count] += limits.overhead
            count, piece = count + 1, piece + 1
        if count > begun + 1:
            cost[begun:count] += limits.partial_write
    tiles, cost = tiles[:count], cost[:count]
    finish = np.zeros(limits.num_workers)
    # stable, and by rounded cost: pieces that are about equal start in their own order
    order = np.argsort(-np.rint(cost / (ABOUT_EQUAL * cost.max())), kind="mergesort")
    for t in order:
        worker = np.argmin(finish)
        tiles[t, 0] = worker
        finish[worker] += cost[t]
    order = order[np.argsort(tiles[order, 0], kind="mergesort")]
    return Cut(finish.max() + _merging(runs, limits, tiles), tiles[order], cost[order])


@compiled
def _cut_through(
    runs: Runs, limits: Limits, target: float, tiles: IntArray, cost: FloatArray
) -> tuple[int, int, float]:
    """Cut the list into one part of about ``target`` microseconds for each worker.

    Args:
        tiles, cost: as in ``Cut`` with room for more, written.

    Returns:
        workers needed (or one more than there are), number of tiles, and when the last worker
        has finished.
    """
    slack = SLACK * target + OVERHEAD_SLACK * limits.overhead
    least = limits.overhead  # a shorter piece is not worth another tile
    worker = count = run = done = tiles_of_window = 0
    load = finish = 0.0
    while run < len(runs.tokens) and worker < limits.num_workers:
        end = runs.window_end[run]
        at = runs.before[run] + done * runs.rate[run]
        if done == 0 and (run == 0 or runs.window_end[run - 1] == run):
            tiles_of_window = 0
        rest = runs.before[end] - at
        fixed = limits.overhead + (limits.partial_write if tiles_of_window else 0.0)
        goal = np.inf
        if rest + fixed > target - load + slack:
            # a piece of the window, with enough before and after it
            room = target - load - limits.overhead - limits.partial_write
            part = min(max(room, least), rest - least)
            if load > 0.0 and (room < least or part < least):
                worker, load = worker + 1, 0.0
                continue
            if part >= least:
                goal, fixed = at + part, limits.overhead + limits.partial_write
        tile = tiles[count]
        tile[0], tile[1], tile[2] = worker, run, done
        run, done, used = _tile_end(runs, limits, run, done, goal)
        tile[3], tile[4] = run, done
        cost[count] = fixed + used
        load += cost[count]
        finish = max(finish, load)
        count += 1
        tiles_of_window += 1
        if goal < np.inf and run - tile[1] < limits.max_tile_runs:
            worker, load = worker + 1, 0.0
    needed = worker + (load > 0.0 or run < len(runs.tokens))
    return needed, count, finish


@compiled
def _cut_through_at_best(runs: Runs, limits: Limits) -> Cut:
    """``_cut_through`` at the target that finishes first."""
    room = len(runs.tokens) + limits.num_workers
    tiles, cost = np.empty((room, 5), np.int32), np.empty(room)
    low = high = runs.before[-1] / limits.num_workers + limits.overhead
    best, best_finish = 0.0, np.inf
    while high - low > PRECISION * high or best == 0.0:
        target = high if best == 0.0 else (low + high) / 2
        workers, _, finish = _cut_through(runs, limits, target, tiles, cost)
        if workers <= limits.num_workers:
            high = target
            if finish < best_finish:
                best, best_finish = target, finish
        else:
            low = target
            if best == 0.0:
                high = 1.25 * target
    _, count, _ = _cut_through(runs, limits, best, tiles, cost)
    tiles, cost = tiles[:count], cost[:count]
    return Cut(best_finish + _merging(runs, limits, tiles), tiles, cost)


@compiled
def divide(
    request_rows: IntArray,
    private_start: IntArray,
    node_start: IntArray,
    node_end: IntArray,
    node_first: IntArray,
    node_last: IntArray,
    kv_lens: IntArray,
    largest: int,
    rows_per_request: int,
    limits: Limits,
    memory: FloatArray,
    cached: FloatArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``, for windows of ``largest`` requests, a half, or a quarter."""
    best_score = np.inf
    workers = limits.num_workers
    tried = 0
    for window in (largest, max(1, largest // 2), max(1, largest // 4)):
        if window == tried:
            continue
        tried = window
        runs = list_runs(
            request_rows, private_start, node_start, node_end, node_first, node_last, kv_lens,
            window, rows_per_request, limits.block_size, limits.overhead, memory, cached,
        )  # fmt: skip
        ends = np.unique(runs.window_end)
        least = (runs.before[-1] + len(ends) * limits.overhead) / workers
        if least >= best_score:
            continue
        for num_tiles in (0, workers // 2, workers, 2 * workers):
            if num_tiles == 0 or num_tiles > len(ends):
                cut = _cut_evenly(runs, limits, ends, num_tiles)
                if cut.finish < best_score:
                    best_score, best_runs, best = cut.finish, runs, cut
        if least * (1 + IN_STEP) < best_score:
            cut = _cut_through_at_best(runs, limits)
            if cut.finish * (1 + IN_STEP) < best_score:
                best_score, best_runs, best = cut.finish * (1 + IN_STEP), runs, cut
    return _as_tiles(best_runs, best, request_rows)


@compiled
def _as_tiles(
    runs: Runs, cut: Cut, request_rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``."""
    tiles = cut.tiles
    num_tiles = len(tiles)
    row_indptr, run_indptr = np.zeros((2, num_tiles + 1), np.int32)
    for t in range(num_tiles):
        run_indptr[t + 1] = run_indptr[t] + tiles[t, 3] - tiles[t, 1] + (tiles[t, 4] > 0)
    out = np.empty((run_indptr[-1], 5), np.int32)
    low = np.empty(num_tiles, np.int32)
    for t in range(num_tiles):
        _, run, done, last_run, last_done = tiles[t]
        low[t] = runs.first[run]  # in preorder the first run has the first reader
        high = 0
        for i in range(run_indptr[t], run_indptr[t + 1]):
            end = last_done if run == last_run else runs.tokens[run]
            high = max(high, runs.last[run])
            row = out[i]
            row[0] = request_rows[runs.first[run]]
            row[1], row[2] = runs.start[run] + done, runs.start[run] + end
            row[3], row[4] = runs.first[run] - low[t], runs.last[run] - low[t]
            if row[4] - row[3] == 1 and end == runs.tokens[run]:
                row[2] = OPEN_END
            run, done = run + 1, 0
        row_indptr[t + 1] = row_indptr[t] + high - low[t]
    rows = np.empty(row_indptr[-1], np.int32)
    for t in range(num_tiles):
        size = row_indptr[t + 1] - row_indptr[t]
        rows[row_indptr[t] : row_indptr[t + 1]] = request_rows[low[t] : low[t] + size]
    return row_indptr, rows, run_indptr, out, cut.cost, tiles[:, 0].copy()
