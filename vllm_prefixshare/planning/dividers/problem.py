"""DivisionProblem, the input of dividers, and how query groups become work tiles.

Minimising the time of the slowest thread block over all splits and assignments is NP-hard
(FlashForge, section 5.1). Every strategy splits along KV only and leaves the assignment to
``plan.longest_first``, except ``depth_first``, which schedules its own tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.core import (
    OPEN_END,
    RUN_COLUMNS,
    RUN_KV_END,
    RUN_KV_START,
    RUN_READER_END,
    RUN_ROW,
    FloatArray,
    Forest,
    IntArray,
    KVSegment,
    QueryGroup,
    WorkTiles,
)
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.grouping import group_queries
from vllm_prefixshare.planning.window import first_in_window


class DivisionProblem(NamedTuple):
    """One batch to divide.

    planned_seq_lens: ``[num_reqs]`` planned length of each batch row, in tokens.
    rows_per_request: query rows of one request on one KV head.
    rates: of ``cost``.
    query_len: maximum number of query tokens of a request.
    """

    forest: Forest
    planned_seq_lens: IntArray
    cost: CostModel
    rates: TileRates
    rows_per_request: int
    block_size: int
    config: PlannerConfig
    query_len: int = 1

    @property
    def kv_starts(self) -> IntArray:
        """``[num_reqs]`` first token of the first block that a batch row sees."""
        first = first_in_window(self.planned_seq_lens, self.config.sliding_window, self.query_len)
        return first // self.block_size * self.block_size

    def groups(self, concatenate: bool) -> list[QueryGroup]:
        """Query groups, each with no more requests than a work tile takes."""
        limit = self.config.max_tile_requests
        groups = group_queries(
            self.forest, self.planned_seq_lens, self.cost, self.rows_per_request, concatenate
        )
        if all(len(g.rows) <= limit for g in groups):
            return groups
        return [
            group._replace(rows=part, segment=group.segment._replace(row=int(part[0])))
            for group in groups
            for part in np.array_split(group.rows, -(-len(group.rows) // limit))
        ]

    def tile_cost(self, rows: FloatArray | IntArray, kv_len: FloatArray | IntArray) -> FloatArray:
        """Microseconds of tiles that read ``kv_len`` tokens for ``rows`` requests."""
        return self.cost.tile(rows * self.rows_per_request, kv_len)

    def even_chunk(self, groups: list[QueryGroup]) -> int:
        """Tokens per tile that give every worker about one, in whole blocks."""
        total = sum(g.kv_len for g in groups)
        return self.round_up(-(-total // self.config.num_workers))

    def round_up(self, tokens: int) -> int:
        """``tokens`` rounded up to whole blocks."""
        return -(-tokens // self.block_size) * self.block_size


Divide = Callable[[DivisionProblem], WorkTiles]


def indptr_of(counts: IntArray) -> IntArray:
    """Where each of the consecutive groups of these sizes begins: ``[len(counts) + 1]`` int32."""
    out = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def split(problem: DivisionProblem, groups: list[QueryGroup], splits: IntArray) -> WorkTiles:
    """Cut each group into at most ``splits`` KV splits of whole blocks, equal but the last."""
    counts = np.array([len(g.rows) for g in groups])
    lens = np.array([g.kv_len for g in groups])
    row, start, end = np.array([g.segment for g in groups]).T
    chunks = -(-lens // splits // problem.block_size) * problem.block_size
    chunks = np.where(splits > 1, np.maximum(chunks, problem.block_size), lens)
    num_splits = -(-lens // chunks)
    group = np.repeat(np.arange(len(groups)), num_splits)
    last = np.cumsum(num_splits) - 1
    index = np.arange(len(group)) - (last - num_splits + 1)[group]
    runs = np.zeros((len(group), RUN_COLUMNS), np.int32)
    runs[:, RUN_ROW] = row[group]
    runs[:, RUN_KV_START] = start[group] + index * chunks[group]
    runs[:, RUN_KV_END] = runs[:, RUN_KV_START] + chunks[group]
    runs[last, RUN_KV_END] = end
    runs[:, RUN_READER_END] = counts[group]
    return WorkTiles(
        row_indptr=indptr_of(counts[group]),
        rows=np.concatenate([groups[g].rows for g in group]),
        run_indptr=np.arange(len(group) + 1, dtype=np.int32),
        runs=runs,
        cost=problem.tile_cost(counts, chunks)[group],
    )


def by_chunk(problem: DivisionProblem, groups: list[QueryGroup], chunk: int) -> WorkTiles:
    """Cut every KV segment into equal KV splits of about ``chunk`` tokens."""
    lens = np.array([g.kv_len for g in groups])
    return split(problem, groups, np.maximum(1, -(-lens // chunk)))


def one_tile_each(problem: DivisionProblem) -> WorkTiles:
    """One tile for each request, without sharing or splits: the plan that always fits."""
    groups = unshared_groups(problem)
    return split(problem, groups, np.ones(len(groups), np.int64))


def unshared_groups(problem: DivisionProblem) -> list[QueryGroup]:
    """One query group for each request: no sharing."""
    tokens = zip(problem.kv_starts.tolist(), problem.planned_seq_lens.tolist(), strict=True)
    return [
        QueryGroup(KVSegment(row, start, OPEN_END), np.array([row], np.int32), max(1, end - start))
        for row, (start, end) in enumerate(tokens)
    ]
