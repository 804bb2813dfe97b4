"""GPUs by name, to plan for one that this machine may not have."""

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import (
    CATALOG,
    SHARED_MEMORY,
    Gpu,
    KernelLimits,
    candidates,
)
from vllm_prefixshare.planning.costs.gpus import GPUS, MEASURED, NamedGpu, data_sheet
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.roofline import AnalyticCost


def gpu_named(name: str) -> NamedGpu:
    """The GPU of this name in ``GPUS``, in any case.

    Raises:
        PrefixShareError: there is none.
    """
    gpu = GPUS.get(name.upper().replace(" ", ""))
    if gpu is None:
        raise PrefixShareError(f"GPU {name!r} is not known: use one of {', '.join(GPUS)}.")
    return gpu


def cost_source(cost: CostModel, device: str) -> str:
    """Where the costs of a device come from."""
    if not isinstance(cost, AnalyticCost):
        return f"cost table measured on {device}"
    sheet = data_sheet(device)
    if sheet is None:
        return f"roofline of common hardware, not measured on {device}"
    if sheet is MEASURED:
        return f"roofline of {device}"
    return f"roofline of {device}, scaled from an H200 by data sheet, not measured"


def kernel_on(
    gpu: NamedGpu, name: str | None, attention: AttentionConfig, query_len: int = 1
) -> tuple[str, KernelLimits]:
    """The kernel for layers of this shape on ``gpu``, and the limits of its plans.

    Args:
        name: of the kernel; None for the first that serves.
        query_len: maximum number of query tokens of a request.

    Raises:
        PrefixShareError: a shape that no kernel serves.
    """
    here = Gpu(gpu.capability, gpu.multiprocessors, SHARED_MEMORY[gpu.capability] << 10)
    name = name or candidates(attention, here, "auto", query_len)[0]
    return name, CATALOG[name].limits(attention, query_len, here)
