"""The divider that splits KV at fixed places: a request's output bits do not depend on the batch.

Every request is cut at the same places, multiples of ``kv_chunk_size`` from its first token, and
each split is a tile of one run. A kernel then walks a split in the same steps for all its readers,
and merge states merges a request's splits from first to last. A split's other readers and its
worker do not change the bits: in a matrix product a row does not depend on others.

Requests therefore share whole splits only; each reads the rest of a shared prefix, half a split
on average, separately. The last split is never shared: it grows.
"""

import numpy as np

from vllm_prefixshare.core import (
    OPEN_END,
    RUN_COLUMNS,
    RUN_KV_END,
    RUN_KV_START,
    RUN_READER_END,
    RUN_ROW,
    IntArray,
    WorkTiles,
)
from vllm_prefixshare.planning.dividers.problem import DivisionProblem, indptr_of


def last_split(planned_seq_lens: IntArray, size: int) -> IntArray:
    """First token of the split that holds the last token of each request."""
    return np.maximum(planned_seq_lens - 1, 0) // size * size


def batch_invariant(problem: DivisionProblem) -> WorkTiles:
    """Tiles of one split each, in the order of their places."""
    forest = problem.forest
    limit = problem.config.max_tile_requests
    size = problem.round_up(problem.config.kv_chunk_size)
    lens = problem.planned_seq_lens[forest.request_rows]
    # for each node, then each request: readers as depth-first positions, and tokens
    positions = np.arange(forest.num_reqs)
    low = np.concatenate([forest.node_reader_start, positions])
    high = np.concatenate([forest.node_reader_end, positions + 1])
    start = np.concatenate([forest.node_start, forest.private_start]) // size
    end = np.concatenate([forest.node_end // size, last_split(lens, size) // size + 1])
    part, nth = _ranges(np.maximum(end - start, 0))
    low = low[part]
    high = high[part]
    start = start[part] + nth
    is_last = (part >= forest.num_nodes) & (start + 1 == end[part])
    # no more readers than a tile takes
    tiles = -(-(high - low) // limit)
    part, nth = _ranges(tiles)
    count = (high - low)[part]
    tiles = tiles[part]
    start = start[part]
    is_last = is_last[part]
    high = low[part] + count * (nth + 1) // tiles
    low = low[part] + count * nth // tiles
    order = np.argsort(start, kind="stable")
    low = low[order]
    high = high[order]
    is_last = is_last[order]
    start = start[order] * size
    tokens = np.where(is_last, lens[low] - start, size)
    slot, nth = _ranges(high - low)
    runs = np.zeros((len(start), RUN_COLUMNS), np.int32)
    runs[:, RUN_ROW] = forest.request_rows[low]
    runs[:, RUN_KV_START] = start
    runs[:, RUN_KV_END] = np.where(is_last, OPEN_END, start + size)
    runs[:, RUN_READER_END] = high - low
    return WorkTiles(
        row_indptr=indptr_of(high - low),
        rows=forest.request_rows[low[slot] + nth],
        run_indptr=np.arange(len(start) + 1, dtype=np.int32),
        runs=runs,
        cost=problem.tile_cost(high - low, np.maximum(tokens, 1)),
    )


def _ranges(counts: IntArray) -> tuple[IntArray, IntArray]:
    """For ``counts[i]`` entries of each ``i`` in turn: ``i``, and the entry's number within it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
