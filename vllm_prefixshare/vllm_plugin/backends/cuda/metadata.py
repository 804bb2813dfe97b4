"""The attention metadata of a step on a GPU: how the batch is divided, and its plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.compat import decode_query_len
from vllm_prefixshare.vllm_plugin.step.first_step import (
    KERNELS,
    MAX_ROWS,
    DeviceRows,
    FirstStep,
    TokenRows,
)
from vllm_prefixshare.vllm_plugin.step.gpu_builder import PlanningBuilder
from vllm_prefixshare.vllm_plugin.step.mixed_graphs import graph_rows, mixed_graphs_refusal
from vllm_prefixshare.vllm_plugin.step.planner import PlannedStep, StepBatch


@dataclass
class PrefixShareCUDAMetadata(FlashAttentionMetadata):
    """FLASH_ATTN's metadata of the whole batch, and how this step divides it.

    executor: holds the plan of the decodes; None where no layer is served.
    num_planned_tokens: query tokens of the decodes, and of the requests that ``first_step`` adds to
        them; they come first in the batch. (FLASH_ATTN's ``num_decode_tokens`` says how it divides
        a batch itself.)
    rows: where ``kv_table`` and ``local_seq_lens`` have a row for each query token: what fills
        them.
    kv_table: int32 ``[rows, max_blocks]`` block table of the plan's rows.
    local_seq_lens: int32 ``[rows]`` KV tokens of each row on this rank: its shard under decode
        context parallelism, else all.
    prefill_metadata: FLASH_ATTN's metadata of the other requests; None if there are none.
    single_prefills, single_rows: under batch invariance, FLASH_ATTN's metadata of prefills of one
        token among the decodes, and their rows ``[num_single]``; None if there are none.
    """

    executor: GpuExecutor | None = None
    num_planned_tokens: int = 0
    rows: DeviceRows | None = None
    kv_table: torch.Tensor | None = None
    local_seq_lens: torch.Tensor | None = None
    prefill_metadata: FlashAttentionMetadata | None = None
    single_prefills: FlashAttentionMetadata | None = None
    single_rows: torch.Tensor | None = None


class PrefixShareMetadataBuilder(PlanningBuilder, FlashAttentionMetadataBuilder, final=True):
    """Plans for one KV-cache group; called once per step, and for each graph captured."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    _graph_buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """All batches where ``mixed_graphs`` serves them, else batches of decodes."""
        if mixed_graphs_refusal(vllm_config) is None:
            return AttentionCGSupport.ALWAYS
        return cls._cudagraph_support

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._first_step = self._choose_first_step()
        self._takes_mixed_graphs = self._first_step is not None and self.all_layers
        if self.planner is not None:
            if getattr(kv_cache_spec, "sliding_window", None) is not None:
                # FLASH_ATTN looks for windows when it first makes a schedule, but not if it has
                # built without one before, as for the batch of a graph; then it would make those
                # of prefills, and of layers with windows, for full attention
                self.aot_schedule = False
            # the requests for our kernel come first
            max_new_tokens = 0 if self._first_step is None else self._first_step.max_new_tokens
            self.reorder_batch_threshold = max(self.planner.query_len, max_new_tokens)
        if not self._takes_mixed_graphs:
            # the V2 model runner asks each builder; a graph would hold the launches of one batch
            # of FLASH_ATTN's prefill
            vars(self)["get_cudagraph_support"] = _decodes_only

    def _layers(self) -> Iterable[Any]:
        return get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names).values()

    def _max_token_rows(self) -> int:
        config = self.vllm_config
        # Drafts make the rows of a plan several tokens wide; a rank with a shard has only some of
        # the tokens; under batch invariance the kernel of a request must not depend on the others,
        # and each row would have room for all pieces of a request.
        shards = config.parallel_config.decode_context_parallel_size
        if decode_query_len(config) > 1 or shards > 1 or invariance.wanted():
            return 0
        # the graphs of mixed steps may have more rows than steps that are planned without them
        return max([MAX_ROWS, *(config.compilation_config.cudagraph_capture_sizes or [])])

    def _choose_first_step(self) -> FirstStep | None:
        """Which prefills are planned with the decodes, or None."""
        if self.executor is None or self.planner is None or not self._max_token_rows():
            return None
        # also where only the divider is chosen
        invariant = self.planner.decode_planner.divider.cuts_at_fixed_places
        if self.executor.name not in KERNELS or self.planner.window is not None or invariant:
            return None
        return FirstStep.of(self.executor.attention)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """False where this builder plans: with cascade attention vLLM uses no FULL graphs."""
        if self.executor is not None:
            return False
        # up to vLLM 0.31; later releases have no such method and do not ask
        return bool(super().use_cascade_attention(*args, **kwargs))  # type: ignore[misc]

    def _divide(
        self, batch: StepBatch, common: CommonAttentionMetadata
    ) -> tuple[PrefixShareCUDAMetadata, PlannedStep]:
        assert self.executor is not None and self.planner is not None
        block_size = self.executor.attention.block_size
        kv_table = common.block_table_tensor
        local_seq_lens = (
            common.seq_lens if self.planner.shard.size == 1 else common.dcp_local_seq_lens
        )
        rows = self._graph_rows(common, block_size)
        tokens = self._token_rows(batch, every=rows is not None)
        step = self.planner.plan(batch, tokens)
        num_reqs, num_tokens = step.num_reqs, step.num_tokens
        if tokens is not None and rows is None:
            rows = DeviceRows.allocate(common, num_tokens, block_size)
        if rows is not None:
            kv_table, local_seq_lens = rows.table, rows.lens
        prefill = None
        # tokens after those of the last request are padding
        if num_tokens < min(batch.num_tokens, int(batch.query_start_loc[-1])):
            prefill = self._build_prefill(common, num_reqs, num_tokens)
        singles, single_rows = None, None
        if self.planner.is_invariant and not batch.for_capture:
            singles, single_rows = self._build_single_prefills(common, num_reqs)
        # the whole batch in FLASH_ATTN: only for layers that are not served
        stock = FlashAttentionMetadataBuilder.build(self, 0, common, fast_build=self.all_layers)
        _take_image_ranges(stock, (prefill, slice(num_tokens, None)), (singles, single_rows))
        metadata = PrefixShareCUDAMetadata(
            **vars(stock),
            executor=self.executor,
            num_planned_tokens=num_tokens,
            rows=rows,
            kv_table=kv_table,
            local_seq_lens=local_seq_lens,
            prefill_metadata=prefill,
            single_prefills=singles,
            single_rows=single_rows,
        )
        return metadata, step

    def _graph_rows(self, common: CommonAttentionMetadata, block_size: int) -> DeviceRows | None:
        """The rows that a FULL graph of mixed steps reads, or None for a step without one. Which
        graph is replayed, or none, is not known here: every step that fits one is planned for it.
        """
        num_tokens = common.num_actual_tokens
        max_rows = graph_rows(self.vllm_config) if self._takes_mixed_graphs else 0
        if num_tokens > max_rows:
            return None
        if self._graph_buffers is None:
            table = torch.zeros(
                (max_rows, common.block_table_tensor.shape[1]),
                dtype=torch.int32,
                device=self.device,
            )
            self._graph_buffers = table, table.new_zeros(max_rows)
        table, lens = self._graph_buffers
        return DeviceRows(common, table[:num_tokens], lens[:num_tokens], block_size)

    def _token_rows(self, batch: StepBatch, every: bool) -> TokenRows | None:
        """The query tokens of the requests that are planned with the decodes, each a row of the
        plan; None where the decodes alone are planned, and in a dummy batch.

        Args:
            every: plan all requests, as a FULL graph of mixed steps needs; otherwise those that
                ``first_step`` adds.
        """
        max_seq_lens, num_reqs = batch.max_seq_lens, batch.num_reqs
        if self._first_step is None or max_seq_lens is None or batch.max_query_len == 1:
            return None
        if not num_reqs:
            return None
        starts = batch.query_start_loc
        if every:
            return TokenRows.of(starts, num_reqs)
        rows, _ = batch.table.rows(num_reqs)
        return self._first_step.rows(
            starts[: num_reqs + 1],
            max_seq_lens[:num_reqs],
            batch.table.block_table,
            np.arange(num_reqs) if rows is None else rows,
        )

    def _build_prefill(
        self, common: CommonAttentionMetadata, num_decodes: int, num_tokens: int
    ) -> FlashAttentionMetadata:
        """FLASH_ATTN's metadata of the requests after the first ``num_decodes``."""
        max_seq_lens = common.seq_lens_cpu_upper_bound
        part = common.replace(
            query_start_loc=common.query_start_loc[num_decodes:] - num_tokens,
            query_start_loc_cpu=common.query_start_loc_cpu[num_decodes:] - num_tokens,
            seq_lens=common.seq_lens[num_decodes:],
            seq_lens_cpu_upper_bound=None if max_seq_lens is None else max_seq_lens[num_decodes:],
            num_reqs=common.num_reqs - num_decodes,
            num_actual_tokens=common.num_actual_tokens - num_tokens,
            block_table_tensor=common.block_table_tensor[num_decodes:],
            slot_mapping=common.slot_mapping[num_tokens:],
            mm_req_doc_ranges=_ranges_of(common, range(num_decodes, common.num_reqs)),
        )
        return self._build_part(part)

    def _build_single_prefills(
        self, common: CommonAttentionMetadata, num_decodes: int
    ) -> tuple[FlashAttentionMetadata | None, torch.Tensor | None]:
        """FLASH_ATTN's metadata of the prefills of one token among the first ``num_decodes``
        requests, and their rows. Their bits must not depend on how a prompt was cut into steps.
        """
        if common.is_prefilling is None or not common.is_prefilling[:num_decodes].any():
            return None, None
        found = common.is_prefilling[:num_decodes].nonzero().flatten()
        starts = torch.arange(len(found) + 1, dtype=torch.int32, device="cpu")
        max_seq_lens = common.seq_lens_cpu_upper_bound
        rows = found.to(self.device, non_blocking=True)
        part = common.replace(
            query_start_loc=starts.to(self.device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=common.seq_lens[rows],
            seq_lens_cpu_upper_bound=None if max_seq_lens is None else max_seq_lens[found],
            num_reqs=len(found),
            num_actual_tokens=len(found),
            max_query_len=1,
            block_table_tensor=common.block_table_tensor[rows],
            slot_mapping=common.slot_mapping[rows],
            mm_req_doc_ranges=_ranges_of(common, found.tolist()),
        )
        return self._build_part(part), rows

    def _build_part(self, part: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """FLASH_ATTN's metadata of some of the requests. The builder has one buffer for a schedule,
        and one for the lengths of shards; those of the whole batch are built last.
        """
        built = FlashAttentionMetadataBuilder.build(self, 0, part, fast_build=not self.all_layers)
        if built.dcp_context_kv_lens is not None:
            built.dcp_context_kv_lens = built.dcp_context_kv_lens.clone()
        return built


def _decodes_only(vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
    """``get_cudagraph_support`` of a builder that leaves FLASH_ATTN a part of mixed steps."""
    return PrefixShareMetadataBuilder._cudagraph_support


def _take_image_ranges(
    whole: FlashAttentionMetadata,
    *parts: tuple[FlashAttentionMetadata | None, slice | torch.Tensor | None],
) -> None:
    """Give parts of a batch the image ranges of their tokens: vLLM has one buffer for the ranges,
    and the whole batch is the last to fill it.
    """
    ranges = whole.mm_prefix_query_range_tensor
    for part, tokens in parts:
        if part is not None:
            part.mm_prefix_query_range_tensor = None if ranges is None else ranges[tokens]


def _ranges_of(
    common: CommonAttentionMetadata, rows: Iterable[int]
) -> dict[int, list[tuple[int, int]]] | None:
    """The places of images in some requests, by their row among these. FLASH_ATTN reads them of
    every request that has an image, also for layers that do not let its tokens see each other.
    """
    ranges = common.mm_req_doc_ranges
    if ranges is None:
        return None
    return {i: ranges[row] for i, row in enumerate(rows) if row in ranges}
