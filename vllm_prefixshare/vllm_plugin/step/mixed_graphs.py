"""FULL CUDA graphs for steps that mix decodes with requests that have a few new tokens.

vLLM runs such a step piecewise: the host launches attention layer by layer, while running requests
wait for their next token. Here every query token of a small step is a row of the plan, so the
kernels launch as in a decode step and one graph serves both.
"""

from typing import Any

from packaging.version import Version

from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.compat import decode_query_len, vllm_version
from vllm_prefixshare.vllm_plugin.observability.log import logger

#: Tokens of the largest mixed step in a graph where the user names no sizes.
MAX_GRAPH_TOKENS = 1024
#: Sizes of these graphs: vLLM's steps of 16 tokens, and steps of 32 where vLLM's own sizes end.
GRAPH_SIZES = (*range(16, 512, 16), *range(512, MAX_GRAPH_TOKENS + 1, 32))
#: The oldest vLLM that has run mixed steps so.
FIRST_RELEASE = Version("0.33.0")
_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def mixed_graphs_refusal(config: Any) -> str | None:
    """Why the steps of an engine cannot all run in FULL CUDA graphs, or None.

    Args:
        config: a ``VllmConfig``.
    """
    from vllm.platforms import current_platform

    model, parallel = config.model_config, config.parallel_config
    checks = (
        (vllm_version() < FIRST_RELEASE, f"a vLLM before {FIRST_RELEASE}"),
        (not config.use_v2_model_runner, "the V1 model runner"),
        (decode_query_len(config) > 1, "speculative decoding"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (parallel.use_ubatching, "micro-batches"),
        (config.kv_transfer_config is not None, "a KV connector, which loads layer by layer"),
        # whose Python code prepares steps with images: a graph does not run it
        (model.is_multimodal_model or model.is_mm_prefix_lm, "a multimodal model"),
        (model.is_diffusion, "diffusion decoding"),
        (model.use_mla, "multi-head latent attention"),
        (model.is_hybrid or model.is_encoder_decoder, "a hybrid or encoder-decoder model"),
        (getattr(model.hf_text_config, "sliding_window", None) is not None, "sliding windows"),
        (model.attention_chunk_size is not None, "chunked attention"),
        (config.attention_config.flash_attn_version not in (None, 3), "another FlashAttention"),
        (invariance.wanted() or settings().divider == invariance.DIVIDER, "batch invariance"),
        (settings().kernel == "portable", "the portable kernel"),
        (not current_platform.is_device_capability(90), "a GPU other than Hopper"),
    )
    return next((reason for found, reason in checks if found), None)


def named_by_user(args: Any) -> frozenset[str]:
    """Which choices about CUDA graphs the user has made.

    Args:
        args: ``EngineArgs``, before vLLM completes them.
    """
    return frozenset(
        name
        for name in ("cudagraph_mode", *_SIZES)
        for owner in (args, args.compilation_config)
        if getattr(owner, name, None) is not None
    )


def choose_mixed_graphs(config: Any, named: frozenset[str]) -> None:
    """Let mixed steps run in FULL graphs where vLLM's default would run them piecewise.

    Args:
        config: a finished ``VllmConfig``.
        named: what the user has chosen, which is kept.
    """
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    if "cudagraph_mode" in named or compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        return
    reason = mixed_graphs_refusal(config)
    if reason is not None:
        logger().info_once("Steps with new requests run in piecewise CUDA graphs: %s.", reason)
        return
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    sizes = compilation.cudagraph_capture_sizes
    if sizes and not named.intersection(_SIZES):
        # vLLM captures twice as many tokens as there can be decodes, and new requests have more
        maximum = config.scheduler_config.max_num_batched_tokens
        added = (size for size in GRAPH_SIZES if sizes[-1] < size <= maximum)
        compilation.cudagraph_capture_sizes = [*sizes, *added]
        compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]


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
