"""The base of the metadata builders of plain and of latent attention: plans the decodes."""

import time
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.kernels.aot.compilation import CompileError, load_cache_write
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.extras import checked_extras
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import PlanUpdate
from vllm_prefixshare.planning.unshared import PLANNING_FAILED, Unshared
from vllm_prefixshare.planning.window import tokens_seen
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import BACKEND_NAME, invariance
from vllm_prefixshare.vllm_plugin.backends.cuda.context_parallel import Interleaved
from vllm_prefixshare.vllm_plugin.compat import steps_in_flight
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.groups import (
    attention_of,
    builder_refusal,
    served_together,
)
from vllm_prefixshare.vllm_plugin.eligibility.layer import window_of
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import host_tables
from vllm_prefixshare.vllm_plugin.step.first_step import TokenRows
from vllm_prefixshare.vllm_plugin.step.host_tables import HostTable
from vllm_prefixshare.vllm_plugin.step.planner import planner_for

#: KV blocks that are looked through at once after wake-up
MAX_BLOCKS = 256


class PlanningBuilder(AttentionMetadataBuilder[Any]):
    """Plans for one KV-cache group. A subclass derives from this class first, then from a vLLM
    metadata builder (the parent), and divides each step between the two.

    latent: whether layers have latents in place of keys and values.
    _step: KV tokens that stock reads in the step, and how many of them the plan saves; None where
        nothing is planned.
    """

    _step: tuple[int, int] | None = None
    supports_update_block_table = False  # another group has another tree
    latent = False
    _invariant = False
    _scales_checked = True
    _shard = Interleaved(1, 0, 1)

    def _start_planning(
        self, layers: Iterable[Any], final: type, query_len: int, max_rows: int = 0
    ) -> None:
        """Make an executor and a planner where a layer is served and its KV cache can be.

        Args:
            layers: those of the group that may be served.
            final: the only class that may plan; vLLM derives others, which keep the parent.
            query_len: most query tokens of a decode.
            max_rows: of a plan, where a request may have several.
        """
        self._executor: GpuExecutor | None = None
        self._query_len = query_len
        served = served_together((layer.impl for layer in layers), self.kv_cache_spec)
        self._all_layers = len(served) == len(self.layer_names)
        self._window = window_of(served[0]) if served else None
        reason = builder_refusal(self, final, self.latent, self._window)
        if served and reason is not None:
            fall_back(reason)
        elif served:
            self._prepare_executor(served, max_rows)

    def _prepare_executor(self, impls: list[Any], max_rows: int) -> None:
        dtype = self.vllm_config.model_config.dtype
        attention = attention_of(impls, self.kv_cache_spec.block_size, dtype)
        executor = GpuExecutor(
            attention,
            self.device,
            kernel=settings().kernel if self.latent else kernel_for(self.kv_cache_spec),
            query_len=self._query_len,
            partials=impls[0].partials,
        )
        write = cache_write(attention, self.device)
        for impl in impls:
            impl.cache_write = write
        scheduler = self.vllm_config.scheduler_config
        pieces = invariance.piece_limits(self.vllm_config, self.kv_cache_spec.block_size)
        executor.reserve_for(max(scheduler.max_num_seqs, max_rows), pieces)
        self._invariant = pieces is not None
        self._planner = planner_for(executor, attention, self.vllm_config, self._invariant)
        self._planner.warm_up(then=executor.prepare)
        drafts = self._query_len - 1
        # The host counts drafts as accepted before the GPU has verified them, so lengths may be
        # shorter in a later step. A plan must hold for lengths up to this much shorter.
        self._slack = drafts * max(1, steps_in_flight(self.vllm_config))
        self._plan: DecodePlan | None = None
        self._single_rows = 0  # of plans for one step
        self.supports_draft_decode_metadata_update = False  # planning would miss new lengths
        self._executor = executor
        _BUILDERS.add(self)
        self.check_scales()
        if executor.passed_over:
            logger().warning_once("%s", executor.passed_over)

    def check_scales(self) -> None:
        """Read the scales of layers with a quantised KV cache: a CUDA graph does not.

        Raises:
            PrefixShareError: one is not positive and finite.
        """
        if self._executor is not None and self._executor.attention.kv_dtype is not None:
            context = self.vllm_config.compilation_config.static_forward_context
            for layer in (context[name] for name in self.layer_names):
                if getattr(layer.impl, "shares", False):
                    extras = layer.impl.extras_of(layer, self._executor.attention)
                    checked_extras(extras, self._executor.attention, self.device)
        self._scales_checked = True

    def forget_plan(self) -> None:
        """Make a new plan in the next step: the one on the device is lost."""
        self._plan = None
        self._planner.forget()

    def clean_cache(self) -> None:
        """Make every slot of the KV cache finite: the memory may hold anything after wake-up, and
        zero times NaN is NaN. Finite values are kept.
        """
        context = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            cache = context[name].kv_cache
            if cache.element_size() == 1:  # e4m3: all bits set is NaN
                # a block at a time would take seconds, all at once as much memory again
                for bits in cache.view(torch.uint8).split(MAX_BLOCKS):
                    bits.masked_fill_((bits & 0x7F) == 0x7F, 0)
            else:
                torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)

    def after_wake_up(self, tags: list[str] | None) -> None:
        """Make a new plan and clean the KV cache, if the cache slept.

        A patched vLLM calls this; otherwise the function ``after_wake_up`` does.
        """
        if self._executor is not None and (tags is None or "kv_cache" in tags):
            self.forget_plan()
            self.clean_cache()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """As the parent's ``build``; also puts the plan of the decodes in force."""
        if not self._scales_checked:
            self.check_scales()
        table = self._host_table(common_attn_metadata)
        if self._executor is None or table is None:
            parent: Any = super()
            return parent.build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = self._divide(self._executor, table, common_attn_metadata, dummy=False)
        # the parent's own where a subclass leaves it the whole step
        if self._step is not None and hasattr(metadata, "executor"):
            STATS.note_step(*self._step)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As in vLLM, with a plan of no requests: the graph reads later plans in its place."""
        table = self._host_table(common_attn_metadata)
        if self._executor is None or table is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self._divide(self._executor, table, common_attn_metadata, dummy=True)

    def _divide(
        self, executor: GpuExecutor, table: HostTable, common: CommonAttentionMetadata, dummy: bool
    ) -> Any:
        """The metadata of a step whose decodes are planned by ``_plan_decodes``."""
        raise NotImplementedError

    def _host_table(self, common: CommonAttentionMetadata) -> HostTable | None:
        """The host's copy of the block table. A KV-cache group whose table is derived from the
        runner's in each step has no copy and keeps the parent; its first batch shows this, before
        any graph is captured.

        Raises:
            PrefixShareError: a graph was captured already.
        """
        if self._executor is None:
            return None
        table = host_tables.table_of(common)
        if table is None:
            if self._executor.workspace.plan.captured:
                raise PrefixShareError(
                    f"{BACKEND_NAME} does not know a block table that it knew when graphs were "
                    "captured: choose another backend, and report the model and settings."
                )
            fall_back("block tables of their own")
            self._executor = None
        return table

    def _plan_decodes(
        self, executor: GpuExecutor, table: HostTable, common: CommonAttentionMetadata, dummy: bool
    ) -> tuple[int, int]:
        """Put in force the plan of the decodes, which come first in the batch.

        Args:
            dummy: plan for no requests, to capture a graph.

        Returns:
            how many requests are planned, and how many query tokens, with the padding of a graph.
        """
        if common.causal is not True:
            raise PrefixShareError(f"{BACKEND_NAME} does not serve non-causal batches.")
        starts = common.query_start_loc_cpu.numpy()
        num_reqs = 0 if dummy else table.num_reqs(starts)
        num_decodes, num_tokens = num_reqs, common.num_actual_tokens
        # a graph of mixed steps is captured with several tokens a request: all of them are rows
        if not dummy and common.max_query_len > self._query_len:  # some are in prefill
            num_decodes = min(num_reqs, int(np.argmax(np.diff(starts) > self._query_len)))
            num_tokens = int(starts[num_decodes])
        self._load_plan(executor, table, common, num_decodes)
        return num_decodes, num_tokens

    def _load_plan(
        self,
        executor: GpuExecutor,
        table: HostTable,
        common: CommonAttentionMetadata,
        num_decodes: int,
        tokens: TokenRows | None = None,
    ) -> None:
        """Put the plan of the first ``num_decodes`` requests in force.

        Args:
            tokens: the rows of the plan, where they are not the requests themselves.
        """
        self._step = None
        if num_decodes:
            bound = common.seq_lens_cpu_upper_bound
            # where lengths are unknown nothing is shared, and each request is read to its end
            seq_lens = (
                np.ones(num_decodes, np.int32) if bound is None else bound.numpy()[:num_decodes]
            )
            lengths = self._shard.lengths(seq_lens)
            table_rows, row_ids = table.rows(num_decodes)
            if tokens is not None:
                if table_rows is None:
                    table_rows = np.arange(num_decodes)
                table_rows = table_rows[tokens.requests]
                lengths = (lengths[tokens.requests] - tokens.later).astype(np.int32)
                # the rows of one step only, so the plan is kept for no other
                row_ids = -1 - np.arange(len(table_rows)) - self._single_rows
                self._single_rows += len(table_rows)
            update = self._planner.update(
                table.block_table if table_rows is not None else table.block_table[:num_decodes],
                lengths,
                self._query_len,
                table_rows=table_rows,
                row_ids=row_ids,
                slack=self._slack,
            )
        else:
            lengths = np.zeros(0, np.int32)
            update = self._planner.update(np.zeros((0, 0), np.int32), lengths, self._query_len)
        plan = update.plan
        if plan is not self._plan:
            began = time.perf_counter()
            self._plan = None  # until the new one is in force
            try:
                executor.prepare(plan)
            except PrefixShareError:
                raise
            except Exception as e:
                least = np.maximum(lengths - self._slack, 1)
                plan = self._planner.without_sharing(least, self._query_len, e)
                update = PlanUpdate(plan, True, update.seconds, Unshared(PLANNING_FAILED))
                executor.prepare(plan)
            self._plan = plan
            planned = plan.planned_seq_lens
            stock = self._kv_tokens_stock(planned, tokens, executor.attention.gqa_group_size)
            self._tokens_saved = stock - plan.kv_tokens_read(planned)
            if num_decodes and update.is_new:
                seconds = update.seconds + time.perf_counter() - began
                STATS.note_plan(seconds, plan.imbalance, update.unshared)
        if num_decodes:
            stock = self._kv_tokens_stock(lengths, tokens, executor.attention.gqa_group_size)
            self._step = stock, self._tokens_saved

    def _kv_tokens_stock(
        self, lengths: IntArray, tokens: TokenRows | None, gqa_group_size: int
    ) -> int:
        """KV tokens that FLASH_ATTN would read for the rows of a plan, of these lengths."""
        if tokens is None:
            return tokens_seen(lengths, self._window, self._query_len)
        return tokens.kv_tokens_stock(lengths, gqa_group_size)


#: Builders that have a plan on the device.
_BUILDERS: "weakref.WeakSet[PlanningBuilder]" = weakref.WeakSet()


@cache
def cache_write(attention: AttentionConfig, device: torch.device) -> CacheWrite | None:
    """The cache write that graphs of these layers may capture. None where vLLM quantises what it
    writes, and where Triton cannot compile it, which the log says.
    """
    if attention.kv_dtype is not None:
        return None
    try:
        return load_cache_write(attention, device)
    except CompileError as e:
        logger().warning_once("%s", e)
        return None


def is_invariant() -> bool:
    """Whether a builder plans as batch invariance needs."""
    return any(builder._invariant for builder in _BUILDERS)


def weights_loaded() -> None:
    """Check the scales in the next step: the weights were loaded, maybe anew."""
    for builder in _BUILDERS:
        builder._scales_checked = False


def after_wake_up() -> None:
    """Plan again and clean the KV cache: sleep freed the memory of both."""
    for builder in _BUILDERS:
        builder.after_wake_up(None)


def kernel_for(spec: Any) -> Any:
    """The kernel that the environment names; ``portable`` in place of ``auto`` where padding makes
    the block stride not a multiple of a token's size, which TMA cannot address.
    """
    kernel = settings().kernel
    token_bytes = 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    if kernel == "auto" and spec.page_size_bytes % token_bytes:
        return "portable"
    return kernel
