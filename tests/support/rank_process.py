"""What each rank of ``test_ranks.py`` does in its own process, over gloo."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.kernel import scaling
from benchmarks.peers.ring import RingDecode
from tests.support.paged_batches import PagedBatch, paged_batch
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.distributed import tree_reduction
from vllm_prefixshare.distributed.ranks import Ranks
from vllm_prefixshare.distributed.shards import Shard, shard
from vllm_prefixshare.distributed.tree_reduction import COLLECTIVES, TreeDecode

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16, "seed": 1},
    "long": {"document_blocks": 21, "private_blocks": 9, "heads": (6, 2), "head_dim": 80},
    "one short request": {"documents": 1, "requests": 1},
}
WAYS = (*COLLECTIVES, "ring")
PATIENCE = 60.0  # seconds; long, for the cases in which no rank is late on purpose
SOON = 5.0
FINE = "nothing was refused"


def rank_at_work(rank: int, size: int, port: int, results: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    last = rank == size - 1
    found: dict[str, Any] = {}

    deciders: dict[Any, Any] = {}
    for name, options in CASES.items():
        batch = paged_batch(**options)
        if name == "one short request":
            batch.seq_lens[:] = 5
        _, expected_lse = expected = batch.expected()
        table, lens, caches = own_part(batch, rank, size)
        found[name, "empty"] = int((lens == 0).sum())
        for way in WAYS:
            key = way, batch.q.dtype, batch.q.shape[1:]
            if key not in deciders:
                deciders[key] = make(batch, way)
            decider = deciders[key]
            decider.plan(table, lens)
            held = caches if way == "ring" else [shard_of(table, lens, caches)]
            sent = decider.ranks.bytes_sent
            out, lse = decider.run(batch.q, *held)
            difference = (out.double() - expected[0]).norm() / expected[0].norm()
            found[name, way] = {
                "error": float(difference),
                "lse error": float((lse.double() - expected_lse).abs().max()),
                "sent": decider.ranks.bytes_sent - sent,
                "of the model": bytes_of_the_model(batch, way, caches, size),
                "dtype": out.dtype == batch.q.dtype and lse.dtype == torch.float32,
                "bits": out.view(torch.uint8).numpy().tobytes() + lse.numpy().tobytes(),
            }

    batch = paged_batch()
    other = paged_batch(heads=(8, 2)) if last else batch
    found["other heads"] = sentence(lambda: make(other, "gather"))
    other = paged_batch(dtype=torch.bfloat16) if last else batch
    found["other dtype"] = sentence(lambda: make(other, "ring"))
    found["other reduction"] = sentence(lambda: make(batch, "energy" if last else "gather"))
    found["tree and ring"] = sentence(lambda: make(batch, "gather" if last else "ring"))
    found["ring and tree"] = sentence(lambda: make(batch, "ring" if last else "gather"))
    there = dist.is_gloo_available
    dist.is_gloo_available = (lambda: False) if last else there  # type: ignore[assignment]
    found["no backend"] = sentence(lambda: make(batch, "gather"))
    dist.is_gloo_available = there  # type: ignore[assignment]
    found["no GPUs"] = sentence(lambda: make(batch, "one_shot"))
    found["unknown backend"] = sentence(lambda: make(batch, "gather", backend="smoke"))
    table, lens, caches = own_part(batch, rank, size)
    few = slice(0, 2 if last else None)
    decider = make(batch, "gather")
    found["other requests"] = sentence(lambda: decider.plan(table[few], lens[few]))
    ring = deciders["ring", batch.q.dtype, batch.q.shape[1:]]
    ring.plan(table, lens)
    more = [torch.cat([c, c]) if last else c for c in caches]
    found["other cache"] = sentence(lambda: ring.run(batch.q, *more))

    # one rank's cache has changed, the others plan again
    found["other call"] = sentence(
        lambda: ring.run(batch.q, *more) if last else ring.plan(table, lens)
    )

    none = slice(0, 0)
    found["no requests"] = {}
    for way in WAYS:
        decider = deciders[way, batch.q.dtype, batch.q.shape[1:]]
        decider.plan(table[none], lens[none])
        held = caches if way == "ring" else [shard_of(table[none], lens[none], caches)]
        found["no requests"][way] = [list(x.shape) for x in decider.run(batch.q[none], *held)]

    # one rank has fewer requests than before, the others go on
    changed = make(batch, "gather", SOON)
    changed.plan(table, lens)
    changed.run(batch.q, shard_of(table, lens, caches))

    def change() -> None:
        changed.plan(table[few], lens[few])
        changed.run(batch.q[few], shard_of(table[few], lens[few], caches))

    found["changed"] = timed_sentence(change)

    # from here on one rank is late or dead
    held = shard_of(table, lens, caches)
    refused, late, dead, passing, meeting, before, between, turning = (
        make(batch, way, SOON)
        for way in (
            "gather", "gather", "all_reduce", "ring", "gather", "gather", "all_reduce", "ring",
        )
    )  # fmt: skip
    for decider in (refused, late, dead, passing, before, between, turning):
        decider.plan(table, lens)
    for decider in (passing, turning):
        decider.run(batch.q, *caches)
    group = dist.new_group([0])
    found["a group"] = sentence(lambda: make(batch, "gather", group=group))
    found["groups"] = len(dist.distributed_c10d._world.pg_names)
    found["other groups"] = sentence(lambda: make(batch, "gather"))
    # one rank refuses its first call and makes the second, while the others wait in their first
    for case, q in ("refused", batch.q[:, :2] if last else batch.q), ("refused, again", batch.q):
        found[case] = timed_sentence(lambda q=q: refused.run(q, held))
    # one rank runs out of memory before its collective, between two, or between two turns
    for case, of, name, call in (
        ("memory before", before._wrapper, "run", lambda: before.run(batch.q, held)),
        ("memory between", tree_reduction, "_weighted", lambda: between.run(batch.q, held)),
        (
            "memory in the ring",
            turning._wrappers[rank - 1],
            "run",
            lambda: turning.run(batch.q, *caches),
        ),
    ):
        dist.barrier()
        fault = mock.Mock(side_effect=torch.OutOfMemoryError("planted"))
        with mock.patch.object(of, name, fault) if last else nullcontext():
            found[case] = timed_sentence(call)
        found[f"{case}, again"] = timed_sentence(call)
    dist.barrier()  # the ranks have waited for different times
    if not last:
        found["late"] = timed_sentence(lambda: late.run(batch.q, held))
        found["absent"] = timed_sentence(lambda: make(batch, "gather", SOON))
        found["stuck"] = timed_sentence(lambda: wait_for_a_stuck_gpu(late.ranks))
        found["unmet"] = timed_sentence(lambda: meeting.ranks._meet("passing KV on"))
    else:
        time.sleep(5 * SOON + 1)
    if last:
        results.send(found)
        os._exit(7)
    found["dead"] = timed_sentence(lambda: dead.run(batch.q, held))
    found["dead ring"] = timed_sentence(lambda: passing.run(batch.q, *caches))
    results.send(found)
    os._exit(0)  # the process groups are broken and cannot be shut down


def make(batch: PagedBatch, way: str, timeout: float = PATIENCE, **options: Any) -> Any:
    if way == "ring":
        return RingDecode(batch.wrapper, timeout=timeout, **options)
    return TreeDecode(batch.wrapper(), reduction=way, timeout=timeout, **options)


def wait_for_a_stuck_gpu(ranks: Ranks) -> None:
    """Wait as over nccl, for a kernel that does not end."""
    with (
        mock.patch.object(torch.cuda, "Event", StuckGpu),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(dist.distributed_c10d, "_abort_process_group") as abort,
        mock.patch.object(ranks, "group", "nccl"),
        mock.patch.object(ranks, "_over_nccl", True),
    ):
        try:
            ranks._wait_for_gpu("an all-gather")
        finally:
            abort.assert_called_once_with("nccl")


class StuckGpu:
    """An event of a GPU that does not get there."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


def own_part(
    batch: PagedBatch, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray, list[torch.Tensor]]:
    """The rank's shard; blocks of the other ranks hold NaN in this rank's cache."""
    block_size = batch.k_cache.shape[1]
    table, lens = shard(batch.block_table, batch.seq_lens, block_size, rank, size)
    own = np.zeros(len(batch.k_cache), bool)
    for row, length in zip(table, lens, strict=True):
        own[row[: -(-length // block_size)]] = True
    caches = [cache.clone() for cache in (batch.k_cache, batch.v_cache)]
    for cache in caches:
        cache[~torch.from_numpy(own)] = torch.nan
    return table, lens, caches


def bytes_of_the_model(batch: PagedBatch, way: str, caches: list[torch.Tensor], size: int) -> float:
    requests, heads, head_dim = batch.q.shape
    kv_heads = batch.k_cache.shape[2]
    layer = scaling.Layer(requests, 0, 0, heads, kv_heads, head_dim, batch.q.itemsize)
    if way == "gather":
        return scaling.gather_bytes(layer, size)
    if way == "ring":  # the ring sends the whole cache; a shard counts as part of the cache
        return float((size - 1) * sum(c.nbytes for c in caches))
    return scaling.all_reduce_bytes(layer, size)


def shard_of(table: np.ndarray, lens: np.ndarray, caches: list[torch.Tensor]) -> Shard:
    return Shard(caches[0], caches[1], torch.from_numpy(table), torch.from_numpy(lens))


def sentence(call: Callable[[], object]) -> str:
    """The error message with which ``call`` is refused, or fails for want of memory."""
    try:
        call()
    except (PrefixShareError, torch.OutOfMemoryError) as e:
        return str(e)
    return FINE


def timed_sentence(call: Callable[[], object]) -> tuple[str, float]:
    started = time.monotonic()
    return sentence(call), time.monotonic() - started
