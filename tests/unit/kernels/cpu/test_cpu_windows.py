"""Sliding windows through the operator on a CPU, against float64."""

import numpy as np
import pytest
import torch

from tests.support.paged_batches import PagedBatch, as_hnd, batch_at_boundaries, paged_batch
from vllm_prefixshare import LayerExtras, PrefixShareError
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.extras import PLAIN
from vllm_prefixshare.kernels.geometry import GPU
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.sharing import min_window


def check(batch: PagedBatch, window: int, extras: LayerExtras, **options: object) -> None:
    """Compare output and log-sum-exp."""
    wrapper = batch.wrapper(sliding_window=window, **options)
    wrapper.plan(batch.block_table, batch.seq_lens, batch.query_start_loc)
    out, lse = wrapper.run(*batch.arguments, extras=extras, return_lse=True)
    wanted, wanted_lse = batch.expected(extras, sliding_window=window)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("divider", DIVIDERS)
@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 100, 1000])
def test_matches_float64(window, queries, divider):
    batch = paged_batch(query_lens=queries, heads=(6, 2), requests=5)
    extras = LayerExtras(sinks=torch.linspace(-2, 3, 6), soft_cap=3.0)
    check(batch, window, extras, divider=divider, features=["sinks", "soft_cap"])


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [8, 16, 272])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_every_length_at_a_boundary(blocks, more, block_size, layout, queries):
    """Windows that end at, one token before and one token after the ends of blocks, too."""
    window = blocks * block_size + more
    batch = batch_at_boundaries(queries, block_size=block_size)
    batch = as_hnd(batch) if layout == "HND" else batch
    check(batch, window, PLAIN, divider="deft_node")


def test_figures_count_what_a_window_sees():
    batch = paged_batch(documents=1)
    wrapper = batch.wrapper(sliding_window=64)
    wrapper.plan(batch.block_table, batch.seq_lens)
    figures = wrapper.stats()
    assert figures.kv_tokens_per_request == np.minimum(batch.seq_lens, 64).sum()
    assert 1 < figures.share_factor < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        (
            {"num_kv_heads": 1, "head_dim": 576, "kv_lora_rank": 512, "sliding_window": 64},
            "kv_lora_rank goes with neither features nor sliding_window",
        ),
    ],
)
def test_what_is_not_served_is_refused(options, message):
    shape = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, **options}
    with pytest.raises(PrefixShareError, match=message):
        AttentionConfig(**shape)


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_the_threshold_falls_with_what_a_token_costs(kernel):
    """A window is worth sharing from fewer tokens on where each token is wider."""
    found = []
    for head_dim in (64, 128, 256):
        cost = analytic_cost(AttentionConfig(32, 8, head_dim, 16), kernel)
        found.append(min_window(cost, 4, 16, GPU))
    assert found == sorted(found, reverse=True) and found[0] > found[-1]
    assert min_window(cost, 4, 1, GPU) is None, "one reader has nothing to share"
