"""The reasons why a layer keeps vLLM's own backend, as one ordered list."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_prefixshare.config import LATENT_SHAPE, MIN_HEAD_DIM
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import Platform

#: Maximum number of rows of a request, query heads times query tokens, in a layer with latents
#: (MLA) on a GPU. With more, a work tile of 64 rows holds a single request, and nothing is shared.
MAX_LATENT_ROWS = 32
#: Output dtypes of FLASHMLA with an fp8 cache.
FP8_LATENT_DTYPES = ("bfloat16",)

Condition = Callable[[LayerSpec, Platform], bool]


class Rule(NamedTuple):
    """A rule: layers for which ``applies`` returns True are not served.

    reason: completes "Layers with ..."; a function if it names a value.
    """

    reason: str | Callable[[LayerSpec], str]
    applies: Condition


def refusal(layer: LayerSpec, platform: Platform) -> str | None:
    """Why a layer is not served: the reason of the first rule that applies, or None.

    Raises:
        PrefixShareError: no kernel serves the shape, or a cost table does not fit (on this
            machine's GPU only).
    """
    for rule in RULES if platform.is_gpu else LAYER_RULES:
        if rule.applies(layer, platform):
            return rule.reason if isinstance(rule.reason, str) else rule.reason(layer)
    return None


def _needs(extra: str, has: Callable[[LayerSpec], bool]) -> Condition:
    return lambda layer, platform: has(layer) and extra not in platform.extras


def _other_dtype(layer: LayerSpec, platform: Platform) -> bool:
    latents_in_fp8 = layer.use_mla and layer.has_fp8_cache and platform.fp8_extra(use_mla=True)
    dtypes = FP8_LATENT_DTYPES if latents_in_fp8 else platform.dtypes
    return layer.dtype is not None and layer.dtype not in dtypes


def _other_cache(layer: LayerSpec, platform: Platform) -> bool:
    cache = layer.kv_cache_dtype
    if cache in (None, "auto", layer.dtype):
        return False
    if layer.has_fp8_cache and platform.fp8_extra(layer.use_mla):
        return False
    return layer.dtype is not None or "fp8" in str(cache)


def _other_head_dim(layer: LayerSpec, platform: Platform) -> bool:
    if layer.use_mla:
        width, rank = LATENT_SHAPE
        return layer.head_size != width or layer.kv_lora_rank not in (0, rank)
    return not MIN_HEAD_DIM <= layer.head_size <= platform.max_head_dim or layer.head_size % 8 != 0


def _no_composite(layer: LayerSpec, platform: Platform) -> bool:
    # sinks, batch invariance and shards are not supported by vLLM's composite, fp8 caches and
    # drafts were not tested in it
    is_plain = not (
        layer.has_sink
        or layer.use_batch_invariant
        or layer.use_dcp
        or layer.engine.shards > 1
        or layer.has_fp8_cache
        or layer.engine.query_len > 1
    )
    return layer.use_mm_prefix and not (is_plain and "mm_prefix" in platform.extras)


def _too_many_draft_rows(layer: LayerSpec, _: Platform) -> bool:
    max_heads = MAX_LATENT_ROWS // layer.engine.query_len
    return layer.use_mla and layer.engine.query_len > 1 and layer.all_heads > max_heads


def _too_short_window(layer: LayerSpec, platform: Platform) -> bool:
    if not platform.is_here or layer.sliding_window is None:
        return False
    from vllm_prefixshare.vllm_plugin.eligibility.measured import shortest_window

    shortest = shortest_window(layer.attention_config())
    return shortest is None or layer.sliding_window < shortest


def _pays_from(layer: LayerSpec) -> str:
    from vllm_prefixshare.vllm_plugin.eligibility.measured import shortest_window

    shortest = shortest_window(layer.attention_config())
    return "no window" if shortest is None else f"{shortest} tokens"


def _latent_kernel_failure(layer: LayerSpec) -> str | None:
    from vllm_prefixshare.vllm_plugin.eligibility.measured import kernel_failure

    return kernel_failure(layer.attention_config(), layer.engine.query_len)


#: Rules that depend on the layer only, on CPUs and GPUs.
LAYER_RULES = (
    # vLLM chooses a backend for these layers without asking the platform
    Rule(
        lambda s: f"keys of {s.head_size} and values of {s.value_size}",
        lambda s, _: s.value_size not in (0, s.head_size),
    ),
    Rule("chunked local attention", lambda s, _: s.chunked),
    Rule("ALiBi slopes", _needs("alibi", lambda s: s.alibi)),
    Rule("a logits soft cap", _needs("softcap", lambda s: s.logits_soft_cap)),
    Rule("multi-head latent attention", _needs("mla", lambda s: s.use_mla)),
    Rule("sparse attention", lambda s, _: s.use_sparse),
    Rule("attention sinks", _needs("sinks", lambda s: s.has_sink)),
    Rule(
        "a sliding window",
        lambda s, p: s.has_sliding_window and (s.use_mla or "windows" not in p.extras),
    ),
    Rule("bidirectional multimodal prefixes", _no_composite),
    Rule("non-causal attention", lambda s, _: s.use_non_causal),
    Rule("reference sliding-window attention", lambda s, _: s.use_rswa),
    Rule("decode context parallelism", _needs("dcp", lambda s: s.use_dcp)),
    Rule("prefill context parallelism", lambda s, _: s.use_pcp),
    Rule("adaptive verification", lambda s, _: s.use_adaptive_verification),
    Rule(
        "batch invariance",
        lambda s, p: s.use_batch_invariant and (s.use_mla or "invariance" not in p.extras),
    ),
    Rule(lambda s: f"attention type {s.attn_type}", lambda s, _: s.attn_type != "decoder"),
    Rule(lambda s: f"dtype {s.dtype}", _other_dtype),
    Rule(lambda s: f"a KV cache of type {s.kv_cache_dtype}", _other_cache),
    Rule(lambda s: f"head_dim {s.head_size}", _other_head_dim),
)

#: Rules that depend on the engine as well, on GPUs.
ENGINE_RULES = (
    Rule(
        f"multi-head latent attention of more than {MAX_LATENT_ROWS} heads a GPU",
        lambda s, _: s.use_mla and s.all_heads > MAX_LATENT_ROWS,
    ),
    Rule(
        "multi-head latent attention and kernel 'portable'",
        lambda s, _: s.use_mla and settings().kernel == "portable",
    ),
    Rule(
        lambda s: (
            f"{s.engine.query_len - 1} drafts and multi-head latent attention of more than "
            f"{MAX_LATENT_ROWS // s.engine.query_len} heads a GPU"
        ),
        _too_many_draft_rows,
    ),
    Rule("prefill context parallelism", lambda s, _: s.engine.prefill_shards > 1),
    Rule("micro-batches", lambda s, _: s.engine.micro_batches),
    Rule("diffusion decoding", lambda s, _: s.engine.is_diffusion),
    Rule("a draft model", lambda s, _: s.engine.is_draft),
    # lengths that count rejected drafts would move the last cut
    Rule(
        "drafts under batch invariance",
        lambda s, _: s.engine.query_len > 1 and invariance.wanted(),
    ),
    # not tested
    Rule(
        "decode context parallelism under batch invariance",
        lambda s, _: s.engine.shards > 1 and invariance.wanted(),
    ),
    # the causal order of a request's queries is not known within a shard
    Rule(
        "drafts under decode context parallelism",
        lambda s, _: s.engine.shards > 1 and s.engine.query_len > 1,
    ),
    # every rank would add the sink
    Rule(
        "attention sinks under decode context parallelism",
        lambda s, _: s.engine.shards > 1 and s.has_sink,
    ),
    # a position in a shard is not the position in the request
    Rule(
        "ALiBi slopes under decode context parallelism",
        lambda s, _: s.engine.shards > 1 and s.alibi,
    ),
    Rule(
        "a sliding window under decode context parallelism",
        lambda s, _: s.engine.shards > 1 and s.sliding_window is not None,
    ),
    # not tested
    Rule(
        "an fp8 KV cache under decode context parallelism",
        lambda s, _: s.engine.shards > 1 and s.has_fp8_cache,
    ),
    # requests that accept more drafts free blocks that other requests still read
    Rule(
        "drafts with a sliding window",
        lambda s, _: s.sliding_window is not None and s.engine.query_len > 1,
    ),
    # the start of a KV range depends on its readers
    Rule(
        "a sliding window under batch invariance",
        lambda s, _: s.sliding_window is not None and invariance.wanted(),
    ),
    # a block that a window has left may hold a state, which may read as NaN
    Rule(
        "a sliding window next to linear attention",
        lambda s, _: s.sliding_window is not None and s.engine.is_hybrid,
    ),
    # such a block may hold numbers of another type, which may read as NaN
    Rule(
        "a sliding window next to KV caches of another type",
        lambda s, _: s.sliding_window is not None and s.engine.mixed_caches,
    ),
)

#: Rules that depend on this machine's kernels and cost table.
MEASURED_RULES = (
    Rule(
        lambda s: (
            f"a sliding window of {s.sliding_window} tokens where sharing pays from "
            f"{_pays_from(s)} on"
        ),
        _too_short_window,
    ),
    # Where Triton does not compile the Hopper kernel, plain attention uses the portable kernel; MLA
    # has no other kernel.
    Rule(
        lambda s: f"multi-head latent attention without a kernel ({_latent_kernel_failure(s)})",
        lambda s, p: p.is_here and s.use_mla and _latent_kernel_failure(s) is not None,
    ),
)

RULES = LAYER_RULES + ENGINE_RULES + MEASURED_RULES
