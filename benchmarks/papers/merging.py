"""Merging partial results: all requests in one launch, as this project does, or one request after
the other.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from tests.support.reference_attention import reference_attention_and_lse
from vllm_prefixshare import merge_states
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.interface import Tensors
from vllm_prefixshare.kernels.merge_states import merge_states as launch_merging
from vllm_prefixshare.kernels.workspace import PartialResults, Workspace
from vllm_prefixshare.planning.plan import DecodePlan


class Merge(Protocol):
    """Merges the partial results ``[indptr[i], indptr[i + 1])`` into ``out[i]``, and their
    log-sum-exp into ``lse[i]``; ``dependent`` as in ``kernels.merge_states``.
    """

    def __call__(
        self,
        indptr: torch.Tensor,
        outs: torch.Tensor,
        lses: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        dependent: bool = False,
    ) -> None: ...


def merge_on_gpu(
    indptr: torch.Tensor,
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """One launch."""
    launch_merging(indptr, outs, lses, out, out_lse=lse, dependent=dependent)


def merge_on_cpu(
    indptr: torch.Tensor,
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """As the kernel, in torch operators."""
    for request, (first, last) in enumerate(pairwise(indptr.tolist())):
        merged, weight = merge_states(outs[first:last, None], lses[first:last, None])
        out[request] = merged[0]
        if lse is not None:
            lse[request] = weight[0]


def merge_one_by_one(
    merge: Merge,
    requests: Iterable[int],
    indptr: torch.Tensor,
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    *,
    dependent: bool = False,
) -> None:
    """A launch for each request; each waits for the one before. Only the first may be
    ``dependent``: what it follows is the attention.
    """
    for request in requests:
        own = indptr[request : request + 2], outs, lses, out[request : request + 1]
        merge(*own, dependent=dependent)
        dependent = False


class Tiles(Protocol):
    """What ``Serially`` needs of a ``interface.Kernel``."""

    starts_merging: bool

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None: ...


class Serially:
    """Runs a layer as an executor does, but merges one request after the other: FlashForge's
    algorithm 4 without what section 4.3 does in parallel.

    Args:
        kernel: runs the tiles of ``plan``; one query for each request.
        workspace: with ``plan`` loaded, and room for its partial results.
    """

    def __init__(self, kernel: Tiles, merge: Merge, workspace: Workspace, plan: DecodePlan) -> None:
        self.kernel, self.merge, self.workspace = kernel, merge, workspace
        #: those whose tiles have not written their outputs
        self.requests: list[int] = np.flatnonzero(np.diff(plan.merge_indptr)).tolist()

    @classmethod
    def on_cpu(cls, plan: DecodePlan, attention: AttentionConfig) -> "Serially":
        """In torch operators."""
        device = torch.device("cpu")
        shape = attention.num_qo_heads, attention.head_dim
        work = Workspace(device, PartialResults(device, shape, query_len=1))
        work.partials.reserve(plan.num_partials)
        work.plan.load({"merge_indptr": plan.merge_indptr})
        return cls(TilesInTorch(plan), merge_on_cpu, work, plan)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        """As ``interface.Executor.run``."""
        arrays, partials = self.workspace.plan.arrays, self.workspace.partials
        # with one query for each request nothing reads where its queries start
        tensors = q, k_cache, v_cache, block_table, seq_lens, seq_lens, None
        t = Tensors(*tensors, partials.out, partials.lse, out)
        self.kernel.launch(arrays, t, sm_scale)
        merge_one_by_one(
            self.merge,
            self.requests,
            arrays["merge_indptr"],
            partials.out,
            partials.lse,
            out,
            dependent=self.kernel.starts_merging,
        )
        return out


class TilesInTorch:
    """The tiles of a plan one after the other, request by request: the partial results of a GPU's
    kernels, for miniatures on a CPU.
    """

    starts_merging = False

    def __init__(self, plan: DecodePlan) -> None:
        self.plan = plan

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """As ``interface.Kernel.launch``."""
        p, size = self.plan, t.k_cache.shape[1]
        ends = p.run_kv_start + p.run_lengths(t.seq_lens.numpy())
        # each token as a block of its own, because a run need not begin with a block
        caches = [cache.flatten(0, 1)[:, None] for cache in (t.k_cache, t.v_cache)]
        for tile in range(p.num_tiles):
            first, last = p.tile_req_indptr[tile : tile + 2]
            for slot in range(first, last):
                tokens = []
                for run in range(*p.tile_run_indptr[tile : tile + 2]):
                    if p.run_reader_start[run] <= slot - first < p.run_reader_end[run]:
                        at = torch.arange(p.run_kv_start[run], ends[run])
                        tokens.append(t.block_table[p.run_row[run], at // size] * size + at % size)
                table = torch.cat(tokens)[None]
                length = torch.tensor([table.shape[1]])
                request, row = p.tile_req_indices[slot], p.partial_indices[slot]
                q = t.q[request, None]
                out, lse = reference_attention_and_lse(q, *caches, table, length, None, sm_scale)
                if row < 0:
                    t.out[request] = out[0]
                else:
                    t.partial_out[row], t.partial_lse[row] = out[0], lse[0]
