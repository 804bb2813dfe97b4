"""The one-shot reduction with several ranks on one GPU, each with a stream of its own, against
merge states: the same bits, round after round, in a CUDA graph, and when a rank stays away.

python -m pytest -m gpu tests/gpu/test_gpu_one_shot.py
"""

import pytest
import torch

from tests.support.gpu_layer import DEVICE, ON_GPU
from vllm_prefixshare.kernels.merge_states import merge_stacked
from vllm_prefixshare.kernels.one_shot import PROGRAMS, one_shot, one_shot_bytes

pytestmark = ON_GPU
HEADS, PATIENCE = 32, 60.0


class World:
    """Ranks that share a GPU, with memory for states of ``rows`` rows."""

    def __init__(self, size: int, rows: int, head_dim: int, dtype: torch.dtype) -> None:
        num_bytes = one_shot_bytes(size, rows, head_dim, dtype.itemsize)
        self.max_rows = rows
        self.memory = torch.zeros(size, num_bytes, dtype=torch.uint8, device=DEVICE)
        self.addresses = torch.tensor([m.data_ptr() for m in self.memory], device=DEVICE)
        self.rounds = torch.zeros(size, PROGRAMS, dtype=torch.int32, device=DEVICE)
        self.gave_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def merge(self, rank: int, state, patience: float = PATIENCE):
        out, lse = state
        mine = self.rounds[rank], self.gave_up, rank, self.max_rows
        return one_shot(out, lse, self.addresses, *mine, patience)

    def together(self, states):
        """The results of all ranks, launched side by side."""
        torch.cuda.synchronize()
        results = []
        for rank, (stream, state) in enumerate(zip(self.streams, states, strict=True)):
            with torch.cuda.stream(stream):
                results.append(self.merge(rank, state))
        torch.cuda.synchronize()
        return results


def states_of(size: int, tokens: int, head_dim: int, dtype: torch.dtype, seed: int):
    """A state for each rank; one query without a token on the last rank, one without any."""
    torch.manual_seed(seed)
    outs = torch.randn(size, tokens, HEADS, head_dim, device=DEVICE).to(dtype)
    lses = torch.randn(size, tokens, HEADS, device=DEVICE) * 5
    for ranks, query in ((slice(-1, None), 0), (slice(None), -1)):
        lses[ranks, query], outs[ranks, query] = -torch.inf, torch.nan
    return outs, lses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "head_dim"), [(2, 128), (3, 80), (8, 64)])
def test_the_bits_of_merge_states_in_every_round(size, head_dim, dtype):
    world = World(size, 150 * HEADS, head_dim, dtype)
    # from one program to several rounds of all of them, and back
    for seed, tokens in enumerate((1, 150, 2, 64, 64, 3, 150)):
        outs, lses = states_of(size, tokens, head_dim, dtype, seed)
        wanted = merge_stacked(outs, lses)
        for got in world.together(list(zip(outs, lses, strict=True))):
            assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert not world.gave_up.item()


def test_a_graph_that_is_replayed():
    world = World(2, 4 * HEADS, 128, torch.bfloat16)
    outs, lses = states_of(2, 4, 128, torch.bfloat16, 0)
    world.together(list(zip(outs, lses, strict=True)))  # compiles
    graphs, results = [], []
    for rank in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=world.streams[rank]):
            results.append(world.merge(rank, (outs[rank], lses[rank])))
    for seed in range(1, 6):
        for held, new in zip((outs, lses), states_of(2, 4, 128, torch.bfloat16, seed), strict=True):
            held.copy_(new)
        wanted = merge_stacked(outs, lses)
        torch.cuda.synchronize()
        for stream, graph in zip(world.streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for got in results:
            assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def test_a_rank_that_stays_away_ends_the_wait_once():
    world = World(2, 4 * HEADS, 128, torch.bfloat16)
    outs, lses = states_of(2, 4, 128, torch.bfloat16, 0)
    world.together(list(zip(outs, lses, strict=True)))  # compiles
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    world.merge(0, (outs[0], lses[0]), patience=0.5)
    middle.record()
    world.merge(0, (outs[0], lses[0]), patience=0.5)
    end.record()
    torch.cuda.synchronize()
    assert world.gave_up.item() == 1
    assert 400 < begin.elapsed_time(middle) < 2000
    assert middle.elapsed_time(end) < 100, "it has given up already"
