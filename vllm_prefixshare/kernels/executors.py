"""The executor for a device."""

from typing import Literal

import torch

from vllm_prefixshare.config import AttentionConfig, require_launchable
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.interface import Executor


def executor_for(
    attention: AttentionConfig,
    device: torch.device,
    *,
    kernel: Literal["auto", "hopper", "portable"] = "auto",
    query_len: int = 1,
    num_workers: int = 1,
) -> Executor:
    """The executor that runs plans on ``device``.

    Args:
        kernel, query_len: for a GPU, see ``GpuExecutor``.
        num_workers: for a CPU, see ``CpuExecutor``.

    Raises:
        PrefixShareError: the device has no executor, or none for this shape; or an argument is out
            of range, for whichever device it is.
    """
    require_launchable(kernel, query_len)
    if device.type == "cpu":
        from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor

        return TorchExecutor(attention, num_workers)
    if device.type == "cuda":  # needs triton
        from vllm_prefixshare.kernels.gpu_executor import GpuExecutor

        return GpuExecutor(attention, device, kernel=kernel, query_len=query_len)
    raise PrefixShareError(f"device {str(device)!r} has no executor: use cpu or cuda.")
