"""The model and GPUs of an estimate: shapes of its layers, planning, weights and memory."""

import argparse
from collections import Counter
from dataclasses import dataclass, replace

from vllm_prefixshare.cli.call_time import weight_bytes
from vllm_prefixshare.cli.gpu_memory import UTILIZATION, GpuMemory, KvLayers
from vllm_prefixshare.cli.gpus import gpu_named
from vllm_prefixshare.cli.options import (
    DEFAULT_SHAPE,
    attention_of,
    check_block_size,
    check_cache_argument,
    check_range,
    shape_option,
)
from vllm_prefixshare.cli.planned import Layer
from vllm_prefixshare.cli.served import on_one_gpu, shape_of
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.costs.gpus import NamedGpu
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import (
    MAX_LAYERS,
    LayerKind,
    layer_kinds,
    special_weights,
)

MAX_WEIGHTS_GB = 10_000
MAX_GPUS = 1024
#: The model of ``DEFAULT_SHAPE``, its number of layers, and GB of its weights.
DEFAULT_NAME = "Llama-3.1-8B"
DEFAULT_LAYERS, DEFAULT_WEIGHTS_GB = 32, 16.06


@dataclass(frozen=True)
class EstimatedModel:
    """What is estimated.

    name: of the model; None for a shape that was given by numbers.
    layers: number of layers of each shape, with the heads of one GPU, whose attention is estimated.
    left_out: number of other layers with attention, by the reason.
    num_bytes: of the weights on one GPU, 16 bits each; 0 if unknown.
    special_weights: what makes them other than dense ones of 16 bits, which is not counted.
    """

    name: str | None
    gpu: NamedGpu
    num_gpus: int
    layers: Counter[AttentionConfig]
    left_out: Counter[str]
    planning: dict[AttentionConfig, Layer]
    num_bytes: int
    memory: GpuMemory
    special_weights: tuple[str, ...] = ()

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return next(iter(self.layers)).block_size

    @property
    def cost_source(self) -> str:
        """Where the costs of attention come from."""
        return "; ".join(dict.fromkeys(layer.cost_source for layer in self.planning.values()))

    @property
    def attention_flops(self) -> float:
        """Operations of a query token and a KV token, in all layers of one GPU."""
        return sum(4.0 * a.num_qo_heads * a.head_dim * n for a, n in self.layers.items())


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Declare options of the model next to its shape."""
    command.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of the model")
    command.add_argument(
        "--num-layers", type=int, help="layers with attention (default: of the model)"
    )
    command.add_argument(
        "--weights-gb", type=float, help="GB of the weights (default: the files in --model)"
    )


def estimated_model(args: argparse.Namespace) -> EstimatedModel:
    """The model that the options describe.

    Raises:
        PrefixShareError: an option is out of range, or no layer would be served.
    """
    check_block_size(args)
    check_cache_argument(args)
    gpu = gpu_named(args.gpu)
    check_range(args, "tensor-parallel-size", 1, MAX_GPUS)
    if args.weights_gb is not None and not 0 < args.weights_gb <= MAX_WEIGHTS_GB:
        raise PrefixShareError(
            f"--weights-gb must be above 0 and at most {MAX_WEIGHTS_GB}, got {args.weights_gb}."
        )
    if args.model is None:
        name, layers, kv_layers = _numbered(args, gpu)
        left_out: Counter[str] = Counter()
    else:
        name = str(args.model)
        layers, left_out, kv_layers = _checkpoint(args, gpu)
    num_bytes = _weight_bytes(args, name) // args.tensor_parallel_size
    return EstimatedModel(
        name,
        gpu,
        args.tensor_parallel_size,
        layers,
        left_out,
        {attention: Layer.on(args.gpu, attention) for attention in layers},
        num_bytes,
        GpuMemory(gpu.memory_gb * 1e9 * UTILIZATION, num_bytes, tuple(kv_layers)),
        () if args.model is None else tuple(special_weights(args.model)),
    )


def _weight_bytes(args: argparse.Namespace, name: str | None) -> int:
    if args.weights_gb is not None:
        if name is None and args.num_layers is None:
            raise PrefixShareError(
                "--weights-gb needs the number of layers: name the --model folder, or give "
                "--num-layers."
            )
        return int(args.weights_gb * 1e9)
    if args.model is None:
        return int(DEFAULT_WEIGHTS_GB * 1e9) if name is not None else 0
    return weight_bytes(args.model)


def _numbered(
    args: argparse.Namespace, gpu: NamedGpu
) -> tuple[str | None, Counter[AttentionConfig], list[KvLayers]]:
    """Layers of a shape that is given by numbers; one if their number is not known."""
    from vllm_prefixshare.vllm_plugin.eligibility.platform import gpu_of

    whole = attention_of(args)
    if whole.kv_dtype is not None and "fp8" not in gpu_of(gpu.capability).extras:
        raise PrefixShareError(
            f"layers with an fp8 KV cache keep vLLM's own backend on {args.gpu}: name another "
            "GPU, or leave out --kv-cache-dtype."
        )
    shape = whole.num_qo_heads, whole.num_kv_heads, whole.head_dim
    is_default = shape == (*DEFAULT_SHAPE.values(),)[:3] and args.num_layers in (
        None,
        DEFAULT_LAYERS,
    )
    check_range(args, "num-layers", 1, MAX_LAYERS)
    count = args.num_layers
    if count is None:
        count = DEFAULT_LAYERS if is_default else 1
    kind = LayerKind(
        name="attention",
        count=count,
        dtype=whole.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        num_heads=whole.num_qo_heads,
        num_kv_heads=whole.num_kv_heads,
        head_size=whole.head_dim,
    )
    kind = on_one_gpu(kind, args.tensor_parallel_size)
    attention = replace(whole, num_qo_heads=kind.num_heads, num_kv_heads=kind.num_kv_heads)
    return DEFAULT_NAME if is_default else None, Counter({attention: count}), [_kv_layers(kind)]


def _checkpoint(
    args: argparse.Namespace, gpu: NamedGpu
) -> tuple[Counter[AttentionConfig], Counter[str], list[KvLayers]]:
    """Layers of the folder that ``--model`` names.

    Raises:
        PrefixShareError: there is none to estimate.
    """
    from vllm_prefixshare.vllm_plugin import invariance
    from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
    from vllm_prefixshare.vllm_plugin.eligibility.platform import gpu_of
    from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal

    if args.num_layers is not None:
        raise PrefixShareError(
            "--num-layers is for a shape without --model: leave out one of them."
        )
    kinds = layer_kinds(args.model)
    engine = Engine(is_hybrid=not all(kind.attention for kind in kinds))
    served: list[LayerKind] = []
    left_out: Counter[str] = Counter()
    kv_layers = []
    for kind in kinds:
        if not kind.attention:
            continue
        kind = replace(
            kind,
            dtype=shape_option(args, "dtype"),
            use_batch_invariant=invariance.wanted(),
        )
        if args.kv_cache_dtype != "auto":
            kind = replace(kind, kv_cache_dtype=args.kv_cache_dtype)
        kind = on_one_gpu(kind, args.tensor_parallel_size)
        kv_layers.append(_kv_layers(kind))
        reason = refusal(replace(kind, engine=engine), gpu_of(gpu.capability))
        if reason is None and kind.has_sliding_window:
            length = kind.sliding_window  # None: the file does not say
            reason = "a sliding window" + (f" of {length} tokens" if length else "")
        if reason is None:
            served.append(kind)
        else:
            left_out[reason] += kind.count
    if not served:
        reasons = ", ".join(left_out) or "none has attention"
        raise PrefixShareError(
            f"{args.model} has no layer to estimate on {args.gpu} ({reasons}): see what 'doctor "
            "--model' says of it."
        )
    # one size for all layers, as in an engine
    block_size = args.block_size
    if block_size is None:
        block_size = max(shape_of(kind).block_size for kind in served)
    layers: Counter[AttentionConfig] = Counter()
    for kind in served:
        layers[shape_of(kind, block_size=block_size)] += kind.count
    return layers, left_out, kv_layers


def _kv_layers(kind: LayerKind) -> KvLayers:
    """What layers of a kind, with the heads of one GPU, keep of a token."""
    numbers = kind.head_size if kind.use_mla else 2 * kind.num_kv_heads * kind.head_size
    cache = kind.kv_cache_dtype or "auto"
    if cache == "auto":
        cache = kind.dtype or "bfloat16"
    if cache in ("bfloat16", "float16", "float32"):
        item = 4.0 if cache == "float32" else 2.0
    else:
        item = 1.0 if "8" in cache else 0.5
    return KvLayers(kind.count * numbers * item, kind.sliding_window)
