"""Pieces of the list of runs: where a tile ends that begins at some token, what it costs, and the
tiles of a cut as ``WorkTiles``.
"""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.dividers.windows import Runs
from vllm_prefixshare.records import OPEN_END, FloatArray, IntArray


class Limits(NamedTuple):
    """Limits of a cut.

    rows_per_request, rows_per_query: query rows of one request and of one of its query tokens, on
        one KV head.
    cut_size, kv_tile: tokens; long runs are cut at multiples of kv_tile, short ones of cut_size.
    query_cut_size: as in ``TileGeometry`` if tiles hold several queries of one request, else 0.
    half_rows and the fields after it: as in ``TileGeometry``.
    """

    num_workers: int
    max_tile_requests: int
    max_tile_runs: int
    rows_per_request: int
    rows_per_query: int
    cut_size: int
    kv_tile: int
    query_cut_size: int
    half_rows: int
    spread: bool
    spread_gain: float
    lockstep_gain: float
    uncached_lockstep_gain: float
    cached_tokens: int

    @classmethod
    def of(cls, problem: DivisionProblem, kv_tile: int | None = None) -> "Limits":
        """The limits of ``problem``; kv_tile, the geometry's if None, is rounded up to a multiple
        of cut_size.
        """
        geometry = problem.config.geometry
        kv_tile = geometry.kv_tile if kv_tile is None else kv_tile
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
            -(-(geometry.query_cut_size or 0) // size) * size if alone else 0,
            geometry.half_rows,
            geometry.spread,
            geometry.spread_gain,
            geometry.lockstep_gain,
            geometry.uncached_lockstep_gain,
            geometry.cached_tokens,
        )


class Cut(NamedTuple):
    """A way to cut the list.

    finish: microseconds until the last result is merged.
    tiles: ``[num_tiles, 8]``: worker; run and token where it begins; run and token where it ends;
        if it is spread, the run that it reads a part of before these, and that part's first token
        and end, else 0.
    cost: ``[num_tiles]`` microseconds.
    """

    finish: float
    tiles: IntArray
    cost: FloatArray


@compiled
def _line(ends: FloatArray, value: float) -> int:
    """The line of ``TileRates.lines`` for a value; the last first, because most tiles are long."""
    at = len(ends) - 1
    while at > 0 and ends[at - 1] > value:
        at -= 1
    return at


@compiled
def tile_us(lines: FloatArray, reading: float) -> float:
    """Microseconds of a tile whose runs take ``reading`` by their rates."""
    at = _line(lines[0], reading)
    return lines[2, at] + lines[3, at] * reading


@compiled
def reading_in(lines: FloatArray, us: float) -> float:
    """The inverse of ``tile_us``: microseconds for reading in a tile of ``us`` microseconds,
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
def as_tiles(
    runs: Runs, tiles: IntArray, cost: FloatArray, request_rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``. tiles, cost: as in ``Cut``."""
    num_tiles = len(tiles)
    row_indptr, run_indptr = np.zeros((2, num_tiles + 1), np.int32)
    for t in range(num_tiles):
        own = tiles[t, 3] - tiles[t, 1] + (tiles[t, 4] > 0)
        run_indptr[t + 1] = run_indptr[t] + own + (tiles[t, 7] > 0)
    out = np.empty((run_indptr[-1], 5), np.int32)
    low = np.empty(num_tiles, np.int32)
    for t in range(num_tiles):
        _, run, done, last_run, last_done, head, head_start, head_end = tiles[t]
        begin = run_indptr[t]
        low[t] = runs.reader_start[head if head_end else run]  # in preorder the first of all
        high = 0
        if head_end:
            high = runs.reader_end[head]
            out[begin, 0] = request_rows[low[t]]
            out[begin, 1], out[begin, 2] = (
                runs.start[head] + head_start,
                runs.start[head] + head_end,
            )
            out[begin, 3], out[begin, 4] = 0, high - low[t]
            begin += 1
        for i in range(begin, run_indptr[t + 1]):
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
