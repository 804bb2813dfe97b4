"""Merging partial results: for all requests in one launch, one request after the other, or in two
levels, of which the first merges groups of a request's partial results side by side.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from bench_kernel import TOLERANCE, measure
from peers import Launch

from papers.experiment import Figures, Setting
from papers.timing import dtype_on, machine
from vllm_prefixshare import merge_states
from vllm_prefixshare.kernels.merge_states import merge_states as merge_on_gpu

HEADS, HEAD_DIM = 32, 128
#: partial results that the first of two levels merges
FAN_IN = 8

#: of indptr, partial outputs and their log-sum-exps into an output and its log-sum-exp
Merge = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None
]


def merge_on_cpu(
    indptr: torch.Tensor,
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """As the kernel, in torch operators."""
    for request, (first, last) in enumerate(pairwise(indptr.tolist())):
        merged, weight = merge_states(outs[first:last, None], lses[first:last, None])
        out[request] = merged[0]
        if lse is not None:
            lse[request] = weight[0]


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
        merge(self.second, self.out, self.lse, out, None)


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
    merge: Merge = merge_on_cpu
    if device == "cuda":

        def merge(indptr, outs, lses, out, lse) -> None:
            merge_on_gpu(indptr, outs, lses, out, out_lse=lse)

    levels = TwoLevels(indptr, outs)

    def serial() -> None:
        for request in range(requests):
            merge(indptr[request : request + 2], outs, lses, out[request : request + 1], None)

    ways: dict[str, Callable[[], None]] = {
        "ours": lambda: merge(indptr, outs, lses, out, None),
        "serial": serial,
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
