"""Small batches over a latent KV cache, for tests of the executors and of the kernel."""

from dataclasses import replace

import torch

from tests.support.paged_batches import PagedBatch, batch_at_boundaries, paged_batch
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras

RANK, WIDTH = 512, 576
#: of the heads before absorption, as in DeepSeek V3
SCALE = 192**-0.5
#: of queries and latents of eight bits; a latent has one scale as K and as V
SCALES = {"q_scale": 1.25, "k_scale": 0.5, "v_scale": 0.5}


def latent_batch(heads: int = 4, **shape) -> PagedBatch:
    """As ``paged_batch``; ``k_cache`` is the cache ``[num_blocks, block_size, 1, 576]`` and
    ``v_cache`` a view of it.
    """
    batch = paged_batch(
        **{"heads": (heads, 1), "head_dim": WIDTH, "dtype": torch.bfloat16, **shape}
    )
    return replace(batch, v_cache=batch.k_cache[..., :RANK])


def latents_at_boundaries(
    queries: int, heads: int, block_size: int, dtype: torch.dtype
) -> PagedBatch:
    """As ``batch_at_boundaries``, over a latent KV cache."""
    batch = batch_at_boundaries(
        queries, heads=(heads, 1), head_dim=WIDTH, block_size=block_size, dtype=dtype
    )
    return replace(batch, v_cache=batch.k_cache[..., :RANK])


def quantised(batch: PagedBatch) -> PagedBatch:
    """The same with queries and latents in e4m3."""
    q, cache = (x.to(torch.float8_e4m3fn) for x in (batch.q, batch.k_cache))
    return replace(batch, q=q, k_cache=cache, v_cache=cache[..., :RANK])


def expected(batch: PagedBatch, extras: LayerExtras = PLAIN) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64."""
    return batch.expected(extras, sm_scale=SCALE)


def let_scores_rise(
    q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Let scores rise from block to block in some heads, by up to ten powers of two, and fall in
    others, so that running maxima change late, and in some rows only.

    Args:
        q: ``[num_reqs, heads, WIDTH]``. cache: ``[num_blocks, block_size, 1 (or none), WIDTH]``.
    """
    heads, block_size = q.shape[1], cache.shape[1]
    q[..., -1] = torch.linspace(-100, 100, heads).to(q)
    for row, length in zip(block_table.tolist(), seq_lens.tolist(), strict=True):
        for i in range(-(-length // block_size)):
            at = cache[row[i]][..., -1]
            at[~at.isnan()] = i  # what no request reads holds NaN
