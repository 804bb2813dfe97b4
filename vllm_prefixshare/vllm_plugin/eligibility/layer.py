"""Properties of a layer and its engine that decide whether the layer is served."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_prefixshare.config import FP8, FP8_CACHES, AttentionConfig
from vllm_prefixshare.vllm_plugin.compat import decode_query_len, is_draft_model

#: Default block size of vLLM on a GPU, and the block size of FLASHMLA with an fp8 cache, in tokens.
USUAL_BLOCK = 16
FP8_LATENT_BLOCK = 64


class Engine(NamedTuple):
    """Engine settings that affect whether its layers are served on a GPU.

    query_len: maximum number of query tokens of a decode, drafts included.
    shards: ranks that hold a part of each request's KV (decode context parallelism).
    is_hybrid: whether the model also has layers with linear attention.
    mixed_caches: whether some layers have a 16-bit KV cache and others a quantised one.
    prefill_shards: ranks that divide a prefill (prefill context parallelism).
    micro_batches, is_diffusion, is_draft: whether it runs in micro-batches, decodes by diffusion,
        is a draft model.
    """

    query_len: int = 1
    shards: int = 1
    is_hybrid: bool = False
    mixed_caches: bool = False
    prefill_shards: int = 1
    micro_batches: bool = False
    is_diffusion: bool = False
    is_draft: bool = False

    @staticmethod
    def of_config(config: Any) -> "Engine":
        """The engine of a ``VllmConfig``."""
        parallel, cache = config.parallel_config, config.cache_config
        return Engine(
            query_len=decode_query_len(config),
            shards=parallel.decode_context_parallel_size,
            is_hybrid=config.model_config.is_hybrid,
            mixed_caches=cache.cache_dtype not in ("auto", "float16", "bfloat16")
            and bool(cache.kv_cache_dtype_skip_layers),
            prefill_shards=parallel.prefill_context_parallel_size,
            micro_batches=parallel.use_ubatching,
            is_diffusion=config.model_config.is_diffusion,
            is_draft=is_draft_model(),
        )


@dataclass(frozen=True)
class LayerSpec:
    """What is known of a layer from vLLM's selector (``of_selector``), from its implementation
    (``of_impl``), or from a checkpoint.

    Fields are named as in vLLM's ``AttentionSelectorConfig``. dtype: None if unknown.
    kv_cache_dtype: "auto" or None for the dtype of the layer. num_heads, num_kv_heads: per GPU.
    sliding_window: number of tokens, including the query; None for full attention, or if unknown.
    kv_lora_rank: width of MLA's compressed KV; 0 for none, or if unknown. value_size: width of
    values if vLLM chooses another backend because of it, else 0. quantised_query: whether queries
    are quantised with the KV cache. block_size: None for vLLM's default.
    """

    head_size: int
    dtype: str | None
    kv_cache_dtype: str | None = "auto"
    num_heads: int = 1
    num_kv_heads: int = 1
    attn_type: str = "decoder"
    use_mla: bool = False
    use_sparse: bool = False
    has_sink: bool = False
    has_sliding_window: bool = False
    use_mm_prefix: bool = False
    use_non_causal: bool = False
    use_rswa: bool = False
    use_dcp: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_batch_invariant: bool = False
    chunked: bool = False
    alibi: bool = False
    logits_soft_cap: bool = False
    sliding_window: int | None = None
    kv_lora_rank: int = 0
    value_size: int = 0
    quantised_query: bool = True
    block_size: int | None = None
    engine: Engine = field(default_factory=Engine)

    @staticmethod
    def of_selector(layer: Any) -> "LayerSpec":
        """The layer of an ``AttentionSelectorConfig``."""
        # vLLM 0.29 has no use_rswa
        known = {name: getattr(layer, name) for name in SELECTOR_FIELDS if hasattr(layer, name)}
        return LayerSpec(**known | {"dtype": _name(layer.dtype)})

    @staticmethod
    def of_impl(
        impl: Any,
        full_context: object,
        engine: Engine | None = None,
        dtype: Any = None,
        block_size: int | None = None,
    ) -> "LayerSpec":
        """The layer of an attention implementation.

        Args:
            full_context: value of ``impl.sliding_window`` that means full attention.
            dtype: the model's, even if the KV cache has another; None if unknown.
        """
        latent = getattr(impl, "kv_lora_rank", None) or 0
        return LayerSpec(
            head_size=impl.head_size,
            dtype=None if dtype is None else _name(dtype),
            kv_cache_dtype=impl.kv_cache_dtype,
            num_heads=impl.num_heads,
            num_kv_heads=1 if latent else impl.num_kv_heads,
            attn_type=getattr(impl, "attn_type", "decoder"),
            use_mla=latent > 0,
            has_sink=getattr(impl, "sinks", None) is not None,
            has_sliding_window=not latent and impl.sliding_window != full_context,
            alibi=not latent and impl.alibi_slopes is not None,
            logits_soft_cap=not latent and bool(impl.logits_soft_cap),
            sliding_window=window_of(impl),
            kv_lora_rank=latent,
            quantised_query=bool(latent or getattr(impl, "supports_quant_query_input", False)),
            block_size=block_size,
            engine=engine or Engine(),
        )

    @property
    def all_heads(self) -> int:
        """Query heads that a GPU computes: under decode context parallelism the heads of all
        ranks, on its shard of the KV.
        """
        return self.num_heads * self.engine.shards

    @property
    def has_fp8_cache(self) -> bool:
        """Whether the KV cache has an 8-bit type that the kernels read."""
        return self.kv_cache_dtype in FP8_CACHES

    def attention_config(self) -> AttentionConfig:
        """The shape that an executor for the layer must serve.

        Raises:
            PrefixShareError: no kernel serves the shape.
        """
        assert self.dtype is not None
        fp8 = FP8 if self.has_fp8_cache else None
        usual = FP8_LATENT_BLOCK if self.use_mla and fp8 else USUAL_BLOCK
        block_size = usual if self.block_size is None else self.block_size
        if self.use_mla:
            shape = self.all_heads, 1, self.head_size, block_size, self.dtype
            return AttentionConfig(*shape, fp8, fp8, kv_lora_rank=self.kv_lora_rank)
        has = {"sinks": self.has_sink, "soft_cap": self.logits_soft_cap, "alibi": self.alibi}
        return AttentionConfig(
            self.all_heads,
            self.num_kv_heads,
            self.head_size,
            block_size,
            self.dtype,
            fp8,
            fp8 if self.quantised_query else None,
            tuple(name for name, there in has.items() if there),
            sliding_window=self.sliding_window,
        )


#: Fields with the same name in ``AttentionSelectorConfig``.
SELECTOR_FIELDS = (
    "head_size", "kv_cache_dtype", "attn_type", "use_mla", "use_sparse", "has_sink",
    "has_sliding_window", "use_mm_prefix", "use_non_causal", "use_rswa", "use_dcp", "use_pcp",
    "use_adaptive_verification", "use_batch_invariant",
)  # fmt: skip


def window_of(impl: Any) -> int | None:
    """The sliding window of a GPU layer in tokens, the query included; None for full attention."""
    window: Any = getattr(impl, "sliding_window", None)
    return window[0] + 1 if isinstance(window, tuple) and window[0] >= 0 else None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
