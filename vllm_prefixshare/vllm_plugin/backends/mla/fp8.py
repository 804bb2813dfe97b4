"""PREFIX_SHARE for fp8 (e4m3) latent KV caches (MLA), on NVIDIA GPUs of compute capability 9.0.

Subclasses FLASHMLA for its KV cache in blocks of 64 tokens, its prefills and the short prefills (up
to 128 new tokens) that it treats as decodes; ``latent`` has the rest. vLLM quantises latents and
queries, each layer by a scale of its own.

FLASHMLA takes only decodes of one length, that of the first request. So where all of our decodes
have the same number of query tokens, they are its decodes, too; otherwise the step is its own.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.attention.backends.mla.flashmla import (
    FlashMLABackend,
    FlashMLADecodeMetadata,
    FlashMLAImpl,
    FlashMLAMetadata,
    FlashMLAMetadataBuilder,
)

from vllm_prefixshare.vllm_plugin.backends.mla.latent import (
    LatentBuilder,
    LatentImpl,
    PlannedLatents,
)
from vllm_prefixshare.vllm_plugin.backends.platform_backend import BackendMethods
from vllm_prefixshare.vllm_plugin.step.planner import PlannedStep, StepBatch


@dataclass
class PrefixShareFP8MLAMetadata(PlannedLatents, FlashMLAMetadata):
    """FLASHMLA's metadata of the whole batch, and the plan of its decodes."""


class PrefixShareFP8MLAMetadataBuilder(LatentBuilder, FlashMLAMetadataBuilder, final=True):
    """FLASHMLA's builder, with a plan of the decodes."""

    _num_planned_tokens = 0

    def _build_decode(self, **kwargs: Any) -> FlashMLADecodeMetadata:  # type: ignore[override]
        """FlashMLA's schedule, where a layer needs one: two launches in each step, and two copies
        where graphs read it. vLLM names the arguments, of which not every release has the same.
        """
        is_ours = self.executor is not None and self.all_layers
        if not is_ours or kwargs["num_decode_tokens"] != self._num_planned_tokens:
            return super()._build_decode(**kwargs)
        unread: Any = None
        return FlashMLADecodeMetadata(
            block_table=kwargs["block_table_tensor"],
            seq_lens=kwargs["seq_lens_device"],
            dcp_tot_seq_lens=None,
            scheduler_metadata=unread,
        )

    def _divide(self, batch: StepBatch, common: Any) -> tuple[FlashMLAMetadata, PlannedStep | None]:
        assert self.planner is not None
        step = self.planner.plan(batch)
        n = self._num_planned_tokens = step.num_tokens
        stock = FlashMLAMetadataBuilder.build(self, 0, common)
        # more in a batch that only looks like one, while vLLM warms up
        if not n or n != stock.num_decode_tokens:
            return stock, None
        metadata = PrefixShareFP8MLAMetadata(
            **vars(stock), executor=self.executor, num_planned_tokens=n
        )
        return metadata, step


class PrefixShareFP8MLAImpl(LatentImpl, FlashMLAImpl):
    """One layer: decodes in the kernel of this package, all else in FLASHMLA."""


class PrefixShareFP8MLABackend(BackendMethods, FlashMLABackend):
    """FLASHMLA with an fp8 KV cache, except for decodes."""

    on_gpu = True
    impl_cls = PrefixShareFP8MLAImpl
    builder_cls = PrefixShareFP8MLAMetadataBuilder
