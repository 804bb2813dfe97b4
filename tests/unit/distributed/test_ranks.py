"""Tree reduction and ring attention over gloo with 2, 3 and 8 processes, against attention of all
tokens in float64, and the errors for ranks that disagree.
"""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.peers.ring import RingDecode
from tests.support.rank_process import CASES, WAYS, rank_at_work
from vllm_prefixshare import PrefixShareDecodeWrapper, PrefixShareError
from vllm_prefixshare.distributed.shards import Shard, shard
from vllm_prefixshare.distributed.tree_reduction import TreeDecode

SIZES = (2, 3, 8)
#: relative error of the output: its own rounding, and for bfloat16 the rounding of each rank's
#: result
TOLERANCE = {"bfloat16": 6e-3}
DEADLINE = 240  # seconds for all worlds on a busy machine; otherwise a run takes under a minute


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, list[dict[Any, Any]]]]:
    """The results of each rank, by world size. Their processes are forked as engines are."""
    context = multiprocessing.get_context("forkserver")
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in SIZES]
    ranks, pipes = {}, {}
    try:
        for size, store in zip(SIZES, stores, strict=True):
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                arguments = rank, size, store.port, sender
                ranks[size, rank] = context.Process(target=rank_at_work, args=arguments)
                ranks[size, rank].start()
                sender.close()
                pipes[size, rank] = receiver
        found: dict[int, list[dict[Any, Any]]] = {size: [] for size in SIZES}
        for (size, rank), pipe in pipes.items():
            assert pipe.poll(DEADLINE), f"rank {rank} of {size} hangs"
            found[size].append(pipe.recv())
        for (size, rank), process in ranks.items():
            process.join(10)
            assert process.exitcode == 0, f"rank {rank} of {size}"
        yield found
    finally:
        for process in ranks.values():
            process.kill()
            process.join()


@pytest.fixture(params=SIZES, ids="{} ranks".format)
def world(request: pytest.FixtureRequest, worlds: dict[int, list[dict]]) -> list[dict[Any, Any]]:
    return worlds[request.param]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_attention_over_all_tokens(world, case, way):
    for result in (found[case, way] for found in world):
        assert result["error"] < TOLERANCE.get(case, 2e-6)
        assert result["lse error"] < 1e-5 and result["dtype"]
        assert result["sent"] == pytest.approx(result["of the model"], abs=len(world))
    if way != "ring":  # ranks that continue decoding must choose the same token
        assert len({found[case, way]["bits"] for found in world}) == 1


def test_some_shards_are_empty(world):
    assert sum(found["one short request", "empty"] for found in world) == len(world) - 1


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("other heads", "ranks disagree: num_qo_heads is 4 on rank 0 and 8 on rank {last}"),
        ("other dtype", "ranks disagree: dtype is float32 on rank 0 and bfloat16 on rank {last}"),
        ("other reduction", "reduction is gather on rank 0 and energy on rank {last}"),
        ("tree and ring", "reduction is ring on rank 0 and gather on rank {last}"),
        ("no GPUs", 'reduction "one_shot" needs GPUs, and tensors are on a CPU: take "gather".'),
        ("other requests", "the number of requests is 8 on rank 0 and 2 on rank {last}"),
        ("other cache", "ranks disagree: the KV cache is"),
    ],
)
def test_every_rank_says_what_disagrees(world, case, text):
    for found in world:
        assert text.format(last=len(world) - 1) in found[case]
        assert found[case].count("\n") == 0


def test_a_batch_without_requests_has_an_empty_result(world):
    for found in world:
        assert found["no requests"] == {way: [[0, 4, 64], [0, 4]] for way in WAYS}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shards_hold_every_token_once(size):
    rng = np.random.default_rng(size)
    lens = rng.integers(1, 100, 20).astype(np.int32)
    table = np.arange(20 * 13, dtype=np.int32).reshape(20, 13)
    seen: list[set[tuple[int, int]]] = [set() for _ in lens]
    for rank in range(size):
        own_table, own_lens = shard(table, lens, 8, rank, size)
        for row, own, length in zip(seen, own_table, own_lens, strict=True):
            here = {(int(own[t // 8]), t % 8) for t in range(length)}
            assert not row & here
            row |= here
    for request, row in enumerate(seen):
        assert row == {(int(table[request, t // 8]), t % 8) for t in range(lens[request])}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([[1, 2, 3]], [50], 16, 1, 2), "1 lengths from 0 to 48, for as many rows of 3 blocks of"),
        (([[1, 2, 3]], [-1], 16, 0, 2), "1 lengths from 0 to 48"),
        (([[1, 2, 3]], [5, 6], 16, 0, 2), "1 lengths from 0 to 48"),
        (([[1, 2, 3]], [5], 0, 0, 2), "world_size and block_size must be at least 1, got 2 and 0"),
        (([[1, 2, 3]], [5], 16, 0, 0), "world_size and block_size must be at least 1, got 0 and"),
        (([[1, 2, 3]], [5], 16, 2, 2), "rank must be from 0 to 1, got 2"),
        (([1, 2, 3], [5], 16, 0, 2), "block_table must be 2-dimensional integers"),
    ],
)
def test_shards_that_cannot_be_are_refused(arguments, text):
    with pytest.raises(PrefixShareError, match=text):
        shard(*arguments)


@pytest.fixture
def alone() -> Iterator[PrefixShareDecodeWrapper]:
    """An operator in a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield PrefixShareDecodeWrapper(
        num_qo_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    dist.destroy_process_group()


def test_mistakes_of_one_rank_are_sentences(alone):
    q = torch.zeros(1, 4, 64)
    for timeout in (0.0, -1.0, float("nan")):
        with pytest.raises(PrefixShareError, match="timeout must be positive"):
            TreeDecode(alone, timeout=timeout)
    for more, text in (
        ({"sliding_window": 16}, "has no sliding_window: make the wrapper without"),
        ({"features": ["sinks"]}, "has no sinks: make the wrapper without"),
        ({"features": ["alibi", "soft_cap"]}, "has no alibi and no soft_cap: make the wrapper"),
    ):
        other = PrefixShareDecodeWrapper(
            num_qo_heads=4, num_kv_heads=2, head_dim=64, block_size=16, **more
        )
        for decoder, made in ((TreeDecode, other), (RingDecode, lambda other=other: other)):
            with pytest.raises(PrefixShareError, match=f"KV in shards {text}"):
                decoder(made)
    tree, ring = TreeDecode(alone), RingDecode(lambda: alone)
    for call in (lambda: tree.partial(q, None), lambda: ring.run(q, q, q)):
        with pytest.raises(PrefixShareError, match="there is no plan yet: call plan"):
            call()
    with pytest.raises(PrefixShareError, match="block_table must be 2-dimensional"):
        ring.plan([1, 2], [5])


def test_a_batch_that_was_refused_leaves_no_plan_to_run(alone):
    """The other ranks may have planned it: their tensors have another size."""
    cache, tables = torch.zeros(4, 16, 2, 64), ([[1], [2]], [5, 6])
    held = Shard(cache, cache, *map(torch.tensor, tables))
    q = torch.zeros(2, 4, 64)
    other = PrefixShareDecodeWrapper(
        num_qo_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    tree, ring = TreeDecode(alone), RingDecode(lambda: other)
    runs = (tree, lambda: tree.run(q, held)), (ring, lambda: ring.run(q, cache, cache))
    for decoder, run in runs:
        decoder.plan(*tables)
        assert run()[0].shape == q.shape
        with pytest.raises(PrefixShareError, match="block ids start at 0"):
            decoder.plan([[1], [2], [-1]], [5, 6, 7])
        with pytest.raises(PrefixShareError, match=r"q must have 3 rows|there is no plan yet"):
            run()
        decoder.plan(*tables)
        assert run()[0].shape == q.shape


def test_without_ranks_it_says_how_to_start():
    wrapper = PrefixShareDecodeWrapper(
        num_qo_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    with pytest.raises(PrefixShareError, match="not initialised: call init_process_group first"):
        TreeDecode(wrapper)
    with pytest.raises(PrefixShareError, match="reduction must be one of gather, all_reduce"):
        TreeDecode(wrapper, reduction="bush")  # type: ignore[arg-type]
