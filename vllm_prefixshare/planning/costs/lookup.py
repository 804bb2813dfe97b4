"""The cost table that fits.

The user's choice comes first, then one measured on this machine, then one shipped for this GPU.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.planning.costs.gpus import data_sheet, scaled
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.roofline import AnalyticCost, analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable, Fingerprint
from vllm_prefixshare.settings import settings
from vllm_prefixshare.utils.trusted_files import distrusted

if TYPE_CHECKING:
    import torch

#: Versions of the executors, changed whenever their speed does; part of every fingerprint.
KERNELS = {
    "torch": "torch-1",
    "native": "native-1",
    "hopper": "hopper-1",
    "portable": "portable-4",
    "mla_hopper": "mla_hopper-1",
}
GPU_KERNELS = ("hopper", "portable", "mla_hopper")
SHIPPED = Path(__file__).parent / "tables"


def fingerprint(
    attention: AttentionConfig, executor: str, device_name: str | None = None
) -> Fingerprint:
    """The fingerprint of one attention shape and executor (or GPU kernel) on this machine.

    On a GPU a table is for a head_dim, the width of the KV cache and a kernel, and 0 stands for
    every number of heads and every block size: a work list is walked by one thread block for each
    KV head, which sees query rows and fetches blocks of any size at the same rate. bfloat16 and
    float16 cost the same. A CPU executor works on all heads at once, so there all of it matters.

    Args:
        device_name: name of the processor; detected if None.
    """
    if executor not in GPU_KERNELS:
        return Fingerprint.of(attention, device_name or processor(), KERNELS[executor])
    width = "16-bit" if attention.dtype in ("bfloat16", "float16") else attention.dtype
    return Fingerprint(
        device=device_name or gpu(),
        num_kv_heads=0,
        gqa_group_size=0,
        head_dim=attention.head_dim,
        dtype=width,
        kv_dtype="8-bit" if attention.kv_dtype else width,
        block_size=0,
        kernel=KERNELS[executor],
    )


def processor() -> str:
    """Name and number of this machine's processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        return f"{model} x{sum(line.startswith('processor') for line in lines)}"
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def has_gpu() -> bool:
    """Whether torch finds an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def gpu(device: "torch.device | str" = "cuda") -> str:
    """Name of a GPU and the number of its multiprocessors: a MIG slice counts as a GPU."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} x{properties.multi_processor_count}"


def cost_model(
    attention: AttentionConfig,
    executor: str,
    log: Callable[[str], None] | None = None,
    device_name: str | None = None,
) -> CostModel:
    """The measured table for this machine and shape, or the analytic estimate.

    A table measured here is preferred to a shipped one. The estimate for a GPU in ``gpus.GPUS`` is
    scaled to it; for any other GPU the H200's is used.

    Args:
        executor: "torch" or "native", or the kernel of a GPU: "hopper" or "portable".
        log: called with one sentence where a table could be measured, or others may have written
            the one that is there.
        device_name: as in ``fingerprint``.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_COST_TABLE names a file that does not fit, or a
            table that was found is damaged.
    """
    expected = fingerprint(attention, executor, device_name)
    named = settings().cost_table
    if named is not None:
        return CostTable.load(named, expected)
    path = cache_folder() / expected.file_name()
    if os.path.isfile(path):  # Path.is_file raises where it cannot search, and for too long a name
        if (why := distrusted(path)) is None:
            return CostTable.load(path, expected)
        if log is not None:
            log(f"The cost table measured here is not used: {why}.")
    path = SHIPPED / expected.file_name()
    if path.is_file():
        return CostTable.load(path, expected)
    # plans of MLA layers were no faster by measured prices (docs/notes/mla.md)
    if log is not None and attention.kv_lora_rank is None:
        cache = " --kv-cache-dtype fp8" if attention.kv_dtype else ""
        log(
            f"No cost table for {expected.device} and this model shape: using the analytic "
            f"estimate. Measure one with 'vllm-prefixshare profile{cache}'."
        )
    sheet = data_sheet(expected.device.rpartition(" x")[0]) if executor in GPU_KERNELS else None
    if sheet is None:
        return analytic_cost(attention, executor)
    return AnalyticCost(attention, scaled(executor, sheet))


def cache_folder() -> Path:
    """Where tables measured on this machine are kept."""
    return settings().cache / "cost_tables"
