"""Attention as the gradient of an energy, in float64."""

from itertools import pairwise

import pytest
import torch

from benchmarks.papers.energy import (
    KVShard,
    attention_by_gradient,
    attention_by_shards,
    energy,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def layer(queries: int = 3, tokens: int = 37, heads: tuple[int, int] = (8, 2), scale: float = 1.0):
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q = scale * random(queries, heads[0], 16)
    return q, random(tokens, heads[1], 16), random(tokens, heads[1], 16)


def in_shards(k: torch.Tensor, v: torch.Tensor, *cuts: int) -> list[KVShard]:
    edges = [0, *cuts, len(k)]
    return [KVShard(k[a:b], v[a:b], a) for a, b in pairwise(edges)]


def softmax_attention(q, k, v, sm_scale=1.0, seq_lens=None) -> torch.Tensor:
    """PyTorch's own attention, one query head after the other."""
    group = q.shape[1] // k.shape[1]
    mask = None
    if seq_lens is not None:
        mask = torch.arange(len(k)) < seq_lens[:, None]
    heads = [
        torch.nn.functional.scaled_dot_product_attention(
            q[None, :, h], k[None, :, h // group], v[None, :, h // group], mask, scale=sm_scale
        )[0]
        for h in range(q.shape[1])
    ]
    return torch.stack(heads, 1)


@pytest.mark.parametrize("cuts", [(), (20,), (1, 9, 9, 36)])
def test_the_gradient_of_the_energy_is_attention(cuts):
    """Observation 1, equation 15; the shards of algorithm 1 make no difference."""
    q, k, v = layer()
    expected = softmax_attention(q, k, v, 0.25)
    found = attention_by_gradient(q, in_shards(k, v, *cuts), sm_scale=0.25)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("cuts", [(), (20,), (1, 9, 9, 36)])
def test_the_sharded_gradient_is_algorithm_2(cuts):
    q, k, v = layer()
    shards = in_shards(k, v, *cuts)
    found = attention_by_shards(q, shards, sm_scale=0.25)
    torch.testing.assert_close(found, attention_by_gradient(q, shards, sm_scale=0.25), **EXACT)
    torch.testing.assert_close(found, softmax_attention(q, k, v, 0.25), **EXACT)


def test_a_shards_own_gradient_is_weighted_by_its_part_of_the_energy():
    """What ``reduce_by_energy`` sums over ranks: each output times ``exp(F_shard - F)``."""
    q, k, v = layer()
    shards = in_shards(k, v, 5, 30)
    total = energy(q, shards).value
    found = torch.zeros_like(q)
    for shard in shards:
        share = torch.exp(energy(q, [shard]).value - total)
        found += share[..., None] * attention_by_gradient(q, [shard])
    torch.testing.assert_close(found, attention_by_shards(q, shards), **EXACT)
    each = torch.stack([energy(q, [shard]).value for shard in shards])
    torch.testing.assert_close(each.logsumexp(0), total, **EXACT)


def test_safe_softmax_keeps_large_exponents_finite():
    """Appendix F: without the maximum, the exponentials of these exponents overflow."""
    q, k, v = layer(scale=1000.0)
    assert torch.isinf(torch.exp(torch.einsum("qhd,ahd->qha", q[:, :2], k))).any()
    shards = in_shards(k, v, 11, 24)
    expected = softmax_attention(q, k, v)
    torch.testing.assert_close(attention_by_shards(q, shards), expected, **EXACT)
    torch.testing.assert_close(attention_by_gradient(q, shards), expected, **EXACT)
    assert energy(q, shards).value.isfinite().all()


def test_causal_queries_have_one_energy_in_all():
    """Equations 25 and 26: the gradient of the sum of all energies is causal attention."""
    q, k, v = layer(queries=9, tokens=9)
    seen = torch.arange(1, 10)
    shards = in_shards(k, v, 4)
    expected = softmax_attention(q, k, v, 0.25, seen)
    for way in (attention_by_gradient, attention_by_shards):
        found = way(q, shards, sm_scale=0.25, seq_lens=seen)
        torch.testing.assert_close(found, expected, **EXACT)
    # the first shard is all that the first four queries see
    first = attention_by_shards(q[:4], shards[:1], sm_scale=0.25, seq_lens=seen[:4])
    torch.testing.assert_close(first, expected[:4], **EXACT)


def test_the_energy_generates_the_cumulants_of_the_values():
    """Equation 20: its second derivative is the covariance of the values under the softmax."""
    q, k, v = layer(queries=1, heads=(1, 1))
    shards = in_shards(k, v, 13)

    def of(source: torch.Tensor) -> torch.Tensor:
        return energy(q, shards, source.view_as(q)).value.sum()

    found = torch.autograd.functional.hessian(of, torch.zeros(16, dtype=torch.float64))
    weights = (q[:, 0] @ k[:, 0].T).softmax(-1)[0]
    mean = weights @ v[:, 0]
    expected = torch.einsum("a,ai,aj->ij", weights, v[:, 0], v[:, 0]) - torch.outer(mean, mean)
    torch.testing.assert_close(found, expected, **EXACT)


def test_away_from_zero_the_source_tilts_the_weights():
    q, k, v = layer()
    source = torch.full_like(q, 0.1)
    scores = torch.einsum("qhd,ahd->qha", q, k.repeat_interleave(4, 1))
    scores = scores + torch.einsum("qhd,ahd->qha", source, v.repeat_interleave(4, 1))
    found = energy(q, in_shards(k, v, 8), source).value
    torch.testing.assert_close(found, scores.logsumexp(-1), **EXACT)
