"""One plan after the other: turns a changing batch into tree events and, only where they
ask for it, into a new plan."""

import time
from dataclasses import dataclass

import numpy as np

from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.cost_table import CostModel
from vllm_prefixshare.planning.dividers import DivisionProblem, get_divider
from vllm_prefixshare.planning.grouping import group_queries
from vllm_prefixshare.planning.plan import DecodePlan, build_plan
from vllm_prefixshare.planning.prefix_tree import PrefixTree
from vllm_prefixshare.types import Forest, IntArray


@dataclass(slots=True)
class PlannerCounters:
    """How often the planner was asked, how often it had to plan, and for how long."""

    updates: int = 0
    plans: int = 0
    plan_seconds: float = 0.0
    update_seconds: float = 0.0


class DecodePlanner:
    """Plans for the successive batches of one KV-cache group.

    Args:
        config: divider, workers and policy.
        cost: measured or analytic cost model.
        block_size: tokens in a KV block.
        gqa_group_size: query heads per KV head.

    Raises:
        PrefixShareError: unknown divider.
    """

    def __init__(
        self, config: PlannerConfig, cost: CostModel, block_size: int, gqa_group_size: int
    ) -> None:
        self.config = config
        self.cost = cost
        self.block_size = block_size
        self.gqa_group_size = gqa_group_size
        self.counters = PlannerCounters()
        self._divide = get_divider(config.divider)
        self._tree = PrefixTree(block_size)
        self._next_request = 0
        self._requests: list[int] = []  # tree request of each batch row
        self._table = np.zeros((0, 0), np.int32)  # the block table of the last plan
        self._tracked = np.zeros(0, np.int64)  # blocks of each row that the tree has
        self._used = np.zeros(0, np.int64)  # those and the ones being written, all in _table
        self._private_start = np.zeros(0, np.int64)  # by row, in the last plan
        self._query_len = 1
        self._plan: DecodePlan | None = None

    def update(self, block_table: IntArray, seq_lens: IntArray, query_len: int = 1) -> DecodePlan:
        """The plan for this batch: the last one while it still holds.

        A step in which sequences only grew costs one comparison of the block table.

        Args:
            block_table: ``[num_reqs, max_blocks]`` physical block ids.
            seq_lens: ``[num_reqs]`` tokens of each request, its queries included.
            query_len: most query tokens of a request. They and the block that they fill
                stay private.
        """
        began = time.perf_counter()
        self.counters.updates += 1
        plan = self._plan
        if plan is None or not self.holds(block_table, seq_lens, query_len):
            self._query_len = query_len
            self._follow(block_table, seq_lens)
            plan = self._plan = self._make_plan(block_table, seq_lens)
            self.counters.plans += 1
            self.counters.plan_seconds += time.perf_counter() - began
        self.counters.update_seconds += time.perf_counter() - began
        return plan

    def holds(self, block_table: IntArray, seq_lens: IntArray, query_len: int = 1) -> bool:
        """Whether the last plan is right, and balanced enough, for this batch."""
        plan = self._plan
        if plan is None or query_len != self._query_len:
            return False
        if len(seq_lens) != plan.num_reqs:
            return False
        known = block_table[:, : self._table.shape[1]]
        if known.shape != self._table.shape:
            return False
        depth = np.arange(known.shape[1])
        if np.any((known != self._table) & (depth < self._used[:, None])):
            return False
        if np.any(seq_lens < plan.planned_seq_lens):
            return False  # a request was rolled back, maybe into blocks that are read to their end
        if self.config.num_workers == 1:
            return True  # nothing to balance
        planned = plan.planned_seq_lens - self._private_start
        limit = self.config.rebalance_factor * planned + self.block_size
        return not np.any(seq_lens - self._private_start > limit)

    def _follow(self, block_table: IntArray, seq_lens: IntArray) -> None:
        """Bring the tree up to date with the batch, as remove, append and add events.

        Rows are told apart by their block ids: a row that moved keeps its place in the tree.
        """
        num_blocks = np.maximum(seq_lens - self._query_len, 0) // self.block_size
        if self.config.null_block_id is not None and block_table.size:
            filled = block_table != self.config.null_block_id
            leading = np.where(filled.all(axis=1), block_table.shape[1], filled.argmin(axis=1))
            num_blocks = np.minimum(num_blocks, leading)
        ids = [row[:n] for row, n in zip(block_table, num_blocks.tolist(), strict=True)]

        moved: dict[bytes, list[tuple[int, int]]] = {}
        for row, request in enumerate(self._requests):
            n = int(self._tracked[row])
            if (
                row < len(ids)
                and n <= len(ids[row])
                and np.array_equal(ids[row][:n], self._table[row, :n])
            ):
                continue
            moved.setdefault(self._table[row, :n].tobytes(), []).append((request, n))
            self._requests[row] = -1
        self._requests = (self._requests + [-1] * len(ids))[: len(ids)]
        lengths = sorted({n for found in moved.values() for _, n in found}, reverse=True)
        arrivals = []
        for row, request in enumerate(self._requests):
            if request >= 0:
                continue
            for n in lengths:
                found = moved.get(ids[row][:n].tobytes()) if n <= len(ids[row]) else None
                if found:
                    self._requests[row] = found.pop()[0]
                    break
            else:
                arrivals.append(row)
        for found in moved.values():
            for request, _ in found:
                self._tree.remove(request)
        for row, request in enumerate(self._requests):
            if request >= 0:
                self._tree.append(request, ids[row][self._tree.num_blocks(request) :].tolist())
        for row in arrivals:
            self._requests[row] = self._next_request
            self._next_request += 1
            self._tree.add(self._requests[row], ids[row].tolist())

        self._tracked = num_blocks.astype(np.int64)
        self._used = -(-seq_lens // self.block_size)
        width = int(self._used.max(initial=0))
        self._table = block_table[:, :width].astype(np.int32, copy=True)

    def _make_plan(self, block_table: IntArray, seq_lens: IntArray) -> DecodePlan:
        kv_lens = seq_lens.astype(np.int32)
        forest = self._tree.forest(self._requests)
        rows = self.gqa_group_size * self._query_len
        if self.config.share != "always":
            forest = drop_trees(forest, self._roots_to_drop(forest, kv_lens, rows))
        self._private_start = np.empty(len(kv_lens), np.int64)
        self._private_start[forest.request_rows] = forest.private_start
        problem = DivisionProblem(forest, kv_lens, self.cost, rows, self.block_size, self.config)
        tiles = self._divide(problem) if len(kv_lens) else []
        plan = build_plan(tiles, self.config.num_workers, self.block_size, kv_lens)
        if self.config.check_plans:
            invariants.check(plan, block_table, kv_lens)
        return plan

    def _roots_to_drop(self, forest: Forest, kv_lens: IntArray, rows: int) -> list[int]:
        """Roots of the trees that cost less when every request is read alone."""
        roots = np.flatnonzero(forest.node_parent < 0).tolist()
        if self.config.share == "never" or not roots:
            return roots
        groups = group_queries(forest, kv_lens, self.cost, rows, self.config.grouping)
        counts = np.array([len(g.rows) for g in groups]) * rows
        lens = np.array([g.kv_len for g in groups])
        shared = self.cost.tile(counts, lens) + self.cost.merge(counts)
        alone = self.cost.unshared(rows, kv_lens)
        position_of = np.empty(forest.num_reqs, np.int64)
        position_of[forest.request_rows] = np.arange(forest.num_reqs)
        positions = position_of[[int(g.rows[0]) for g in groups]]
        alone_by_position = alone[forest.request_rows]
        dropped = []
        for root in roots:
            first, last = int(forest.node_first[root]), int(forest.node_last[root])
            inside = (positions >= first) & (positions < last)
            if shared[inside].sum() >= alone_by_position[first:last].sum():
                dropped.append(root)
        return dropped


def drop_trees(forest: Forest, roots: list[int]) -> Forest:
    """``forest`` without the trees under ``roots``; their requests become private whole."""
    if not roots:
        return forest
    private = forest.private_start.copy()
    keep = np.ones(forest.num_nodes, bool)
    for root in roots:
        first, last = int(forest.node_first[root]), int(forest.node_last[root])
        private[first:last] = 0
        keep &= (forest.node_first < first) | (forest.node_first >= last)
    renumber = np.cumsum(keep, dtype=np.int32) - 1
    parents = forest.node_parent[keep]
    return Forest(
        request_rows=forest.request_rows,
        private_start=private,
        node_parent=np.where(parents < 0, -1, renumber[parents]).astype(np.int32),
        node_start=forest.node_start[keep],
        node_end=forest.node_end[keep],
        node_first=forest.node_first[keep],
        node_last=forest.node_last[keep],
    )
