"""Whether an engine would serve a kind of layer: the same functions decide as in an engine."""

from dataclasses import replace

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.eligibility import platform
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal


def in_engine(
    kinds: list[LayerKind], cache: str, gpus: int, shards: int = 1, drafts: int = 0
) -> list[LayerKind]:
    """All kinds of layers of a model as one GPU of an engine has them.

    Args:
        kinds: with the heads of the model.
        cache: ``--kv-cache-dtype``; "auto" for the checkpoint's own.
        gpus, shards: as for ``on_one_gpu``.
        drafts: draft tokens that a decode verifies.

    Raises:
        PrefixShareError: vLLM would refuse so many GPUs, or shards.
    """
    engine = Engine(1 + drafts, shards, is_hybrid=not all(kind.attention for kind in kinds))
    is_invariant = invariance.wanted()
    kinds = [replace(x, engine=engine, use_batch_invariant=is_invariant) for x in kinds]
    if cache != "auto":
        kinds = [replace(kind, kv_cache_dtype=cache) for kind in kinds]
    return [on_one_gpu(kind, gpus, shards) for kind in kinds]


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


def falls_back(layer: LayerKind, on_cpu: bool | None) -> str | None:
    """Why a kind of layer would not be served, or None.

    Args:
        layer: with the heads of one GPU, and its engine.
        on_cpu: None where the platform is not known: whether some GPU would serve it, whatever the
            length of its window.

    Raises:
        PrefixShareError: no kernel serves the shape, or a cost table does not fit.
    """
    if on_cpu:
        return refusal(layer, platform.CPU)
    somewhere = platform.Platform(platform.CUDA_DTYPES, platform.gpu_extras(anywhere=True))
    reason = refusal(layer, somewhere)
    is_plain = refusal(layer, somewhere._replace(extras=platform.NOTHING)) is None
    if on_cpu is None or reason is not None or is_plain:
        return reason
    # only now: this imports half of vLLM, which takes seconds, and compiles the kernel, as an
    # engine does
    return refusal(layer, somewhere._replace(extras=platform.gpu_extras(), is_here=True))
