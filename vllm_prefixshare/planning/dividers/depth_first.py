"""The divider for kernels that walk KV ranges: one depth-first list, cut by time.

It is DeFT-Flatten (section 3.3) with costs in place of block counts. In depth-first order
neighbouring requests share the most, so the batch is cut into windows of as many neighbours as
a work tile holds. The KV ranges below a window are in preorder from root to leaves, so the readers
of any part of the list are neighbours, too.

There is a module for each of three steps: ``kv_list`` lists the KV ranges of all windows with the
rates of their tokens, ``prices`` prices tiles and merging, and ``cuts``, which calls both, cuts the
list into work tiles.

The price of a token depends on its readers. A kernel's tile is two halves, each with half of the
requests, that work in parallel: a range that both halves read is compute-bound, a range that one
half reads memory-bound. A range that several windows read comes from memory once. The cost of a
tile in addition to its tokens is taken from the cost table at the tile's size (``TileRates``).
"""

import numpy as np

from vllm_prefixshare.config import TileGeometry
from vllm_prefixshare.core import FloatArray, Forest, IntArray, WorkTiles
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.cuts import Limits, as_tiles, best_cut
from vllm_prefixshare.planning.dividers.kv_list import (
    Runs,
    ends_of_windows,
    list_runs,
    window_ends,
)
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.utils.numba_cache import compiled


def depth_first(problem: DivisionProblem) -> WorkTiles:
    """Work tiles, scheduled.

    Windows as large as a tile suit long shared prefixes; where little is shared, smaller ones
    need fewer cuts. So three sizes are tried, and the lowest estimated finish wins.
    """
    geometry = problem.config.geometry
    limits = Limits.of(problem)
    lens = problem.planned_seq_lens
    return WorkTiles(*_divide(problem.forest, lens, limits, geometry, problem.rates))


@compiled
def _lockstep_gain(forest: Forest, runs: Runs, limits: Limits, geometry: TileGeometry) -> float:
    """Time saved by an even cut, whose windows read in lockstep, as a fraction of the finish."""
    if not len(forest.node_start):
        return 0.0
    ends = ends_of_windows(runs)
    begins = runs.reader_start[ends[:-1]]  # of all windows but the first
    before = np.searchsorted(begins, forest.node_reader_start, "right")
    several = before < np.searchsorted(begins, forest.node_reader_end, "left")
    tokens = ((forest.node_end - forest.node_start) * several).sum()
    if tokens <= geometry.cached_tokens * limits.num_workers:
        return geometry.lockstep_gain
    gain = geometry.uncached_lockstep_gain
    is_half = limits.max_tile_requests * limits.rows_per_request <= geometry.half_rows
    return 2 * gain if is_half else gain


@compiled
def _divide(
    forest: Forest,
    planned_seq_lens: IntArray,
    limits: Limits,
    geometry: TileGeometry,
    rates: TileRates,
) -> tuple[IntArray, IntArray, IntArray, IntArray, FloatArray, IntArray]:
    """The arrays of ``WorkTiles``, for windows of as many requests as a tile takes, a half, or
    a quarter.
    """
    finish = np.inf
    largest = limits.max_tile_requests
    tried = 0
    for size in (largest, max(1, largest // 2), max(1, largest // 4)):
        if size == tried:
            continue
        tried = size
        ways = window_ends(forest, size, rates)
        for way in range(1 if np.array_equal(*ways) else 2):
            runs = list_runs(
                forest, planned_seq_lens, ways[way], limits.rows_per_request, geometry.half_rows,
                limits.cut_size, rates,
            )  # fmt: skip
            lockstep = _lockstep_gain(forest, runs, limits, geometry)
            if way > 0 and lockstep > geometry.lockstep_gain:
                continue  # windows that take unlike times do not stay in lockstep
            cut = best_cut(runs, limits, geometry, rates, lockstep, finish)
            if cut.finish < finish:
                finish = cut.finish
                best_runs = runs
                best = cut
    return as_tiles(best_runs, best.tiles, best.cost, forest.request_rows)
