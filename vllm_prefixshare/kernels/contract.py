"""What a kernel on a GPU is to the executor: limits of a plan, layout of a plan, launch."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import IntArray


class Tensors(NamedTuple):
    """Arguments of one launch, on the device and checked."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    tree_mask: torch.Tensor | None
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    out: torch.Tensor


class Capacity(NamedTuple):
    """Room for the plans of a number of requests.

    max_tiles, max_runs, max_partials: most work tiles, runs and partial results of a plan.
    sizes: entries of each array of its layout.
    """

    max_tiles: int
    max_runs: int
    max_partials: int
    sizes: dict[str, int]


class Gpu(NamedTuple):
    """What a kernel is made for.

    capability: compute capability, as in ``(9, 0)``.
    multi_processor_count: its multiprocessors.
    shared_memory: bytes of it that a thread block may have.
    """

    capability: tuple[int, int]
    multi_processor_count: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        found = torch.cuda.get_device_properties(device)
        return cls(
            (found.major, found.minor),
            found.multi_processor_count,
            found.shared_memory_per_block_optin,
        )


class Kernel(Protocol):
    """Partial attention as one kernel does it.

    divider: the one that measures best with it.
    num_workers, max_tile_requests, max_tile_runs: what its plans must keep to.
    """

    name: str
    divider: str
    num_workers: int
    max_tile_requests: int
    max_tile_runs: int

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """The plan as int32 arrays for the device."""
        ...

    def capacity(self, num_reqs: int) -> Capacity:
        """Room for all plans of at most ``num_reqs`` requests; at the very least for one tile
        each, which leaves no partial results."""
        ...

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """Write ``out`` where a request has one tile, else partial results."""
        ...
