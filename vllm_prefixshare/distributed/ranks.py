"""Ranks: a process group whose ranks agree on what they compute and whose collectives time out."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.distributed.backends import errors_left_to_us, listed, one_line, problem_of

#: newer releases of torch rename it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: seconds; gloo counts nanoseconds in 64 bits, and takes a longer time for one that has passed
LONGEST = 1e9
#: number of groups made so far in this process, by their ranks; equal on every rank
_made: Counter[tuple[int, ...]] = Counter()


class Ranks:
    """A separate process group with a time-out over the ranks of another one.

    Ranks describe what they are about to do, through the store of torch.distributed, before
    they open a connection to each other: ranks that disagree, or are missing, are named in one
    sentence on every rank that is there.

    A call ends within the time-out, also if another rank has ended. With nccl it waits for that
    until the GPU has finished, but not in a capture: see ``synchronize`` for replays. After an
    error the ranks have to be started again.

    Its connections last until ``torch.distributed.destroy_process_group`` ends all of them. A
    single group is never destroyed: PyTorch would give its name to the next group, and the store
    still has the old addresses under that name.

    Args:
        device: device of the tensors: nccl sends GPU tensors, gloo CPU tensors.
        describe: what all ranks must have in common, names and JSON values.
        group: the ranks; all of them if None.
        timeout: seconds within which a call to another rank ends, at most ``LONGEST``.
        backend: backend to use in place of the device's own.

    Attributes:
        rank, size: this rank, and how many there are.
        bytes_sent: bytes that this rank has sent so far if collectives are rings; messages
            on the host are not counted, and what a CUDA graph sends counts at its capture only.
        gave_up: int32 ``[1]`` on the host, set by a kernel that has waited for another rank for too
            long; None without a GPU.

    Raises:
        PrefixShareError: torch.distributed is not initialised, the backend is missing on a rank,
            ranks disagree, or a rank does not answer in time.
    """

    def __init__(
        self,
        device: torch.device,
        describe: dict[str, Any],
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 30.0,
        backend: str | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise PrefixShareError(
                "torch.distributed is not initialised: call init_process_group first."
            )
        if not 0 < timeout <= LONGEST:
            raise PrefixShareError(
                f"timeout must be positive and at most {LONGEST:.0e} seconds, got {timeout}."
            )
        self.timeout = timedelta(seconds=timeout)
        try:
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
        except KeyError:  # of a world without groups
            members = []
        if dist.get_rank() not in members:  # new_group returns a group on the other ranks, too
            raise PrefixShareError(
                f"rank {dist.get_rank()} is not in the group: call it on the group's ranks only."
            )
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        self._members = members
        self.bytes_sent = 0
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        problem = problem_of(backend, device)
        _made[tuple(members)] += 1
        self._store = dist.PrefixStore(
            f"vllm_prefixshare/{members}/{_made[tuple(members)]}",
            dist.distributed_c10d._get_default_store(),
        )
        self._waits = 0  # of the GPU for other ranks, so far; equal on every rank
        self._failed: PrefixShareError | None = None  # why this rank joins no further call
        self._launched: set[tuple[str, int]] = set()  # collectives so far, and their bytes
        # torch names a group after its ranks and the number of groups so far
        groups = {"the number of process groups": len(dist.distributed_c10d._world.pg_names)}
        self._agree_by_store({"backend": backend, **describe, **groups, "": problem})
        # the host group carries messages between ranks; the tensors have a separate group, over
        # gloo too: gloo cannot tell a message from another rank's tensor, and ends the process or
        # takes one for the other
        self._host = self._new_group("gloo", self.timeout)
        self._over_nccl = backend == "nccl"
        self.gave_up: torch.Tensor | None = None
        if self._over_nccl:
            self.gave_up = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
            with errors_left_to_us():
                self.group = self._new_group(backend, timedelta(days=1))
            # nccl makes its communicator at the first use
            self.all_reduce(torch.zeros(1, device=device))
            self.bytes_sent = 0
        else:
            self.group = self._new_group(backend, self.timeout)

    def _new_group(self, backend: str, timeout: timedelta) -> dist.ProcessGroup:
        with self.within_time(f"connecting through {backend}"):
            made: dist.ProcessGroup = dist.new_group(
                self._members, timeout, backend, use_local_synchronization=True
            )
        return made

    def _agree_by_store(self, mine: dict[str, Any]) -> None:
        """Compare descriptions through the store, before there is a connection."""
        said: list[dict[str, Any]] = []
        missing: list[int] = []
        store = self._store
        try:
            store.set(str(self.rank), json.dumps(mine))
            for rank in range(self.size):
                # after one rank has timed out, the others have had as long: do not wait again
                patience = timedelta(seconds=0.1) if missing else self.timeout
                try:
                    store.wait([str(rank)], patience)
                except dist.DistStoreError:
                    missing.append(rank)
                    continue
                said.append(json.loads(store.get(str(rank))))
        except RuntimeError as e:
            raise PrefixShareError(
                f"rank {self.rank}: the store of torch.distributed cannot be reached, the process "
                f"that holds it has ended ({one_line(e)})."
            ) from None
        if missing:
            raise PrefixShareError(
                f"rank {self.rank}: rank {listed(missing)} of {self.size} did not come within "
                f"{self.timeout.total_seconds():g} s: start all of them, and look at their logs."
            )
        self._compare(said)

    def agree(self, describe: dict[str, Any]) -> None:
        """Make sure that all ranks give the same description; every rank must call it.

        Raises:
            PrefixShareError: descriptions differ, or a rank is missing.
        """
        mine = " and ".join(f"{name} ({value} here)" for name, value in describe.items())
        said: list[dict[str, Any]] = self.exchange(
            describe, f"about {', '.join(describe)}", f"comparing {mine}"
        )
        self._compare(said)

    def exchange(self, mine: Any, call: str, doing: str) -> list[Any]:
        """The values of all ranks, by rank; every rank must call it.

        Args:
            call: what is exchanged, the same on all ranks: one that makes another call must not
                take these values for its own.
            doing: what for, in an error.

        Raises:
            PrefixShareError: a rank is missing, or makes another call.
        """
        self._check()
        said: list[Any] = [None] * self.size
        with self.within_time(doing):
            dist.all_gather_object(said, (call, mine), group=self._host)
        self._compare([{"the call": theirs} for theirs, _ in said])
        return [value for _, value in said]

    def _compare(self, said: list[dict[str, Any]]) -> None:
        for rank, theirs in enumerate(said):
            if theirs.get(""):
                raise PrefixShareError(f"rank {rank}: {theirs['']}")
        names = dict.fromkeys(name for theirs in said for name in theirs)
        for rank, theirs in enumerate(said):
            for name in names:
                value = said[0].get(name)
                if theirs.get(name) != value:
                    raise PrefixShareError(
                        f"ranks disagree: {name} is {value} on rank 0 and {theirs.get(name)} on "
                        f"rank {rank}: make it the same on all of them."
                    )

    @contextmanager
    def within_time(self, doing: str) -> Iterator[None]:
        """Turn a lost connection or a time-out into an error of one sentence, for this and every
        later call.
        """
        try:
            yield
        except (RuntimeError, ValueError) as e:
            if isinstance(e, PrefixShareError):
                raise
            self._failed = PrefixShareError(
                f"rank {self.rank}: {doing} failed: another rank has ended, or was elsewhere for "
                f"{self.timeout.total_seconds():g} s: restart all ranks ({one_line(e)})."
            )
            raise self._failed from None

    @contextmanager
    def before_the_others(self) -> Iterator[None]:
        """What this rank does by itself before a collective, or between two. If that fails, the
        others may have begun the collective, and the next one here would meet it: there is none.
        """
        self._check()
        try:
            yield
        except BaseException as e:  # out of memory and interrupts, too: a caller may go on
            if self.size > 1 and self._failed is None:
                how = "was refused" if isinstance(e, PrefixShareError) else "failed"
                self._failed = PrefixShareError(
                    f"rank {self.rank}: an earlier call {how} here, while the others may have gone "
                    f"on: restart all ranks ({one_line(e)})."
                )
            raise

    @contextmanager
    def _launching(self, doing: str, num_bytes: int) -> Iterator[None]:
        """Give a collective to the backend, within the time-out."""
        self._check()
        abort = None
        if self._over_nccl and (doing, num_bytes) not in self._launched:
            # nccl connects when a message of its size is first sent, and waits there for the others
            self._meet(doing)
            abort = threading.Timer(self.timeout.total_seconds(), self._abort)
            abort.daemon = True
            abort.start()
        try:
            with self.within_time(doing):
                yield
        finally:
            if abort is not None:
                abort.cancel()
        self._launched.add((doing, num_bytes))

    def _meet(self, doing: str) -> None:
        """Wait on the host until all ranks are about to do the same: stopping nccl while it
        connects is the last resort, because it may not give back its connections then.

        Raises:
            PrefixShareError: names the ranks that did not come.
        """
        self._waits += 1
        self._say_waiting()
        until = time.monotonic() + self.timeout.total_seconds()
        try:
            dist.barrier(group=self._host)
        except (RuntimeError, ValueError):
            # one rank's end ends the barrier; others may only be late
            self._fail(doing, until)

    def synchronize(self) -> None:
        """Wait until the GPU has done what its current stream holds, such as the replay of a CUDA
        graph with collectives, which no other time-out applies to. Every rank must call it.

        Raises:
            PrefixShareError: a rank is missing.
        """
        self._check()
        self._wait_for_gpu("a collective in a CUDA graph")

    def _wait_for_gpu(self, doing: str) -> None:
        """Wait until the GPU has done what its stream holds: a kernel of nccl waits for the other
        ranks for ever. The calls of gloo do not, and in a capture there is nothing to wait for.
        """
        if not self._over_nccl or torch.cuda.is_current_stream_capturing():
            return
        self._waits += 1
        done = torch.cuda.Event()
        done.record()
        began, said = time.monotonic(), False
        while not done.query():
            waited, patience = time.monotonic() - began, self.timeout.total_seconds()
            if waited > patience:
                self._give_up(doing)
            if waited > 1e-3:
                time.sleep(1e-4)
            if waited > 0.1 * patience and not said:
                # the ranks that wait say so; the others are those that did not come
                said = True
                self._say_waiting()
        if self.gave_up is not None and self.gave_up.item():
            self._say_waiting()
            self._fail(doing, time.monotonic() + 0.1 * self.timeout.total_seconds())

    @contextmanager
    def on_gpu(self, doing: str, num_bytes: int) -> Iterator[None]:
        """Launch kernels that send by themselves; see ``gave_up``.

        Raises:
            PrefixShareError: a rank is missing.
        """
        self._check()
        yield
        self._wait_for_gpu(doing)
        self.bytes_sent += num_bytes

    def _give_up(self, doing: str) -> None:
        """End the connections, and with them the kernel that waits.

        Raises:
            PrefixShareError: names the ranks that did not come.
        """
        # in another thread, because nccl also waits until no graph uses the connections any more
        ending = threading.Thread(target=self._abort, daemon=True)
        ending.start()
        ending.join(2.0)
        self._fail(doing)

    def _fail(self, doing: str, until: float = 0.0) -> None:
        """Raise the error of this and every later call.

        Args:
            until: time at which a rank that does not wait counts as missing.

        Raises:
            PrefixShareError: names the ranks that did not come.
        """
        who = "another rank"
        try:
            while (silent := self._silent()) and time.monotonic() < until:
                time.sleep(0.05)
            who = f"rank {listed(silent)}" if silent else who
        except RuntimeError:
            who = "the rank that holds the store of torch.distributed"
        self._failed = PrefixShareError(
            f"rank {self.rank}: {doing} failed: {who} has ended, or was elsewhere for "
            f"{self.timeout.total_seconds():g} s: restart all ranks."
        )
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed.with_traceback(None)

    def _abort(self) -> None:
        dist.distributed_c10d._abort_process_group(self.group)

    def _say_waiting(self) -> None:
        with suppress(RuntimeError):
            self._store.set(f"waits {self.rank}", str(self._waits))

    def _silent(self) -> list[int]:
        """The ranks that do not wait as this one does."""
        keys = {rank: f"waits {rank}" for rank in range(self.size)}
        return [
            rank
            for rank, key in keys.items()
            if not self._store.check([key]) or int(self._store.get(key)) < self._waits
        ]

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """``x``, reduced in place over all ranks.

        Raises:
            PrefixShareError: a rank is missing.
        """
        with self._launching("an all-reduce", x.nbytes):
            dist.all_reduce(x, op, group=self.group)
        self._wait_for_gpu("an all-reduce")
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``: every rank's ``x``, by rank.

        Raises:
            PrefixShareError: a rank is missing.
        """
        gathered = x.new_empty(self.size, *x.shape)
        with self._launching("an all-gather", x.nbytes):
            whole = gathered.view(-1), x.contiguous().view(-1)
            _all_gather(*whole, group=self.group)
        self._wait_for_gpu("an all-gather")
        self.bytes_sent += (self.size - 1) * x.nbytes
        return gathered
