"""Finding the cost table that fits: the one that the user names, or one measured here."""

import platform
from collections.abc import Callable
from pathlib import Path

from vllm_prefixshare import envs
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.planning.cost_table import CostModel, CostTable, Fingerprint, analytic_cost

#: Changes whenever the executor's speed does; part of every fingerprint.
KERNELS = {"torch": "torch-1", "native": "native-1"}


def fingerprint(attention: AttentionConfig, executor: str) -> Fingerprint:
    """The fingerprint of this machine for one attention shape and CPU executor."""
    return Fingerprint.of(attention, processor(), KERNELS[executor])


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        return f"{model} x{sum(line.startswith('processor') for line in lines)}"
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cost_model(
    attention: AttentionConfig, executor: str, log: Callable[[str], None] | None = None
) -> CostModel:
    """The measured table for this machine and shape, or the analytic estimate.

    Args:
        log: is told once when there is no table.

    Raises:
        PrefixShareError: VLLM_PREFIXSHARE_COST_TABLE names a file that does not fit.
    """
    expected = fingerprint(attention, executor)
    named = envs.get("VLLM_PREFIXSHARE_COST_TABLE")
    if named is not None:
        return CostTable.load(named, expected)
    path = cache_folder() / expected.file_name()
    if path.is_file():
        return CostTable.load(path, expected)
    if log is not None:
        log(
            "No cost table for this processor and model shape: using the analytic estimate. "
            "Measure one with 'vllm-prefixshare profile'."
        )
    return analytic_cost(attention, executor)


def cache_folder() -> Path:
    """Where tables measured on this machine are kept."""
    return Path(envs.get("VLLM_PREFIXSHARE_CACHE")) / "cost_tables"
