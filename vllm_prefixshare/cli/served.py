"""Whether an engine would serve a kind of layer: the same functions decide as in an engine."""

from dataclasses import replace
from typing import TYPE_CHECKING

from packaging.version import Version

from vllm_prefixshare.cli.model import LayerKind
from vllm_prefixshare.cli.shape import USUAL_BLOCK
from vllm_prefixshare.config import DTYPES, FP8, FP8_CACHES, AttentionConfig
from vllm_prefixshare.records import PrefixShareError

if TYPE_CHECKING:
    from vllm_prefixshare.integration.support import Engine


def installed_release() -> Version | None:
    """vLLM's, or None if it is not installed."""
    from vllm_prefixshare.integration.compat import vllm_version

    try:
        return vllm_version()
    except PrefixShareError:
        return None


def on_one_gpu(layer: LayerKind, gpus: int, shards: int = 1) -> LayerKind:
    """A kind of layer with the heads that one of ``gpus`` GPUs has, of which each ``shards`` divide
    the KV of a request.

    Raises:
        PrefixShareError: vLLM would refuse so many GPUs, or shards.
    """
    if gpus < 1 or layer.num_heads % gpus:
        raise PrefixShareError(
            f"--tensor-parallel-size must divide the model's {layer.num_heads} query heads, got "
            f"{gpus}."
        )
    heads = layer.num_kv_heads
    shared = layer.attention and not layer.use_mla  # latents are on every GPU
    if shared and max(heads, gpus) % min(heads, gpus):
        raise PrefixShareError(
            f"--tensor-parallel-size must divide the model's {heads} KV heads or be a multiple of "
            f"them, got {gpus}."
        )
    fits = gpus // heads >= shards and layer.num_heads // heads % shards == 0
    if shards > 1 and not (fits or layer.use_mla):
        raise PrefixShareError(
            f"--decode-context-parallel-size must divide the {layer.num_heads // heads} query "
            f"heads of each KV head and be at most --tensor-parallel-size {gpus} divided by the "
            f"model's {heads} KV heads, got {shards}."
        )
    return replace(
        layer,
        num_heads=layer.num_heads // gpus,
        num_kv_heads=max(1, heads // gpus),
        use_dcp=shards > 1,
    )


def falls_back(layer: LayerKind, on_cpu: bool | None, engine: "Engine | None" = None) -> str | None:
    """Why a kind of layer would not be served, or None.

    Args:
        layer: with the heads of one GPU.
        on_cpu: None where the platform is not known: whether some GPU would serve it, whatever the
            length of its window.
        engine: None for one without drafts, shards and other kinds of layers.

    Raises:
        PrefixShareError: no kernel serves the shape, or a cost table does not fit.
    """
    from vllm_prefixshare.integration.support import NOTHING, gpu_extras

    reason = _refusal(layer, NOTHING, on_cpu)
    if not on_cpu and reason != _refusal(layer, gpu_extras(anywhere=True), on_cpu):
        # only now: this imports half of vLLM, which takes seconds
        reason = _refusal(layer, gpu_extras(anywhere=on_cpu is None), on_cpu)
    if on_cpu or reason is not None:
        return reason
    return _gpu_refusal(layer, on_cpu is None, engine)


def has_late_flash_attention(capability: tuple[int, int]) -> bool:
    """Whether vLLM takes FlashAttention-3 or 4 on such a GPU, which have sinks and fp8 caches."""
    return capability in ((9, 0), (10, 0))


def falls_back_on(
    layer: LayerKind, capability: tuple[int, int], engine: "Engine | None" = None
) -> str | None:
    """As ``falls_back``, on a GPU that this machine may not have, whatever the length of a window.

    Args:
        capability: the GPU's compute capability.
    """
    late = has_late_flash_attention(capability)
    checks = (
        ("fp8" in layer.kv_cache_dtype and not late, "an fp8 KV cache"),
        (layer.has_sink and not late, "attention sinks"),
        (layer.use_mla and capability != (9, 0), "multi-head latent attention"),
    )
    here = next((reason for found, reason in checks if found), None)
    return here or falls_back(layer, None, engine)


def _gpu_refusal(layer: LayerKind, anywhere: bool, engine: "Engine | None") -> str | None:
    """Why a layer that a GPU can serve would not be in an engine."""
    from vllm_prefixshare.integration import support

    engine = engine or support.Engine()
    if layer.use_mla:
        shape, heads = (layer.head_size, layer.kv_lora_rank), layer.num_heads * engine.shards
        reason = (
            support.latent_refusal(heads)
            or support.latent_layer_refusal(shape, heads, engine)
            or support.invariance_refusal(engine)
            or support.shard_refusal(shape_of(layer, engine.shards), engine)
        )
    else:
        attention = shape_of(layer, engine.shards)
        reason = (
            support.invariance_refusal(engine)
            or support.shard_refusal(attention, engine)
            or support.window_refusal(attention, engine)
        )
    if reason is not None or anywhere:
        return reason
    # these import half of vLLM, and compile the kernel, as an engine does
    if layer.use_mla:
        from vllm_prefixshare.integration.cuda.latent import kernel_refusal

        return kernel_refusal(shape_of(layer, engine.shards), engine.query_len)
    if layer.sliding_window is not None:
        from vllm_prefixshare.integration.cuda.backend import short_window_refusal

        return short_window_refusal(attention)
    return None


def shape_of(layer: LayerKind, shards: int = 1, block_size: int | None = None) -> AttentionConfig:
    """The shape of a layer with the heads of one GPU, as the integration makes it from vLLM's.

    Args:
        block_size: None for that which vLLM takes on a GPU.

    Raises:
        PrefixShareError: no kernel serves the shape.
    """
    from vllm_prefixshare.integration.support import FP8_LATENT_BLOCK

    fp8 = FP8 if layer.kv_cache_dtype in FP8_CACHES else None
    if block_size is None:
        block_size = FP8_LATENT_BLOCK if layer.use_mla and fp8 else USUAL_BLOCK
    if layer.use_mla:
        shape = layer.num_heads * shards, 1, layer.head_size, block_size, layer.dtype
        return AttentionConfig(*shape, fp8, fp8, kv_lora_rank=layer.kv_lora_rank)
    features = {"sinks": layer.has_sink, "soft_cap": layer.logits_soft_cap, "alibi": layer.alibi}
    kv_dtype = FP8 if "fp8" in layer.kv_cache_dtype else None
    return AttentionConfig(
        layer.num_heads * shards,
        layer.num_kv_heads,
        layer.head_size,
        block_size,
        layer.dtype,
        kv_dtype,
        kv_dtype,
        features=tuple(name for name, there in features.items() if there),
        sliding_window=layer.sliding_window,
    )


def _refusal(layer: LayerKind, extras: frozenset[str], on_cpu: bool | None) -> str | None:
    """Why a layer would fall back where a GPU's layers may have ``extras``."""
    from vllm_prefixshare.integration.support import CUDA_DTYPES, selector_refusal

    if layer.value_size not in (0, layer.head_size):
        # vLLM names the backend itself, and asks nobody
        return f"keys of {layer.head_size} and values of {layer.value_size}"
    if layer.chunked:
        return "chunked local attention"
    if layer.alibi and "alibi" not in extras:
        return "ALiBi slopes"
    if layer.logits_soft_cap and "softcap" not in extras:
        return "a logits soft cap"
    return selector_refusal(layer, DTYPES if on_cpu else CUDA_DTYPES, extras)
