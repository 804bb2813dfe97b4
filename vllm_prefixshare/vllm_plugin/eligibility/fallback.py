"""Applies the rules, and logs why a layer is not served."""

from typing import Any

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import BACKEND_NAME
from vllm_prefixshare.vllm_plugin.eligibility import platform
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CPU, CUDA_DTYPES, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.stats import STATS


def declines(layer: Any, on_gpu: bool) -> str | None:
    """Why a layer with this ``AttentionSelectorConfig`` is not served, or None; logs the reason
    once. Called for each kind of layer for which the backend was chosen, so metrics start here even
    if no layer is served.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    metrics.start_in_worker()
    here = Platform(CUDA_DTYPES, platform.gpu_extras()) if on_gpu else CPU
    reason = refusal(LayerSpec.of_selector(layer), here)
    if reason is not None:
        fall_back(reason)
    return reason


def fall_back(reason: str) -> None:
    """Count and log once that a layer keeps vLLM's own backend; raise under the strict setting.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_STRICT=1.
    """
    if settings().strict:
        raise PrefixShareError(f"{BACKEND_NAME} does not serve a layer ({reason}) and STRICT=1.")
    STATS.note_fallback(reason)
    logger().warning_once("Layers with %s keep vLLM's own attention backend.", reason)
