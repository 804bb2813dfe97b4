"""The divider for kernels that walk runs of KV blocks: one depth-first list, cut by time.

It is DeFT-Flatten (section 3.3) with costs in place of block counts. In depth-first order
neighbouring requests share the most, so the batch is cut into windows of as many neighbours as
a work tile holds. The runs of KV tokens below a window, root to leaves, follow each other in
preorder: then the readers of any piece of the list are neighbours, too.

There are two ways to cut; the lower estimate wins. ``_cut_evenly`` gives each window a whole
number of equal pieces: windows below the same node then read it in step, and what one fetches
from memory the others find in cache. Where the numbers of windows and workers do not match,
``_cut_through`` lays the windows end to end and cuts them into one part of equal time for
each worker, the target found by bisection (FlashForge's lower bound, section 5.1, with this
cut as its test); a part that reaches into the next window is two tiles.

The cost of a token depends on its readers. A kernel's tile is two halves, each with half of the
requests: a run that both halves read is bound by arithmetic, a run that one half reads by memory,
because the halves work in parallel. A run that several windows read comes from memory once. The
cost of a tile besides its tokens is taken from the cost table at the tile's size (``TileRates``).
"""

import heapq
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.dividers.windows import Runs, ends_of_windows, list_runs
from vllm_prefixshare.planning.plan import longest_first
from vllm_prefixshare.records import OPEN_END, FloatArray, Forest, IntArray, WorkTiles

#: tokens that a kernel multiplies at once
KV_TILE = 128
#: A worker may exceed its target by this part of it and this part of a tile's overhead.
SLACK, OVERHEAD_SLACK = 0.02, 0.2
#: bisection ends at this precision
PRECISION = 0.005
#: advantage of an even cut, whose windows read in step, as a part of the finish
IN_STEP = 0.03
#: tiles keep their order where their costs differ by less than this part of the largest
ABOUT_EQUAL = 0.02


class Limits(NamedTuple):
    """Limits of a cut.

    rows_per_request, rows_per_query: query rows of one request and of one of its query tokens, on
        one KV head.
    cut_size, kv_tile: tokens; long runs are cut at multiples of kv_tile, short ones of cut_size.
    query_cut_size: as in ``PlannerConfig`` if tiles hold several queries of one request, else 0.
    """

    num_workers: int
    max_tile_requests: int
    max_tile_runs: int
    rows_per_request: int
    rows_per_query: int
    cut_size: int
    kv_tile: int
    query_cut_size: int

    @classmethod
    def of(cls, problem: DivisionProblem, kv_tile: int = KV_TILE) -> "Limits":
        """The limits of ``problem``; kv_tile is rounded up to a multiple of cut_size."""
        size = problem.config.cut_size or problem.block_size
        requests = min(problem.config.max_tile_requests, problem.forest.num_reqs)
        alone = requests == 1 and problem.query_len > 1
        return cls(
            problem.config.num_workers,
            requests,
            problem.config.max_tile_runs,
            problem.rows_per_request,
            problem.rows_per_request // problem.query_len,
            size,
            (kv_tile + size - 1) // size * size,
            -(-(problem.config.query_cut_size or 0) // size) * size if alone else 0,
        )


class Cut(NamedTuple):
    """A way to cut the list.

    finish: microseconds until the last result is merged.
    tiles: ``[num_tiles, 5]``: worker; run and token where it begins; run and token where it ends.
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
    rates = problem.rates or TileRates.of(problem.cost)
    return WorkTiles(*_divide(problem.forest, problem.kv_lens, Limits.of(problem), rates))


@compiled
def _line(ends: FloatArray, value: float) -> int:
    """The line of ``TileRates.lines`` for a value; the last first, because most tiles are long."""
    at = len(ends) - 1
    while at > 0 and ends[at - 1] > value:
        at -= 1
    return at


@compiled
def _tile_us(lines: FloatArray, reading: float) -> float:
    """Microseconds of a tile whose runs take ``reading`` by their rates."""
    at = _line(lines[0], reading)
    return lines[2, at] + lines[3, at] * reading


@compiled
def _reading_in(lines: FloatArray, us: float) -> float:
    """The inverse of ``_tile_us``: microseconds for reading in a tile of ``us`` microseconds,
    negative where ``us`` is too little for any tile.
    """
    at = _line(lines[1], us)
    return (us - lines[2, at]) / lines[3, at] if at else us - lines[1, 0]


@compiled
def tile_end(
    runs: Runs, limits: Limits, run: int, done: int, goal: float
) -> tuple[int, int, float]:
    """The run and token where a tile ends that begins at token ``done`` of ``run``, and the cost
    of its tokens. It ends at about ``goal`` microseconds of the whole list, after whole pieces of
    ``cut_size``, or whole KV tiles if it is long; at the latest where its window or the room for
    runs ends.
    """
    stop = min(runs.window_end[run], run + limits.max_tile_runs)
    begin = runs.before[run] + done * runs.rate[run]
    if goal >= runs.before[stop]:
        return stop, 0, runs.before[stop] - begin
    end, after = run, stop  # a search by hand: with NumPy's, a cut took three times as long
    while after - end > 1:
        middle = (end + after) // 2
        if runs.before[middle] <= goal:
            end = middle
        else:
            after = middle
    size, kv_tile = limits.cut_size, limits.kv_tile
    tokens = (goal - runs.before[end]) / runs.rate[end]
    read = tokens - done if end == run else tokens
    step = kv_tile if read >= 4 * kv_tile else size
    at = int(tokens) // step * step
    if end == run and limits.query_cut_size:
        size = limits.query_cut_size
        at = min(done + (int(read + 0.5) + size - 1) // size * size, runs.tokens[run])
    if end == run and at <= done:  # no tile is empty
        at = min(done + size, runs.tokens[run])
    cost = runs.before[end] + at * runs.rate[end] - begin
    return (end + 1, 0, cost) if at == runs.tokens[end] else (end, at, cost)


@compiled
def _merging(runs: Runs, limits: Limits, rates: TileRates, tiles: IntArray) -> float:
    """Microseconds of merging. One program merges all partial results of a query token, and the
    tokens of a request are merged side by side.
    """
    num_reqs = runs.reader_end[-1]
    tiles_of = np.zeros(num_reqs + 1, np.int32)  # differences between neighbours
    for t in range(len(tiles)):
        _, run, _, end, done = tiles[t]
        tiles_of[runs.reader_start[run]] += 1  # in preorder the first run has the first reader
        tiles_of[runs.reader_end[run : end + (done > 0)].max()] -= 1
    most = np.cumsum(tiles_of).max()
    merge = rates.merge * limits.rows_per_query
    return rates.merge_launch + most * merge if most > 1 else 0.0


@compiled
def _cut_evenly(
    runs: Runs, limits: Limits, rates: TileRates, ends: IntArray, num_tiles: int
) -> Cut:
    """Cut each window (which ends before run ``ends[w]``) into equal pieces, about ``num_tiles``
    in all, or leave it uncut where there are that many windows, and schedule the tiles.
    """
    num_windows = len(ends)
    load = np.empty(num_windows)
    pieces = np.ones(num_windows, np.int32)
    for w in range(num_windows):
        load[w] = runs.before[ends[w]] - runs.before[ends[w - 1] if w else 0]
    longest = [(-load[w], w) for w in range(num_windows)]  # windows by the length of their pieces
    heapq.heapify(longest)
    for _ in range(num_windows, num_tiles):
        _, w = longest[0]
        if load[w] / (pieces[w] + 1) < rates.overhead:
            break  # not worth another tile
        pieces[w] += 1
        heapq.heapreplace(longest, (-load[w] / pieces[w], w))
    room = len(runs.tokens) + pieces.sum()
    tiles, cost = np.empty((room, 5), np.int32), np.empty(room)
    count = run = done = 0
    for w in range(num_windows):
        begun, begin, piece = count, runs.before[run], 1
        while run < ends[w]:
            goal = np.inf
            if piece < pieces[w]:
                goal = begin + load[w] * piece / pieces[w]
                if limits.query_cut_size:  # as long as the others, if those before were longer
                    at = runs.before[run] + done * runs.rate[run]
                    goal = max(goal, at + load[w] / pieces[w])
            tile = tiles[count]
            tile[1], tile[2] = run, done
            run, done, reading = tile_end(runs, limits, run, done, goal)
            tile[3], tile[4] = run, done
            cost[count] = _tile_us(rates.lines, reading)
            count, piece = count + 1, piece + 1
        if count > begun + 1:
            cost[begun:count] += rates.partial_write
    tiles, cost = tiles[:count], cost[:count]
    order, work_indptr, finish = longest_first(cost, limits.num_workers, ABOUT_EQUAL)
    for w in range(limits.num_workers):
        tiles[order[work_indptr[w] : work_indptr[w + 1]], 0] = w
    return Cut(finish + _merging(runs, limits, rates, tiles), tiles[order], cost[order])


@compiled
def _cut_through(
    runs: Runs,
    limits: Limits,
    rates: TileRates,
    target: float,
    tiles: IntArray,
    cost: FloatArray,
) -> tuple[int, int, float]:
    """Cut the list into one part of about ``target`` microseconds for each worker.

    Args:
        tiles, cost: as in ``Cut`` with room for more, written.

    Returns:
        workers needed (or one more than there are), number of tiles, and when the last worker
        has finished.
    """
    slack = SLACK * target + OVERHEAD_SLACK * rates.overhead
    least = rates.overhead  # a shorter piece is not worth another tile
    worker = count = run = done = tiles_of_window = 0
    load = finish = 0.0
    while run < len(runs.tokens) and worker < limits.num_workers:
        end = runs.window_end[run]
        at = runs.before[run] + done * runs.rate[run]
        if done == 0 and (run == 0 or runs.window_end[run - 1] == run):
            tiles_of_window = 0
        rest = runs.before[end] - at
        writing = rates.partial_write if tiles_of_window else 0.0
        goal = np.inf
        left = target - load + slack - writing
        if rest > left or _tile_us(rates.lines, rest) > left:
            # a piece of the window, with enough before and after it
            room = _reading_in(rates.lines, target - load - rates.partial_write)
            part = min(max(room, least), rest - least)
            if load > 0.0 and (room < least or part < least):
                worker, load = worker + 1, 0.0
                continue
            if part >= least:
                goal, writing = at + part, rates.partial_write
        tile = tiles[count]
        tile[0], tile[1], tile[2] = worker, run, done
        run, done, reading = tile_end(runs, limits, run, done, goal)
        tile[3], tile[4] = run, done
        cost[count] = _tile_us(rates.lines, reading) + writing
        load += cost[count]
        finish = max(finish, load)
        count += 1
        tiles_of_window += 1
        if goal < np.inf and run - tile[1] < limits.max_tile_runs:
            worker, load = worker + 1, 0.0
    needed = worker + (load > 0.0 or run < len(runs.tokens))
    return needed, count, finish


@compiled
def _cut_through_at_best(runs: Runs, limits: Limits, rates: TileRates, known: float) -> Cut:
    """``_cut_through`` at the target that finishes first; a cut with infinite finish if none
    finishes before ``known``.
    """
    room = len(runs.tokens) + limits.num_workers
    tiles, cost = np.empty((room, 5), np.int32), np.empty(room)
    low = high = runs.before[-1] / limits.num_workers + rates.overhead
    best, best_finish = 0.0, np.inf
    while low < known and (high - low > PRECISION * high or best == 0.0):
        target = high if best == 0.0 else (low + high) / 2
        workers, _, finish = _cut_through(runs, limits, rates, target, tiles, cost)
        if workers <= limits.num_workers:
            high = target
            if finish < best_finish:
                best, best_finish = target, finish
        else:
            low = target
            if best == 0.0:
                high = 1.25 * target
    if best_finish >= known:
        return Cut(np.inf, tiles[:0], cost[:0])
    _, count, _ = _cut_through(runs, limits, rates, best, tiles, cost)
    tiles, cost = tiles[:count], cost[:count]
    return Cut(best_finish + _merging(runs, limits, rates, tiles), tiles, cost)


@compiled
def _divide(
    forest: Forest, kv_lens: IntArray, limits: Limits, rates: TileRates
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``, for windows of as many requests as a tile takes, a half, or
    a quarter.
    """
    best_score = np.inf
    workers, largest = limits.num_workers, limits.max_tile_requests
    tried = 0
    for window in (largest, max(1, largest // 2), max(1, largest // 4)):
        if window == tried:
            continue
        tried = window
        runs = list_runs(forest, kv_lens, window, limits.rows_per_request, limits.cut_size, rates)
        ends = ends_of_windows(runs)
        least = (runs.before[-1] + len(ends) * rates.overhead) / workers
        if least >= best_score:
            continue
        for num_tiles in (workers, 2 * workers, workers // 2, 0):
            at_once = min(max(num_tiles, len(ends)), workers)
            if runs.before[-1] >= best_score * at_once:
                continue  # too few to finish sooner
            if num_tiles == 0 or num_tiles > len(ends):
                cut = _cut_evenly(runs, limits, rates, ends, num_tiles)
                if cut.finish < best_score:
                    best_score, best_runs, best = cut.finish, runs, cut
        if least * (1 + IN_STEP) < best_score:
            cut = _cut_through_at_best(runs, limits, rates, best_score / (1 + IN_STEP))
            if cut.finish * (1 + IN_STEP) < best_score:
                best_score, best_runs, best = cut.finish * (1 + IN_STEP), runs, cut
    return as_tiles(best_runs, best.tiles, best.cost, forest.request_rows)


@compiled
def as_tiles(
    runs: Runs, tiles: IntArray, cost: FloatArray, request_rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``. tiles, cost: as in ``Cut``."""
    num_tiles = len(tiles)
    row_indptr, run_indptr = np.zeros((2, num_tiles + 1), np.int32)
    for t in range(num_tiles):
        run_indptr[t + 1] = run_indptr[t] + tiles[t, 3] - tiles[t, 1] + (tiles[t, 4] > 0)
    out = np.empty((run_indptr[-1], 5), np.int32)
    low = np.empty(num_tiles, np.int32)
    for t in range(num_tiles):
        _, run, done, last_run, last_done = tiles[t]
        low[t] = runs.reader_start[run]  # in preorder the first run has the first reader
        high = 0
        for i in range(run_indptr[t], run_indptr[t + 1]):
            end = last_done if run == last_run else runs.tokens[run]
            high = max(high, runs.reader_end[run])
            row = out[i]
            row[0] = request_rows[runs.reader_start[run]]
            row[1], row[2] = runs.start[run] + done, runs.start[run] + end
            row[3], row[4] = runs.reader_start[run] - low[t], runs.reader_end[run] - low[t]
            if row[4] - row[3] == 1 and end == runs.tokens[run]:
                row[2] = OPEN_END
            run, done = run + 1, 0
        row_indptr[t + 1] = row_indptr[t] + high - low[t]
    rows = np.empty(row_indptr[-1], np.int32)
    for t in range(num_tiles):
        size = row_indptr[t + 1] - row_indptr[t]
        rows[row_indptr[t] : row_indptr[t + 1]] = request_rows[low[t] : low[t] + size]
    return row_indptr, rows, run_indptr, out, cost, tiles[:, 0].copy()
