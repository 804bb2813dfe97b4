"""Tree reduction in one launch, over memory that the GPUs of one host write for each other."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.distributed.ranks import Ranks


class Room(NamedTuple):
    """Memory of all ranks for states; see ``kernels.one_shot``."""

    max_rows: int
    memory: torch.Tensor
    handle: Any  # keeps the other GPUs' memory within reach
    addresses: torch.Tensor
    rounds: torch.Tensor


class OneShot:
    """All ranks' states, exchanged and merged by one launch on each GPU (``kernels.one_shot``).

    The memory is PyTorch's symmetric memory: GPUs of one host that reach each other over NVLink. A
    GPU that waits for another one gives up within the time-out, also in the replay of a CUDA graph;
    the next call raises then. Memory is kept for as long as this object, because graphs may use it.

    Args:
        ranks: the ranks, on GPUs.
        head_dim, dtype, device: of the outputs.

    Raises:
        PrefixShareError: the tensors are not on GPUs.
    """

    def __init__(
        self, ranks: Ranks, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if device.type != "cuda":
            raise PrefixShareError(
                'reduction "one_shot" needs GPUs, and tensors are on a CPU: take "gather".'
            )
        self._ranks = ranks
        # set by a kernel that has waited for another GPU for too long
        self._gave_up = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._of = head_dim, dtype, device
        self._rooms: dict[int, Room] = {}  # by the rows that they hold
        self._room: Room | None = None

    def reserve(self, rows: int) -> None:
        """Make room for states of ``rows`` rows, one for each query and head; every rank must call
        it, with the same.

        Raises:
            PrefixShareError: the GPUs do not reach each other's memory.
        """
        enough = [held for held in self._rooms if held >= rows]
        if enough or not rows:
            self._room = self._rooms[min(enough)] if enough else None
            return
        hosts = self._ranks.exchange(socket.gethostname())
        with self._on_all_ranks():
            if len(set(hosts)) > 1:
                raise RuntimeError(f"they are in hosts {', '.join(sorted(set(hosts)))}")
            memory, rounds = self._allocate(rows)
        with self._on_all_ranks():
            handle, addresses = self._connect(memory)
        self._room = self._rooms[rows] = Room(rows, memory, handle, addresses, rounds)

    def _allocate(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        from vllm_prefixshare.kernels.one_shot import PROGRAMS, one_shot_bytes  # needs triton

        head_dim, dtype, device = self._of
        num_bytes = one_shot_bytes(self._ranks.size, rows, head_dim, dtype.itemsize)
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        rounds = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # before another rank writes
        return memory, rounds

    def _connect(self, memory: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The handle, and the addresses of all ranks' memories."""
        import torch.distributed._symmetric_memory as symmetric

        handle = symmetric.rendezvous(memory, self._ranks.group)
        # newer releases of torch may place several memories in one buffer
        buffers = [address + getattr(handle, "offset", 0) for address in handle.buffer_ptrs]
        if buffers[self._ranks.rank] != memory.data_ptr():
            raise RuntimeError("this torch reports another address for the memory")
        return handle, torch.tensor(buffers, dtype=torch.int64, device=memory.device)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """Do it on every rank, and raise on all of them if it fails on one."""
        why = ""
        try:
            yield
        except Exception as e:  # whatever it is: the others wait to hear of it
            why = (str(e).splitlines() or [type(e).__name__])[0].rstrip(".")
        for rank, theirs in enumerate(self._ranks.exchange(why)):
            if theirs:
                raise PrefixShareError(
                    f'rank {rank}: reduction "one_shot" needs GPUs that reach each other\'s '
                    f'memory: take "gather" ({theirs}).'
                )

    def __call__(
        self, packed: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp over all ranks' tokens, on every rank, with the same bits.

        Args:
            packed, out, lse: as ``tree_reduction.Partial``, of as many rows as are reserved or
                fewer.

        Raises:
            PrefixShareError: in an earlier call another rank was missing.
        """
        from vllm_prefixshare.kernels.one_shot import one_shot  # needs triton

        ranks, room = self._ranks, self._room
        assert room is not None, "reserve comes first"
        if self._gave_up.item():
            raise PrefixShareError(
                f"another rank was not there within {ranks.timeout.total_seconds():g} s: restart "
                "all ranks."
            )
        ranks.bytes_sent += (ranks.size - 1) * packed.nbytes
        patience = ranks.timeout.total_seconds()
        return one_shot(
            out, lse, room.addresses, room.rounds, self._gave_up, ranks.rank,
            room.max_rows, patience,
        )  # fmt: skip
