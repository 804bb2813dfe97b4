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
