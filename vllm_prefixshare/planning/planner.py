"""DecodePlanner: caches plans, and makes a new one only when none of them fits the batch."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.core import FloatArray, Forest, IntArray, PrefixShareError, WorkTiles
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.batch_invariant import last_split
from vllm_prefixshare.planning.dividers.depth_first import depth_first
from vllm_prefixshare.planning.dividers.problem import DivisionProblem, one_tile_each
from vllm_prefixshare.planning.dividers.registry import get_divider
from vllm_prefixshare.planning.forest.prefix_tree import first_difference
from vllm_prefixshare.planning.plan import DecodePlan, build_plan, through_the_shortest
from vllm_prefixshare.planning.sharing import ShareDecision, shareable_forest, without_losses
from vllm_prefixshare.planning.unshared import (
    NO_COMMON_PREFIX,
    NO_GAIN,
    ONE_REQUEST,
    PLAN_TOO_LARGE,
    PLANNING_FAILED,
    SHARING_OFF,
    Unshared,
)
from vllm_prefixshare.planning.window import first_in_window
from vllm_prefixshare.utils.numba_cache import compiled, one_process_at_a_time

#: Minimum steps between replans for balance; replanning costs host time even if the plan is
#: unbalanced.
MIN_STEPS = 16


@dataclass(slots=True)
class PlannerCounters:
    """Numbers of updates and of plans made, and the total seconds of making plans.

    fallbacks: plans without sharing, by reason: the plan with sharing exceeded the limits, or
        making it raised an exception.
    """

    updates: int = 0
    plans: int = 0
    plan_seconds: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)


class PlanUpdate(NamedTuple):
    """The result of ``DecodePlanner.update``.

    is_new: whether the plan was made for this batch.
    seconds: time that making the plan took; 0 for a cached plan.
    unshared: why a new plan shares nothing; None if it shares, and for a cached plan.
    """

    plan: DecodePlan
    is_new: bool = False
    seconds: float = 0.0
    unshared: Unshared | None = None


class _NewPlan(NamedTuple):
    """A plan as it was made.

    max_balanced_lens: ``[num_reqs]`` tokens of each request up to which the plan stays balanced.
    unshared: as in ``PlanUpdate``.
    """

    plan: DecodePlan
    max_balanced_lens: FloatArray
    unshared: Unshared | None


class DecodePlanner:
    """Plans for the successive batches of one KV-cache group.

    Args:
        config: divider, workers and policy.
        cost: measured or analytic cost model.
        block_size: tokens in a KV block.
        gqa_group_size: query heads per KV head.
        on_failure: called once when a plan cannot be made; a warning is logged if None.

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
        self.divider = get_divider(config.divider)
        self._rates = TileRates.of(cost, config.geometry)
        #: Most recently used first.
        self._known = [CachedPlan(block_size) for _ in range(config.kept_plans)]

    def warm_up(self, then: Callable[[DecodePlan], object] | None = None) -> None:
        """Compile what planning needs: about ten seconds the first time on a machine, half a
        second in each process after that. Call it at start-up, or the first plan takes it.

        Args:
            then: called with a plan for two requests, to compile the code that uses plans.
        """
        twin = DecodePlanner(self.config, self.cost, self.block_size, self.gqa_group_size)
        table = np.array([[1, 2], [1, 3]], np.int32)
        lens = np.full(2, self.block_size + 1, np.int32)
        with one_process_at_a_time():
            for rows in (None, np.arange(2)):
                for _ in range(2):  # first makes a plan, then checks that it holds
                    plan = twin.update(table, lens, table_rows=rows, row_ids=rows).plan
            if then is not None:
                then(plan)

    def update(
        self,
        block_table: IntArray,
        max_seq_lens: IntArray,
        query_len: int = 1,
        *,
        table_rows: IntArray | None = None,
        row_ids: IntArray | None = None,
        slack: int = 0,
    ) -> PlanUpdate:
        """The plan for this batch: a cached one if it still holds, else a new one.

        A step in which sequences only grew costs one comparison of the block table; int32
        arrays in C order are read as they are, others are copied first. Where planning itself
        fails, this step's plan shares nothing, and the next update tries again.

        Args:
            block_table: ``[num_reqs, max_blocks]`` physical block ids.
            max_seq_lens: ``[num_reqs]`` tokens of each request, its queries included: the true
                lengths or more, see ``slack``.
            query_len: maximum number of query tokens of a request. They and the block that they
                fill stay private.
            row_ids: ``[num_reqs]`` compared in place of the block table: a number that a
                request keeps as long as the blocks it has stay the same, and that no other
                request has had before.
            table_rows: ``[num_reqs]`` row of ``block_table`` that each request has, where its
                rows are not those of the batch; goes with ``row_ids``.
            slack: maximum number of tokens by which the true lengths may be less.

        Raises:
            PrefixShareError: the arguments differ in their number of requests.
        """
        _require_one_per_request(block_table, max_seq_lens, table_rows, row_ids)
        self.counters.updates += 1
        cached = self._first_that_holds(block_table, max_seq_lens, query_len, row_ids)
        if cached.unchanged is not None:
            return cached.unchanged
        began = time.perf_counter()
        planned_seq_lens = max_seq_lens.astype(np.int32)
        if slack:
            planned_seq_lens = np.maximum(planned_seq_lens - slack, 1)
        table = np.ascontiguousarray(block_table, np.int32)
        try:
            made = self._make_plan(table, table_rows, planned_seq_lens, query_len, slack)
            cached.remember(made.plan, made.max_balanced_lens, query_len, table, row_ids)
            plan = made.plan
            unshared = made.unshared
        except PrefixShareError:
            raise
        except Exception as e:
            plan = self.without_sharing(planned_seq_lens, query_len, e)
            unshared = Unshared(PLANNING_FAILED)
        if self.config.check_plans:
            rows = table if table_rows is None else table[table_rows]
            invariants.check(plan, rows, planned_seq_lens, self.config.sliding_window, query_len)
        seconds = time.perf_counter() - began
        self.counters.plans += 1
        self.counters.plan_seconds += seconds
        return PlanUpdate(plan, True, seconds, unshared)

    def without_sharing(
        self, planned_seq_lens: IntArray, query_len: int, reason: Exception
    ) -> DecodePlan:
        """The plan of a step whose own plan could not be made or used: one tile for each request,
        which is right for every batch. The next update makes a new plan.

        Args:
            planned_seq_lens: ``[num_reqs]`` minimum number of tokens of each request.
            reason: logged the first time.
        """
        self._known[0].forget()
        self.counters.fallbacks[PLANNING_FAILED] += 1
        if self.counters.fallbacks[PLANNING_FAILED] == 1:
            self._on_failure(
                f"Planning failed ({type(reason).__name__}: {reason}), and this step shares "
                "nothing: please report it. Later failures are counted, not logged."
            )
        planned_seq_lens = planned_seq_lens.astype(np.int32)
        problem = self._problem(Forest.alone(len(planned_seq_lens)), planned_seq_lens, query_len)
        tiles = one_tile_each(problem) if len(planned_seq_lens) else WorkTiles.none()
        return self._plan_of(tiles, planned_seq_lens)

    def merge_us(self, plan: DecodePlan, query_len: int = 1) -> float:
        """Estimated microseconds of merging a plan's partial results, spread over the workers."""
        each = float(self.cost.merge(self.gqa_group_size * query_len))
        return plan.num_partials * each / self.config.num_workers

    def unshared_us(self, seq_lens: IntArray, query_len: int = 1) -> float:
        """Estimated microseconds of a layer's attention in a kernel without sharing that splits
        and balances its work: what ``plan.worker_us.max()`` compares with.

        Args:
            seq_lens: ``[num_reqs]`` tokens of each request, its queries included.
        """
        if self.config.num_workers == 1:
            lens = seq_lens - first_in_window(seq_lens, self.config.sliding_window, query_len)
            return float(self.cost.unshared(self.gqa_group_size * query_len, lens).sum())
        lens = seq_lens.astype(np.int32)
        problem = self._problem(Forest.alone(len(lens)), lens, query_len)
        forest = problem.forest._replace(private_start=problem.kv_starts.astype(np.int32))
        tiles = depth_first(problem._replace(forest=forest))
        return float(self._plan_of(tiles, lens).worker_us.max())

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
    ) -> "CachedPlan":
        """The cached plan that holds for this batch, or the oldest one, emptied."""
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
        self,
        table: IntArray,
        table_rows: IntArray | None,
        planned_seq_lens: IntArray,
        query_len: int,
        slack: int,
    ) -> "_NewPlan":
        """A plan for this batch; one without sharing where that would be too large."""
        null = self.config.null_block_id
        window = self.config.sliding_window
        forest = shareable_forest(
            table, planned_seq_lens, self.block_size, query_len, null, table_rows, window
        )
        problem = self._problem(forest, planned_seq_lens, query_len)
        decision = ShareDecision(forest)
        if self.config.share != "always":
            decision = without_losses(problem, self.divider.tiles_span_nodes)
            problem = problem._replace(forest=decision.forest)
        tiles = self.divider.divide(problem) if len(planned_seq_lens) else WorkTiles.none()
        plan = self._plan_of(tiles, planned_seq_lens)
        unshared = self._why_unshared(plan, forest, decision)
        if not plan.fits(self.config.max_tiles, self.config.max_runs, self.config.max_partials):
            unshared = Unshared(PLAN_TOO_LARGE)
            self.counters.fallbacks[PLAN_TOO_LARGE] += 1
            plan = self._plan_of(one_tile_each(problem), planned_seq_lens)
        if window is not None:
            plan = through_the_shortest(plan)
        if self.divider.cuts_at_fixed_places:
            # the same plan, and so the same bits, for all lengths that end in the same split
            size = problem.round_up(self.config.kv_chunk_size)
            first = last_split(planned_seq_lens, size)
            plan = replace(plan, planned_seq_lens=first + 1)
            return _NewPlan(plan, (first + size).astype(float), unshared)
        growth = self._growth(plan, problem.rows_per_request, query_len)
        return _NewPlan(plan, planned_seq_lens.astype(np.float64) + slack + growth, unshared)

    def _why_unshared(
        self, plan: DecodePlan, shareable: Forest, decision: ShareDecision
    ) -> Unshared | None:
        """Why ``plan`` shares nothing, or None if it shares or has no requests."""
        if plan.num_reqs == 0 or (decision.forest.num_nodes and plan.shares):
            return None
        if self.config.share == "never" or not self.divider.shares:
            return Unshared(SHARING_OFF)
        if plan.num_reqs == 1:
            return Unshared(ONE_REQUEST)
        if not shareable.num_nodes:
            return Unshared(NO_COMMON_PREFIX)
        return Unshared(NO_GAIN, decision.expected_gain)

    def _plan_of(self, tiles: WorkTiles, planned_seq_lens: IntArray) -> DecodePlan:
        return build_plan(tiles, self.config.num_workers, self.block_size, planned_seq_lens)

    def _problem(
        self, forest: Forest, planned_seq_lens: IntArray, query_len: int
    ) -> DivisionProblem:
        return DivisionProblem(
            forest=forest,
            planned_seq_lens=planned_seq_lens,
            cost=self.cost,
            rows_per_request=self.gqa_group_size * query_len,
            block_size=self.block_size,
            config=self.config,
            rates=self._rates,
            query_len=query_len,
        )

    def _growth(self, plan: DecodePlan, rows: int, query_len: int) -> float:
        """By how many tokens each request may grow until the plan is no longer balanced, or reads
        a quarter more than a sliding window: it still reads what the window has left.
        """
        growth, window = np.inf, self.config.sliding_window
        if self.config.num_workers > 1:
            us_per_token = self._rates.memory[int(rows > self.config.geometry.half_rows)]
            growth = plan.balanced_growth(us_per_token, self.config.rebalance_factor)
        if window is not None:
            growth = min(growth, window / 4)
        return max(growth, MIN_STEPS * query_len)


def _require_one_per_request(
    block_table: IntArray,
    seq_lens: IntArray,
    table_rows: IntArray | None,
    row_ids: IntArray | None,
) -> None:
    """Raise ``PrefixShareError`` if arguments of ``update`` differ in their number of requests."""
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


class CachedPlan:
    """A plan, and what the next batches are compared with: its requests' block ids or row ids.

    Attributes:
        plan: None until something is remembered.
        unchanged: the result of an update for which the plan holds; None as long as ``plan`` is.
    """

    def __init__(self, block_size: int) -> None:
        self.plan: DecodePlan | None = None
        self.unchanged: PlanUpdate | None = None
        self._block_size = block_size
        self._query_len = 1
        self._row_ids: IntArray | None = None
        self._block_ids = np.zeros((0, 0), np.int32)  # of the plan's requests, and room for more
        #: ``[num_reqs]`` tokens of each request up to which the plan is balanced
        self._max_balanced_lens = np.zeros(0)

    def remember(
        self,
        plan: DecodePlan,
        max_balanced_lens: FloatArray,
        query_len: int,
        block_table: IntArray,
        row_ids: IntArray | None,
    ) -> None:
        """Keep a plan. The block table is read only where no row ids stand for it.

        Args:
            max_balanced_lens: ``[num_reqs]`` tokens up to which the plan is balanced.
            query_len, block_table, row_ids: as in ``DecodePlanner.update``.
        """
        self.plan = plan
        self.unchanged = PlanUpdate(plan)
        self._max_balanced_lens = max_balanced_lens
        self._query_len = query_len
        self._row_ids = None if row_ids is None else row_ids.copy()
        if row_ids is not None:
            return
        used = np.minimum(-(-plan.planned_seq_lens // self._block_size), block_table.shape[1])
        num_rows = len(used)
        width = int(used.max(initial=0))
        if num_rows > self._block_ids.shape[0] or width > self._block_ids.shape[1]:
            # with room to grow, because the first touch of new memory is slow
            self._block_ids = np.empty((num_rows + num_rows // 4, width + width // 4), np.int32)
        _copy_rows(block_table, used, self._block_ids)

    def forget(self) -> None:
        """Drop the plan: it holds for no batch any more."""
        self.plan = None
        self.unchanged = None
        self._row_ids = None

    def holds(
        self,
        block_table: IntArray,
        seq_lens: IntArray,
        query_len: int,
        row_ids: IntArray | None = None,
    ) -> bool:
        """Whether the plan is right, and balanced enough, for this batch."""
        plan = self.plan
        if plan is None or query_len != self._query_len or len(seq_lens) != plan.num_reqs:
            return False
        if row_ids is not None and self._row_ids is not None:
            planned = plan.planned_seq_lens
            return bool(
                _rows_hold(row_ids, self._row_ids, seq_lens, planned, self._max_balanced_lens)
            )
        if row_ids is not self._row_ids:  # only one of the two is None
            return False
        return bool(
            _blocks_hold(
                np.ascontiguousarray(block_table, np.int32),
                np.ascontiguousarray(seq_lens, np.int32),
                self._block_ids,
                plan.planned_seq_lens,
                self._max_balanced_lens,
                self._block_size,
            )
        )


@compiled
def _blocks_hold(
    table: IntArray,
    seq_lens: IntArray,
    known: IntArray,
    planned: IntArray,
    max_lens: FloatArray,
    block_size: int,
) -> bool:
    """Whether each request has at least its planned tokens, in its known blocks, and at most
    ``max_lens`` tokens.
    """
    for row in range(len(seq_lens)):
        # fewer tokens than planned: rolled back, maybe into blocks that are read to their end
        if not planned[row] <= seq_lens[row] <= max_lens[row]:
            return False
        used = (planned[row] + block_size - 1) // block_size
        if used > table.shape[1] or first_difference(table[row], known[row], 0, used) < used:
            return False
    return True


@compiled
def _rows_hold(
    row_ids: IntArray,
    known: IntArray,
    seq_lens: IntArray,
    planned: IntArray,
    max_lens: FloatArray,
) -> bool:
    for row in range(len(row_ids)):
        if row_ids[row] != known[row] or not planned[row] <= seq_lens[row] <= max_lens[row]:
            return False
    return True


@compiled
def _copy_rows(table: IntArray, lengths: IntArray, out: IntArray) -> None:
    for row in range(len(lengths)):
        out[row, : lengths[row]] = table[row, : lengths[row]]
