"""Tree reduction and ring attention over NCCL, on two GPUs, launched one by one and in a CUDA
graph, against attention in float64.

python -m pytest -m gpu tests/gpu/test_gpu_ranks.py

All ranks are started once, and say what they have done when (``-s``). Where planning and kernels
are not compiled yet, that takes most of the first minute.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.peers.ring import RingDecode
from tests.support.gpu_layer import ON_GPU, TWO_GPUS
from tests.support.paged_batches import PagedBatch, paged_batch
from tests.support.rank_process import own_part
from vllm_prefixshare import PrefixShareDecodeWrapper
from vllm_prefixshare.distributed.shards import Shard
from vllm_prefixshare.distributed.tree_reduction import REDUCTIONS, TreeDecode

WAYS = (*REDUCTIONS, "ring")
RANKS = 2
DEADLINE = 240  # seconds; a cold start takes a minute
Tensors = list[torch.Tensor]
pytestmark = [*ON_GPU, TWO_GPUS]
#: documents of 21 blocks; and one request of 5 tokens, which leaves a shard empty
CASES: dict[str, dict[str, Any]] = {
    "documents": {"document_blocks": 21, "private_blocks": 9},
    "one short request": {"documents": 1, "requests": 1},
}
#: a graph of "documents", replayed under other contents of its tensors
REPLAYS = ("replay 0", "replay 1", "replay 2")
SHAPE: dict[str, Any] = {"heads": (32, 8), "head_dim": 128, "dtype": torch.bfloat16}


def started(rank: int, port: int, began: float) -> Callable[[str], None]:
    """Start torch.distributed; a function that prints what the rank has done, and when."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    def say(what: str) -> None:
        torch.cuda.synchronize()
        print(f"rank {rank}, {time.time() - began:.1f} s: {what}", flush=True)

    say("imported and met")
    return say


def at_work(rank: int, port: int, began: float, results: Any) -> None:
    say = started(rank, port, began)
    device = torch.device("cuda", rank)

    def wrapper() -> PrefixShareDecodeWrapper:
        return PrefixShareDecodeWrapper(
            num_qo_heads=32, num_kv_heads=8, head_dim=128, block_size=16, device=device
        )

    wrappers = {way: wrapper() for way in WAYS if way != "ring"}
    say("planning is compiled")
    decoders: dict[str, Any] = {
        way: TreeDecode(wrappers[way], reduction=way) if way in wrappers else RingDecode(wrapper)
        for way in WAYS
    }
    say("connected")
    found = {}
    for case, options in CASES.items():
        batch = paged_batch(**options, **SHAPE)
        if case == "one short request":
            batch.seq_lens[:] = 5
        wanted = batch.expected()
        table, lens, tensors = on_gpu(batch, rank, device)
        for way, decoder in decoders.items():
            decoder.plan(table, lens)
            found[case, way] = compared(wanted, *run(way, decoder, tensors))
            say(f"{case}, {way}")
    batches = {ring: replay_batches(ring) for ring in (False, True)}
    for way, decoder in decoders.items():
        of_way = batches[way == "ring"]
        for case, result in zip(REPLAYS, replayed(way, decoder, wrappers, of_way), strict=True):
            found[case, way] = result
        say(f"replays, {way}")
    results.put((rank, found))
    dist.destroy_process_group()


def on_gpu(batch: PagedBatch, rank: int, device: torch.device) -> tuple[Any, Any, Tensors]:
    """Table and lengths of the rank's shard, and the tensors of a run."""
    table, lens, caches = own_part(batch, rank, RANKS)
    # a GPU kernel multiplies whole blocks: tokens past a length must be finite
    parts = batch.q, *(c.nan_to_num() for c in caches), *map(torch.from_numpy, (table, lens))
    return table, lens, [x.to(device) for x in parts]


def run(way: str, decoder: Any, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    q, *part = tensors
    out, lse = decoder.run(q, *part[:2]) if way == "ring" else decoder.run(q, Shard(*part))
    return out, lse


def compared(
    expected: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[float, float, str]:
    """Errors against float64, and a hash of the output."""
    wanted, wanted_lse = expected
    error = (out.cpu().double() - wanted).norm() / wanted.norm()
    lse_error = (lse.cpu().double() - wanted_lse).abs().max()
    bits = hashlib.sha256(out.view(torch.int16).cpu().numpy().tobytes()).hexdigest()
    return float(error), float(lse_error), bits


def replay_batches(ring: bool) -> list[tuple[PagedBatch, tuple[torch.Tensor, torch.Tensor]]]:
    """Batches with other queries and KV, and their attention; for a tree reduction also with other
    block tables and lengths, some of which leave a shard empty.
    """
    batches = [paged_batch(**CASES["documents"], **SHAPE, seed=i) for i in range(len(REPLAYS))]
    batches[1].seq_lens[:3] = 5
    for batch in batches:
        batch.k_cache, batch.v_cache = batch.k_cache.nan_to_num(), batch.v_cache.nan_to_num()
        if ring:
            batch.block_table, batch.seq_lens = batches[0].block_table, batches[0].seq_lens
    return [(batch, batch.expected()) for batch in batches]


def replayed(
    way: str,
    decoder: Any,
    wrappers: dict[str, PrefixShareDecodeWrapper],
    batches: list[tuple[PagedBatch, tuple[torch.Tensor, torch.Tensor]]],
) -> Iterator[tuple[float, float, str]]:
    """A graph captured once, replayed for each batch, under plans made since."""
    device, rank = torch.device("cuda", decoder.ranks.rank), decoder.ranks.rank
    table, lens, tensors = on_gpu(batches[0][0], rank, device)
    decoder.plan(table, lens)
    if way in wrappers:
        wrappers[way].reserve()
    run(way, decoder, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out, lse = run(way, decoder, tensors)
    for batch, wanted in batches:
        table, lens, others = on_gpu(batch, rank, device)
        for old, new in zip(tensors, others, strict=True):
            old.copy_(new)
        if way in wrappers:
            decoder.plan(table, lens)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        yield compared(wanted, out, lse)


World = tuple[Any, Any]  # processes, and the queue of their results


def start(work: Callable[..., None], *args: Any) -> World:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    # a free port, which the first rank opens again
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    arguments = port, time.time(), results, *args
    return multiprocessing.spawn(work, arguments, nprocs=RANKS, join=False), results


def finish(world: World, deadline: float) -> tuple[dict[Any, Any], bool]:
    """The results of a world's ranks, and whether all of them have ended by ``deadline``."""
    processes, results = world
    ended = False
    try:
        while not ended and time.time() < deadline:
            ended = processes.join(1.0)
    finally:
        for process in processes.processes:
            process.kill()
    found = {}
    while not results.empty():
        key, value = results.get()
        found[key] = value
    return found, ended


@pytest.fixture(scope="module")
def world() -> tuple[dict[Any, Any], bool]:
    return finish(start(at_work), time.time() + DEADLINE)


@pytest.fixture
def ranks(world) -> dict[int, dict[Any, Any]]:
    found, _ = world
    assert len(found) == RANKS, "a rank hangs, and left no results"
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [*CASES, *REPLAYS])
def test_every_rank_has_the_attention_over_all_tokens(ranks, case, way):
    for error, lse_error, _ in (found[case, way] for found in ranks.values()):
        assert error < 8e-3 and lse_error < 2e-2
    if way != "ring":  # ranks that continue decoding must choose the same token
        assert ranks[0][case, way][2] == ranks[1][case, way][2]


def test_every_rank_ends(world):
    _, ended = world
    assert ended
