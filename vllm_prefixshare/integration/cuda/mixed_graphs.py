"""FULL CUDA graphs for steps that mix decodes with requests that have a few new tokens.

vLLM runs such a step piecewise: the host launches attention layer by layer, while running requests
wait for their next token. Here every query token of a small step is
a row of the plan, so the kernels launch as in a decode step and one graph serves both.
"""

from typing import Any

from vllm_prefixshare.integration import invariance
from vllm_prefixshare.integration.compat import decode_query_len
from vllm_prefixshare.integration.log import logger
from vllm_prefixshare.settings import settings


def is_asked_for() -> bool:
    """Whether ``VLLM_PREFIXSHARE_EXPERIMENTAL`` names ``mixed_graphs``."""
    return "mixed_graphs" in settings().experimental


def mixed_graphs_refusal(config: Any) -> str | None:
    """Why the steps of an engine cannot all run in FULL CUDA graphs, or None.

    Args:
        config: a ``VllmConfig``.
    """
    from vllm.platforms import current_platform

    model, text = config.model_config, config.model_config.hf_text_config
    checks = (
        (not config.use_v2_model_runner, "the V1 model runner"),
        (decode_query_len(config) > 1, "speculative decoding"),
        (config.parallel_config.decode_context_parallel_size > 1, "decode context parallelism"),
        (config.parallel_config.use_ubatching, "micro-batches"),
        (config.kv_transfer_config is not None, "a KV connector, which loads layer by layer"),
        (model.use_mla, "multi-head latent attention"),
        (model.is_hybrid or model.is_encoder_decoder, "a hybrid or encoder-decoder model"),
        (getattr(text, "sliding_window", None) is not None, "sliding windows"),
        (invariance.wanted(), "batch invariance"),
        (settings().kernel == "portable", "the portable kernel"),
        (not current_platform.is_device_capability(90), "a GPU other than Hopper"),
    )
    return next((reason for found, reason in checks if found), None)


def choose_mixed_graphs(config: Any) -> None:
    """Let mixed steps run in FULL graphs where vLLM's default would run them piecewise.

    Args:
        config: a finished ``VllmConfig`` whose ``cudagraph_mode`` the user left to vLLM.
    """
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    if not is_asked_for() or compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        return
    reason = mixed_graphs_refusal(config)
    if reason is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL
    else:
        logger().info_once("Steps with new requests run in piecewise CUDA graphs: %s.", reason)


def graph_rows(config: Any) -> int:
    """Maximum number of query tokens of a mixed step that replays a FULL graph; 0 where mixed
    steps do not. vLLM settles its mode after it has made the metadata builders.
    """
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    mode, sizes = compilation.cudagraph_mode, compilation.cudagraph_capture_sizes
    if mode is None or mode.mixed_mode() != CUDAGraphMode.FULL or not sizes:
        return 0
    return int(max(sizes))
