"""GPUs by name, to plan for one that this machine may not have."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.costs.model import CostModel
from vllm_prefixshare.costs.roofline import ROOFLINES, AnalyticCost
from vllm_prefixshare.records import PrefixShareError

if TYPE_CHECKING:
    from vllm_prefixshare.kernels.contract import Kernel


class NamedGpu(NamedTuple):
    """A GPU as its vendor describes it.

    device: its CUDA name. gb_per_s: memory bandwidth. tflops: dense bfloat16.
    """

    device: str
    capability: tuple[int, int]
    multiprocessors: int
    gb_per_s: float
    tflops: float


#: From NVIDIA's data sheets; tables and rooflines were measured on the H200.
GPUS = {
    "A100": NamedGpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2039, 312),
    "H100": NamedGpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 3350, 989),
    "H200": NamedGpu("NVIDIA H200", (9, 0), 132, 4800, 989),
    "B200": NamedGpu("NVIDIA B200", (10, 0), 148, 8000, 2250),
    "L4": NamedGpu("NVIDIA L4", (8, 9), 58, 300, 121),
    "L40S": NamedGpu("NVIDIA L40S", (8, 9), 142, 864, 362),
    "RTX4090": NamedGpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 1008, 165),
}


@dataclass(frozen=True, slots=True)
class GpuPlanning:
    """Planner limits and costs for a GPU.

    says: where the costs come from.
    """

    config: PlannerConfig
    cost: CostModel
    says: str


def planning_for(name: str, attention: AttentionConfig) -> GpuPlanning:
    """The kernel's limits and the cost model that an engine would have on this GPU.

    Args:
        name: one of ``GPUS``.

    Raises:
        PrefixShareError: an unknown GPU, a shape that no kernel serves, or Triton is missing.
    """
    gpu = GPUS.get(name.upper().replace(" ", ""))
    if gpu is None:
        raise PrefixShareError(f"GPU {name!r} is not known: use one of {', '.join(GPUS)}.")
    kernel = _kernel(gpu, attention)
    config = PlannerConfig(
        divider=kernel.divider,
        share="always",  # as in the executor: depth_first compares both at every cut
        num_workers=kernel.num_workers,
        max_tile_requests=kernel.max_tile_requests,
        max_tile_runs=kernel.max_tile_runs,
        null_block_id=0,
    )
    from vllm_prefixshare.costs.lookup import cost_model

    cost = cost_model(attention, kernel.name, device_name=f"{gpu.device} x{gpu.multiprocessors}")
    if not isinstance(cost, AnalyticCost):
        return GpuPlanning(config, cost, f"cost table measured on {gpu.device}")
    measured = GPUS["H200"]
    share = measured.multiprocessors / gpu.multiprocessors
    memory = gpu.gb_per_s / measured.gb_per_s * share
    arithmetic = gpu.tflops / measured.tflops * share
    roofline = ROOFLINES["triton" if kernel.name == "hopper" else kernel.name]
    scaled = replace(
        roofline,
        bytes_per_us=roofline.bytes_per_us * memory,
        cached_bytes_per_us=roofline.cached_bytes_per_us * memory,
        flops_per_us=roofline.flops_per_us * arithmetic,
        unshared_flops_per_us=roofline.unshared_flops_per_us * arithmetic,
    )
    says = f"roofline of {gpu.device}, scaled from an H200 by data sheet, not measured"
    return GpuPlanning(config, AnalyticCost(attention, scaled), says)


def _kernel(gpu: NamedGpu, attention: AttentionConfig) -> "Kernel":
    try:
        from vllm_prefixshare.kernels.contract import Gpu
        from vllm_prefixshare.kernels.precompile import SHARED_MEMORY
        from vllm_prefixshare.kernels.registry import candidates, make_kernel
    except ImportError as e:
        raise PrefixShareError(
            f"{e}: install what planning for a GPU needs with pip install 'vllm-prefixshare[gpu]'."
        ) from None
    here = Gpu(gpu.capability, gpu.multiprocessors, SHARED_MEMORY[gpu.capability] << 10)
    return make_kernel(candidates(attention, here)[0], attention, 1, here)
