"""Ranks that hold KV in shards: their collectives, in process groups that time out."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_prefixshare.core import PrefixShareError

#: newer releases of torch rename it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks:
    """Process groups over all ranks: one for tensors, by nccl on GPUs and gloo on CPUs, and one for
    messages between the hosts. Every rank makes the same calls.

    What torch.distributed does about a rank that is late or has ended applies, after ``timeout``.

    Args:
        device: device of the tensors.
        describe: what all ranks must have in common, names and values.
        timeout: seconds within which a call to another rank ends.

    Attributes:
        rank, size: this rank, and how many there are.
        bytes_sent: bytes that this rank has sent so far if collectives are rings; messages
            on the host are not counted, and what a CUDA graph sends counts at its capture only.

    Raises:
        PrefixShareError: torch.distributed is not initialised, or ranks disagree.
    """

    def __init__(
        self, device: torch.device, describe: dict[str, Any], *, timeout: float = 30.0
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise PrefixShareError(
                "torch.distributed is not initialised: call init_process_group first."
            )
        if not timeout > 0:
            raise PrefixShareError(f"timeout must be positive, got {timeout}.")
        self.timeout = timedelta(seconds=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.bytes_sent = 0
        # tensors have a separate group, over gloo too: gloo cannot tell a message from another
        # rank's tensor
        self._host = dist.new_group(timeout=self.timeout, backend="gloo")
        self.agree(describe)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.group = dist.new_group(timeout=self.timeout, backend=backend)
        # nccl makes its communicator at the first use
        self.all_reduce(torch.zeros(1, device=device))
        self.bytes_sent = 0

    def agree(self, describe: dict[str, Any]) -> None:
        """Make sure that all ranks give the same description; every rank must call it.

        Raises:
            PrefixShareError: descriptions differ.
        """
        said: list[dict[str, Any]] = self.exchange(describe)
        names = dict.fromkeys(name for theirs in said for name in theirs)
        for rank, theirs in enumerate(said):
            for name in names:
                value = said[0].get(name)
                if theirs.get(name) != value:
                    raise PrefixShareError(
                        f"ranks disagree: {name} is {value} on rank 0 and {theirs.get(name)} on "
                        f"rank {rank}: make it the same on all of them."
                    )

    def exchange(self, mine: Any) -> list[Any]:
        """The values of all ranks, by rank; every rank must call it."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self._host)
        return said

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """``x``, reduced in place over all ranks."""
        dist.all_reduce(x, op, group=self.group)
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``: every rank's ``x``, by rank."""
        gathered = x.new_empty(self.size, *x.shape)
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=self.group)
        self.bytes_sent += (self.size - 1) * x.nbytes
        return gathered
