"""Times of GPU kernels as a decode step sees them: replayed from a CUDA graph, KV not in L2.

Between two layers of a model the weights pass through the L2 cache, so that attention finds
its KV in device memory. Each timed replay therefore follows a write of a buffer several times
larger than the cache.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")

FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: median, fastest and slowest of ``repeats``."""

    median_ms: float
    min_ms: float
    max_ms: float
    repeats: int


class GpuTimer:
    """Times calls on the current CUDA device; holds the buffer that flushes the L2 cache."""

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        self._flush = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")

    def time(self, call: Callable[[], object], repeats: int = 20, warmup: int = 3) -> Timing:
        """Time ``call``, which queues work on the current stream, such as ``graph.replay``."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for _ in range(warmup):
            self._flush.zero_()
            call()
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in events]
        return Timing(statistics.median(times), min(times), max(times), repeats)


def capture(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of one ``call``, which runs twice before so that all is compiled and
    allocated. Each replay writes the result that is returned here.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Highest rates of a GPU: bytes read from device memory and matrix FLOPs, per second."""

    bytes_per_second: float
    flops_per_second: float

    def roof_ms(self, num_bytes: float, flops: float) -> float:
        """Time that no kernel can beat, in milliseconds (roofline model)."""
        seconds = max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)
        return seconds * 1e3


def measure_rates(timer: GpuTimer, dtype: torch.dtype = torch.bfloat16) -> MachineRates:
    """Rates of the current device: the bandwidth of a 4 GiB reduction or copy, whichever moves
    more bytes, and the FLOPs of a large matrix product of ``dtype``. Takes about a second.
    """
    return MachineRates(_bandwidth(timer), _matmul_rate(timer, dtype))


def _bandwidth(timer: GpuTimer) -> float:
    rows = torch.zeros(1 << 15, 1 << 15, device="cuda")
    target = torch.empty_like(rows)
    size = rows.numel() * rows.element_size()
    read = timer.time(lambda: torch.amax(rows, dim=1), repeats=10).min_ms
    copied = timer.time(lambda: target.copy_(rows), repeats=10).min_ms
    return max(size / read, 2 * size / copied) * 1e3


def _matmul_rate(timer: GpuTimer, dtype: torch.dtype) -> float:
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    taken = timer.time(lambda: torch.matmul(a, b, out=out), repeats=10).median_ms
    return 2 * n**3 / taken * 1e3
