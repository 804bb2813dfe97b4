"""One plan after the other: a new one only where the batch asks for it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_prefixshare.compiled import one_process_at_a_time
from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.costs.cost_table import CostModel, TileRates
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.cached_plan import CachedPlan
from vllm_prefixshare.planning.dividers.problem import DivisionProblem, one_tile_each
from vllm_prefixshare.planning.dividers.registry import get_divider
from vllm_prefixshare.planning.grouping import group_queries
from vllm_prefixshare.planning.plan import DecodePlan, build_plan
from vllm_prefixshare.records import FloatArray, Forest, IntArray, PrefixShareError, WorkTiles
from vllm_prefixshare.tree.prefix_tree import forest_from_blocks


@dataclass(slots=True)
class PlannerCounters:
    """How often the planner was asked, how often it had to plan, and for how long.

    oversized: plans that shared nothing because the one that did exceeded the limits.
    failures: plans that shared nothing because making one that does raised an exception.
    """

    updates: int = 0
    plans: int = 0
    oversized: int = 0
    failures: int = 0
    plan_seconds: float = 0.0
    update_seconds: float = 0.0


class DecodePlanner:
    """Plans for the successive batches of one KV-cache group.

    Args:
        config: divider, workers and policy.
        cost: measured or analytic cost model.
        block_size: tokens in a KV block.
        gqa_group_size: query heads per KV head.
        on_failure: told once when a plan cannot be made; a warning is logged if None.

    Attributes:
        last_plan_seconds: what the last plan took to make.

    Raises:
        PrefixShareError: unknown divider.
    """

    def __init__(
        self,
        config: PlannerConfig,
        cost: CostModel,
        block_size: int,
        gqa_group_size: int,
        on_failure: Callable[[str], object] | None = None,
    ) -> None:
        self.config = config
        self.cost = cost
        self.block_size = block_size
        self.gqa_group_size = gqa_group_size
        self._on_failure = on_failure or logging.getLogger(__name__).warning
        self.counters = PlannerCounters()
        self.last_plan_seconds = 0.0
        self._divide = get_divider(config.divider)
        self._rates = TileRates.of(cost)
        #: The one used last comes first.
        self._known = [CachedPlan(block_size) for _ in range(config.kept_plans)]

    def warm_up(self, then: Callable[[DecodePlan], object] | None = None) -> None:
        """Compile what planning needs: about ten seconds the first time on a machine, half a
        second in each process after that. Call it at start-up, or the first plan takes it.

        Args:
            then: called with a plan for two requests; what follows planning compiles, too.
        """
        twin = DecodePlanner(self.config, self.cost, self.block_size, self.gqa_group_size)
        table = np.array([[1, 2], [1, 3]], np.int32)
        lens = np.full(2, self.block_size + 1, np.int32)
        with one_process_at_a_time():
            for rows in (None, np.arange(2)):
                for _ in range(2):  # a plan, and the question whether it holds
                    plan = twin.update(table, lens, table_rows=rows, row_ids=rows)
            if then is not None:
                then(plan)

    def update(
        self,
        block_table: IntArray,
        seq_lens: IntArray,
        query_len: int = 1,
        *,
        table_rows: IntArray | None = None,
        row_ids: IntArray | None = None,
        slack: int = 0,
    ) -> DecodePlan:
        """The plan for this batch: one that was kept, while it still holds.

        A step in which sequences only grew costs one comparison of the block table; int32
        arrays in C order are read as they are, others are copied first. Where planning itself
        fails, this step's plan shares nothing, and the next update tries again.

        Args:
            block_table: ``[num_reqs, max_blocks]`` physical block ids.
            seq_lens: ``[num_reqs]`` tokens of each request, its queries included.
            query_len: most query tokens of a request. They and the block that they fill
                stay private.
            row_ids: ``[num_reqs]`` stands for the block table in the comparison: a number
                that a request keeps as long as the blocks it has stay the same, and that no
                other request has had before.
            table_rows: ``[num_reqs]`` row of ``block_table`` that each request has, where its
                rows are not those of the batch; goes with ``row_ids``.
            slack: the true lengths may be less than ``seq_lens`` by so much.

        Raises:
            PrefixShareError: the arguments differ in requests.
        """
        if len(block_table if table_rows is None else table_rows) != len(seq_lens):
            raise PrefixShareError(
                f"block_table has {len(block_table)} rows and seq_lens {len(seq_lens)} entries: "
                "pass one of each for every request."
            )
        if row_ids is not None and len(row_ids) != len(seq_lens):
            raise PrefixShareError(
                f"row_ids has {len(row_ids)} entries and seq_lens {len(seq_lens)}: "
                "pass one of each for every request."
            )
        began = time.perf_counter()
        self.counters.updates += 1
        known = self._first_that_holds(block_table, seq_lens, query_len, row_ids)
        plan = known.plan
        if plan is None:
            least = np.maximum(seq_lens - slack, 1) if slack else seq_lens
            table = np.ascontiguousarray(block_table, np.int32)
            try:
                plan, longest = self._make_plan(table, table_rows, least, query_len)
                known.remember(plan, longest, query_len, table, row_ids)
            except PrefixShareError:
                raise
            except Exception as e:
                plan = self._plan_without_sharing(least, query_len, e)
                known.forget()  # so that the next update tries again
            if self.config.check_plans:
                invariants.check(plan, table if table_rows is None else table[table_rows], least)
            self.counters.plans += 1
            self.last_plan_seconds = time.perf_counter() - began
            self.counters.plan_seconds += self.last_plan_seconds
        self.counters.update_seconds += time.perf_counter() - began
        return plan

    def holds(self, block_table: IntArray, seq_lens: IntArray, query_len: int = 1) -> bool:
        """Whether the last plan is right, and balanced enough, for this batch."""
        return self._known[0].holds(block_table, seq_lens, query_len)

    def forget(self) -> None:
        """Make a new plan at the next update."""
        for known in self._known:
            known.forget()

    def _first_that_holds(
        self,
        block_table: IntArray,
        seq_lens: IntArray,
        query_len: int,
        row_ids: IntArray | None,
    ) -> CachedPlan:
        """The known batch whose plan serves this one, or the oldest one, emptied."""
        for known in self._known:
            if known.holds(block_table, seq_lens, query_len, row_ids):
                break
        else:
            known.forget()
        if known is not self._known[0]:
            self._known.remove(known)
            self._known.insert(0, known)
        return known

    def _make_plan(
        self, table: IntArray, table_rows: IntArray | None, seq_lens: IntArray, query_len: int
    ) -> tuple[DecodePlan, FloatArray]:
        """A plan, and the tokens of each request up to which it stays balanced."""
        kv_lens = seq_lens.astype(np.int32)
        # a block that this step's queries may still write to is nobody else's
        filled = np.maximum(kv_lens - query_len, 0) // self.block_size
        filled = np.minimum(filled, table.shape[1]).astype(np.int32)
        null = self.config.null_block_id
        forest = forest_from_blocks(table, filled, self.block_size, null, table_rows)
        rows = self.gqa_group_size * query_len
        if self.config.share != "always":
            forest = drop_trees(forest, self._roots_to_drop(forest, kv_lens, rows))
        problem = DivisionProblem(
            forest, kv_lens, self.cost, rows, self.block_size, self.config, self._rates
        )
        tiles = self._divide(problem) if len(kv_lens) else WorkTiles.none()
        plan = build_plan(tiles, self.config.num_workers, self.block_size, kv_lens)
        limits = self.config.max_tiles, self.config.max_runs, self.config.max_partials
        if not plan.fits(*limits):
            self.counters.oversized += 1
            tiles = one_tile_each(problem)
            plan = build_plan(tiles, self.config.num_workers, self.block_size, kv_lens)
        return plan, self._longest(plan, forest)

    def _plan_without_sharing(
        self, seq_lens: IntArray, query_len: int, reason: Exception
    ) -> DecodePlan:
        """One tile for each request: right for every batch, whatever went wrong before."""
        self.counters.failures += 1
        if self.counters.failures == 1:
            self._on_failure(
                f"Planning failed ({type(reason).__name__}: {reason}), and this step shares "
                "nothing: please report it. Later failures are counted, not logged."
            )
        kv_lens = seq_lens.astype(np.int32)
        problem = DivisionProblem(
            Forest.alone(len(kv_lens)),
            kv_lens,
            self.cost,
            self.gqa_group_size * query_len,
            self.block_size,
            self.config,
            self._rates,
        )
        tiles = one_tile_each(problem) if len(kv_lens) else WorkTiles.none()
        return build_plan(tiles, self.config.num_workers, self.block_size, kv_lens)

    def _longest(self, plan: DecodePlan, forest: Forest) -> FloatArray:
        """Tokens of each request up to which the plan stays balanced."""
        if self.config.num_workers == 1:
            return np.full(plan.num_reqs, np.inf)
        private = np.empty(plan.num_reqs)
        private[forest.request_rows] = forest.private_start
        planned = plan.planned_seq_lens - private
        return private + self.config.rebalance_factor * planned + self.block_size

    def _roots_to_drop(self, forest: Forest, kv_lens: IntArray, rows: int) -> list[int]:
        """Roots of the trees that cost less when every request is read alone."""
        roots = np.flatnonzero(forest.node_parent < 0).tolist()
        if self.config.share == "never" or not roots:
            return roots
        positions, costs = self._shared_costs(forest, kv_lens, rows)
        alone = self.cost.unshared(rows, kv_lens)[forest.request_rows]
        shared = np.bincount(positions, weights=costs, minlength=forest.num_reqs)
        # running sums over positions, because those of a tree are neighbours
        gain = np.concatenate([[0.0], np.cumsum(alone - shared)])
        gains = gain[forest.node_last[roots]] - gain[forest.node_first[roots]]
        return [root for root, g in zip(roots, gains.tolist(), strict=True) if g <= 0]

    def _shared_costs(
        self, forest: Forest, kv_lens: IntArray, rows: int
    ) -> tuple[IntArray, FloatArray]:
        """Microseconds of what is read together or alone in a batch that shares, and the
        depth-first position of a request that reads it."""
        lens = np.maximum(1, kv_lens[forest.request_rows] - forest.private_start)
        if self.config.divider == "depth_first":  # no tiles for single nodes: rates will do
            nodes = (forest.node_end - forest.node_start) * self._rates.memory[1]
            private = lens * self._rates.memory[0]
            private[:: self.config.max_tile_requests] += self._rates.overhead
            positions = np.concatenate([forest.node_first, np.arange(forest.num_reqs)])
            return positions, np.concatenate([nodes, private])
        groups = group_queries(forest, kv_lens, self.cost, rows, self.config.grouping)
        counts = np.array([len(g.rows) for g in groups]) * rows
        costs = self.cost.tile(counts, np.array([g.kv_len for g in groups]))
        position_of = np.empty(forest.num_reqs, np.int64)
        position_of[forest.request_rows] = np.arange(forest.num_reqs)
        positions = position_of[[int(g.rows[0]) for g in groups]]
        return positions, costs + self.cost.merge(counts)


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
