"""The highest rates of a GPU, measured: what a roofline is drawn with."""

from dataclasses import dataclass

import torch

from vllm_prefixshare.profiling.gpu_timing import GpuTimer


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
