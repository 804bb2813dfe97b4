"""Which layers are served; the others keep vLLM's own backend."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm_prefixshare.config import (
    FP8,
    FP8_CACHES,
    LATENT_SHAPE,
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    AttentionConfig,
)
from vllm_prefixshare.integration import BACKEND_NAME, invariance, metrics
from vllm_prefixshare.integration.log import logger
from vllm_prefixshare.integration.stats import STATS
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.settings import settings

#: dtypes that the GPU kernels take.
CUDA_DTYPES = ("bfloat16", "float16")
#: what FLASHMLA answers in, whatever the layer's dtype, and the blocks that it takes, where the
#: cache has fp8
FP8_LATENT_DTYPES = ("bfloat16",)
FP8_LATENT_BLOCK = 64
#: largest head_dim served unless the experimental ``head_dim`` is asked for
USUAL_HEAD_DIM = 256
#: most rows of a request, query heads times query tokens, in a layer with latents (MLA) on a GPU:
#: with more, a work tile of 64 rows holds one request, and nothing is shared
MAX_LATENT_ROWS = 32
#: what a layer may have beside plain attention: on a GPU, and on a CPU
GPU_EXTRAS = frozenset(
    {"dcp", "fp8", "invariance", "mla", "mla_fp8", "sinks", "softcap", "windows"}
)
NOTHING: frozenset[str] = frozenset()


def gpu_extras(anywhere: bool = False) -> frozenset[str]:
    """What layers may have on this GPU: sinks and fp8 caches only where FLASH_ATTN, which does
    their prefills, takes them; latents where FLASH_ATTN_MLA does, in fp8 where FLASHMLA does; batch
    invariance where this vLLM makes it possible.

    Args:
        anywhere: return what layers may have on a GPU that supports everything.
    """
    extras = GPU_EXTRAS | settings().experimental
    if anywhere:
        return extras
    from vllm.v1.attention.backends.fa_utils import flash_attn_supports_mla
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.ops.flashmla import is_flashmla_dense_supported

    takes = {
        "mla": flash_attn_supports_mla(),
        "mla_fp8": is_flashmla_dense_supported()[0],
        "sinks": FlashAttentionBackend.supports_sink(),
        "fp8": FlashAttentionBackend.supports_kv_cache_dtype("fp8"),
        "invariance": not invariance.wanted() or invariance.is_possible(),
    }
    return extras - {name for name, there in takes.items() if not there}


def selector_refusal(
    layer: Any, dtypes: Iterable[str], extras: frozenset[str] = NOTHING
) -> str | None:
    """Why a layer with this ``AttentionSelectorConfig`` cannot be served, or None.

    Args:
        dtypes: those that the platform's executors take.
        extras: the served ones of ``GPU_EXTRAS`` and ``settings.EXPERIMENTAL``.
    """
    dtype = str(layer.dtype).removeprefix("torch.")
    named = {
        "use_mla": "multi-head latent attention",
        "use_sparse": "sparse attention",
        "has_sink": "attention sinks",
        "has_sliding_window": "a sliding window",
        "use_mm_prefix": "bidirectional multimodal prefixes",
        "use_non_causal": "non-causal attention",
        "use_rswa": "reference sliding-window attention",
        "use_dcp": "decode context parallelism",
        "use_pcp": "prefill context parallelism",
        "use_adaptive_verification": "adaptive verification",
        "use_batch_invariant": "batch invariance",
    }
    if "sinks" in extras:
        del named["has_sink"]
    if "dcp" in extras:
        del named["use_dcp"]
    if "mla" in extras:
        del named["use_mla"]
    if "invariance" in extras and not layer.use_mla:
        del named["use_batch_invariant"]
    if "windows" in extras and not layer.use_mla:
        del named["has_sliding_window"]
    # vLLM 0.29 has no use_rswa
    found = [reason for name, reason in named.items() if getattr(layer, name, False)]
    if layer.attn_type != "decoder":
        found.append(f"attention type {layer.attn_type}")
    caches = FP8_CACHES if ("mla_fp8" if layer.use_mla else "fp8") in extras else ()
    if layer.use_mla and layer.kv_cache_dtype in caches:
        dtypes = FP8_LATENT_DTYPES
    if dtype not in dtypes:
        found.append(f"dtype {dtype}")
    if layer.kv_cache_dtype not in (None, "auto", dtype, *caches):
        found.append(f"a {layer.kv_cache_dtype} KV cache")
    widest = MAX_HEAD_DIM if "head_dim" in extras else USUAL_HEAD_DIM
    fits = MIN_HEAD_DIM <= layer.head_size <= widest and layer.head_size % 8 == 0
    if layer.use_mla:
        fits = layer.head_size == LATENT_SHAPE[0]
    if not fits:
        found.append(f"head_dim {layer.head_size}")
    return found[0] if found else None


class Engine(NamedTuple):
    """What of an engine decides, beside the layer, whether it is served on a GPU.

    query_len: most query tokens of a decode: its own and its drafts.
    shards: ranks that hold a part of each request's KV (decode context parallelism).
    is_hybrid: whether the model has layers with linear attention, too.
    mixed_caches: whether some layers keep a 16-bit KV cache beside quantised ones.
    """

    query_len: int = 1
    shards: int = 1
    is_hybrid: bool = False
    mixed_caches: bool = False


def latent_refusal(num_heads: int) -> str | None:
    """Why MLA with so many query heads on a GPU is not served, or None: under decode context
    parallelism those of all ranks, which each rank multiplies with its shard.
    """
    if num_heads > MAX_LATENT_ROWS:
        return f"multi-head latent attention of more than {MAX_LATENT_ROWS} heads a GPU"
    if settings().kernel == "portable":
        return "multi-head latent attention and kernel 'portable'"
    return None


def latent_layer_refusal(shape: tuple[int, int], num_heads: int, engine: Engine) -> str | None:
    """Why MLA on a GPU is not served in an engine, or None.

    Args:
        shape: head_dim, and how much of it is the latent (``kv_lora_rank``).
        num_heads: as in ``latent_refusal``.
    """
    most = MAX_LATENT_ROWS // engine.query_len
    checks = (
        (shape != LATENT_SHAPE, f"head_dim {shape[0]}"),
        (
            engine.query_len > 1 and num_heads > most,
            f"{engine.query_len - 1} drafts and multi-head latent attention of more than {most} "
            "heads a GPU",
        ),
    )
    return next((reason for found, reason in checks if found), None)


def invariance_refusal(engine: Engine) -> str | None:
    """Why an engine with VLLM_BATCH_INVARIANT=1 is not served on a GPU, or None."""
    if not invariance.wanted():
        return None
    checks = (
        # lengths that count rejected drafts would move the last cut
        (engine.query_len > 1, "drafts under batch invariance"),
        # nothing known is against it; no test and no GPU has run it
        (engine.shards > 1, "decode context parallelism under batch invariance"),
    )
    return next((reason for found, reason in checks if found), None)


def shard_refusal(attention: AttentionConfig, engine: Engine) -> str | None:
    """Why a layer on a GPU cannot be served where each rank sees a shard of its KV, or None."""
    if engine.shards == 1:
        return None
    has = attention.features
    checks = (
        # several queries of a request have a causal order
        (engine.query_len > 1, "drafts under decode context parallelism"),
        # every rank would count them
        ("sinks" in has, "attention sinks under decode context parallelism"),
        # positions in a shard are not those in the request
        ("alibi" in has, "ALiBi slopes under decode context parallelism"),
        (
            attention.sliding_window is not None,
            "a sliding window under decode context parallelism",
        ),
        # nothing known is against it; no test and no GPU has run it
        (attention.kv_dtype is not None, "an fp8 KV cache under decode context parallelism"),
    )
    return next((reason for found, reason in checks if found), None)


def window_refusal(attention: AttentionConfig, engine: Engine) -> str | None:
    """Why a layer on a GPU with a sliding window of any length cannot be served, or None."""
    if attention.sliding_window is None:
        return None
    checks = (
        # requests that accept more drafts than others lose blocks that the others still read
        (engine.query_len > 1, "drafts with a sliding window"),
        # where a run begins depends on its readers
        (invariance.wanted(), "a sliding window under batch invariance"),
        # a block that a window has left may hold a state, and so no numbers
        (engine.is_hybrid, "a sliding window beside linear attention"),
        # it may hold numbers of another type, which read as NaN
        (engine.mixed_caches, "a sliding window beside KV caches of another type"),
    )
    return next((reason for found, reason in checks if found), None)


def declines(layer: Any, dtypes: Iterable[str], latent: bool = False) -> str | None:
    """As ``selector_refusal``, and logs the reason once. Called for each kind of layer for which
    the backend was chosen, so metrics start here even if no layer is served.

    Args:
        latent: whether the caller has a backend for latents, which is another class.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    metrics.start_in_worker()
    dtypes = tuple(dtypes)
    extras = gpu_extras() if dtypes == CUDA_DTYPES else NOTHING
    if not latent:
        extras -= {"mla"}
    reason = selector_refusal(layer, dtypes, extras)
    if reason is not None:
        fall_back(reason)
    return reason


def served_together(impls: Iterable[Any], spec: Any) -> list[Any]:
    """The implementations that one plan can serve, of those of a group with this ``KVCacheSpec``.
    The others are set not to share.

    Where vLLM's hybrid KV cache manager is off, layers with a window are in the group of those
    without, and its blocks are kept for all tokens.
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
    """Why a metadata builder cannot plan for its layers, or None. Block tables of other kinds
    than full attention keep ids of freed blocks, or leave some out. With a window this is known,
    and no such block is shared.

    Args:
        final: the only class that may plan; vLLM derives others, which change the runner's
            metadata before they build.
        latent: whether the layers have latents in place of keys and values.
        window: sliding window of the served layers; None for none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    spec, derived = builder.kv_cache_spec, type(builder) is not final
    usual = MLAAttentionSpec if latent else FullAttentionSpec
    known = type(spec) is SlidingWindowSpec and window == spec.sliding_window
    checks = (
        (type(spec) is not usual and not known, f"a KV cache of {type(spec).__name__}"),
        # other layers of the group may have the chunks
        (
            derived and getattr(spec, "attention_chunk_size", None) is not None,
            "chunked local attention",
        ),
        (derived, f"metadata of {type(builder).__name__}"),
    )
    return next((reason for found, reason in checks if found), None)


def impl_refusal(impl: Any, full_context: object, extras: frozenset[str] = NOTHING) -> str | None:
    """Why a layer with this implementation cannot be served, or None; for what is not in the
    selector's configuration.

    Args:
        full_context: value of ``sliding_window`` that stands for none.
        extras: as in ``selector_refusal``.
    """
    cache = impl.kv_cache_dtype
    takes_cache = "fp8" not in cache or ("fp8" in extras and cache in FP8_CACHES)
    slopes, cap = impl.alibi_slopes is not None, bool(impl.logits_soft_cap)
    checks = (
        (slopes and "alibi" not in extras, "ALiBi slopes"),
        (cap and "softcap" not in extras, "a logits soft cap"),
        (impl.sliding_window != full_context and "windows" not in extras, "a sliding window"),
        (impl.sinks is not None and "sinks" not in extras, "attention sinks"),
        (impl.attn_type != "decoder", f"attention type {impl.attn_type}"),
        (not takes_cache, f"a {cache} KV cache"),
    )
    return next((reason for found, reason in checks if found), None)


def attention_of(impls: Sequence[Any], block_size: int, dtype: Any) -> AttentionConfig:
    """What an executor for these implementations of one shape must serve: the query heads of all
    ranks among which decode context parallelism divides the KV.

    Args:
        dtype: the model's, even if the KV cache has another.
    """
    impl, name = impls[0], str(dtype).removeprefix("torch.")
    if (rank := getattr(impl, "kv_lora_rank", None)) is not None:
        shape = impl.num_heads * impl.dcp_world_size, 1, impl.head_size, block_size, name
        fp8 = FP8 if impl.kv_cache_dtype in FP8_CACHES else None
        return AttentionConfig(*shape, fp8, fp8, kv_lora_rank=rank)
    has = {
        "sinks": any(x.sinks is not None for x in impls),
        "soft_cap": any(x.logits_soft_cap for x in impls),
        "alibi": any(x.alibi_slopes is not None for x in impls),
    }
    kv_dtype = FP8 if "fp8" in impl.kv_cache_dtype else None
    return AttentionConfig(
        impl.num_heads * impl.dcp_world_size,
        impl.num_kv_heads,
        impl.head_size,
        block_size,
        name,
        kv_dtype,
        kv_dtype if getattr(impl, "supports_quant_query_input", False) else None,
        tuple(name for name, there in has.items() if there),
        sliding_window=window_of(impl),
    )


def window_of(impl: Any) -> int | None:
    """The sliding window of a GPU layer, in tokens, its own included; None for full attention."""
    window: Any = getattr(impl, "sliding_window", None)
    return window[0] + 1 if isinstance(window, tuple) and window[0] >= 0 else None


def fall_back(reason: str) -> None:
    """Log once that a layer keeps vLLM's own backend; refuse under the strict setting.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    if settings().strict:
        raise PrefixShareError(f"{BACKEND_NAME} does not serve a layer ({reason}) and STRICT=1.")
    STATS.note_fallback(reason)
    logger().warning_once("Layers with %s keep vLLM's own attention backend.", reason)
