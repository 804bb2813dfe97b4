"""Attention as the gradient of an energy (Tree Attention, sections 4 and 5.1, appendices C and F).

The energy of a query is ``F(source) = log sum_a exp(q k_a + source v_a)``, and attention is its
gradient with respect to ``source`` at zero (observation 1). The energy is one reduction over the
tokens, so tokens may be in shards, and so may its gradient: that is why decode over sharded KV
needs a reduction and no ring. ``distributed.tree_reduction`` reduces what kernels compute; this
module has the derivation itself, for any dtype and device, differentiable.

Shapes of all functions: queries ``[num_queries, num_qo_heads, head_dim]``, keys and values
``[num_tokens, num_kv_heads, head_dim]`` with ``num_kv_heads`` dividing ``num_qo_heads``, sources
as queries, energies ``[num_queries, num_qo_heads]`` with natural logarithms.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class KVShard(NamedTuple):
    """Keys and values of some of the tokens, and where they begin in the sequence."""

    k: torch.Tensor
    v: torch.Tensor
    start: int = 0


class Energy(NamedTuple):
    """The energy as algorithm 1 leaves it, so that no exponential overflows: ``largest + lse``.

    largest: the largest exponent over all tokens, 0 where a query sees none. lse: log-sum-exp of
    the exponents minus ``largest``, ``-inf`` where a query sees no token.
    """

    largest: torch.Tensor
    lse: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        """``F``."""
        return self.largest + self.lse


def energy(
    q: torch.Tensor,
    shards: Sequence[KVShard],
    source: torch.Tensor | None = None,
    *,
    sm_scale: float = 1.0,
    seq_lens: torch.Tensor | None = None,
) -> Energy:
    """Algorithm 1 with safe softmax (appendix F): a maximum over all shards, then a sum.

    Args:
        shards: all tokens, in parts of any size.
        source: ``zeta``; zeros if None.
        sm_scale: factor of ``q k``, which the paper leaves out.
        seq_lens: int ``[num_queries]`` tokens that each query sees from the first one; all if None.
            Consecutive numbers are causal attention (equations 25 and 26).
    """
    exponents = [_exponents(q, shard, source, sm_scale, seq_lens) for shard in shards]
    # the maximum shifts both terms of ``value``, so its gradient is zero
    largest = torch.stack([x.detach().amax(-1) for x in exponents if x.shape[-1]]).amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    sums = [torch.exp(x - largest[..., None]).sum(-1) for x in exponents]
    return Energy(largest, torch.stack(sums).sum(0).log())


def attention_by_gradient(
    q: torch.Tensor,
    shards: Sequence[KVShard],
    *,
    sm_scale: float = 1.0,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention ``[num_queries, num_qo_heads, head_dim]`` by automatic differentiation of
    ``energy`` at a source of zeros. Arguments as in ``energy``; every query sees a token.
    """
    source = torch.zeros_like(q, requires_grad=True)
    with torch.enable_grad():
        total = energy(q.detach(), shards, source, sm_scale=sm_scale, seq_lens=seq_lens).value.sum()
    (gradient,) = torch.autograd.grad(total, source)
    return gradient


def attention_by_shards(
    q: torch.Tensor,
    shards: Sequence[KVShard],
    *,
    sm_scale: float = 1.0,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by algorithm 2: the gradient of algorithm 1, written out. Each shard weights its
    values by the energy of all; one sum over the shards remains. Arguments and result as in
    ``attention_by_gradient``.
    """
    largest, lse = energy(q, shards, sm_scale=sm_scale, seq_lens=seq_lens)
    parts = []
    for shard in shards:
        exponents = _exponents(q, shard, None, sm_scale, seq_lens) - largest[..., None]
        weights = torch.exp(exponents - lse[..., None])
        values = _for_query_heads(shard.v, q.shape[1])
        parts.append(torch.einsum("qha,ahd->qhd", weights, values))
    return torch.stack(parts).sum(0)


def _exponents(
    q: torch.Tensor,
    shard: KVShard,
    source: torch.Tensor | None,
    sm_scale: float,
    seq_lens: torch.Tensor | None,
) -> torch.Tensor:
    """``q k + source v`` of a shard's tokens: ``[num_queries, num_qo_heads, num_tokens]``, ``-inf``
    where the query does not see the token.
    """
    num_heads = q.shape[1]
    found = torch.einsum("qhd,ahd->qha", q * sm_scale, _for_query_heads(shard.k, num_heads))
    if source is not None:
        found = found + torch.einsum("qhd,ahd->qha", source, _for_query_heads(shard.v, num_heads))
    if seq_lens is None:
        return found
    position = torch.arange(shard.start, shard.start + len(shard.k), device=q.device)
    return found.masked_fill((position >= seq_lens[:, None])[:, None], -torch.inf)


def _for_query_heads(kv: torch.Tensor, num_qo_heads: int) -> torch.Tensor:
    """Keys or values once for each query head that reads them."""
    return kv.repeat_interleave(num_qo_heads // kv.shape[1], dim=1)
