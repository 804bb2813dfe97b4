"""What the GPU backends of plain attention and of multi-head latent attention share."""

import weakref
from typing import Any

import torch

from vllm_prefixshare.config import FP8_CACHES
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.registry import kernels_that_may_serve
from vllm_prefixshare.kernels.workspace import PartialResults
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.backends.context_parallel import check_collectives
from vllm_prefixshare.vllm_plugin.background_compilation import load_planning
from vllm_prefixshare.vllm_plugin.compat import decode_query_len
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.groups import attention_of
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.measured import this_device
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.step import gpu_builder
from vllm_prefixshare.vllm_plugin.step.host_tables import HOST_TABLES

#: Partial results by shape. Layers of one shape share them, since the layers and KV-cache groups of
#: a worker run one after the other; they are freed with the last layer that holds them.
_PARTIALS: weakref.WeakValueDictionary[tuple[object, ...], PartialResults] = (
    weakref.WeakValueDictionary()
)


class PlannedLayer:
    """A layer whose decodes run in the kernels of this package. An implementation derives from this
    class first, then from vLLM's.

    shares: whether the layer is served.
    partials: partial results of the plans; set where the layer is served.
    cache_write: set by the builder of the layer's metadata.
    """

    shares: bool
    partials: PartialResults
    cache_write: CacheWrite | None = None
    _extras: LayerExtras | None = None

    def set_up(self, config: Any, layer: LayerSpec, extras: frozenset[str]) -> None:
        """Decide whether the layer is served, and if so reserve room for partial results: now,
        because vLLM sizes the KV cache after creating the layers.

        Args:
            config: the ``VllmConfig``.
            layer: this layer.
            extras: see ``Platform``.
        """
        reason = refusal(layer, Platform(CUDA_DTYPES, extras, is_here=True))
        self.shares = reason is None
        if reason is not None:
            fall_back(reason)
            return
        if layer.engine.shards > 1:
            check_collectives(config)
        HOST_TABLES.want(self)
        self.partials = reserve_partials(self, config, this_device())

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called after each load of weights, including a load into the same tensors."""
        parent: Any = super()
        parent.process_weights_after_loading(act_dtype)
        gpu_builder.weights_loaded()


def block_size_of(impl: Any, config: Any) -> int | None:
    """The block size of a layer that vLLM is creating. None for the default of its backend, which
    FLASHMLA sets later with an fp8 cache: ``LayerSpec.attention_config`` knows it.
    """
    is_latent = getattr(impl, "kv_lora_rank", None) is not None
    if is_latent and impl.kv_cache_dtype in FP8_CACHES:
        return None
    block_size: int | None = config.cache_config.block_size
    return block_size


def reserve_partials(impl: Any, config: Any, device: torch.device) -> PartialResults:
    """Room for the partial results of any batch of this configuration."""
    attention = attention_of([impl], block_size_of(impl, config), config.model_config.dtype)
    query_len = decode_query_len(config)
    shape = (attention.num_qo_heads, attention.v_head_dim)
    key = (*shape, query_len, device)
    partials = _PARTIALS.get(key)
    kernels = kernels_that_may_serve(attention, device, settings().kernel, query_len)
    room = config.scheduler_config.max_num_seqs, invariance.piece_limits(config)
    maximum = max(k.capacity(*room).max_partials for k in kernels)
    # captured: by graphs of another engine in this process, which keeps them
    if partials is None or (partials.captured and not partials.holds(maximum)):
        load_planning(kernels[0], attention)
        partials = PartialResults(device, shape, query_len)
        _PARTIALS[key] = partials
    partials.reserve(maximum)
    return partials
