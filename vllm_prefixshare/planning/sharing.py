"""The share policy: what may be shared, and which trees and sliding windows are worth it."""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.config import TileGeometry
from vllm_prefixshare.core import FloatArray, Forest, IntArray
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.rates import SIZES, TileRates
from vllm_prefixshare.planning.dividers.problem import DivisionProblem
from vllm_prefixshare.planning.forest.prefix_tree import forest_from_blocks, windowed_forest
from vllm_prefixshare.planning.grouping import group_queries
from vllm_prefixshare.planning.window import first_in_window


class ShareDecision(NamedTuple):
    """The forest that a plan shares.

    expected_gain: fraction of the attention time that sharing every tree, the dropped ones
        included, would save by the cost model; None if the model was not asked.
    """

    forest: Forest
    expected_gain: float | None = None


def shareable_forest(
    table: IntArray,
    planned_seq_lens: IntArray,
    block_size: int,
    query_len: int = 1,
    null_block_id: int | None = None,
    table_rows: IntArray | None = None,
    sliding_window: int | None = None,
) -> Forest:
    """The blocks that requests of a step may share; arguments as in ``DecodePlanner.update``."""
    # a block that this step's queries may still write to is not shared
    filled = np.maximum(planned_seq_lens - query_len, 0) // block_size
    filled = np.minimum(filled, table.shape[1]).astype(np.int32)
    if sliding_window is None:
        return forest_from_blocks(table, filled, block_size, null_block_id, table_rows)
    first = first_in_window(planned_seq_lens, sliding_window, query_len) // block_size
    first = first.astype(np.int32)
    # readers of a node then have at least half of their windows in common
    band = sliding_window // (2 * block_size)
    return windowed_forest(table, filled, first, band, block_size, null_block_id, table_rows)


def without_losses(problem: DivisionProblem, tiles_span_nodes: bool) -> ShareDecision:
    """The forest of ``problem`` without the trees that cost less when every request is read
    separately; without any tree if its configuration never shares.

    Args:
        tiles_span_nodes: as in ``dividers.registry.Divider``.
    """
    forest = problem.forest
    roots = np.flatnonzero(forest.node_parent < 0)
    expected_gain = None
    if problem.config.share != "never" and len(roots):
        positions, costs = _shared_costs(problem, tiles_span_nodes)
        lens = problem.planned_seq_lens - problem.kv_starts
        alone = problem.cost.unshared(problem.rows_per_request, lens)
        shared = np.bincount(positions, weights=costs, minlength=forest.num_reqs)
        # running sums over positions, because those of a tree are neighbours
        gain = np.concatenate([[0.0], np.cumsum(alone[forest.request_rows] - shared)])
        gains = gain[forest.node_reader_end[roots]] - gain[forest.node_reader_start[roots]]
        total = float(alone.sum())
        expected_gain = float(gains.sum()) / total if total else 0.0
        roots = roots[gains <= 0]
    return ShareDecision(_drop_trees(forest, roots.tolist(), problem.kv_starts), expected_gain)


def min_window(
    cost: CostModel, rows_per_request: int, readers: int, geometry: TileGeometry
) -> int | None:
    """The shortest sliding window, a power of two, that gains by sharing, in tokens. None if none
    does.

    Compared are one request for each worker, read separately; and as many requests in work tiles of
    ``readers`` each, of which every worker reads a part.
    """
    rates = TileRates.of(cost, geometry)
    rows = readers * rows_per_request
    apart = cost.tile(rows_per_request, SIZES)
    together = cost.tile(rows, np.maximum(SIZES / readers, 1)) + rates.partial_write
    together += rates.merge_launch + readers * cost.merge(rows_per_request)
    gains = SIZES[apart > together]
    return int(gains[0]) if len(gains) else None


def _shared_costs(problem: DivisionProblem, tiles_span_nodes: bool) -> tuple[IntArray, FloatArray]:
    """For each segment in a batch that shares: the depth-first position of a request that reads
    it, and its microseconds.
    """
    forest = problem.forest
    config = problem.config
    rows = problem.rows_per_request
    lens = np.maximum(1, problem.planned_seq_lens[forest.request_rows] - forest.private_start)
    if tiles_span_nodes:
        rates = problem.rates
        nodes = (forest.node_end - forest.node_start) * rates.memory[1]
        private = lens * rates.memory[0]
        private[:: config.max_tile_requests] += rates.overhead
        positions = np.concatenate([forest.node_reader_start, np.arange(forest.num_reqs)])
        return positions, np.concatenate([nodes, private])
    groups = group_queries(forest, problem.planned_seq_lens, problem.cost, rows, config.grouping)
    counts = np.array([len(g.rows) for g in groups]) * rows
    costs = problem.cost.tile(counts, np.array([g.kv_len for g in groups]))
    position_of = np.empty(forest.num_reqs, np.int64)
    position_of[forest.request_rows] = np.arange(forest.num_reqs)
    positions = position_of[[int(g.rows[0]) for g in groups]]
    return positions, costs + problem.cost.merge(counts)


def _drop_trees(forest: Forest, roots: list[int], kv_starts: IntArray) -> Forest:
    """``forest`` without the trees under ``roots``; their requests become entirely private.

    Args:
        kv_starts: ``[num_reqs]`` first token that each batch row reads.
    """
    if not roots:
        return forest
    private = forest.private_start.copy()
    keep = np.ones(forest.num_nodes, bool)
    for root in roots:
        low = int(forest.node_reader_start[root])
        high = int(forest.node_reader_end[root])
        private[low:high] = kv_starts[forest.request_rows[low:high]]
        keep &= (forest.node_reader_start < low) | (forest.node_reader_start >= high)
    renumber = np.cumsum(keep, dtype=np.int32) - 1
    parents = forest.node_parent[keep]
    return Forest(
        request_rows=forest.request_rows,
        private_start=private,
        node_parent=np.where(parents < 0, -1, renumber[parents]).astype(np.int32),
        node_start=forest.node_start[keep],
        node_end=forest.node_end[keep],
        node_reader_start=forest.node_reader_start[keep],
        node_reader_end=forest.node_reader_end[keep],
    )
