"""Cuts of the list of KV ranges into work tiles, and the cost of a cut.

There are two ways to cut; the lower estimate wins. ``_cut_evenly`` gives each window a whole
number of equal splits: windows below the same node then read it in lockstep on neighbouring
workers, one from memory and the others from L2. If the numbers of windows and workers do not match,
``_cut_through`` lays the windows end to end and cuts them into one part of equal time per worker,
with the target found by bisection (FlashForge's lower bound, section 5.1); a part that extends
into the next window is two tiles. Lockstep gains nothing without shared tokens, and more if L2 does
not hold them until the next window.

A kernel may ask for even cuts to be spread (``TileGeometry.spread``): each split of a window then
reads a part of the range that all of its requests share, and some of their private KV, so that
splits take equal times whatever the relative costs.
"""

import heapq
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.config import TileGeometry
from vllm_prefixshare.core import (
    OPEN_END,
    RUN_COLUMNS,
    RUN_KV_END,
    RUN_KV_START,
    RUN_READER_END,
    RUN_READER_START,
    RUN_ROW,
    FloatArray,
    IntArray,
)
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.kv_list import Runs, ends_of_windows
from vllm_prefixshare.planning.dividers.prices import merging_us, reading_in, tile_us
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.plan import longest_first
from vllm_prefixshare.utils.numba_cache import compiled

#: A worker may exceed its target by this fraction of it and this fraction of a tile's overhead.
SLACK = 0.02
OVERHEAD_SLACK = 0.2
#: Bisection ends at this precision.
PRECISION = 0.005
#: Tiles keep their order where their costs differ by less than this fraction of the largest.
ABOUT_EQUAL = 0.02

#: Columns of ``Cut.tiles``: the worker; the range and its token where a tile begins, and where it
#: ends; the range that a spread tile reads a part of before these, and the part's first token and
#: end. HEAD_END is 0 in all other tiles.
WORKER = 0
FIRST_RUN = 1
FIRST_TOKEN = 2
END_RUN = 3
END_TOKEN = 4
HEAD_RUN = 5
HEAD_START = 6
HEAD_END = 7
COLUMNS = 8


class Limits(NamedTuple):
    """Limits of a cut.

    rows_per_request, rows_per_query: query rows of one request and of one of its query tokens, on
        one KV head.
    cut_size, kv_tile: tokens; long runs are cut at multiples of kv_tile, short ones of cut_size.
    query_cut_size: as in ``TileGeometry`` if tiles hold several queries of one request, else 0.
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
    def of(cls, problem: DivisionProblem, kv_tile: int | None = None) -> "Limits":
        """The limits of ``problem``; kv_tile, the geometry's if None, is rounded up to a multiple
        of cut_size.
        """
        config = problem.config
        geometry = config.geometry
        if kv_tile is None:
            kv_tile = geometry.kv_tile
        cut_size = config.cut_size or problem.block_size
        max_tile_requests = min(config.max_tile_requests, problem.forest.num_reqs)
        query_cut_size = 0
        if max_tile_requests == 1 and problem.query_len > 1:
            query_cut_size = _round_up(geometry.query_cut_size, cut_size)
        return cls(
            num_workers=config.num_workers,
            max_tile_requests=max_tile_requests,
            max_tile_runs=config.max_tile_runs,
            rows_per_request=problem.rows_per_request,
            rows_per_query=problem.rows_per_request // problem.query_len,
            cut_size=cut_size,
            kv_tile=_round_up(kv_tile, cut_size),
            query_cut_size=query_cut_size,
        )


def _round_up(tokens: int, step: int) -> int:
    return -(-tokens // step) * step


class Cut(NamedTuple):
    """A way to cut the list.

    finish: microseconds until the last result is merged.
    tiles: int32 ``[num_tiles, COLUMNS]``.
    cost: ``[num_tiles]`` microseconds.
    """

    finish: float
    tiles: IntArray
    cost: FloatArray


@compiled
def tile_end(
    runs: Runs, limits: Limits, run: int, done: int, goal: float
) -> tuple[int, int, float]:
    """Where a tile ends that begins at token ``done`` of range ``run``: the range and the token in
    it, and the microseconds of its tokens.

    It ends at about ``goal`` microseconds of the whole list, after a multiple of ``cut_size``, or
    of KV tiles if it is long; at the latest where its window ends or it has the maximum number of
    ranges.
    """
    stop = min(runs.window_end[run], run + limits.max_tile_runs)
    begin = runs.before[run] + done * runs.rate[run]
    if goal >= runs.before[stop]:
        return stop, 0, runs.before[stop] - begin
    end = run  # a search by hand: with NumPy's, a cut took three times as long
    after = stop
    while after - end > 1:
        middle = (end + after) // 2
        if runs.before[middle] <= goal:
            end = middle
        else:
            after = middle
    size = limits.cut_size
    tokens = (goal - runs.before[end]) / runs.rate[end]
    read = tokens - done if end == run else tokens
    step = limits.kv_tile if read >= 4 * limits.kv_tile else size
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
    """Microseconds of merging the partial results of a cut's ``tiles``."""
    num_reqs = runs.reader_end[-1]
    tiles_of = np.zeros(num_reqs + 1, np.int32)  # differences between neighbours
    for t in range(len(tiles)):
        run = tiles[t, FIRST_RUN]
        end = tiles[t, END_RUN] + (tiles[t, END_TOKEN] > 0)
        if tiles[t, HEAD_END]:  # its readers are all of the tile's
            run = tiles[t, HEAD_RUN]
            end = run + 1
        tiles_of[runs.reader_start[run]] += 1  # in preorder the first run has the first reader
        tiles_of[runs.reader_end[run:end].max()] -= 1
    max_partials = np.cumsum(tiles_of).max()
    return merging_us(rates, limits.rows_per_query, max_partials)


@compiled
def _can_spread(runs: Runs, limits: Limits, first: int, end: int, splits: int) -> bool:
    """Whether the window of the runs ``[first, end)`` may be spread: all of its requests read the
    first run, which is at least as long as the others together, and every split gets two KV tiles
    of either.
    """
    if splits < 2 or end - first < 2 or end - first > limits.max_tile_runs:
        return False
    if runs.reader_end[first] != runs.reader_end[end - 1]:
        return False
    others = runs.tokens[first + 1 : end].sum()
    return 2 * splits * limits.kv_tile <= others <= runs.tokens[first]


@compiled
def _some_can_spread(runs: Runs, limits: Limits, ends: IntArray) -> bool:
    """Whether any window may be spread, in two splits if not in more."""
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
        tiles, cost: as in ``Cut``, for as many splits as they have room for; written.
    """
    begin = runs.before[first]
    load = runs.before[end] - begin
    tokens = runs.tokens[first]
    rate = runs.rate[first]
    splits = len(tiles)
    read = 0
    run = first + 1
    done = 0
    for split in range(1, splits + 1):
        tile = tiles[split - 1]
        head_end = tokens
        goal = np.inf
        if split < splits:
            head_end = tokens * split // splits // limits.kv_tile * limits.kv_tile
            # on the list, where the whole first run comes before the others
            goal = begin + load * split / splits + (tokens - head_end) * rate
        tile[FIRST_RUN] = run
        tile[FIRST_TOKEN] = done
        reading = (head_end - read) * rate
        if run < end:
            run, done, others = tile_end(runs, limits, run, done, goal)
            reading += others
        tile[END_RUN] = run
        tile[END_TOKEN] = done
        tile[HEAD_RUN] = first
        tile[HEAD_START] = read
        tile[HEAD_END] = head_end
        cost[split - 1] = tile_us(lines, reading)
        read = head_end


@compiled
def _splits_of_windows(load: FloatArray, num_tiles: int, overhead: float, alike: bool) -> IntArray:
    """``[num_windows]`` number of splits of each window, about ``num_tiles`` in all.

    Args:
        load: ``[num_windows]`` microseconds.
        overhead: microseconds that a split must exceed.
        alike: windows that take about as long get as many splits.
    """
    splits = np.ones(len(load), np.int32)
    longest = [(-load[w], w) for w in range(len(load))]  # a heap of windows by their splits' length
    heapq.heapify(longest)
    for _ in range(len(load), num_tiles):
        _, w = longest[0]
        if load[w] / (splits[w] + 1) < overhead:
            break  # not worth another tile
        splits[w] += 1
        heapq.heapreplace(longest, (-load[w] / splits[w], w))
    if alike:
        split_us = -longest[0][0] * (1 + ABOUT_EQUAL)
        for w in range(len(load)):
            splits[w] = int(np.ceil(load[w] / split_us))
    return splits


@compiled
def _cut_windows(
    runs: Runs,
    limits: Limits,
    rates: TileRates,
    ends: IntArray,
    splits: IntArray,
    spread: bool,
    tiles: IntArray,
    cost: FloatArray,
    split_of: IntArray,
) -> int:
    """Cut each window into ``splits[w]`` tiles of equal time, or more where the room for runs ends.

    Args:
        ends: ``[num_windows]`` run before which each window ends.
        spread: spread windows where that is possible.
        tiles, cost: as in ``Cut`` with room for more; written.
        split_of: ``[room]`` number of each tile within its window; written.

    Returns:
        number of tiles.
    """
    count = 0
    run = 0
    done = 0
    for w in range(len(ends)):
        begun = count
        begin = runs.before[run]
        load = runs.before[ends[w]] - begin
        if spread and _can_spread(runs, limits, run, ends[w], splits[w]):
            count += splits[w]
            _spread(runs, limits, rates.lines, run, ends[w], tiles[begun:count], cost[begun:count])
            run = ends[w]
        while run < ends[w]:
            goal = np.inf
            split = count + 1 - begun
            if split < splits[w]:
                goal = begin + load * split / splits[w]
                if limits.query_cut_size:  # as long as the others, if those before were longer
                    at = runs.before[run] + done * runs.rate[run]
                    goal = max(goal, at + load / splits[w])
            tile = tiles[count]
            tile[FIRST_RUN] = run
            tile[FIRST_TOKEN] = done
            run, done, reading = tile_end(runs, limits, run, done, goal)
            tile[END_RUN] = run
            tile[END_TOKEN] = done
            cost[count] = tile_us(rates.lines, reading)
            count += 1
        if count > begun + 1:
            cost[begun:count] += rates.partial_write
        split_of[begun:count] = np.arange(count - begun)
    return count


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
    """Cut each window (which ends before run ``ends[w]``) into equal splits, about ``num_tiles``
    in all, or leave it uncut where there are that many windows, and schedule the tiles. If
    ``alike``, windows that take about as long get as many splits: 5, 5 and 5 instead of 6, 5 and 5,
    which end no sooner. With ``spread`` windows are spread where that is possible.
    """
    load = np.empty(len(ends))
    for w in range(len(ends)):
        load[w] = runs.before[ends[w]] - runs.before[ends[w - 1] if w else 0]
    alike = alike and num_tiles <= limits.num_workers
    splits = _splits_of_windows(load, num_tiles, rates.overhead, alike)
    room = len(runs.tokens) + splits.sum()
    tiles = np.zeros((room, COLUMNS), np.int32)
    cost = np.empty(room)
    split_of = np.empty(room, np.int32)
    count = _cut_windows(runs, limits, rates, ends, splits, spread, tiles, cost, split_of)
    # the same split of every window, then the next: neighbouring workers read the same tokens
    by_split = np.argsort(split_of[:count], kind="mergesort")
    tiles = tiles[by_split]
    cost = cost[by_split]
    order, work_indptr, finish = longest_first(cost, limits.num_workers, ABOUT_EQUAL)
    for w in range(limits.num_workers):
        tiles[order[work_indptr[w] : work_indptr[w + 1]], WORKER] = w
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
    """Cut the list into one range of about ``target`` microseconds for each worker.

    Args:
        tiles, cost: as in ``Cut`` with room for more, written.

    Returns:
        workers needed (or one more than there are), number of tiles, and when the last worker
        has finished.
    """
    slack = SLACK * target + OVERHEAD_SLACK * rates.overhead
    min_us = rates.overhead  # a shorter range is not worth another tile
    worker = 0
    count = 0
    run = 0
    done = 0
    tiles_of_window = 0
    load = 0.0
    finish = 0.0
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
            # a range of the window, with enough before and after it
            room = reading_in(rates.lines, target - load - rates.partial_write)
            part = min(max(room, min_us), rest - min_us)
            if load > 0.0 and (room < min_us or part < min_us):
                worker += 1
                load = 0.0
                continue
            if part >= min_us:
                goal = at + part
                writing = rates.partial_write
        tile = tiles[count]
        tile[WORKER] = worker
        tile[FIRST_RUN] = run
        tile[FIRST_TOKEN] = done
        run, done, reading = tile_end(runs, limits, run, done, goal)
        tile[END_RUN] = run
        tile[END_TOKEN] = done
        cost[count] = tile_us(rates.lines, reading) + writing
        load += cost[count]
        finish = max(finish, load)
        count += 1
        tiles_of_window += 1
        if goal < np.inf and run - tile[FIRST_RUN] < limits.max_tile_runs:
            worker += 1
            load = 0.0
    needed = worker + (load > 0.0 or run < len(runs.tokens))
    return needed, count, finish


@compiled
def _cut_through_at_best(runs: Runs, limits: Limits, rates: TileRates, known: float) -> Cut:
    """``_cut_through`` at the target that finishes first; a cut with infinite finish if none
    finishes before ``known``.
    """
    room = len(runs.tokens) + limits.num_workers
    tiles = np.zeros((room, COLUMNS), np.int32)
    cost = np.empty(room)
    high = runs.before[-1] / limits.num_workers + rates.overhead
    low = high
    best = 0.0
    best_finish = np.inf
    while low < known and (high - low > PRECISION * high or best == 0.0):
        target = high if best == 0.0 else (low + high) / 2
        workers, _, finish = _cut_through(runs, limits, rates, target, tiles, cost)
        if workers <= limits.num_workers:
            high = target
            if finish < best_finish:
                best = target
                best_finish = finish
        else:
            low = target
            if best == 0.0:
                high = 1.25 * target
    if best_finish >= known:
        return Cut(np.inf, tiles[:0], cost[:0])
    _, count, _ = _cut_through(runs, limits, rates, best, tiles, cost)
    tiles = tiles[:count]
    return Cut(best_finish + _merging(runs, limits, rates, tiles), tiles, cost[:count])


@compiled
def best_cut(
    runs: Runs,
    limits: Limits,
    geometry: TileGeometry,
    rates: TileRates,
    lockstep: float,
    known: float,
) -> Cut:
    """The best cut of the list, its finish without its advantage; one with infinite finish if none
    finishes before ``known``.

    Args:
        lockstep: time saved by an even cut, as a fraction of the finish.
    """
    ends = ends_of_windows(runs)
    workers = limits.num_workers
    best = Cut(np.inf, np.empty((0, COLUMNS), np.int32), np.empty(0))
    min_finish = (runs.before[-1] + len(ends) * rates.overhead) / workers
    if min_finish >= known:
        return best
    spread = geometry.spread and _some_can_spread(runs, limits, ends)
    handicap = 1 + lockstep
    alike = lockstep > geometry.lockstep_gain
    for num_tiles in (workers, 2 * workers, workers // 2, 0):
        at_once = min(max(num_tiles, len(ends)), workers)
        if runs.before[-1] >= known * at_once:
            continue  # too few to finish sooner
        if num_tiles == 0 or num_tiles > len(ends):
            cut = _cut_evenly(runs, limits, rates, ends, num_tiles, alike, False)
            if cut.finish < known:
                known = cut.finish
                best = cut
            if spread:
                cut = _cut_evenly(runs, limits, rates, ends, num_tiles, alike, True)
                finish = cut.finish * (1 - geometry.spread_gain)
                if cut.tiles[:, HEAD_END].any() and finish < known:
                    known = finish
                    best = Cut(finish, cut.tiles, cut.cost)
    if min_finish * handicap < known:
        cut = _cut_through_at_best(runs, limits, rates, known / handicap)
        finish = cut.finish * handicap
        if finish < known:
            best = Cut(finish, cut.tiles, cut.cost)
    return best


@compiled
def as_tiles(
    runs: Runs, tiles: IntArray, cost: FloatArray, request_rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``. tiles, cost: as in ``Cut``."""
    num_tiles = len(tiles)
    row_indptr, run_indptr = np.zeros((2, num_tiles + 1), np.int32)
    for t in range(num_tiles):
        own = tiles[t, END_RUN] - tiles[t, FIRST_RUN] + (tiles[t, END_TOKEN] > 0)
        run_indptr[t + 1] = run_indptr[t] + own + (tiles[t, HEAD_END] > 0)
    out = np.empty((run_indptr[-1], RUN_COLUMNS), np.int32)
    low = np.empty(num_tiles, np.int32)
    for t in range(num_tiles):
        run = tiles[t, FIRST_RUN]
        done = tiles[t, FIRST_TOKEN]
        head = tiles[t, HEAD_RUN]
        head_end = tiles[t, HEAD_END]
        begin = run_indptr[t]
        low[t] = runs.reader_start[head if head_end else run]  # in preorder the first of all
        high = 0
        if head_end:
            high = runs.reader_end[head]
            row = out[begin]
            row[RUN_ROW] = request_rows[low[t]]
            row[RUN_KV_START] = runs.start[head] + tiles[t, HEAD_START]
            row[RUN_KV_END] = runs.start[head] + head_end
            row[RUN_READER_START] = 0
            row[RUN_READER_END] = high - low[t]
            begin += 1
        for i in range(begin, run_indptr[t + 1]):
            end = tiles[t, END_TOKEN] if run == tiles[t, END_RUN] else runs.tokens[run]
            high = max(high, runs.reader_end[run])
            row = out[i]
            row[RUN_ROW] = request_rows[runs.reader_start[run]]
            row[RUN_KV_START] = runs.start[run] + done
            row[RUN_KV_END] = runs.start[run] + end
            row[RUN_READER_START] = runs.reader_start[run] - low[t]
            row[RUN_READER_END] = runs.reader_end[run] - low[t]
            if row[RUN_READER_END] - row[RUN_READER_START] == 1 and end == runs.tokens[run]:
                row[RUN_KV_END] = OPEN_END
            run += 1
            done = 0
        row_indptr[t + 1] = row_indptr[t] + high - low[t]
    rows = np.empty(row_indptr[-1], np.int32)
    for t in range(num_tiles):
        size = row_indptr[t + 1] - row_indptr[t]
        rows[row_indptr[t] : row_indptr[t + 1]] = request_rows[low[t] : low[t] + size]
    return row_indptr, rows, run_indptr, out, cost, tiles[:, WORKER].copy()
