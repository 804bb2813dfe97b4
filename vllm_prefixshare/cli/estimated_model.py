"""The model and GPUs of an estimate: shapes of its layers, planning, weights and memory."""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_prefixshare.cli.options import (
    DEFAULT_SHAPE,
    attention_of,
    check_range,
    shape_option,
)
from vllm_prefixshare.cli.planned import Layer, gpu_named
from vllm_prefixshare.cli.served import in_engine
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.planning.costs.gpus import NamedGpu
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import (
    LayerKind,
    layer_kinds,
    special_weights,
)
from vllm_prefixshare.vllm_plugin.eligibility.platform import Platform, gpu_of
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal

#: Files that hold a checkpoint's weights.
WEIGHTS = ("*.safetensors", "*.bin")
#: Lists which of them vLLM loads.
INDEX = "model.safetensors.index.json"
#: The same weights in Mistral's own format.
COPY = "consolidated*"
MAX_WEIGHTS_GB = 10_000
MAX_GPUS = 1024
MAX_LAYERS = 4096
#: Part of a GPU's memory that vLLM takes by default (``gpu_memory_utilization``).
UTILIZATION = 0.92
#: The model of ``DEFAULT_SHAPE``, its number of layers, and GB of its weights.
DEFAULT_NAME = "Llama-3.1-8B"
DEFAULT_LAYERS, DEFAULT_WEIGHTS_GB = 32, 16.06


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU for weights and KV cache, in bytes.

    total: what vLLM takes of the GPU.
    weights: 16 bits each; 0 if unknown.
    kinds: layers with a KV cache, with the KV heads that the GPU has.
    """

    total: float
    weights: int
    kinds: list[LayerKind]

    @property
    def kv_room(self) -> float:
        """Bytes for the KV cache; below 0 if the weights do not fit."""
        return self.total - self.weights

    def kv_bytes(self, new_tokens: int, num_tokens: int | IntArray) -> float:
        """Bytes of the KV cache that requests add.

        Args:
            new_tokens: KV tokens in blocks that no running request holds.
            num_tokens: all KV tokens of each request; windows are not shared here.
        """
        total = 0.0
        for kind in self.kinds:
            tokens = new_tokens
            if kind.sliding_window is not None:
                tokens = int(np.minimum(num_tokens, kind.sliding_window).sum())
            total += _bytes_per_token(kind) * tokens
        return total


@dataclass(frozen=True)
class EstimatedModel:
    """What is estimated.

    name: of the model; None for a shape that was given by numbers.
    layers: number of layers of each shape, with the heads of one GPU, whose attention is estimated.
    left_out: number of other layers with attention, by the reason.
    special_weights: what makes them other than dense ones of 16 bits, which is not counted.
    """

    name: str | None
    gpu: NamedGpu
    num_gpus: int
    layers: Counter[AttentionConfig]
    left_out: Counter[str]
    planning: dict[AttentionConfig, Layer]
    memory: GpuMemory
    special_weights: list[str]

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
    gpu = gpu_named(args.gpu)
    platform = gpu_of(gpu.capability)
    check_range(args, "tensor-parallel-size", 1, MAX_GPUS)
    if args.weights_gb is not None and not 0 < args.weights_gb <= MAX_WEIGHTS_GB:
        raise PrefixShareError(
            f"--weights-gb must be above 0 and at most {MAX_WEIGHTS_GB}, got {args.weights_gb}."
        )
    if args.model is None:
        name, kinds = _numbered(args, platform)
    else:
        name, kinds = str(args.model), _checkpoint(args)
    kinds = in_engine(kinds, args.kv_cache_dtype, args.tensor_parallel_size)
    kinds = [kind for kind in kinds if kind.attention]
    served, left_out = kinds, Counter[str]()
    if args.model is not None:
        served, left_out = _served(args, kinds, platform)
    # one block size for all layers, as in an engine
    block_size = args.block_size
    if block_size is None:
        block_size = max(kind.attention_config().block_size for kind in served)
    layers: Counter[AttentionConfig] = Counter()
    for kind in served:
        layers[replace(kind, block_size=block_size).attention_config()] += kind.count
    num_bytes = _weight_bytes(args, name) // args.tensor_parallel_size
    return EstimatedModel(
        name,
        gpu,
        args.tensor_parallel_size,
        layers,
        left_out,
        {attention: Layer.on(args.gpu, attention) for attention in layers},
        GpuMemory(gpu.memory_gb * 1e9 * UTILIZATION, num_bytes, kinds),
        [] if args.model is None else special_weights(args.model),
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


def _numbered(args: argparse.Namespace, platform: Platform) -> tuple[str | None, list[LayerKind]]:
    """Layers of a shape that is given by numbers, one if their number is not known; and the name of
    the model that has them.
    """
    whole = attention_of(args)
    if whole.kv_dtype is not None and not platform.fp8_extra(use_mla=False):
        raise PrefixShareError(
            f"layers with an fp8 KV cache keep vLLM's own backend on {args.gpu}: name another "
            "GPU, or leave out --kv-cache-dtype."
        )
    check_range(args, "num-layers", 1, MAX_LAYERS)
    shape = whole.num_qo_heads, whole.num_kv_heads, whole.head_dim
    is_default = shape == (*DEFAULT_SHAPE.values(),)[:3]
    count = args.num_layers or (DEFAULT_LAYERS if is_default else 1)
    kind = LayerKind(
        name="attention",
        count=count,
        dtype=whole.dtype,
        num_heads=whole.num_qo_heads,
        num_kv_heads=whole.num_kv_heads,
        head_size=whole.head_dim,
    )
    return DEFAULT_NAME if is_default and count == DEFAULT_LAYERS else None, [kind]


def _checkpoint(args: argparse.Namespace) -> list[LayerKind]:
    """Layers of the folder that ``--model`` names."""
    if args.num_layers is not None:
        raise PrefixShareError(
            "--num-layers is for a shape without --model: leave out one of them."
        )
    return [replace(x, dtype=shape_option(args, "dtype")) for x in layer_kinds(args.model)]


def _served(
    args: argparse.Namespace, kinds: list[LayerKind], platform: Platform
) -> tuple[list[LayerKind], Counter[str]]:
    """Layers of a model whose attention is estimated, and the number of others by the reason.

    Raises:
        PrefixShareError: there is none to estimate.
    """
    served = []
    left_out: Counter[str] = Counter()
    for kind in kinds:
        reason = refusal(kind, platform)
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
    return served, left_out


def _bytes_per_token(kind: LayerKind) -> float:
    """What layers of a kind, with the heads of one GPU, keep of a token."""
    numbers = kind.head_size if kind.use_mla else 2 * kind.num_kv_heads * kind.head_size
    cache = kind.kv_cache_dtype or "auto"
    if cache == "auto":
        cache = kind.dtype or "bfloat16"
    narrow = 1.0 if "8" in cache else 0.5
    item = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}.get(cache, narrow)
    return kind.count * numbers * item


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights in a checkpoint folder; 0 if it has none.

    Raises:
        PrefixShareError: the folder or its index of weights cannot be read.
    """
    try:
        return sum(path.stat().st_size for path in _weight_files(folder))
    except OSError as e:
        raise PrefixShareError(f"{folder} cannot be read ({e.strerror}).") from None


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM loads. Mistral's folders hold the weights a second time."""
    files = next(filter(None, (list(folder.glob(kind)) for kind in WEIGHTS)), [])
    index = folder / INDEX
    names = _indexed(index) if index.is_file() else set()
    indexed = [path for path in files if path.name in names]
    return indexed or [path for path in files if not path.match(COPY)] or files


def _indexed(index: Path) -> set[str]:
    """Names of the files in an index of weights."""
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        raise PrefixShareError(
            f"{index} is not an index of weights: download it again, or give --weights-gb."
        ) from None
