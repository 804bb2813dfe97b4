"""Plans the steps of one KV-cache group, on GPUs and on CPUs."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.kernels.interface import Executor
from vllm_prefixshare.planning.costs.lookup import cost_model, fingerprint
from vllm_prefixshare.planning.costs.roofline import AnalyticCost
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner, PlanUpdate
from vllm_prefixshare.planning.unshared import (
    NO_COMMON_PREFIX,
    NO_COST_TABLE,
    PLANNING_FAILED,
    PREFIX_CACHING_OFF,
    SHARING_OFF,
    Unshared,
)
from vllm_prefixshare.planning.window import tokens_seen
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.observability.tracing import (
    Trace,
    TracedEngine,
    TracedPlan,
    trace_to,
)
from vllm_prefixshare.vllm_plugin.step.first_step import TokenRows
from vllm_prefixshare.vllm_plugin.step.host_tables import HostTable
from vllm_prefixshare.vllm_plugin.step.shards import WHOLE, Interleaved

NULL_BLOCK_ID = 0  # pads vLLM's block tables; never holds a request's tokens


def planner_for(
    executor: Executor, attention: AttentionConfig, vllm_config: Any, invariant: bool = False
) -> DecodePlanner:
    """A planner for ``executor``.

    Args:
        invariant: plan as batch invariance needs.

    Raises:
        PrefixShareError: a cost table that was named does not fit.
    """
    chosen = settings()
    cost = cost_model(attention, executor.name, logger().info_once)
    share = chosen.share
    causes = {}
    if not vllm_config.cache_config.enable_prefix_caching:
        causes[NO_COMMON_PREFIX] = PREFIX_CACHING_OFF
    if share == "auto" and not executor.trusts_estimates and isinstance(cost, AnalyticCost):
        share = "never"
        causes[SHARING_OFF] = NO_COST_TABLE
    STATS.note_engine(executor.name, causes)
    logger().info_once("PREFIX_SHARE decodes with the %s kernel.", executor.name)
    pieces = {"kv_chunk_size": invariance.piece_tokens(vllm_config)} if invariant else {}
    config = executor.planner_config(
        invariance.DIVIDER if invariant else chosen.divider,
        share,
        null_block_id=NULL_BLOCK_ID,
        # with n pipeline stages, n batches take turns
        kept_plans=vllm_config.parallel_config.pipeline_parallel_size,
        check_plans=chosen.check_plans,
        **pieces,
    )
    # vLLM remembers the backends that the first engine of this process chose, and asks no more.
    metrics.start_in_worker(vllm_config)
    return DecodePlanner(
        config,
        cost,
        attention.block_size,
        attention.gqa_group_size,
        on_failure=logger().warning,
    )


class StepBatch(NamedTuple):
    """The batch of a step, as the host knows it.

    table: block table of the KV-cache group.
    num_reqs: requests of the batch; 0 in a dummy batch.
    num_tokens: query tokens, with the padding of a graph.
    query_start_loc: int32 ``[at least num_reqs + 1]`` query tokens of each request.
    max_query_len: maximum number of query tokens of a request.
    max_seq_lens: int32 ``[at least num_reqs]`` maximum number of KV tokens of each request, on all
        ranks; None where the host does not know.
    for_capture: whether the metadata is for the capture of a CUDA graph.
    """

    table: HostTable
    num_reqs: int
    num_tokens: int
    query_start_loc: IntArray
    max_query_len: int
    max_seq_lens: IntArray | None
    for_capture: bool = False

    @classmethod
    def of(
        cls, common: Any, table: HostTable, max_seq_lens: Any, for_capture: bool = False
    ) -> "StepBatch":
        """The batch of a ``CommonAttentionMetadata``.

        Args:
            max_seq_lens: a tensor on the host, or None.
        """
        starts = common.query_start_loc_cpu.numpy()
        return cls(
            table,
            0 if for_capture else table.num_reqs(starts),
            common.num_actual_tokens,
            starts,
            common.max_query_len,
            None if max_seq_lens is None else max_seq_lens.numpy(),
            for_capture,
        )


class PlannedStep(NamedTuple):
    """The result of ``StepPlanner.plan``.

    plan: None where no request is planned and the caller loads plans itself.
    num_reqs, num_tokens: planned requests, which come first in the batch, and their query tokens;
        with the padding of a graph where all requests of the batch are planned.
    kv_tokens: KV tokens per layer that the baseline reads for them.
    kv_tokens_saved: how many of these tokens the plan does not read again.
    """

    plan: DecodePlan | None
    num_reqs: int
    num_tokens: int
    kv_tokens: int = 0
    kv_tokens_saved: int = 0

    def record(self) -> None:
        """Count the step, unless no request is planned."""
        if self.num_reqs:
            STATS.note_step(self.kv_tokens, self.kv_tokens_saved)


class StepPlanner:
    """Plans the steps of one KV-cache group, and counts the plans.

    Args:
        executor: runs the plans.
        attention: shape of the layers.
        query_len: maximum number of query tokens of a decode.
        window: sliding window of the layers, or None.
        shard: KV tokens that this rank holds.
        invariant: plan as batch invariance needs.
        slack: maximum number of tokens by which true lengths may be below ``max_seq_lens``.
        load: called with each plan that differs from the one before, to copy it to the device. None
            if the caller does this in each step.

    Raises:
        PrefixShareError: a cost table that was named does not fit.
    """

    def __init__(
        self,
        executor: Executor,
        attention: AttentionConfig,
        vllm_config: Any,
        query_len: int,
        *,
        window: int | None = None,
        shard: Interleaved = WHOLE,
        invariant: bool = False,
        slack: int = 0,
        load: Callable[[DecodePlan], object] | None = None,
    ) -> None:
        self.query_len = query_len
        self.window = window
        self.shard = shard
        self.is_invariant = invariant
        self.decode_planner = planner_for(executor, attention, vllm_config, invariant)
        self.decode_planner.warm_up(then=load)
        #: the last plan; None if another one must be loaded
        self.current: DecodePlan | None = None
        self._load = load
        self._slack = slack
        self._gqa_group_size = attention.gqa_group_size
        self._kv_tokens_saved = 0
        self._used_row_ids = 0
        self._trace = self._traced(executor, attention)

    def _traced(
        self, executor: Executor, attention: AttentionConfig
    ) -> tuple[Trace, TracedEngine] | None:
        """The trace of this process, and what it records of the engine; None if there is none."""
        path = settings().trace
        trace = None if path is None else trace_to(path)
        if trace is None:
            return None
        engine = TracedEngine(
            attention,
            self.query_len,
            fingerprint(attention, executor.name).device,
            executor.name,
            self.decode_planner.config.divider,
            executor.planner_config().divider,
        )
        return trace, engine

    def forget(self) -> None:
        """Make a new plan in the next step: the plan on the device is lost."""
        self.current = None
        self.decode_planner.forget()

    def plan(self, batch: StepBatch, tokens: TokenRows | None = None) -> PlannedStep:
        """Plan the decodes of a batch, or the requests that ``tokens`` names.

        Args:
            tokens: query tokens of the first requests, each a row of the plan.
        """
        if tokens is None:
            num_reqs, num_tokens = self._decodes_of(batch)
        else:
            num_reqs, num_tokens = tokens.num_reqs, len(tokens.requests)
        if not num_reqs and self._load is None:
            return PlannedStep(None, num_reqs, num_tokens)
        rows = self._rows_of(batch, num_reqs, tokens)
        update = self.decode_planner.update(
            rows.block_table,
            rows.max_seq_lens,
            self.query_len,
            table_rows=rows.table_rows,
            row_ids=rows.row_ids,
            slack=self._slack,
        )
        if update.plan is not self.current:
            update = self._make_current(update, rows.max_seq_lens)
            planned = update.plan.planned_seq_lens
            baseline = self._baseline_tokens(planned, tokens)
            self._kv_tokens_saved = baseline - update.plan.kv_tokens_read(planned)
            if num_reqs and update.is_new:
                STATS.note_plan(update.seconds, update.plan.imbalance, update.unshared)
                self._record(update, rows, tokens)
        if not num_reqs:
            return PlannedStep(update.plan, num_reqs, num_tokens)
        baseline = self._baseline_tokens(rows.max_seq_lens, tokens)
        return PlannedStep(update.plan, num_reqs, num_tokens, baseline, self._kv_tokens_saved)

    def _decodes_of(self, batch: StepBatch) -> tuple[int, int]:
        """Requests before the first one with more query tokens than a decode, and their tokens."""
        # a graph of mixed steps is captured with several tokens a request: all of them are rows
        if batch.max_query_len <= self.query_len or batch.for_capture:
            return batch.num_reqs, batch.num_tokens
        starts = batch.query_start_loc
        num_decodes = min(batch.num_reqs, int(np.argmax(np.diff(starts) > self.query_len)))
        return num_decodes, int(starts[num_decodes])

    def _rows_of(self, batch: StepBatch, num_reqs: int, tokens: TokenRows | None) -> "_PlanRows":
        """The rows of a plan for the first requests. Where the host does not know the lengths
        nothing is shared, and each request is read to its end.
        """
        if not num_reqs:
            return _NO_ROWS
        table, seq_lens = batch.table.block_table, batch.max_seq_lens
        seq_lens = np.ones(num_reqs, np.int32) if seq_lens is None else seq_lens[:num_reqs]
        local_seq_lens = self.shard.local_seq_lens(seq_lens)
        table_rows, row_ids = batch.table.rows(num_reqs)
        if tokens is None:
            table = table if table_rows is not None else table[:num_reqs]
            return _PlanRows(table, local_seq_lens, table_rows, row_ids)
        local_seq_lens = (local_seq_lens[tokens.requests] - tokens.later).astype(np.int32)
        table_rows = tokens.requests if table_rows is None else table_rows[tokens.requests]
        # these rows exist in one step only, so no other step may find the plan by their ids
        row_ids = -1 - np.arange(len(tokens.requests)) - self._used_row_ids
        self._used_row_ids += len(tokens.requests)
        return _PlanRows(table, local_seq_lens, table_rows, row_ids)

    def _make_current(self, update: PlanUpdate, max_seq_lens: IntArray) -> PlanUpdate:
        """Load a plan, or a plan that shares nothing where that fails.

        Returns:
            the update with the plan that was loaded; ``seconds`` includes the loading.
        """
        began = time.perf_counter()
        self.current = None  # until the new plan is loaded
        if self._load is not None:
            try:
                self._load(update.plan)
            except PrefixShareError:
                raise
            except Exception as e:
                planned = np.maximum(max_seq_lens - self._slack, 1)
                plan = self.decode_planner.without_sharing(planned, self.query_len, e)
                update = PlanUpdate(plan, True, update.seconds, Unshared(PLANNING_FAILED))
                self._load(plan)
        self.current = update.plan
        return update._replace(seconds=update.seconds + time.perf_counter() - began)

    def _record(self, update: PlanUpdate, rows: "_PlanRows", tokens: TokenRows | None) -> None:
        """Add a new plan to the trace, if there is one."""
        if self._trace is None or STATS.is_warming_up:
            return
        trace, engine = self._trace
        if not trace.is_open:
            return
        plan, lens, table = update.plan, rows.max_seq_lens, rows.block_table
        baseline = self._baseline_tokens(lens, tokens)
        # query tokens of one request, each a row of the plan, read its KV together in the baseline
        part = baseline / max(1, tokens_seen(lens, self.window, self.query_len))
        made = TracedPlan(
            plan,
            table if rows.table_rows is None else table[rows.table_rows],
            lens,
            baseline,
            baseline - self._kv_tokens_saved,
            self.decode_planner.merge_us(plan, self.query_len),
            part * self.decode_planner.unshared_us(lens, self.query_len),
            None if update.unshared is None else STATS.reason_of(update.unshared),
            update.seconds,
        )
        trace.record(engine, made)

    def _baseline_tokens(self, seq_lens: IntArray, tokens: TokenRows | None) -> int:
        """KV tokens that FLASH_ATTN would read for the rows of a plan, of these lengths."""
        if tokens is None:
            return tokens_seen(seq_lens, self.window, self.query_len)
        return tokens.kv_tokens_stock(seq_lens, self._gqa_group_size)


class _PlanRows(NamedTuple):
    """The rows of a plan, as ``DecodePlanner.update`` takes them."""

    block_table: IntArray
    max_seq_lens: IntArray
    table_rows: IntArray | None = None
    row_ids: IntArray | None = None


_NO_ROWS = _PlanRows(np.zeros((0, 0), np.int32), np.zeros(0, np.int32))
