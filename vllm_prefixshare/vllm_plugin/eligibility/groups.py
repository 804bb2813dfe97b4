"""Which layers of a KV-cache group one plan serves."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine, LayerSpec, window_of


def served_together(impls: Iterable[Any], spec: Any) -> list[Any]:
    """The implementations of a group with this ``KVCacheSpec`` that one plan can serve. The others
    are set not to share.

    Without vLLM's hybrid KV cache manager, layers with and without a window are in one group, which
    keeps the blocks of all tokens.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    served = [impl for impl in impls if getattr(impl, "shares", False)]
    if type(spec) is SlidingWindowSpec:
        return served
    for impl in served:
        if window_of(impl) is not None:
            impl.shares = False
            fall_back("a sliding window")
    return [impl for impl in served if impl.shares]


def builder_refusal(
    builder: Any, final: type, latent: bool = False, window: int | None = None
) -> str | None:
    """Why a metadata builder cannot plan for its layers, or None. Block tables of attention other
    than full attention keep ids of freed blocks, or leave some out. With a known window these
    blocks are known, and are not shared.

    Args:
        final: the only class that may plan; vLLM derives classes that change the runner's metadata
            before they build.
        latent: whether the layers have an MLA cache.
        window: sliding window of the served layers; None for none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    spec = builder.kv_cache_spec
    derived = type(builder) is not final
    usual = MLAAttentionSpec if latent else FullAttentionSpec
    known = type(spec) is SlidingWindowSpec and window == spec.sliding_window
    checks = (
        (type(spec) is not usual and not known, f"a KV cache of {type(spec).__name__}"),
        # other layers of the group may use chunked attention
        (
            derived and getattr(spec, "attention_chunk_size", None) is not None,
            "chunked local attention",
        ),
        (derived, f"metadata of {type(builder).__name__}"),
    )
    return next((reason for found, reason in checks if found), None)


def attention_of(impls: Sequence[Any], block_size: int | None, dtype: Any) -> AttentionConfig:
    """The shape that an executor for these implementations, all of one shape, must serve. Under
    decode context parallelism it has the query heads of all ranks.

    Args:
        block_size: None for the default of the layers' backend.
        dtype: the model's, even if the KV cache has another.
    """
    engine = Engine(shards=impls[0].dcp_world_size)
    specs = [LayerSpec.of_impl(impl, None, engine, dtype, block_size) for impl in impls]
    return replace(
        specs[0],
        has_sink=any(s.has_sink for s in specs),
        logits_soft_cap=any(s.logits_soft_cap for s in specs),
        alibi=any(s.alibi for s in specs),
    ).attention_config()
