"""The divider for kernels that walk runs of KV blocks: one depth-first list, cut by time.

It is DeFT-Flatten (section 3.3) with costs in place of block counts. In depth-first order
neighbouring requests share the most, so the batch is cut into windows of as many neighbours as
a work tile holds. The runs of KV tokens below a window, root to leaves, follow each other in
preorder: then the readers of any piece of the list are neighbours, too.

There are two ways to cut; the lower estimate wins. ``_cut_evenly`` gives each window a whole
number of equal pieces: windows below the same node then read it in step, on neighbouring workers,
and what one fetches from memory the others find in cache. Where the numbers of windows and workers
do not match, ``_cut_through`` lays the windows end to end and cuts them into one part of equal time
for each worker, the target found by bisection (FlashForge's lower bound, section 5.1, with this cut
as its test); a part that reaches into the next window is two tiles. Reading in step counts for
nothing where no tokens are shared, and for more where L2 does not keep them until the next window.

A kernel may ask for even cuts to be spread (``PlannerConfig.spread``): each piece of a window then
reads a part of the run that all of its requests share, and some of their private parts, so that
pieces take equal times whatever the price of one is beside the other.

The cost of a token depends on its readers. A kernel's tile is two halves, each with half of the
requests: a run that both halves read is bound by arithmetic, a run that one half reads by memory,
because the halves work in parallel. A run that several windows read comes from memory once. The
cost of a tile besides its tokens is taken from the cost table at the tile's size (``TileRates``).
"""

import heapq

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.pieces import (
    Cut,
    Limits,
    as_tiles,
    reading_in,
    tile_end,
    tile_us,
)
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.dividers.windows import (
    Runs,
    ends_of_windows,
    list_runs,
    window_ends,
)
from vllm_prefixshare.planning.plan import longest_first
from vllm_prefixshare.records import FloatArray, Forest, IntArray, WorkTiles

#: A worker may exceed its target by this part of it and this part of a tile's overhead.
SLACK, OVERHEAD_SLACK = 0.02, 0.2
#: bisection ends at this precision
PRECISION = 0.005
#: tiles keep their order where their costs differ by less than this part of the largest
ABOUT_EQUAL = 0.02


def depth_first(problem: DivisionProblem) -> WorkTiles:
    """Work tiles, scheduled.

    Windows as large as a tile suit long shared prefixes; where little is shared, smaller ones
    need fewer cuts. So three sizes are tried, and the least estimated finish wins.
    """
    rates = problem.rates or TileRates.of(problem.cost, problem.config.geometry)
    return WorkTiles(*_divide(problem.forest, problem.kv_lens, Limits.of(problem), rates))


@compiled
def _merging(runs: Runs, limits: Limits, rates: TileRates, tiles: IntArray) -> float:
    """Microseconds of merging. One program merges all partial results of a query token, and the
    tokens of a request are merged side by side.
    """
    num_reqs = runs.reader_end[-1]
    tiles_of = np.zeros(num_reqs + 1, np.int32)  # differences between neighbours
    for t in range(len(tiles)):
        _, run, _, end, done, head, _, head_end = tiles[t]
        if head_end:  # its readers are all of the tile's
            run, end, done = head, head + 1, 0
        tiles_of[runs.reader_start[run]] += 1  # in preorder the first run has the first reader
        tiles_of[runs.reader_end[run : end + (done > 0)].max()] -= 1
    most = np.cumsum(tiles_of).max()
    each = min(max(rates.merge * limits.rows_per_query, rates.min_merge), rates.max_merge)
    return rates.merge_launch + most * each if most > 1 else 0.0


@compiled
def _can_spread(runs: Runs, limits: Limits, first: int, end: int, pieces: int) -> bool:
    """Whether the window of the runs ``[first, end)`` may be spread: all of its requests read the
    first run, which is at least as long as the others together, and every piece gets two KV tiles
    of either.
    """
    if pieces < 2 or end - first < 2 or end - first > limits.max_tile_runs:
        return False
    if runs.reader_end[first] != runs.reader_end[end - 1]:
        return False
    others = runs.tokens[first + 1 : end].sum()
    return 2 * pieces * limits.kv_tile <= others <= runs.tokens[first]


@compiled
def _some_can_spread(runs: Runs, limits: Limits, ends: IntArray) -> bool:
    """Whether any window may be spread, in two pieces if not in more."""
    first = 0
    for end in ends:
        if _can_spread(runs, limits, first, end, 2):
            return True
        first = end
    return False


@compiled
def _spread(
    runs: Runs,
    limits: Limits,
    lines: FloatArray,
    first: int,
    end: int,
    tiles: IntArray,
    cost: FloatArray,
) -> None:
    """Cut the window of the runs ``[first, end)`` into tiles of about equal time, each with a part
    of the first run and a part of the others.

    Args:
        lines: as in ``TileRates``.
        tiles, cost: as in ``Cut``, for as many pieces as they have room for; written.
    """
    begin, load = runs.before[first], runs.before[end] - runs.before[first]
    tokens, rate, pieces = runs.tokens[first], runs.rate[first], len(tiles)
    read, run, done = 0, first + 1, 0
    for piece in range(1, pieces + 1):
        tile = tiles[piece - 1]
        upto, goal = tokens, np.inf
        if piece < pieces:
            upto = tokens * piece // pieces // limits.kv_tile * limits.kv_tile
            # on the list, where the whole first run comes before the others
            goal = begin + load * piece / pieces + (tokens - upto) * rate
        tile[1], tile[2] = run, done
        reading = (upto - read) * rate
        if run < end:
            run, done, others = tile_end(runs, limits, run, done, goal)
            reading += others
        tile[3], tile[4] = run, done
        tile[5], tile[6], tile[7] = first, read, upto
        cost[piece - 1] = tile_us(lines, reading)
        read = upto


@compiled
def _cut_evenly(
    runs: Runs,
    limits: Limits,
    rates: TileRates,
    ends: IntArray,
    num_tiles: int,
    alike: bool,
    spread: bool,
) -> Cut:
    """Cut each window (which ends before run ``ends[w]``) into equal pieces, about ``num_tiles``
    in all, or leave it uncut where there are that many windows, and schedule the tiles. If
    ``alike``, windows that take about as long get as many pieces: 5, 5 and 5 instead of 6, 5 and 5,
    which end no sooner. With ``spread`` windows are spread where that is possible.
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
    if alike and num_tiles <= limits.num_workers:
        piece_us = -longest[0][0] * (1 + ABOUT_EQUAL)
        for w in range(num_windows):
            pieces[w] = int(np.ceil(load[w] / piece_us))
    room = len(runs.tokens) + pieces.sum()
    tiles, cost = np.zeros((room, 8), np.int32), np.empty(room)
    piece_of = np.empty(room, np.int32)
    count = run = done = 0
    for w in range(num_windows):
        begun, begin, piece = count, runs.before[run], 1
        if spread and _can_spread(runs, limits, run, ends[w], pieces[w]):
            count += pieces[w]
            _spread(runs, limits, rates.lines, run, ends[w], tiles[begun:count], cost[begun:count])
            run, done = ends[w], 0
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
            cost[count] = tile_us(rates.lines, reading)
            count, piece = count + 1, piece + 1
        if count > begun + 1:
            cost[begun:count] += rates.partial_write
        piece_of[begun:count] = np.arange(count - begun)
    # the same piece of every window, then the next: neighbouring workers read the same tokens
    by_piece = np.argsort(piece_of[:count], kind="mergesort")
    tiles, cost = tiles[by_piece], cost[by_piece]
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
        if rest > left or tile_us(rates.lines, rest) > left:
            # a piece of the window, with enough before and after it
            room = reading_in(rates.lines, target - load - rates.partial_write)
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
        cost[count] = tile_us(rates.lines, reading) + writing
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
    tiles, cost = np.zeros((room, 8), np.int32), np.empty(room)
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
def _in_step(forest: Forest, runs: Runs, limits: Limits) -> float:
    """Advantage of an even cut, whose windows read in step, as a part of the finish."""
    if not len(forest.node_start):
        return 0.0
    ends = ends_of_windows(runs)
    begins = runs.reader_start[ends[:-1]]  # of all windows but the first
    before = np.searchsorted(begins, forest.node_reader_start, "right")
    several = before < np.searchsorted(begins, forest.node_reader_end, "left")
    tokens = ((forest.node_end - forest.node_start) * several).sum()
    if tokens <= limits.cached_tokens * limits.num_workers:
        return limits.lockstep_gain
    gain = limits.uncached_lockstep_gain
    half = limits.max_tile_requests * limits.rows_per_request <= limits.half_rows
    return 2 * gain if half else gain


@compiled
def _best_cut(runs: Runs, limits: Limits, rates: TileRates, in_step: float, known: float) -> Cut:
    """The best cut of the list, its finish without its advantage; one with infinite finish if none
    finishes before ``known``.

    Args:
        in_step: advantage of an even cut, as a part of the finish.
    """
    ends, workers = ends_of_windows(runs), limits.num_workers
    best = Cut(np.inf, np.empty((0, 8), np.int32), np.empty(0))
    least = (runs.before[-1] + len(ends) * rates.overhead) / workers
    if least >= known:
        return best
    spread = limits.spread and _some_can_spread(runs, limits, ends)
    handicap, alike = 1 + in_step, in_step > limits.lockstep_gain
    for num_tiles in (workers, 2 * workers, workers // 2, 0):
        at_once = min(max(num_tiles, len(ends)), workers)
        if runs.before[-1] >= known * at_once:
            continue  # too few to finish sooner
        if num_tiles == 0 or num_tiles > len(ends):
            cut = _cut_evenly(runs, limits, rates, ends, num_tiles, alike, False)
            if cut.finish < known:
                known, best = cut.finish, cut
            if spread:
                cut = _cut_evenly(runs, limits, rates, ends, num_tiles, alike, True)
                finish = cut.finish * (1 - limits.spread_gain)
                if cut.tiles[:, 7].any() and finish < known:
                    known, best = finish, Cut(finish, cut.tiles, cut.cost)
    if least * handicap < known:
        cut = _cut_through_at_best(runs, limits, rates, known / handicap)
        finish = cut.finish * handicap
        if finish < known:
            best = Cut(finish, cut.tiles, cut.cost)
    return best


@compiled
def _divide(
    forest: Forest, kv_lens: IntArray, limits: Limits, rates: TileRates
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``, for windows of as many requests as a tile takes, a half, or
    a quarter.
    """
    finish = np.inf
    largest, tried = limits.max_tile_requests, 0
    for size in (largest, max(1, largest // 2), max(1, largest // 4)):
        if size == tried:
            continue
        tried = size
        ways = window_ends(forest, size, rates)
        for way in range(1 if np.array_equal(*ways) else 2):
            runs = list_runs(
                forest,
                kv_lens,
                ways[way],
                limits.rows_per_request,
                limits.half_rows,
                limits.cut_size,
                rates,
            )
            in_step = _in_step(forest, runs, limits)
            if way > 0 and in_step > limits.lockstep_gain:
                continue  # windows that take unlike times do not stay in step
            cut = _best_cut(runs, limits, rates, in_step, finish)
            if cut.finish < finish:
                finish, best_runs, best = cut.finish, runs, cut
    return as_tiles(best_runs, best.tiles, best.cost, forest.request_rows)
