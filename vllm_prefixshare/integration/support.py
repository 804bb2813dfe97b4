"""Which layers are served; the others keep vLLM's own backend."""

from collections.abc import Iterable
from typing import Any

from vllm_prefixshare.config import MAX_HEAD_DIM, MIN_HEAD_DIM
from vllm_prefixshare.integration import BACKEND_NAME, metrics
from vllm_prefixshare.integration.log import logger
from vllm_prefixshare.integration.stats import STATS
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.settings import settings

#: dtypes that the GPU kernels take.
CUDA_DTYPES = ("bfloat16", "float16")


def selector_refusal(layer: Any, dtypes: Iterable[str]) -> str | None:
    """Why a layer with this ``AttentionSelectorConfig`` cannot be served, or None.

    Args:
        dtypes: those that the platform's executors take.
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
    # not every release has every field
    found = [reason for name, reason in named.items() if getattr(layer, name, False)]
    if layer.attn_type != "decoder":
        found.append(f"attention type {layer.attn_type}")
    if dtype not in dtypes:
        found.append(f"dtype {dtype}")
    if layer.kv_cache_dtype not in (None, "auto", dtype):
        found.append(f"a {layer.kv_cache_dtype} KV cache")
    if not MIN_HEAD_DIM <= layer.head_size <= MAX_HEAD_DIM or layer.head_size % 8:
        found.append(f"head_dim {layer.head_size}")
    return found[0] if found else None


def declines(layer: Any, dtypes: Iterable[str]) -> str | None:
    """As ``selector_refusal``, and said once. Asked for each kind of layer for which the backend
    was chosen, so metrics start here: also where no layer is served.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    metrics.start_in_worker()
    reason = selector_refusal(layer, dtypes)
    if reason is not None:
        fall_back(reason)
    return reason


def spec_refusal(spec: Any) -> str | None:
    """Why layers with this ``KVCacheSpec`` cannot be served, or None. Block tables of other kinds
    than full attention keep ids of freed blocks, or leave some out.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if type(spec) is not FullAttentionSpec:
        return f"a KV cache of {type(spec).__name__}"
    if getattr(spec, "sliding_window", None) is not None:
        return "a sliding window"
    if getattr(spec, "attention_chunk_size", None) is not None:
        return "chunked local attention"
    return None


def impl_refusal(impl: Any, full_context: object) -> str | None:
    """Why a layer with this implementation cannot be served, or None; for what is not in the
    selector's configuration.

    Args:
        full_context: value of ``sliding_window`` that stands for none.
    """
    checks = (
        (impl.alibi_slopes is not None, "ALiBi slopes"),
        (bool(impl.logits_soft_cap), "a logits soft cap"),
        (impl.sliding_window != full_context, "a sliding window"),
        (impl.sinks is not None, "attention sinks"),
        (impl.attn_type != "decoder", f"attention type {impl.attn_type}"),
        ("fp8" in impl.kv_cache_dtype, f"a {impl.kv_cache_dtype} KV cache"),
    )
    return next((reason for found, reason in checks if found), None)


def fall_back(reason: str) -> None:
    """Say once that a layer keeps vLLM's own backend; refuse under the strict setting.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    if settings().strict:
        raise PrefixShareError(f"{BACKEND_NAME} does not serve a layer ({reason}) and STRICT=1.")
    STATS.note_fallback(reason)
    logger().warning_once("Layers with %s keep vLLM's own attention backend.", reason)
