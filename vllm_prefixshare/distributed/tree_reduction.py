"""Tree Attention (section 5): attention over KV that ranks hold in shards, by one reduction.

Each rank attends over its own shard. Ranks send each other an output and a log-sum-exp for each
query, whatever the length of the context. The collectives choose the tree.
"""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from vllm_prefixshare.core import PrefixShareError, host_integers
from vllm_prefixshare.distributed.one_shot import OneShot
from vllm_prefixshare.distributed.ranks import Ranks
from vllm_prefixshare.distributed.shards import Shard
from vllm_prefixshare.merging import merge_states
from vllm_prefixshare.wrapper import PrefixShareDecodeWrapper


class Partial(NamedTuple):
    """A rank's result over its own tokens, in one piece of memory that is sent as it is.

    packed: uint8 ``[num_bytes]``: the output, then the log-sum-exp.
    out: ``[num_tokens, num_qo_heads, head_dim]``.
    lse: float32 ``[num_tokens, num_qo_heads]``, natural logarithm; ``-inf`` for no tokens.
    """

    packed: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


Reduction = Literal["gather", "all_reduce", "energy", "one_shot"]
COLLECTIVES: tuple[Reduction, ...] = ("gather", "all_reduce", "energy")
REDUCTIONS: tuple[Reduction, ...] = (*COLLECTIVES, "one_shot")


def reduce_lse(ranks: Ranks, lse: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp over all ranks' tokens, from each rank's own: algorithm 1 without its
    source term. Two all-reduces.

    Args:
        lse: float32 ``[num_tokens, num_qo_heads]``, natural logarithm; ``-inf`` for no tokens.
    """
    largest = ranks.all_reduce(lse.clone(), dist.ReduceOp.MAX)
    total = ranks.all_reduce(torch.exp(lse - _finite(largest)))
    return largest + total.log()


def reduce_by_energy(ranks: Ranks, mine: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 2: the log-sum-exp over all ranks first, then the sum of the outputs, each
    weighted by its share of it. Arguments and results as in ``reduce_by_gather``.
    """
    total = reduce_lse(ranks, mine.lse)
    share = torch.exp(mine.lse - _finite(total))[..., None]
    return ranks.all_reduce(_weighted(mine.out, share)).to(mine.out.dtype), total


def reduce_by_all_reduce(ranks: Ranks, mine: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 3: all-reduces of the maximum, and of numerator and denominator, which are sent
    together. Arguments and results as in ``reduce_by_gather``.
    """
    largest = ranks.all_reduce(mine.lse.clone(), dist.ReduceOp.MAX)
    share = torch.exp(mine.lse - _finite(largest))[..., None]
    sums = ranks.all_reduce(torch.cat([_weighted(mine.out, share), share], dim=-1))
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    z = numerator / denominator.clamp_min(1e-30)  # at least 1 where a token is seen
    return z.to(mine.out.dtype), largest + denominator[..., 0].log()


def reduce_by_gather(ranks: Ranks, mine: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    """One collective: outputs and log-sum-exps in one message, gathered and merged on every
    rank. The bits are the same on all of them.

    Returns:
        Output and log-sum-exp over all ranks' tokens, on every rank; shapes and dtypes as in
        ``mine``.
    """
    gathered = ranks.all_gather(mine.packed)
    return merge_states(*_unpacked(gathered, mine.out.shape, mine.out.dtype))


def _unpacked(
    packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of output and log-sum-exp in ``[..., num_bytes]``."""
    end = shape.numel() * dtype.itemsize
    out, lse = packed[..., :end].view(dtype), packed[..., end:].view(torch.float32)
    return out.unflatten(-1, shape), lse.unflatten(-1, shape[:-1])


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

    On GPUs every rank may capture ``run`` in a CUDA graph, which then serves later plans as that of
    ``PrefixShareDecodeWrapper.run`` does: it waits for nothing, and what it sends lies in the
    graph's memory. Call it once before, which connects and compiles, and ``wrapper.reserve``; then
    capture with ``capture_error_mode="thread_local"``, because another thread watches nccl.

    Args:
        wrapper: the operator for the shard.
        reduction: "gather" (one collective), "all_reduce" (algorithm 3), "energy" (algorithms 1
            and 2), or "one_shot" (one launch without a collective, for GPUs of one host).
        timeout: see ``Ranks``.

    Raises:
        PrefixShareError: see ``Ranks``; an unknown reduction; an operator that ``shape_of``
            refuses.
    """

    def __init__(
        self,
        wrapper: PrefixShareDecodeWrapper,
        *,
        reduction: Reduction = "gather",
        timeout: float = 30.0,
    ) -> None:
        if reduction not in REDUCTIONS:
            raise PrefixShareError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}."
            )
        describe = {**shape_of(wrapper), "reduction": reduction}
        self.ranks = Ranks(wrapper.device, describe, timeout=timeout)
        self._one_shot = None
        if reduction == "one_shot":
            shape = wrapper.attention.head_dim, wrapper.dtype, wrapper.device
            self._one_shot = OneShot(self.ranks, *shape)
        self._reduce = _REDUCE.get(reduction, self._by_one_shot)
        self._wrapper = wrapper
        self._num_reqs = -1

    def plan(self, block_table: ArrayLike, seq_lens: ArrayLike) -> None:
        """Plan for the batch, as ``PrefixShareDecodeWrapper.plan``. Ranks compare the number of
        requests when it changes.

        Args:
            block_table: host ``[num_reqs, max_blocks]`` block ids of the rank's own shard.
            seq_lens: host ``[num_reqs]`` tokens of the shard; 0 where the rank holds none.

        Raises:
            PrefixShareError: as ``PrefixShareDecodeWrapper.plan``; ranks disagree.
        """
        lens = host_integers(seq_lens, "seq_lens", 1)
        if len(lens) != self._num_reqs:
            self.ranks.agree({"the number of requests": len(lens)})
            if self._one_shot is not None:
                self._one_shot.reserve(len(lens) * self._wrapper.attention.num_qo_heads)
            self._num_reqs = len(lens)
        self._wrapper.plan(block_table, lens)

    def run(self, q: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over all ranks' tokens.

        Args:
            q: ``[num_reqs, num_qo_heads, head_dim]``, the same on every rank.
            shard: the rank's own, as planned.

        Returns:
            Output ``[num_reqs, num_qo_heads, head_dim]`` and log-sum-exp, float32
            ``[num_reqs, num_qo_heads]``, on every rank.

        Raises:
            PrefixShareError: as ``PrefixShareDecodeWrapper.run``.
        """
        mine = self.partial(q, shard)
        if len(q) != self._num_reqs:  # this rank refused the batch that the others planned
            raise PrefixShareError(f"q must have {self._num_reqs} rows, got {len(q)}.")
        if not len(q):  # on all ranks, which agree on the number of requests
            return mine.out, mine.lse
        return self._reduce(self.ranks, mine)

    def _by_one_shot(self, _: Ranks, mine: Partial) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._one_shot is not None
        return self._one_shot(*mine)

    def partial(self, q: torch.Tensor, shard: Shard) -> Partial:
        """The result over the rank's own tokens; arguments as in ``run``."""
        if len(q) != (planned := self._wrapper.last_plan.num_reqs):
            raise PrefixShareError(f"q must have {planned} rows, got {len(q)}.")
        shape, dtype = q.shape, self._wrapper.dtype
        num_bytes = shape.numel() * dtype.itemsize + shape[:-1].numel() * 4
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=q.device)
        out, lse = _unpacked(packed, shape, dtype)
        self._wrapper.run(q, *shard, out, lse=lse)
        return Partial(packed, out, lse)


def shape_of(wrapper: PrefixShareDecodeWrapper) -> dict[str, object]:
    """The properties of the operator that must be equal on all ranks.

    Raises:
        PrefixShareError: a sliding window, which a rank would end at its own tokens; latents;
            sinks, a soft cap or ALiBi, whose values are not passed to the operator.
    """
    a = wrapper.attention
    parts = [name for name in ("sliding_window", "kv_lora_rank") if getattr(a, name) is not None]
    if parts := [*parts, *a.features]:
        raise PrefixShareError(
            f"KV in shards has no {' and no '.join(parts)}: make the wrapper without."
        )
    return {
        "num_qo_heads": a.num_qo_heads,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "block_size": a.block_size,
        "dtype": a.dtype,
        "sm_scale": wrapper.sm_scale,
    }
