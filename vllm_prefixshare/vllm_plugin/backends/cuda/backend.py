"""PREFIX_SHARE on NVIDIA GPUs.

Subclasses FLASH_ATTN for its KV cache and its prefill. Decodes, with their draft tokens, come
first in a batch and run in the kernels of this package. One step:

    build():   host's block table, lengths -> DecodePlanner -> GpuExecutor.prepare  [if changed]
                                           -> FLASH_ATTN metadata of the prefills
    forward(): GpuExecutor.run  and  FLASH_ATTN forward, each on its own tokens     [per layer]

Under decode context parallelism, ``context_parallel`` combines the results of ``run`` across ranks.
``build`` is in ``metadata``. A FULL CUDA graph holds what ``forward`` launched while it was
captured, and is replayed after each ``build``: the launches stay the same and read the new plan.
"""

import weakref
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
)

from vllm_prefixshare.config import FP8_CACHES, AttentionConfig
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.registry import kernels_that_may_serve
from vllm_prefixshare.kernels.workspace import PartialResults
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.backends.cuda import context_parallel
from vllm_prefixshare.vllm_plugin.backends.cuda.metadata import (
    PrefixShareCUDAMetadata,
    PrefixShareMetadataBuilder,
)
from vllm_prefixshare.vllm_plugin.backends.platform_backend import BackendMethods
from vllm_prefixshare.vllm_plugin.background_compilation import load_planning
from vllm_prefixshare.vllm_plugin.compat import decode_query_len
from vllm_prefixshare.vllm_plugin.eligibility import platform
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.groups import attention_of
from vllm_prefixshare.vllm_plugin.eligibility.layer import (
    FP8_LATENT_BLOCK,
    USUAL_BLOCK,
    Engine,
    LayerSpec,
)
from vllm_prefixshare.vllm_plugin.eligibility.measured import this_device
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.step import gpu_builder, host_tables


class PrefixShareCUDAImpl(FlashAttentionImpl):
    """One layer: decodes in the kernels of this package, prefills in FLASH_ATTN."""

    shares: bool
    partials: PartialResults
    cache_write: CacheWrite | None = None  # set by the builder of this layer's metadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        engine = Engine.of_config(config)._replace(shards=self.dcp_world_size)
        layer = LayerSpec.of_impl(self, (-1, -1), engine, config.model_config.dtype)
        reason = refusal(layer, Platform(CUDA_DTYPES, platform.gpu_extras(), is_here=True))
        if reason is None and self.dcp_world_size > 1:
            context_parallel.check_collectives(config)
        set_up(self, config, reason)
        self._extras: LayerExtras | None = None

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
            assert metadata.kv_table is not None and metadata.kv_lens is not None
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
                metadata.kv_lens,
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

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """After each load of weights, also of one into the same tensors."""
        super().process_weights_after_loading(act_dtype)
        gpu_builder.weights_loaded()

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


#: Partial results by shape. Layers of one shape share them, since the layers and KV-cache groups of
#: a worker run one after the other; they are freed with the last layer that holds them.
_PARTIALS: weakref.WeakValueDictionary[tuple[object, ...], PartialResults] = (
    weakref.WeakValueDictionary()
)


def set_up(impl: Any, config: Any, falls_back: str | None) -> None:
    """Set ``impl.shares``, whether the layer is served, and if so ``impl.partials``, the room for
    partial results: reserved now, because vLLM sizes the KV cache after creating the layers.

    Args:
        falls_back: why the layer is not served; None if it is.
    """
    impl.shares = falls_back is None
    if falls_back is not None:
        fall_back(falls_back)
        return
    host_tables.want()
    impl.partials = reserve_partials(impl, config, this_device())


def block_size_of(impl: Any, config: Any) -> int:
    """The block size of a layer that vLLM is creating, where it may not be known yet."""
    is_latent = getattr(impl, "kv_lora_rank", None) is not None
    if is_latent and impl.kv_cache_dtype in FP8_CACHES:
        return FP8_LATENT_BLOCK
    return config.cache_config.block_size or USUAL_BLOCK


def reserve_partials(impl: Any, config: Any, device: torch.device) -> PartialResults:
    """Room for the partial results of any batch of this configuration."""
    attention = attention_of([impl], block_size_of(impl, config), config.model_config.dtype)
    query_len = decode_query_len(config)
    shape = (attention.num_qo_heads, attention.v_head_dim)
    key = (*shape, query_len, device)
    partials = _PARTIALS.get(key)
    kernels = kernels_that_may_serve(attention, device, settings().kernel, query_len)
    room = config.scheduler_config.max_num_seqs, invariance.piece_limits(config)
    most = max(k.capacity(*room).max_partials for k in kernels)
    # captured: by graphs of another engine in this process, which keeps them
    if partials is None or (partials.captured and not partials.holds(most)):
        load_planning(kernels[0], attention)
        partials = PartialResults(device, shape, query_len)
        _PARTIALS[key] = partials
    partials.reserve(most)
    return partials
