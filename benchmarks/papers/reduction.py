"""Merging partial results: for all requests in one launch, one request after the other, or in two
levels, of which the first merges groups of a request's partial results side by side.
"""

from collections.abc import Callable
from itertools import pairwise

import torch

from benchmarks.kernel.bench import TOLERANCE, machine, measure
from benchmarks.papers.experiment import Figures, Setting
from benchmarks.papers.merging import Merge, merge_on_cpu, merge_on_gpu, merge_one_by_one
from benchmarks.papers.timing import dtype_on
from benchmarks.peers import Launch

HEADS, HEAD_DIM = 32, 128
#: partial results that the first of two levels merges
FAN_IN = 8


class TwoLevels:
    """Merges groups of ``FAN_IN`` partial results, then what they leave."""

    def __init__(self, indptr: torch.Tensor, partial: torch.Tensor) -> None:
        cuts, groups = [0], [0]
        for first, last in pairwise(indptr.tolist()):
            cuts += [*range(first + FAN_IN, last, FAN_IN), last]
            groups.append(len(cuts) - 1)
        self.first, self.second = (
            torch.tensor(x, dtype=torch.int32, device=partial.device) for x in (cuts, groups)
        )
        self.out = partial.new_empty(len(cuts) - 1, *partial.shape[1:])
        self.lse = partial.new_empty(self.out.shape[:2])

    def merge(
        self, merge: Merge, outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor
    ) -> None:
        merge(self.first, outs, lses, self.out, self.lse)
        merge(self.second, self.out, self.lse, out)


def time_merging(setting: Setting, requests: int, partials: int) -> Figures:
    """Milliseconds of each way, for ``requests`` with ``partials`` partial results each."""
    device, dtype = setting.device, dtype_on(setting.device)
    torch.manual_seed(0)
    outs = torch.randn(requests * partials, HEADS, HEAD_DIM, device=device)
    lses = torch.randn(requests * partials, HEADS, device=device) * 3
    weights = lses.view(requests, partials, HEADS).double().softmax(1)[..., None]
    expected = (weights * outs.view(requests, partials, HEADS, HEAD_DIM)).sum(1).flatten(1)
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * partials
    out = torch.empty(requests, HEADS, HEAD_DIM, dtype=dtype, device=device)
    merge: Merge = merge_on_gpu if device == "cuda" else merge_on_cpu
    levels = TwoLevels(indptr, outs)
    ways: dict[str, Callable[[], None]] = {
        "ours": lambda: merge(indptr, outs, lses, out),
        "serial": lambda: merge_one_by_one(merge, range(requests), indptr, outs, lses, out),
        "two levels": lambda: levels.merge(merge, outs, lses, out),
    }
    timer, _ = machine(device)

    def launch(way: Callable[[], None]) -> Launch:
        def call() -> torch.Tensor:
            way()
            return out

        return Launch(call, graph=device == "cuda")

    return {
        "requests": requests,
        "partials": partials,
        "peers": {
            name: measure(
                launch(way), expected.float(), TOLERANCE[dtype], timer, setting.repeats, 1e9
            )
            for name, way in ways.items()
        },
    }
