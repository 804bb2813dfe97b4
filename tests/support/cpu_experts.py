"""A worker with the two collectives that data-parallel ranks of a mixture of experts need, and that
vLLM's CPU platform lacks: its engine ends with NotImplementedError.
"""

from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from vllm_prefixshare.vllm_plugin.observability.stats import PrefixShareWorkerExtension


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate the tensors of all ranks, which may differ in their number of rows."""
    assert dim == 0
    if not isinstance(input_, torch.Tensor):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    each = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(each), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in each]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([tensor[:size] for tensor, size in zip(gathered, each, strict=True)])


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Add the tensors of all ranks, and return the rows of this rank."""
    assert dim == 0
    each = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.float()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(each)[self.rank_in_group].to(input_.dtype)


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv


class ExpertsOnCpu(PrefixShareWorkerExtension):
    """The plugin's worker extension; importing this module adds the collectives."""
