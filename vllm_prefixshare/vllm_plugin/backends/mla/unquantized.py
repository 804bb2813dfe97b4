"""PREFIX_SHARE for latent KV caches (MLA) in 16 bits, on NVIDIA GPUs of compute capability 9.0.

Subclasses FLASH_ATTN_MLA for its KV cache, its prefills and the short prefills (up to 512 new
tokens) that it treats as decodes; ``latent`` has the rest.
"""

from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadata,
    FlashAttnMLAMetadataBuilder,
)

from vllm_prefixshare.vllm_plugin.backends.mla.latent import (
    LatentBuilder,
    LatentImpl,
    PlannedLatents,
)
from vllm_prefixshare.vllm_plugin.backends.platform_backend import BackendMethods
from vllm_prefixshare.vllm_plugin.step.planner import PlannedStep, StepBatch


@dataclass
class PrefixShareMLAMetadata(PlannedLatents, FlashAttnMLAMetadata):
    """FLASH_ATTN_MLA's metadata of the whole batch, and how this step divides its decodes."""


class PrefixShareMLAMetadataBuilder(LatentBuilder, FlashAttnMLAMetadataBuilder, final=True):
    """FLASH_ATTN_MLA's builder, with a plan of the decodes."""

    def _schedule_decode(self, *args: Any, **kwargs: Any) -> Any:
        """FlashAttention's schedule, where a layer needs one: two launches in each step."""
        if self.executor is not None and self.all_layers:
            return None
        return super()._schedule_decode(*args, **kwargs)

    def _divide(self, batch: StepBatch, common: Any) -> tuple[PrefixShareMLAMetadata, PlannedStep]:
        assert self.planner is not None
        step = self.planner.plan(batch)
        num_decodes, n = step.num_reqs, step.num_tokens
        stock = FlashAttnMLAMetadataBuilder.build(self, 0, common)
        rest, decode = None, stock.decode
        if decode is not None and stock.num_decode_tokens > n:
            # never in a graph, so FlashAttention may make its schedule itself
            totals = decode.dcp_tot_seq_lens
            others = replace(
                decode,
                block_table=decode.block_table[num_decodes:],
                seq_lens=decode.seq_lens[num_decodes:],
                query_start_loc=decode.query_start_loc[num_decodes:] - n,
                dcp_tot_seq_lens=None if totals is None else totals[num_decodes:],
                scheduler_metadata=None,
                max_num_splits=0,
            )
            rest = replace(stock, decode=others)
        metadata = PrefixShareMLAMetadata(
            **vars(stock), executor=self.executor, num_planned_tokens=n, rest=rest
        )
        return metadata, step


class PrefixShareMLAImpl(LatentImpl, FlashAttnMLAImpl):
    """One layer: decodes in the kernel of this package, all else in FLASH_ATTN_MLA."""


class PrefixShareMLABackend(BackendMethods, FlashAttnMLABackend):
    """FLASH_ATTN_MLA, except for decodes."""

    on_gpu = True
    impl_cls = PrefixShareMLAImpl
    builder_cls = PrefixShareMLAMetadataBuilder
