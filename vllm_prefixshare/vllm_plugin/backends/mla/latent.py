"""What the backends of multi-head latent attention (MLA) have in common: ``mla`` for caches in 16
bits and ``mla_fp8`` for quantised ones, each on top of the backend that vLLM would take.

Decodes, with their draft tokens, come first in a batch and run in the kernel of this package, after
absorption: the queries that ``forward_mqa`` gets are as wide as the cache. One step:

    build():       the parent's metadata of the batch; the plan of the decodes  [if changed]
    forward_mqa(): GpuExecutor.run on the decodes, the parent on the rest       [per layer]

A FULL CUDA graph holds only decodes, and so only our launches, which read the plan of each step. As
with plain attention, rows that share nothing also run in our kernel: a graph cannot switch kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonImpl
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.vllm_plugin.backends.common import PlannedLayer, block_size_of
from vllm_prefixshare.vllm_plugin.eligibility import platform
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine, LayerSpec
from vllm_prefixshare.vllm_plugin.step.gpu_builder import PlanningBuilder


@dataclass
class PlannedLatents:
    """How a step divides its decodes, beside the parent's metadata of the whole batch.

    executor: holds the plan of the decodes; always set.
    num_planned_tokens: their query tokens, which come first, with a graph's padding.
    rest: the parent's metadata of the other requests that it treats as decodes; None if none.
    """

    executor: GpuExecutor | None = None
    num_planned_tokens: int = 0
    rest: Any = None


class LatentBuilder(PlanningBuilder):
    """Plans for one KV-cache group; called once per step, and for each graph captured. A subclass
    derives from this class first, then from the parent.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    latent = True

    def _layers(self) -> Iterable[Any]:
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in self.layer_names]
        for layer in layers:
            # Kimi K3's writes its cache itself: latents need not be finite there
            if getattr(layer.impl, "shares", False) and not isinstance(layer, MLAAttention):
                layer.impl.shares = False
                fall_back(f"multi-head latent attention in {type(layer).__name__}")
        return layers


class LatentImpl(PlannedLayer, MLACommonImpl[Any]):
    """One layer: decodes in the kernel of this package, all else in the parent. A subclass derives
    from this class first, then from the parent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        engine, dtype = Engine.of_config(config), config.model_config.dtype
        layer = LayerSpec.of_impl(self, None, engine, dtype, block_size_of(self, config))
        # the hook has asked what this GPU takes, and chosen the parent by it
        self.set_up(config, layer, platform.gpu_extras(anywhere=True))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``MLACommonImpl.forward_mqa``.

        Args:
            q: ``[num_decode_tokens, num_heads, 576]``, or its first 512 columns and the others;
                float8_e4m3fn where the cache is quantised. Under decode context parallelism the
                heads are those of all ranks.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, 576]`` of the same dtype.

        Returns:
            ``[num_decode_tokens, num_heads, 512]`` of the model's dtype; under decode context
            parallelism also float32 ``[num_decode_tokens, num_heads]``, the natural logarithms of
            the sums of exponentials over the rank's shard, by which vLLM combines the ranks, else
            None.
        """
        parent: Any = super()
        planned, cache = attn_metadata, kv_c_and_k_pe_cache
        if not self.shares or not isinstance(planned, PlannedLatents):
            out, lse = parent.forward_mqa(q, cache, attn_metadata, layer)
            return out, lse
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        executor, n = planned.executor, planned.num_planned_tokens
        assert executor is not None
        dtype = getattr(torch, executor.attention.dtype)
        out, lse = q.new_empty(*q.shape[:2], self.kv_lora_rank, dtype=dtype), None
        if self.dcp_world_size > 1:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        if planned.rest is not None:
            out[n:], rest_lse = parent.forward_mqa(q[n:], cache, planned.rest, layer)
            if lse is not None:
                lse[n:] = rest_lse
        if n:
            latents = cache[:, :, None]  # of one KV head
            executor.run(
                q[:n],
                latents,
                latents[..., : self.kv_lora_rank],
                attn_metadata.decode.block_table,
                attn_metadata.decode.seq_lens,
                out[:n],
                self.scale,
                attn_metadata.query_start_loc if executor.query_len > 1 else None,
                lse=None if lse is None else lse[:n],
                extras=self.extras_of(layer, executor.attention),
            )
        return out, lse

    def extras_of(self, layer: Any, attention: AttentionConfig) -> LayerExtras | None:
        """The scales of this layer, where it is quantised: one record, made anew when vLLM makes
        other tensors. It refers to them: their values may change.
        """
        if attention.kv_dtype is None:
            return None
        q_scale, latent_scale, kept = layer._q_scale, layer._k_scale, self._extras
        if kept is None or kept.q_scale is not q_scale or kept.k_scale is not latent_scale:
            # a latent is the value, too: vLLM writes it once, by the scale of keys
            kept = LayerExtras(q_scale=q_scale, k_scale=latent_scale, v_scale=latent_scale)
            self._extras = kept
        return kept

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
        graph that is one launch, where the cache has 16 bits.

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
