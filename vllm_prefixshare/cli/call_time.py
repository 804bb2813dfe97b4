"""Estimates of a whole call: host work on the prompts, prefill and decode."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.costs.gpus import NamedGpu
from vllm_prefixshare.settings import PROMPT_PARTS
from vllm_prefixshare.utils.trusted_files import read_text

#: Files that hold a checkpoint's weights.
WEIGHTS = ("*.safetensors", "*.bin")
#: Lists which of them vLLM loads; it has up to 9 MB for the largest models.
INDEX, MAX_INDEX_BYTES = "model.safetensors.index.json", 64 << 20
#: The same weights in Mistral's own format.
COPY = "consolidated*"
#: Parts that take as long as vLLM's own code for text that is new. The others never walk a prompt.
PER_TEXT = ("tokenization", "hashes")


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What a call costs next to attention.

    new_us: part of the host work -> microseconds per prompt token in vLLM's own code.
    shared_us: the same where the part is active and the token is known.
    prefill_efficiency: of the GPU's dense bfloat16 arithmetic.
    weights_efficiency: of the GPU's memory bandwidth, in a decode step.
    source: where this was measured.
    """

    new_us: Mapping[str, float]
    shared_us: Mapping[str, float]
    prefill_efficiency: float
    weights_efficiency: float
    source: str

    def with_new_us(self, changes: Mapping[str, float]) -> "CallCosts":
        """These costs with other microseconds per prompt token for some parts."""
        if not changes:
            return self
        source = f"{', '.join(changes)} as given, the rest {self.source}"
        return replace(self, new_us={**self.new_us, **changes}, source=source)


#: Of a request with 34,400 prompt tokens, in milliseconds: tokenization 87.5 (64 to 111) and 0.3,
#: detokenization 20 and 0.01, hashes 3.9 and 0.17, look-up 1.58 and 0.33, copies 2.58 and 0.51.
#: On an H100 such a document takes an 8B model 1.14 s, and a decode step of 64 requests 9.4 ms.
MEASURED = CallCosts(
    {
        "tokenization": 2.54,
        "detokenization": 0.58,
        "hashes": 0.113,
        "lookup": 0.046,
        "copies": 0.075,
    },
    {
        "tokenization": 0.0087,
        "detokenization": 0.0003,
        "hashes": 0.005,
        "lookup": 0.0096,
        "copies": 0.0148,
    },
    prefill_efficiency=0.75,
    weights_efficiency=0.8,
    source="host work of 34k-token prompts on one CPU, vLLM 0.33, HF tokenizers",
)


class Work(NamedTuple):
    """The work of a batch.

    prompt_tokens: of all requests. new_tokens: those in no earlier request's prefix.
    attended: KV tokens that the new tokens attend to, summed over the new tokens.
    output_tokens: steps, in each of which all requests decode. requests: in a step.
    """

    prompt_tokens: float
    new_tokens: float
    attended: float
    output_tokens: int
    requests: int = 1


class Attention(NamedTuple):
    """Attention of all layers. unshared_us, shared_us: of a decode step.

    flops: of a query token and a KV token.
    """

    unshared_us: float
    shared_us: float
    flops: float


class Times(NamedTuple):
    """Milliseconds of a batch in vLLM as it is, and in PREFIX_SHARE with the parts off and on."""

    vllm: float
    parts_off: float
    parts_on: float

    def __add__(self, other: "Times") -> "Times":  # type: ignore[override]
        return Times(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, factor: float) -> "Times":  # type: ignore[override]
        return Times(*(value * factor for value in self))

    def __truediv__(self, divisor: float) -> "Times":
        return Times(*(value / divisor for value in self))

    def rounded(self, digits: int = 2) -> "Times":
        """The same with fewer digits."""
        return Times(*(round(value, digits) for value in self))


def parse_costs(text: str) -> dict[str, float]:
    """Microseconds per prompt token from ``part=number,...``.

    Raises:
        PrefixShareError: another part, or not a number of 0 or more.
    """
    found = {}
    for item in filter(None, text.split(",")):
        part, _, number = item.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if part not in PROMPT_PARTS or not 0 <= value < math.inf:
            raise PrefixShareError(
                f"--host-costs has {item!r}: give PART=MICROSECONDS, with a part of "
                f"{', '.join(PROMPT_PARTS)}."
            )
        found[part] = value
    return found


def weight_bytes(folder: Path | None) -> int:
    """Bytes of the weights in a checkpoint folder; 0 if it has none.

    Raises:
        PrefixShareError: the folder or its index of weights cannot be read.
    """
    if folder is None:
        return 0
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
        return set(json.loads(read_text(index, MAX_INDEX_BYTES))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise PrefixShareError(
            f"{index} is not an index of weights: download it again, or give --weights-gb."
        ) from None


def call_times(
    work: Work, attention: Attention, num_bytes: int, gpu: NamedGpu, costs: CallCosts = MEASURED
) -> dict[str, Times]:
    """Where the time of a batch goes, one thing after the other.

    Args:
        num_bytes: of the weights on one GPU, 16 bits each; 0: only host work is estimated.
    """
    times = {}
    for part in PROMPT_PARTS:
        off = work.prompt_tokens * costs.new_us[part] / 1e3
        new = work.new_tokens if part in PER_TEXT else 0
        known = work.prompt_tokens - new
        on = (known * costs.shared_us[part] + new * costs.new_us[part]) / 1e3
        times[part] = Times(off, off, min(on, off))
    if num_bytes:
        arithmetic = gpu.tflops * 1e6 * costs.prefill_efficiency  # operations per microsecond
        # two operations for each weight of two bytes
        flops = work.new_tokens * num_bytes + work.attended * attention.flops
        prefill = flops / arithmetic / 1e3
        times["prefill"] = Times(prefill, prefill, prefill)
        # a step reads the weights once, and multiplies them with a row of each request
        weights_us = max(
            num_bytes / (gpu.gb_per_s * 1e3 * costs.weights_efficiency),
            num_bytes * work.requests / arithmetic,
        )
        steps = work.output_tokens / 1e3
        shared = steps * (weights_us + attention.shared_us)
        times["decode"] = Times(steps * (weights_us + attention.unshared_us), shared, shared)
    times["sum"] = sum(times.values(), Times(0.0, 0.0, 0.0))
    return times
