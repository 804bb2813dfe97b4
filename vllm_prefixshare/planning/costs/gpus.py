"""GPUs by their data sheets: what scales a roofline that was measured on one of them."""

from dataclasses import replace
from typing import NamedTuple

from vllm_prefixshare.planning.costs.roofline import ROOFLINES, Roofline


class NamedGpu(NamedTuple):
    """A GPU as its vendor describes it.

    device: its CUDA name. gb_per_s: memory bandwidth. tflops: dense bfloat16.
    memory_gb: memory in units of 10**9 bytes.
    """

    device: str
    capability: tuple[int, int]
    multiprocessors: int
    gb_per_s: float
    tflops: float
    memory_gb: int

    @property
    def portable_blocks(self) -> int:
        """Thread blocks of the portable kernel on a multiprocessor, for a 16-bit KV cache and
        head_dim up to 256: one where a thread block may have 99 KiB of shared memory.
        """
        return 1 if self.capability in ((8, 6), (8, 9), (12, 0)) else 2


#: From NVIDIA's data sheets.
GPUS = {
    "A10": NamedGpu("NVIDIA A10", (8, 6), 72, 600, 125, 24),
    "A100": NamedGpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2039, 312, 80),
    "A100-40GB": NamedGpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1555, 312, 40),
    "A100-PCIE": NamedGpu("NVIDIA A100 80GB PCIe", (8, 0), 108, 1935, 312, 80),
    "H100": NamedGpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 3350, 989, 80),
    "H100-NVL": NamedGpu("NVIDIA H100 NVL", (9, 0), 132, 3938, 835, 94),
    "H100-PCIE": NamedGpu("NVIDIA H100 PCIe", (9, 0), 114, 2039, 756, 80),
    "H20": NamedGpu("NVIDIA H20", (9, 0), 78, 4000, 148, 96),
    "H200": NamedGpu("NVIDIA H200", (9, 0), 132, 4800, 989, 141),
    "B200": NamedGpu("NVIDIA B200", (10, 0), 148, 8000, 2250, 180),
    "L4": NamedGpu("NVIDIA L4", (8, 9), 58, 300, 121, 24),
    "L40S": NamedGpu("NVIDIA L40S", (8, 9), 142, 864, 362, 48),
    "RTX4090": NamedGpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 1008, 165, 24),
    "RTX5090": NamedGpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 1792, 209, 32),
}
#: The GPU on which tables and rooflines were measured.
MEASURED = GPUS["H200"]


def data_sheet(device: str) -> NamedGpu | None:
    """The GPU of this CUDA name, or None; a slice of a GPU (MIG) has another name."""
    return next((gpu for gpu in GPUS.values() if gpu.device == device), None)


def scaled(executor: str, gpu: NamedGpu) -> Roofline:
    """The roofline of a GPU kernel, a name in ``ROOFLINES``, as it would be on ``gpu``: by the
    memory bandwidth and the arithmetic that a thread block has there. Fixed prices stay.
    """
    roofline = ROOFLINES[executor]
    share = MEASURED.multiprocessors / gpu.multiprocessors
    if roofline.shares_multiprocessor:
        share *= MEASURED.portable_blocks / gpu.portable_blocks
    memory = gpu.gb_per_s / MEASURED.gb_per_s * share
    arithmetic = gpu.tflops / MEASURED.tflops * share
    return replace(
        roofline,
        bytes_per_us=roofline.bytes_per_us * memory,
        cached_bytes_per_us=roofline.cached_bytes_per_us * memory,
        flops_per_us=roofline.flops_per_us * arithmetic,
        unshared_flops_per_us=roofline.unshared_flops_per_us * arithmetic,
    )
