"""PREFIX_SHARE on NVIDIA GPUs.

Subclasses FLASH_ATTN for its KV cache and its prefill. Decodes, with their draft tokens, come
first in a batch and run in the kernels of this package. One step:

    build():   host's block table, lengths -> StepPlanner -> GpuExecutor.prepare  [if changed]
                                           -> FLASH_ATTN metadata of the prefills
    forward(): GpuExecutor.run  and  FLASH_ATTN forward, each on its own tokens     [per layer]

Under decode context parallelism, ``context_parallel`` combines the results of ``run`` across ranks.
``build`` is in ``metadata``. A FULL CUDA graph holds what ``forward`` launched while it was
captured, and is replayed after each ``build``: the launches stay the same and read the new plan.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
)

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.vllm_plugin.backends import context_parallel
from vllm_prefixshare.vllm_plugin.backends.common import PlannedLayer
from vllm_prefixshare.vllm_plugin.backends.cuda.metadata import (
    PrefixShareCUDAMetadata,
    PrefixShareMetadataBuilder,
)
from vllm_prefixshare.vllm_plugin.backends.platform_backend import BackendMethods
from vllm_prefixshare.vllm_plugin.eligibility import platform
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine, LayerSpec


class PrefixShareCUDAImpl(PlannedLayer, FlashAttentionImpl):
    """One layer: decodes in the kernels of this package, prefills in FLASH_ATTN."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        engine = Engine.of_config(config)._replace(shards=self.dcp_world_size)
        layer = LayerSpec.of_impl(self, (-1, -1), engine, config.model_config.dtype)
        layer = replace(layer, use_mm_prefix=config.model_config.is_mm_prefix_lm)
        self.set_up(config, layer, platform.gpu_extras())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``FlashAttentionImpl.forward``: query and output
        ``[num_tokens, num_heads, head_size]``, written in place.
        """
        metadata = attn_metadata
        if (
            not isinstance(metadata, PrefixShareCUDAMetadata)
            or not self.shares
            or output_scale is not None
            or output_block_scale is not None
        ):
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        n, cache = metadata.num_planned_tokens, kv_cache
        if metadata.prefill_metadata is not None:
            k, v = (None if x is None else x[n:] for x in (key, value))
            super().forward(layer, query[n:], k, v, kv_cache, metadata.prefill_metadata, output[n:])
        if n:
            assert metadata.executor is not None
            assert metadata.kv_table is not None and metadata.local_seq_lens is not None
            if metadata.rows is not None:
                metadata.rows.fill()
            if metadata.executor.attention.kv_dtype is not None:
                kv_cache = kv_cache.view(torch.float8_e4m3fn)
            k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
            q, out, lse = query[:n], output[:n], None
            if self.dcp_world_size > 1:
                q, out, lse = partial = context_parallel.gather(self, q)
            metadata.executor.run(
                q,
                k_cache,
                v_cache,
                metadata.kv_table,
                metadata.local_seq_lens,
                out,
                self.scale,
                metadata.query_start_loc if metadata.executor.query_len > 1 else None,
                lse=lse,
                extras=self.extras_of(layer, metadata.executor.attention),
            )
            if lse is not None:
                output[:n] = context_parallel.combine(self, partial)
        if metadata.single_prefills is not None:
            rows = metadata.single_rows
            part = output[rows]
            super().forward(layer, query[rows], key, value, cache, metadata.single_prefills, part)
            output[rows] = part
        return output

    def extras_of(self, layer: Any, attention: AttentionConfig) -> LayerExtras:
        """What this layer adds to plain attention: one record, made when weights are loaded. It
        refers to vLLM's scale tensors, whose values may change.
        """
        quantised, kept = attention.kv_dtype is not None, self._extras
        q_scale = layer._q_scale if attention.query_dtype is not None else None
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if quantised else (None, None)
        if (
            kept is None
            or kept.q_scale is not q_scale
            or kept.k_scale is not k_scale
            or kept.v_scale is not v_scale
        ):
            kept = self._extras = LayerExtras(
                sinks=self.sinks,
                soft_cap=float(self.logits_soft_cap or 0.0),
                alibi_slopes=self.alibi_slopes,  # type: ignore[arg-type]  # made a tensor
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        return kept

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As ``FlashAttentionImpl.do_kv_cache_update``, with every value made finite: requests
        share a work tile, where a NaN in one reaches the others, since zero times NaN is NaN. A
        request whose activations overflowed still has NaN in its scores.

        In a CUDA graph that is one launch, as in vLLM. Outside of one the host's time counts, of
        which a kernel in Triton takes more than an operator of PyTorch.
        """
        if self.shares:
            if self.cache_write is not None and torch.cuda.is_current_stream_capturing():
                k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
                if self.cache_write.write(key, value, k_cache, v_cache, slot_mapping):
                    return
            value = torch.nan_to_num(value)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class PrefixShareCUDABackend(BackendMethods, FlashAttentionBackend):
    """FLASH_ATTN, except for decodes."""

    # models may not write the KV cache themselves: do_kv_cache_update makes values finite
    supports_kv_cache_update_bypass = False
    on_gpu = True
    impl_cls = PrefixShareCUDAImpl
    builder_cls = PrefixShareMetadataBuilder
