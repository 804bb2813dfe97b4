"""What each rank of ``test_ranks.py`` does in its own process, over gloo."""

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.kernel import scaling
from benchmarks.peers.ring import RingDecode
from tests.support.paged_batches import PagedBatch, paged_batch
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.distributed.shards import Shard, shard
from vllm_prefixshare.distributed.tree_reduction import COLLECTIVES, TreeDecode

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16, "seed": 1},
    "long": {"document_blocks": 21, "private_blocks": 9, "heads": (6, 2), "head_dim": 80},
    "one short request": {"documents": 1, "requests": 1},
}
WAYS = (*COLLECTIVES, "ring")
PATIENCE = 60.0  # seconds
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
    found["no GPUs"] = sentence(lambda: make(batch, "one_shot"))
    table, lens, caches = own_part(batch, rank, size)
    few = slice(0, 2 if last else None)
    decider = make(batch, "gather")
    found["other requests"] = sentence(lambda: decider.plan(table[few], lens[few]))
    ring = deciders["ring", batch.q.dtype, batch.q.shape[1:]]
    ring.plan(table, lens)
    more = [torch.cat([c, c]) if last else c for c in caches]
    found["other cache"] = sentence(lambda: ring.run(batch.q, *more))

    none = slice(0, 0)
    found["no requests"] = {}
    for way in WAYS:
        decider = deciders[way, batch.q.dtype, batch.q.shape[1:]]
        decider.plan(table[none], lens[none])
        held = caches if way == "ring" else [shard_of(table[none], lens[none], caches)]
        found["no requests"][way] = [list(x.shape) for x in decider.run(batch.q[none], *held)]

    results.send(found)
    dist.barrier()  # one rank's end would end what another one still receives
    dist.destroy_process_group()


def make(batch: PagedBatch, way: str) -> Any:
    if way == "ring":
        return RingDecode(batch.wrapper, timeout=PATIENCE)
    return TreeDecode(batch.wrapper(), reduction=way, timeout=PATIENCE)


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
    """The error message with which ``call`` is rejected."""
    try:
        call()
    except PrefixShareError as e:
        return str(e)
    return FINE
