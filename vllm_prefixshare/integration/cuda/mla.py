"""PREFIX_SHARE for multi-head latent attention (MLA), on NVIDIA GPUs of compute capability 9.0.

Subclasses FLASH_ATTN_MLA for its KV cache, its prefills and the short prefills (up to 512 new
tokens) that it treats as decodes. Requests with one new token come first in a batch and run in the
kernel of this package, after absorption: the queries that ``forward_mqa`` gets are as wide as the
cache. One step:

    build():       FLASH_ATTN_MLA metadata of the batch; the plan of the decodes  [if changed]
    forward_mqa(): GpuExecutor.run on the decodes, FLASH_ATTN_MLA on the rest     [per layer]

A FULL CUDA graph holds only decodes, and so only our launches, which read the plan of each step. As
with plain attention, rows that share nothing also run in our kernel: a graph cannot switch kernels.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadata,
    FlashAttnMLAMetadataBuilder,
)

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.integration.backend import BackendMethods
from vllm_prefixshare.integration.cuda.backend import (
    config_refusal,
    engine_of,
    set_up,
    this_device,
)
from vllm_prefixshare.integration.cuda.planning import PlanningBuilder
from vllm_prefixshare.integration.support import (
    CUDA_DTYPES,
    attention_of,
    latent_layer_refusal,
    latent_refusal,
)
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.kernels.registry import kernels_that_may_serve
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.settings import settings


@dataclass
class PrefixShareMLAMetadata(FlashAttnMLAMetadata):
    """FLASH_ATTN_MLA's metadata of the whole batch, and how this step divides its decodes.

    executor: holds the plan of the requests with one new token; None where no layer is served.
    num_planned_tokens: number of these requests, which come first, with a graph's padding.
    rest: FLASH_ATTN_MLA's metadata of the other requests that it treats as decodes; None if none.
    """

    executor: GpuExecutor | None = None
    num_planned_tokens: int = 0
    rest: FlashAttnMLAMetadata | None = None


class PrefixShareMLAMetadataBuilder(PlanningBuilder, FlashAttnMLAMetadataBuilder):
    """Plans for one KV-cache group; called once per step, and for each graph captured."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    latent = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layer_names = layer_names
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        self._start_planning(layers, PrefixShareMLAMetadataBuilder, 1)

    def _schedule_decode(self, *args: Any, **kwargs: Any) -> Any:
        """FlashAttention's schedule, where a layer needs one: two launches in each step."""
        if self._executor is not None and self._all_layers:
            return None
        return super()._schedule_decode(*args, **kwargs)

    def _divide(
        self, executor: GpuExecutor, table: Any, common: Any, dummy: bool
    ) -> PrefixShareMLAMetadata:
        num_decodes, n = self._plan_decodes(executor, table, common, dummy)
        stock = FlashAttnMLAMetadataBuilder.build(self, 0, common)
        rest, decode = None, stock.decode
        if decode is not None and stock.num_decode_tokens > n:
            # never in a graph, so FlashAttention may make its schedule itself
            others = replace(
                decode,
                block_table=decode.block_table[num_decodes:],
                seq_lens=decode.seq_lens[num_decodes:],
                query_start_loc=decode.query_start_loc[num_decodes:] - n,
                scheduler_metadata=None,
                max_num_splits=0,
            )
            rest = replace(stock, decode=others)
        return PrefixShareMLAMetadata(
            **vars(stock), executor=executor, num_planned_tokens=n, rest=rest
        )


class PrefixShareMLAImpl(FlashAttnMLAImpl):
    """One layer: decodes in the kernel of this package, all else in FLASH_ATTN_MLA."""

    shares: bool
    cache_write: CacheWrite | None = None  # set by the builder of this layer's metadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        reason = (
            latent_refusal(self.num_heads)
            or latent_layer_refusal((self.head_size, self.kv_lora_rank), engine_of(config))
            or config_refusal(config)
            or _no_kernel(self, config)
        )
        set_up(self, config, reason)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: FlashAttnMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``FlashAttnMLAImpl.forward_mqa``.

        Args:
            q: ``[num_decode_tokens, num_heads, 576]``, or its first 512 columns and the others.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, 576]``.

        Returns:
            ``[num_decode_tokens, num_heads, 512]``, and None: log-sum-exps are for ranks that hold
            shards.
        """
        metadata, cache = attn_metadata, kv_c_and_k_pe_cache
        if not self.shares or not isinstance(metadata, PrefixShareMLAMetadata):
            return super().forward_mqa(q, cache, metadata, layer)
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        n = metadata.num_planned_tokens
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        if metadata.rest is not None:
            out[n:] = super().forward_mqa(q[n:], cache, metadata.rest, layer)[0]
        if n:
            assert metadata.executor is not None and metadata.decode is not None
            latents = cache[:, :, None]  # of one KV head
            metadata.executor.run(
                q[:n],
                latents,
                latents[..., : self.kv_lora_rank],
                metadata.decode.block_table,
                metadata.decode.seq_lens,
                out[:n],
                self.scale,
            )
        return out, None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As in vLLM, with every latent made finite: it is the value, too, and requests share a
        work tile, where a NaN in one reaches the others, since zero times NaN is NaN. In a CUDA
        graph that is one launch.

        Args:
            kv_c_normed: ``[num_tokens, 512]``.
            k_pe: ``[num_tokens, 64]`` or ``[num_tokens, 1, 64]``.
            kv_cache: ``[num_blocks, block_size, 576]``.
            slot_mapping: int64 ``[num_tokens]``.
        """
        if self.shares:
            if self.cache_write is not None and torch.cuda.is_current_stream_capturing():
                rank, latents = self.kv_lora_rank, kv_cache.unsqueeze(-2)  # of one KV head
                if self.cache_write.write(
                    k_pe.view(len(k_pe), 1, k_pe.shape[-1]),
                    kv_c_normed.unsqueeze(1),
                    latents[..., rank:],
                    latents[..., :rank],
                    slot_mapping.flatten(),
                ):
                    return
            kv_c_normed = torch.nan_to_num(kv_c_normed)
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs)


class PrefixShareMLABackend(BackendMethods, FlashAttnMLABackend):
    """FLASH_ATTN_MLA, except for decodes."""

    dtypes = CUDA_DTYPES
    impl_cls = PrefixShareMLAImpl
    builder_cls = PrefixShareMLAMetadataBuilder


def _no_kernel(impl: Any, config: Any) -> str | None:
    block_size = config.cache_config.block_size or 16  # may not be known yet
    return kernel_refusal(attention_of([impl], block_size, config.model_config.dtype))


@cache
def kernel_refusal(attention: AttentionConfig) -> str | None:
    """Why no kernel serves latents here, or None. With plain attention the portable kernel steps in
    where a Triton does not compile the one for Hopper; here the parent does.
    """
    try:
        kernels_that_may_serve(attention, this_device(), settings().kernel, 1)
    except PrefixShareError as e:
        return f"multi-head latent attention without a kernel ({e})"
    return None
