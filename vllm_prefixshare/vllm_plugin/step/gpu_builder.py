"""The base of the metadata builders of plain and of latent attention: plans the decodes."""

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.aot.compilation import CompileError, load_cache_write
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.extras import checked_extras
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import BACKEND_NAME, invariance
from vllm_prefixshare.vllm_plugin.compat import decode_query_len, steps_in_flight
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.groups import (
    attention_of,
    builder_refusal,
    served_together,
)
from vllm_prefixshare.vllm_plugin.eligibility.layer import window_of
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.step.host_tables import HOST_TABLES
from vllm_prefixshare.vllm_plugin.step.planner import PlannedStep, StepBatch, StepPlanner
from vllm_prefixshare.vllm_plugin.step.shards import Interleaved

#: KV blocks that are looked through at once after wake-up
MAX_BLOCKS = 256


class PlanningBuilder(AttentionMetadataBuilder[Any]):
    """Plans for one KV-cache group. A subclass derives from this class first, then from a vLLM
    metadata builder (the parent), and divides each step between the two.

    latent: whether layers have latents in place of keys and values.
    executor, planner: run and make the plans; None where no layer of the group is served.
    all_layers: whether every layer of the group is served.
    """

    supports_update_block_table = False  # each KV-cache group has its own prefix tree
    latent = False
    executor: GpuExecutor | None = None
    planner: StepPlanner | None = None
    all_layers = False
    _scales_checked = True
    _final: ClassVar[type]

    def __init_subclass__(cls, final: bool = False, **kwargs: Any) -> None:
        """Note the class that may plan.

        Args:
            final: no class that vLLM derives from this one may plan: it keeps the parent.
        """
        super().__init_subclass__(**kwargs)
        if final:
            cls._final = cls

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer_names = layer_names
        served = served_together(map(planned_impl, self._layers()), kv_cache_spec)
        self.all_layers = len(served) == len(layer_names)
        window = window_of(served[0]) if served else None
        reason = builder_refusal(self, self._final, self.latent, window)
        if served and reason is not None:
            fall_back(reason)
        elif served:
            self.executor = self._make_executor(served)
            self.planner = self._make_planner(self.executor, window)
            self.supports_draft_decode_metadata_update = False  # planning would miss new lengths
            _BUILDERS.add(self)
            self.check_scales()
            if self.executor.passed_over:
                logger().warning_once("%s", self.executor.passed_over)

    def _layers(self) -> Iterable[Any]:
        """The layers of the group that may be served."""
        raise NotImplementedError

    def _max_token_rows(self) -> int:
        """Maximum number of rows of a plan where a request may have several, else 0."""
        return 0

    def _make_executor(self, impls: list[Any]) -> GpuExecutor:
        """An executor for layers of one shape, with room for the plans of any batch."""
        config, block_size = self.vllm_config, self.kv_cache_spec.block_size
        attention = attention_of(impls, block_size, config.model_config.dtype)
        executor = GpuExecutor(
            attention,
            self.device,
            kernel=settings().kernel if self.latent else kernel_for(self.kv_cache_spec),
            query_len=decode_query_len(config),
            partials=impls[0].partials,
        )
        write = cache_write(attention, self.device)
        for impl in impls:
            impl.cache_write = write
        max_rows = max(config.scheduler_config.max_num_seqs, self._max_token_rows())
        executor.reserve_for(max_rows, invariance.piece_limits(config, block_size))
        return executor

    def _make_planner(self, executor: GpuExecutor, window: int | None) -> StepPlanner:
        """A planner whose plans ``executor`` runs."""
        config, query_len = self.vllm_config, decode_query_len(self.vllm_config)
        return StepPlanner(
            executor,
            executor.attention,
            config,
            query_len,
            window=window,
            shard=Interleaved.of(config),
            invariant=invariance.wanted(),
            # The host counts drafts as accepted before the GPU has verified them, so lengths may be
            # shorter in a later step. A plan must hold for lengths up to this much shorter.
            slack=(query_len - 1) * max(1, steps_in_flight(config)),
            load=executor.prepare,
        )

    def check_scales(self) -> None:
        """Read the scales of layers with a quantised KV cache: a CUDA graph does not.

        Raises:
            PrefixShareError: one is not positive and finite.
        """
        if self.executor is not None and self.executor.attention.kv_dtype is not None:
            context = self.vllm_config.compilation_config.static_forward_context
            for layer in (context[name] for name in self.layer_names):
                impl = planned_impl(layer)
                if getattr(impl, "shares", False):
                    extras = impl.extras_of(layer, self.executor.attention)
                    checked_extras(extras, self.executor.attention, self.device)
        self._scales_checked = True

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
        if self.planner is not None and (tags is None or "kv_cache" in tags):
            self.planner.forget()
            self.clean_cache()

    def decode_graphs_take_prefills(self) -> bool:
        """Whether a FULL graph of decodes may serve tokens of prompts. A patched vLLM asks this;
        otherwise a hook asks ``is_invariant``.
        """
        return self.planner is None or not self.planner.is_invariant

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """As the parent's ``build``, with a plan of the decodes."""
        if not self._scales_checked:
            self.check_scales()
        batch = self._batch_of(common_attn_metadata)
        if batch is None:
            parent: Any = super()
            return parent.build(common_prefix_len, common_attn_metadata, fast_build)
        metadata, step = self._divide(batch, common_attn_metadata)
        if step is not None:
            step.record()
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As in vLLM, with a plan of no requests: the graph reads later plans in its place."""
        batch = self._batch_of(common_attn_metadata, for_capture=True)
        if batch is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self._divide(batch, common_attn_metadata)[0]

    def _divide(
        self, batch: StepBatch, common: CommonAttentionMetadata
    ) -> tuple[Any, PlannedStep | None]:
        """Divide a step between the plan and the parent. Called where layers are served.

        Returns:
            the metadata of the step, and its planned requests; None where the metadata leaves the
            whole step to the parent.
        """
        raise NotImplementedError

    def _batch_of(
        self, common: CommonAttentionMetadata, for_capture: bool = False
    ) -> StepBatch | None:
        """The batch as the host knows it; None where the group keeps the parent. A KV-cache group
        whose table is derived from the runner's in each step has no copy on the host; its first
        batch shows this, before any graph is captured.

        Raises:
            PrefixShareError: a graph was captured already, or the batch is not causal.
        """
        if self.executor is None:
            return None
        table = HOST_TABLES.table_of(common)
        if table is None:
            if self.executor.workspace.plan.captured:
                raise PrefixShareError(
                    f"{BACKEND_NAME} does not know a block table that it knew when graphs were "
                    "captured: choose another backend, and report the model and settings."
                )
            fall_back("block tables of their own")
            self.executor = self.planner = None
            return None
        if common.causal is not True:
            raise PrefixShareError(f"{BACKEND_NAME} does not serve non-causal batches.")
        return StepBatch.of(common, table, common.seq_lens_cpu_upper_bound, for_capture)


def planned_impl(layer: Any) -> Any:
    """The implementation of a layer that may be served: in a composite of vLLM's, the one for
    causal attention.
    """
    return getattr(layer.impl, "causal_impl", layer.impl)


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
    return any(b.planner is not None and b.planner.is_invariant for b in _BUILDERS)


def weights_loaded() -> None:
    """Check the scales in the next step: weights were loaded, perhaps again."""
    for builder in _BUILDERS:
        builder._scales_checked = False


def after_wake_up() -> None:
    """Make new plans and clean the KV caches: sleep freed the memory of both."""
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
