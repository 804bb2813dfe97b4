"""The divider for a kernel with two sizes of work tile: ``depth_first`` for each of them.

A large tile is bound by arithmetic, whoever reads: what few of its requests read costs it as
much as what all do. A small one is bound by memory. So nodes with more readers than a small
tile holds go into large tiles and everything else, private parts above all, into small ones, if
that saves more than the partial results cost that it leaves for every request. Where little is
private, or everything is, one size does it all.
"""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.costs.cost_table import TileRates
from vllm_prefixshare.planning.dividers.depth_first import Limits, as_tiles, cut_evenly, divide
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.dividers.windows import list_runs
from vllm_prefixshare.records import FloatArray, IntArray, WorkTiles

Arrays = tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]


class SmallTiles(NamedTuple):
    """The second size. rate: microseconds per token of one of its workers."""

    num_workers: int
    max_requests: int
    rate: float


def by_size(problem: DivisionProblem) -> WorkTiles:
    """Work tiles of both sizes; the large ones are scheduled, the small ones lie spread over
    the workers of the large, for the kernel's layout to schedule."""
    config, forest = problem.config, problem.forest
    rates = problem.rates or TileRates.of(problem.cost)
    # rates are of that part of the GPU that one worker of the large size has
    share = config.num_small_workers / config.num_workers
    small = SmallTiles(
        config.num_small_workers, config.small_tile_requests, float(rates.small * share)
    )
    tiles = _by_size(
        forest.request_rows, forest.private_start, forest.node_start, forest.node_end,
        forest.node_first, forest.node_last, problem.kv_lens,
        min(config.max_tile_requests, forest.num_reqs), problem.rows_per_request,
        Limits.of(problem, rates), rates.memory, rates.cached, small, choose(problem, rates),
    )  # fmt: skip
    return WorkTiles(*tiles)


def choose(problem: DivisionProblem, rates: TileRates) -> bool:
    """Whether what few requests read should go into small tiles: where that is all there is,
    or the time it takes the large ones beyond the small ones' exceeds that of merging."""
    config, forest = problem.config, problem.forest
    below = forest.node_last - forest.node_first
    narrow = below <= config.small_tile_requests
    if narrow.all():
        return True
    tokens = problem.kv_lens.sum() - forest.private_start.sum()
    tokens += ((forest.node_end - forest.node_start)[narrow]).sum()
    saved = tokens * max(0.0, float(rates.memory[1]) - rates.small)
    merged = forest.num_reqs * problem.rows_per_request * rates.merge
    if forest.num_reqs > config.num_workers * config.max_tile_requests // 2:
        # large tiles need not be cut: they alone would leave no partial results
        merged = 2 * merged + rates.merge_launch * config.num_workers
    return bool(saved > merged)


@compiled
def _by_size(
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
    small: SmallTiles,
    apart: bool,
) -> Arrays:
    n = len(request_rows)
    if not apart:
        return divide(
            request_rows, private_start, node_start, node_end, node_first, node_last, kv_lens,
            largest, rows_per_request, limits, memory, cached,
        )  # fmt: skip
    wide = node_last - node_first > small.max_requests
    inside = np.zeros(n + 1, np.int32)
    for v in np.flatnonzero(wide):
        inside[node_first[v]] += 1
        inside[node_last[v]] -= 1
    position = np.zeros(n + 1, np.int32)  # among the requests below wide nodes
    depth = 0
    for p in range(n):
        depth += inside[p]
        position[p + 1] = position[p] + (depth > 0)
    narrow = ~wide
    rate = np.full(2, small.rate)
    few_limits = Limits(
        small.num_workers, limits.block_size, limits.max_tile_runs, limits.overhead, limits.merge,
        limits.partial_write, limits.merge_launch,
    )  # fmt: skip
    runs = list_runs(
        request_rows, private_start, node_start[narrow], node_end[narrow], node_first[narrow],
        node_last[narrow], kv_lens, min(small.max_requests, n), rows_per_request,
        limits.block_size, limits.overhead, rate, rate,
    )  # fmt: skip
    cut = cut_evenly(runs, few_limits, np.unique(runs.window_end), small.num_workers)
    few = as_tiles(runs, cut, request_rows)
    few[5][:] = few[5] * limits.num_workers // small.num_workers
    if position[n] == 0:
        return few
    rows = request_rows[position[1:] > position[:-1]]
    many = divide(
        rows, np.full(len(rows), -1, np.int32), node_start[wide], node_end[wide],
        position[node_first[wide]], position[node_last[wide]], kv_lens,
        min(largest, len(rows)), rows_per_request, limits, memory, cached,
    )  # fmt: skip
    return _joined(many, few)


@compiled
def _joined(a: Arrays, b: Arrays) -> Arrays:
    """Both lists of tiles in one, by worker, those of ``a`` first."""
    num_tiles = len(a[4]) + len(b[4])
    row_indptr, run_indptr, worker = np.zeros((3, num_tiles + 1), np.int32)
    rows = np.empty(len(a[1]) + len(b[1]), np.int32)
    runs = np.empty((len(a[3]) + len(b[3]), 5), np.int32)
    cost = np.empty(num_tiles)
    at_a = at_b = 0
    for t in range(num_tiles):
        from_a = at_b == len(b[4]) or (at_a < len(a[4]) and a[5][at_a] <= b[5][at_b])
        part, i = (a, at_a) if from_a else (b, at_b)
        row, last_row = part[0][i], part[0][i + 1]
        run, last_run = part[2][i], part[2][i + 1]
        row_indptr[t + 1] = row_indptr[t] + last_row - row
        run_indptr[t + 1] = run_indptr[t] + last_run - run
        rows[row_indptr[t] : row_indptr[t + 1]] = part[1][row:last_row]
        runs[run_indptr[t] : run_indptr[t + 1]] = part[3][run:last_run]
        cost[t], worker[t] = part[4][i], part[5][i]
        at_a += from_a
        at_b += not from_a
    return row_indptr, rows, run_indptr, runs, cost, worker[:num_tiles].copy()
