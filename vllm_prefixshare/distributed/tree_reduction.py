"""Tree Attention (section 5): attention over KV that ranks hold in shards, by one reduction.

Each rank attends over its own shard. Ranks send each other an output and a log-sum-exp for each
query, whatever the length of the context. The collectives choose the tree.
"""

from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from vllm_prefixshare.distributed.ranks import Ranks
from vllm_prefixshare.distributed.shards import Shard
from vllm_prefixshare.operator import PrefixShareDecodeWrapper, merge_states
from vllm_prefixshare.records import PrefixShareError

Reduction = Literal["gather", "all_reduce", "energy"]
REDUCTIONS: tuple[Reduction, ...] = ("gather", "all_reduce", "energy")


def reduce_lse(ranks: Ranks, lse: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp over all ranks' tokens, from each rank's own: algorithm 1 without its
    source term. Two all-reduces.

    Args:
        lse: float32 ``[num_tokens, num_qo_heads]``, natural logarithm; ``-inf`` for no tokens.

    Raises:
        PrefixShareError: a rank is missing.
    """
    largest = ranks.all_reduce(lse.clone(), dist.ReduceOp.MAX)
    total = ranks.all_reduce(torch.exp(lse - _finite(largest)))
    return largest + total.log()


def reduce_by_energy(
    ranks: Ranks, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 2: the log-sum-exp over all ranks first, then the sum of the outputs, each
    weighted by its share of it. Arguments and results as in ``reduce_by_gather``.
    """
    total = reduce_lse(ranks, lse)
    share = torch.exp(lse - _finite(total))[..., None]
    return ranks.all_reduce(_weighted(out, share)).to(out.dtype), total


def reduce_by_all_reduce(
    ranks: Ranks, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 3: all-reduces of the maximum, of the numerator and of the denominator.
    Arguments and results as in ``reduce_by_gather``.
    """
    largest = ranks.all_reduce(lse.clone(), dist.ReduceOp.MAX)
    share = torch.exp(lse - _finite(largest))
    numerator = ranks.all_reduce(_weighted(out, share[..., None]))
    denominator = ranks.all_reduce(share)
    z = numerator / denominator.clamp_min(1e-30)[..., None]  # at least 1 where a token is seen
    return z.to(out.dtype), largest + denominator.log()


def reduce_by_gather(
    ranks: Ranks, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One collective: outputs and log-sum-exps in one message, gathered and merged on every
    rank. The bits are the same on all of them.

    Args:
        out: ``[num_tokens, num_qo_heads, head_dim]`` over the rank's tokens.
        lse: float32 ``[num_tokens, num_qo_heads]``, natural logarithm; ``-inf`` for no tokens.

    Returns:
        Output and log-sum-exp over all ranks' tokens, on every rank; shapes and dtypes as given.

    Raises:
        PrefixShareError: a rank is missing.
    """
    width = out.shape[-1] * out.element_size()
    parts = out.contiguous().view(torch.uint8), lse[..., None].contiguous().view(torch.uint8)
    packed = ranks.all_gather(torch.cat(parts, dim=-1))
    outs = packed[..., :width].contiguous().view(out.dtype)
    return merge_states(outs, packed[..., width:].contiguous().view(torch.float32)[..., 0])


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """``largest`` to subtract, with 0 in place of ``-inf``, where no rank saw a token."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _weighted(out: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return torch.where(share == 0, 0.0, out.float() * share)


_REDUCE = {
    "gather": reduce_by_gather,
    "all_reduce": reduce_by_all_reduce,
    "energy": reduce_by_energy,
}


class TreeDecode:
    """Decode attention of one query per request over KV sharded along the sequence. Every rank
    makes one, and makes the same calls, with the same queries and its own shard.

    Args:
        wrapper: the operator for the shard.
        reduction: "gather" (one collective), "all_reduce" (algorithm 3) or "energy"
            (algorithms 1 and 2).
        group, timeout, backend: see ``Ranks``.

    Raises:
        PrefixShareError: see ``Ranks``; an unknown reduction.
    """

    def __init__(
        self,
        wrapper: PrefixShareDecodeWrapper,
        *,
        reduction: Reduction = "gather",
        group: dist.ProcessGroup | None = None,
        timeout: float = 30.0,
        backend: str | None = None,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise PrefixShareError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}."
            )
        describe = {**shape_of(wrapper), "reduction": reduction}
        self.ranks = Ranks(wrapper.device, describe, group=group, timeout=timeout, backend=backend)
        self._reduce = _REDUCE[reduction]
        self._wrapper = wrapper
        self._num_reqs = -1
        self._rows: torch.Tensor | None = None

    def plan(self, block_table: ArrayLike, seq_lens: ArrayLike) -> None:
        """Plan for the batch, as ``PrefixShareDecodeWrapper.plan``. Ranks compare the number of
        requests when it changes.

        Args:
            block_table: host ``[num_reqs, max_blocks]`` block ids of the rank's own shard.
            seq_lens: host ``[num_reqs]`` tokens of the shard; 0 where the rank holds none.

        Raises:
            PrefixShareError: as ``PrefixShareDecodeWrapper.plan``; ranks disagree.
        """
        table, lens = np.asarray(block_table), np.asarray(seq_lens)
        if len(lens) != self._num_reqs:
            self.ranks.agree({"the number of requests": len(lens)})
            self._num_reqs = len(lens)
        used = np.flatnonzero(lens)
        self._rows = None
        if len(used) < len(lens):
            self._rows = torch.from_numpy(used).to(self._wrapper.device)
            table, lens = table[used], lens[used]
        self._wrapper.plan(table, lens)

    def run(self, q: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over all ranks' tokens.

        Args:
            q: ``[num_reqs, num_qo_heads, head_dim]``, the same on every rank.
            shard: the rank's own, as planned.

        Returns:
            Output ``[num_reqs, num_qo_heads, head_dim]`` and log-sum-exp, float32
            ``[num_reqs, num_qo_heads]``, on every rank.

        Raises:
            PrefixShareError: as ``PrefixShareDecodeWrapper.run``; a rank is missing.
        """
        return self._reduce(self.ranks, *self.partial(q, shard))

    def partial(self, q: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp over the rank's own tokens; arguments as in ``run``."""
        if len(q) != self._num_reqs:
            raise PrefixShareError(f"q must have {self._num_reqs} rows, got {len(q)}.")
        return partial_of(self._wrapper, self._rows, q, shard)


def partial_of(
    wrapper: PrefixShareDecodeWrapper, rows: torch.Tensor | None, q: torch.Tensor, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the planned ``rows``, all if None; the others see no token."""
    if rows is None:
        return wrapper.run(q, *shard, return_lse=True)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    held = shard._replace(block_table=shard.block_table[rows], seq_lens=shard.seq_lens[rows])
    some, some_lse = wrapper.run(q[rows], *held, return_lse=True)
    return out.index_copy(0, rows, some), lse.index_copy(0, rows, some_lse)


def shape_of(wrapper: PrefixShareDecodeWrapper) -> dict[str, object]:
    """The properties of the operator that must be equal on all ranks."""
    a = wrapper.attention
    return {
        "num_qo_heads": a.num_qo_heads,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "block_size": a.block_size,
        "dtype": a.dtype,
        "sm_scale": wrapper.sm_scale,
    }
