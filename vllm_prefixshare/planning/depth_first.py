"""The divider for kernels that walk runs of KV blocks: one depth-first list, cut in equal parts.

It is DeFT-Flatten (section 3.3) with costs in place of block counts. In depth-first order
neighbouring requests share the most, so the batch is cut into windows of as many neighbours as
a work tile holds. The runs of KV tokens below a window, root to leaves, follow each other in
preorder: then the readers of any piece of the list are neighbours, too. The lists of all
windows, laid end to end, are cut into one part of equal estimated time for each worker, the
target found by bisection (FlashForge's lower bound, section 5.2, with this cut as its test).
A part that reaches into the next window is two tiles.

What a token costs depends on who reads it. A kernel's tile is two halves of 64 query rows: a
run that both read is bound by arithmetic, one of a single half by memory, because the halves
work side by side. And a run that several windows read comes from memory once.
"""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.planning.compiled import compiled
from vllm_prefixshare.planning.cost_table import TileRates
from vllm_prefixshare.types import OPEN_END, FloatArray, Forest, IntArray, WorkTiles

#: query rows of half a kernel tile
HALF_ROWS = 64
#: tokens that a kernel multiplies at once: long runs are cut at multiples of it
KV_TILE = 128
#: A worker may exceed its target by this part of it and this part of a tile's overhead.
SLACK, OVERHEAD_SLACK = 0.02, 0.2
#: bisection ends at this precision
PRECISION = 0.005


class Runs(NamedTuple):
    """The runs of all windows, laid end to end; each array has an entry per run.

    window_end: first run of the next window.
    start, tokens: KV tokens, planned, in whole blocks.
    first, last: depth-first positions of the readers, clipped to the window. What a single
        request reads is its open run: above it, node and private part have become one.
    rate: microseconds per token.
    """

    window_end: IntArray
    start: IntArray
    tokens: IntArray
    first: IntArray
    last: IntArray
    rate: FloatArray


class Limits(NamedTuple):
    """What the cut respects. overhead: microseconds of a tile beside its runs."""

    num_workers: int
    block_size: int
    max_tile_runs: int
    overhead: float


def divide(
    forest: Forest,
    kv_lens: IntArray,
    rates: TileRates,
    rows_per_request: int,
    block_size: int,
    num_workers: int,
    max_tile_requests: int,
    max_tile_runs: int,
) -> WorkTiles:
    """Work tiles, scheduled.

    Windows as large as a tile suit long shared prefixes; where little is shared, smaller ones
    need fewer cuts. So three sizes are tried, and the least estimated finish wins.

    Args:
        forest, kv_lens, rows_per_request, block_size: as in ``DivisionProblem``.
        rates: of the cost model.
        num_workers, max_tile_requests, max_tile_runs: as in ``PlannerConfig``.
    """
    n = forest.num_reqs
    limits = Limits(num_workers, block_size, max_tile_runs, rates.overhead)
    merge = rates.merge * rows_per_request / num_workers
    largest = min(max_tile_requests, n)
    best: tuple[float, Runs, float] | None = None
    for window in sorted({max(1, largest // d) for d in (1, 2, 4)}, reverse=True):
        runs = _list_runs(
            forest.request_rows, forest.private_start, forest.node_start, forest.node_end,
            forest.node_first, forest.node_last, kv_lens, window, rows_per_request,
            block_size, rates.overhead, rates.memory, rates.cached,
        )  # fmt: skip
        target, finish, partials = _best_target(runs, limits, n)
        finish += partials * merge
        if best is None or finish < best[0]:
            best = finish, runs, target
    assert best is not None
    return _tiles(best[1], limits, best[2], forest.request_rows)


@compiled
def _window_ends(
    n: int, size: int, first: IntArray, last: IntArray, tokens: IntArray, price: FloatArray
) -> IntArray:
    """``[n]`` end of the window of each position, windows of ``size`` at most.

    A node that lies across the end of a window is read once more. The ends are chosen so that
    this costs least, by dynamic programming over positions: ``price[0]`` a window and
    ``price[1]`` a token.
    """
    crossing = np.zeros(n + 1)  # cost of ending a window before a position
    for v in range(len(first)):
        crossing[first[v] + 1] += tokens[v] * price[1]
        crossing[last[v]] -= tokens[v] * price[1]
    for p in range(1, n + 1):
        crossing[p] += crossing[p - 1]
    cost = np.zeros(n + 1)  # of the best windows up to a position
    begin = np.zeros(n + 1, np.int32)  # of the last of them
    queue = np.zeros(n + 1, np.int32)  # candidates for it, the best first
    head, tail = 0, 1
    for end in range(1, n + 1):
        while queue[head] < end - size:
            head += 1
        begin[end] = queue[head]
        cost[end] = cost[begin[end]] + price[0]
        if end < n:
            cost[end] += crossing[end]
        while tail > head and cost[queue[tail - 1]] > cost[end]:
            tail -= 1
        queue[tail] = end
        tail += 1
    ends = np.empty(n, np.int32)
    end = n
    while end > 0:
        ends[begin[end] : end] = end
        end = begin[end]
    return ends


@compiled
def _list_runs(
    request_rows: IntArray,
    private_start: IntArray,
    node_start: IntArray,
    node_end: IntArray,
    node_first: IntArray,
    node_last: IntArray,
    kv_lens: IntArray,
    window: int,
    rows_per_request: int,
    block_size: int,
    overhead: float,
    memory: FloatArray,
    cached: FloatArray,
) -> Runs:
    """The runs of windows of at most ``window`` requests, each in preorder."""
    n, num_nodes = len(request_rows), len(node_first)
    price = np.array([overhead, cached[1]])
    ends = _window_ends(n, window, node_first, node_last, node_end - node_start, price)
    number = np.zeros(n, np.int32)  # window of each position
    for p in range(1, n):
        number[p] = number[p - 1] + (ends[p] != ends[p - 1])
    most = n
    for v in range(num_nodes):
        most += 1 + number[node_last[v] - 1] - number[node_first[v]]

    window_end, start, tokens, first, last = np.empty((5, most), np.int32)
    rate = np.empty(most)
    above = np.empty(num_nodes + 1, np.int32)  # nodes on the path to the position at hand
    depth = 0
    count = v = begun = origin = 0
    for p in range(n):
        new_window = p == 0 or ends[p] != ends[p - 1]
        if new_window:
            window_end[begun:count] = count
            begun, origin = count, p
        while depth and node_last[above[depth - 1]] <= p:
            depth -= 1
        skip = 0 if new_window else depth  # nodes from the last window are read again
        while v < num_nodes and node_first[v] == p:
            above[depth] = v
            depth += 1
            v += 1
        half = origin + HALF_ROWS / rows_per_request
        for level in range(skip, depth + 1):
            if level < depth:
                node = above[level]
                low, length, stop = node_start[node], node_end[node] - node_start[node], ends[p]
                stop = min(node_last[node], stop)
                readers = 1 + number[node_last[node] - 1] - number[node_first[node]]
            else:
                low, stop, readers = private_start[p], p + 1, 1
                length = max(1, kv_lens[request_rows[p]] - low)
                length = (length + block_size - 1) // block_size * block_size
            if p < half < stop:
                per_token = cached[1] + (memory[1] - cached[1]) / readers
            elif ends[p] > half:
                per_token = max(cached[0] / 2, memory[0] / readers)
            else:
                per_token = cached[0] + (memory[0] - cached[0]) / readers
            before = count - 1
            if (
                count > begun
                and first[before] == p
                and last[before] == stop
                and start[before] + tokens[before] == low
            ):  # the same readers go on reading: one run
                cost = rate[before] * tokens[before] + per_token * length
                tokens[before] += length
                rate[before] = cost / tokens[before]
                continue
            start[count], tokens[count] = low, length
            first[count], last[count], rate[count] = p, stop, per_token
            count += 1
    window_end[begun:count] = count
    return Runs(
        window_end[:count], start[:count], tokens[:count], first[:count], last[:count], rate[:count]
    )  # fmt: skip


@compiled
def _cut(
    runs: Runs, limits: Limits, target: float, pieces: IntArray, record: bool
) -> tuple[int, float, int]:
    """Cut the list into one part of about ``target`` microseconds for each worker.

    Args:
        pieces: ``[any, 5]``, written if ``record``: worker, tile, run, and which of the run's
            tokens, begin and end.

    Returns:
        workers needed (or one more than there are), the latest finish, pieces.
    """
    window_end, _, tokens, _, _, rate = runs
    num_runs = len(tokens)
    slack = SLACK * target + OVERHEAD_SLACK * limits.overhead
    least = limits.overhead  # a shorter piece is not worth another tile
    kv_tile = (KV_TILE + limits.block_size - 1) // limits.block_size * limits.block_size
    worker = tile = count = run = done = 0
    load = finish = 0.0
    while run < num_runs and worker < limits.num_workers:
        end = window_end[run]
        rest = -done * rate[run]
        for i in range(run, end):
            rest += tokens[i] * rate[i]
        room = target - load - limits.overhead
        whole = rest <= room + slack
        if load > 0.0 and not whole and room < least:
            worker, load = worker + 1, 0.0
            continue
        used, began, full = 0.0, count, False
        while run < end and count - began < limits.max_tile_runs and not full:
            take = tokens[run] - done
            if not whole and used + take * rate[run] > room:
                full = True
                # what is left of the window must be worth a tile, too
                budget = min(room - used, rest - used - least)
                take = _whole_blocks(budget / rate[run], take, limits.block_size, kv_tile)
                if take * rate[run] < least:
                    if count > began:
                        break
                    blocks = int(least / rate[run]) // limits.block_size + 1
                    take = min(blocks * limits.block_size, tokens[run] - done)
                    if rest - take * rate[run] < least:
                        take = tokens[run] - done
            if record:
                piece = pieces[count]
                piece[0], piece[1], piece[2] = worker, tile, run
                piece[3], piece[4] = done, done + take
            count += 1
            used += take * rate[run]
            done += take
            if done == tokens[run]:
                run, done = run + 1, 0
        load += limits.overhead + used
        finish = max(finish, load)
        tile += 1
        if full:
            worker, load = worker + 1, 0.0
    return worker + (load > 0.0 or run < num_runs), finish, count


@compiled
def _whole_blocks(tokens: float, most: int, block_size: int, kv_tile: int) -> int:
    """At most ``tokens``, in whole KV tiles where there are several, else in whole blocks."""
    step = kv_tile if tokens >= 4 * kv_tile else block_size
    return max(0, min(most, int(tokens) // step * step))


@compiled
def _best_target(runs: Runs, limits: Limits, num_reqs: int) -> tuple[float, float, int]:
    """Target whose cut finishes first, that finish, and the partial results it leaves."""
    _, _, tokens, first, last, rate = runs
    total = float((tokens * rate).sum())
    nothing = np.empty((0, 5), np.int32)
    low = high = total / limits.num_workers + limits.overhead
    best, best_finish = 0.0, np.inf
    while high - low > PRECISION * high or best == 0.0:
        target = high if best == 0.0 else (low + high) / 2
        workers, finish, _ = _cut(runs, limits, target, nothing, False)
        if workers <= limits.num_workers:
            high = target
            if finish < best_finish:
                best, best_finish = target, finish
        else:
            low = target
            if best == 0.0:
                high = 1.25 * target
    pieces = np.empty((len(tokens) + limits.num_workers, 5), np.int32)
    _, finish, count = _cut(runs, limits, best, pieces, True)
    tiles_of = np.zeros(num_reqs + 1, np.int32)
    until = 0
    for i in range(count):
        tile, run = pieces[i, 1], pieces[i, 2]
        if i == 0 or tile != pieces[i - 1, 1]:
            tiles_of[first[run]] += 1  # in preorder the first run has the first reader
            until = 0
        until = max(until, last[run])
        if i + 1 == count or tile != pieces[i + 1, 1]:
            tiles_of[until] -= 1
    partials = here = 0
    for p in range(num_reqs):
        here += tiles_of[p]
        partials += here if here > 1 else 0
    return best, finish, partials


def _tiles(runs: Runs, limits: Limits, target: float, request_rows: IntArray) -> WorkTiles:
    pieces = np.empty((len(runs.tokens) + limits.num_workers, 5), np.int32)
    *_, count = _cut(runs, limits, target, pieces, True)
    return WorkTiles(*_as_tiles(runs, limits.overhead, pieces[:count], request_rows))


@compiled
def _as_tiles(
    runs: Runs, overhead: float, pieces: IntArray, request_rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``."""
    _, start, tokens, first, last, rate = runs
    num_tiles = pieces[-1, 1] + 1
    row_indptr, run_indptr = np.zeros((2, num_tiles + 1), np.int32)
    low = np.empty(num_tiles, np.int32)
    high = np.zeros(num_tiles, np.int32)
    worker = np.empty(num_tiles, np.int32)
    cost = np.full(num_tiles, overhead)
    out = np.empty((len(pieces), 5), np.int32)
    for i in range(len(pieces)):
        on, tile, run, begin, end = pieces[i]
        if i == 0 or tile != pieces[i - 1, 1]:
            low[tile] = first[run]
        high[tile] = max(high[tile], last[run])
        worker[tile] = on
        run_indptr[tile + 1] = i + 1
        cost[tile] += (end - begin) * rate[run]
        row = out[i]
        row[0] = request_rows[first[run]]
        row[1], row[2] = start[run] + begin, start[run] + end
        row[3], row[4] = first[run] - low[tile], last[run] - low[tile]
        if row[4] - row[3] == 1 and end == tokens[run]:
            row[2] = OPEN_END
    for tile in range(num_tiles):
        row_indptr[tile + 1] = row_indptr[tile] + high[tile] - low[tile]
    rows = np.empty(row_indptr[-1], np.int32)
    for tile in range(num_tiles):
        rows[row_indptr[tile] : row_indptr[tile + 1]] = request_rows[low[tile] : high[tile]]
    return row_indptr, rows, run_indptr, out, cost, worker
