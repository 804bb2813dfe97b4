"""One attention layer on a GPU: its tensors, a run, and the float64 result to compare with.

Outputs and partial results hold NaN before each run, so that a missing write shows.
"""

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from benchmarks.support.trees import Workload
from tests.support.paged_batches import batch_at_boundaries
from vllm_prefixshare import PrefixShareDecodeWrapper
from vllm_prefixshare.core import IntArray
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.profiling.gpu_timing import capture

THERE = torch.cuda.is_available()
GPUS = torch.cuda.device_count() if THERE else 0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="needs an NVIDIA GPU")]
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
HOPPER = not THERE or torch.cuda.get_device_capability()[0] == 9
KERNELS = ["hopper", "portable"] if HOPPER else ["portable"]
DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
#: relative error of a request's output: its rounding and that of the attention weights
TOLERANCE = {BF16: 4e-3, FP16: 5e-4}
SAMPLES = 12  # requests that are compared; the others are only checked to be finite


def missing(*packages: str) -> list[str]:
    """Which of these packages are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def on_gpu_with(*packages: str) -> list[pytest.MarkDecorator]:
    """Marks of tests that need a GPU and these packages."""
    absent = missing(*packages)
    return [*ON_GPU, pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")]


def cache_of(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype):
    """Random K and V ``[num_blocks, block_size, num_kv_heads, head_dim]`` with vLLM's strides: NHD
    or HND, in two tensors, in one, or interleaved.
    """
    blocks, tokens, heads, dim = shape
    inner = (heads, tokens, dim) if "HND" in layout else (tokens, heads, dim)
    if "interleaved" in layout:
        both = torch.empty(blocks, 2, *inner, dtype=dtype, device=DEVICE).normal_().unbind(1)
    else:
        both = torch.empty(2, blocks, *inner, dtype=dtype, device=DEVICE).normal_().unbind(0)
    return [t.transpose(1, 2) if "HND" in layout else t for t in both]


@dataclass
class Layer:
    """The tensors of a workload in one layer.

    counts: query tokens of each request. parents: token trees of all requests, one after the other.
    """

    work: Workload
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: torch.dtype = BF16
    layout: str = "NHD"
    counts: list[int] | None = None
    parents: IntArray | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        work = self.work
        self.counts = self.counts or [1] * work.num_reqs
        shape = sum(self.counts), self.heads[0], self.head_dim
        self.q = torch.empty(shape, dtype=self.dtype, device=DEVICE).normal_()
        cache = work.num_blocks, work.block_size, self.heads[1], self.head_dim
        self.k_cache, self.v_cache = cache_of(self.layout, cache, self.dtype)
        self.block_table = torch.tensor(work.block_table, device=DEVICE)
        self.seq_lens = torch.tensor(work.seq_lens, device=DEVICE)

    @classmethod
    def repeating(cls, work: Workload, counts: list[int], **options) -> "Layer":
        """A layer of 16 query and 4 KV heads whose requests have these numbers of query tokens, one
        after the other and again from the first, as far as they are long enough.
        """
        each = (counts * work.num_reqs)[: work.num_reqs]
        each = [min(n, int(length)) for n, length in zip(each, work.seq_lens, strict=True)]
        return cls(work, (16, 4), counts=each, **options)

    @property
    def starts(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
        return {name: getattr(self, name) for name in names}

    def holding(
        self, work: Workload, counts: list[int] | None = None, parents: IntArray | None = None
    ) -> "Layer":
        """Put another batch into the same tensors, which a CUDA graph may have captured. The
        tensors must have room for the batch; the unused rest is set to zero.
        """
        rows, columns = work.block_table.shape
        self.block_table.zero_()[:rows, :columns] = torch.from_numpy(work.block_table)
        self.seq_lens.zero_()[:rows] = torch.from_numpy(work.seq_lens)
        other = copy.copy(self)
        other.work, other.counts, other.parents = work, counts or [1] * work.num_reqs, parents
        return other

    def wrapper(self, kernel: str, **options) -> PrefixShareDecodeWrapper:
        options = {"max_query_len": max(self.counts), **options}
        return PrefixShareDecodeWrapper(
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            block_size=self.work.block_size,
            dtype=self.dtype,
            device=DEVICE,
            kernel=kernel,
            **options,
        )

    def planned(self, kernel: str, **options) -> PrefixShareDecodeWrapper:
        wrapper = self.wrapper(kernel, **options)
        wrapper.plan(self.work.block_table, self.work.seq_lens, self.starts, self.parents)
        return wrapper

    def run(self, wrapper: PrefixShareDecodeWrapper) -> torch.Tensor:
        poison(wrapper._executor)
        out = torch.full_like(self.q, torch.nan)
        assert wrapper.run(**self.tensors, out=out) is out
        return out

    def check(self, out: torch.Tensor) -> None:
        assert out.isfinite().all(), f"{self.work.name}: not written, or not a number"
        n = self.work.num_reqs
        for request in np.unique(np.linspace(0, n - 1, SAMPLES).astype(int)):
            first, last = self.starts[request : request + 2]
            expected = self.expected(request)
            error = float((out[first:last].double() - expected).norm() / expected.norm())
            assert error < TOLERANCE[self.dtype], f"{self.work.name}, request {request}"

    def expected(self, request: int) -> torch.Tensor:
        """Attention of one request's queries in float64, read block by block from the cache."""
        first, last = self.starts[request : request + 2]
        n, length = int(last - first), int(self.seq_lens[request])
        ids = self.block_table[request, : -(-length // self.work.block_size)].long()
        k, v = (c[ids].flatten(0, 1)[:length].double() for c in (self.k_cache, self.v_cache))
        q = self.q[first:last].double().unflatten(1, (self.heads[1], -1))
        sees = torch.ones(n, length, dtype=torch.bool)
        sees[:, length - n :] = self.visible(request)
        scores = torch.einsum("nhgd,thd->hgnt", q, k) * self.head_dim**-0.5
        scores = scores.masked_fill(~sees.to(DEVICE), float("-inf"))
        return torch.einsum("hgnt,thd->nhgd", torch.softmax(scores, -1), v).flatten(1, 2)

    def visible(self, request: int) -> torch.Tensor:
        """Which query tokens of a request each of its query tokens sees."""
        first, last = self.starts[request : request + 2]
        n = int(last - first)
        if self.parents is None:
            return torch.ones(n, n, dtype=torch.bool).tril()
        ok = torch.eye(n, dtype=torch.bool)
        for i, parent in enumerate(self.parents[first:last].tolist()):
            if parent >= 0:
                ok[i] |= ok[parent]
        return ok


def newest_slots(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int = 16):
    """The slot of each request's newest token, as a cache write takes it."""
    last = seq_lens.long() - 1
    blocks = block_table.long().gather(1, (last // block_size)[:, None])[:, 0]
    return blocks * block_size + last % block_size


def check_in_a_graph(layers: Callable[[Callable[[], None]], torch.Tensor]) -> None:
    """``layers(in_order)`` calls ``in_order`` after each launch and returns their outputs: the same
    bits in a CUDA graph, where launches may overlap, as one after the other.
    """
    wanted = layers(torch.cuda.synchronize)
    graph, outs = capture(lambda: layers(lambda: None))
    for _ in range(10):
        outs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outs, wanted)


def at_boundaries(block_size: int, queries: int = 1) -> Workload:
    """The requests of ``batch_at_boundaries``."""
    batch = batch_at_boundaries(queries, block_size=block_size)
    num_blocks = len(batch.k_cache)
    return Workload("boundaries", batch.block_table, batch.seq_lens, block_size, num_blocks, ())


def poison(executor: GpuExecutor) -> None:
    executor.workspace.partials.out.fill_(torch.nan)
    executor.workspace.partials.lse.fill_(torch.nan)


def random_trees(counts: list[int]) -> IntArray:
    rng = np.random.default_rng(0)
    return np.array([rng.integers(-1, i) for n in counts for i in range(n)], np.int32)
