"""Sinks, soft caps, ALiBi, wide heads and quantised KV through the operator, on a CPU."""

import numpy as np
import pytest
import torch

from tests.support.paged_batches import (
    PagedBatch,
    as_hnd,
    batch_at_boundaries,
    paged_batch,
    relative_error,
    total_error,
)
from vllm_prefixshare import LayerExtras, PrefixShareError

FP8 = torch.float8_e4m3fn
HEADS = (6, 2)
SINKS = torch.tensor([3.0, -2.0, 0.0, 6.0, -1.0, 1.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01])
PER_HEAD = torch.tensor([0.7, 1.6])
#: name -> options of the wrapper, extras of the layer
CASES = {
    "sinks": ({"features": ["sinks"]}, LayerExtras(sinks=SINKS)),
    "soft_cap": ({"features": ["soft_cap"]}, LayerExtras(soft_cap=2.5)),
    "alibi": ({"features": ["alibi"]}, LayerExtras(alibi_slopes=SLOPES)),
    "all": (
        {"features": ["alibi", "sinks", "soft_cap"]},
        LayerExtras(sinks=SINKS, soft_cap=4.0, alibi_slopes=SLOPES),
    ),
    "fp8": ({"kv_dtype": FP8}, LayerExtras(k_scale=0.6, v_scale=1.7)),
    "fp8 queries, sinks": (
        {"kv_dtype": FP8, "query_dtype": FP8, "features": ["sinks"]},
        LayerExtras(sinks=SINKS, q_scale=0.9, k_scale=PER_HEAD, v_scale=PER_HEAD.flip(0)),
    ),
}


def quantised(batch: PagedBatch, options: dict) -> PagedBatch:
    """The batch with its cache and queries in the wrapper's types."""
    queries, cache = options.get("query_dtype", torch.float32), options.get("kv_dtype")
    return batch.as_type(queries, cache or torch.float32)


def check(batch: PagedBatch, options: dict, extras: LayerExtras) -> torch.Tensor:
    """Compare output and log-sum-exp, with a prefix shared; returns the output in float64."""
    wrapper = batch.wrapper(dtype=torch.float32, divider="deft_node", **options)
    wrapper.plan(batch.block_table, batch.seq_lens, batch.query_start_loc)
    out, lse = wrapper.run(*batch.arguments, extras=extras, return_lse=True)
    wanted, wanted_lse = batch.expected(extras)
    assert wrapper.stats().share_factor > 1
    assert out.dtype == torch.float32
    assert relative_error(out, wanted) < 2e-5
    assert total_error(out, wanted) < 2e-6
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)
    return wanted


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 272])
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name, block_size, layout, queries):
    options, extras = CASES[name]
    batch = quantised(paged_batch(block_size=block_size, heads=HEADS, query_lens=queries), options)
    if layout == "HND":
        batch = as_hnd(batch)
    wanted = check(batch, options, extras)
    without, _ = batch.expected(extras._replace(sinks=None, soft_cap=0.0, alibi_slopes=None))
    if options.get("features"):
        assert (without - wanted).norm() > 0.01 * wanted.norm(), "the feature must matter"


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [8, 16, 272])
@pytest.mark.parametrize("name", CASES)
def test_every_length_at_a_boundary(name, block_size, layout, queries):
    options, extras = CASES[name]
    batch = quantised(batch_at_boundaries(queries, block_size=block_size, heads=HEADS), options)
    check(as_hnd(batch) if layout == "HND" else batch, options, extras)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [8, 16, 272])
@pytest.mark.parametrize("head_dim", [264, 512])
def test_wide_heads(head_dim, block_size, layout, queries):
    batch = batch_at_boundaries(queries, block_size=block_size, head_dim=head_dim)
    check(as_hnd(batch) if layout == "HND" else batch, {}, LayerExtras())


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("sinks", {"sinks": SINKS[:4]}, r"sinks must be \[6\], one for each query head, got \[4\]"),
        ("sinks", {"sinks": SINKS[None]}, r"sinks must be \[6\]"),
        ("sinks", {"sinks": [1.0] * 6}, r"sinks must be \[6\].* got list"),
        ("sinks", {"sinks": SINKS.half()}, "sinks must be contiguous torch.float32 on cpu"),
        ("sinks", {"soft_cap": 30.0}, "soft_cap was not announced: name it among the features"),
        ("sinks", {"k_scale": 1.0}, "k_scale is for quantised numbers, and this layer has none"),
        ("soft_cap", {"soft_cap": -1.0}, "soft_cap must be 0 or more and finite, got -1.0"),
        ("soft_cap", {"soft_cap": NAN}, "soft_cap must be 0 or more and finite"),
        ("soft_cap", {"soft_cap": None}, "soft_cap must be 0 or more and finite, got None"),
        ("sinks", {"soft_cap": None}, "soft_cap must be 0 or more and finite, got None"),
        ("soft_cap", {"sinks": SINKS}, "sinks was not announced"),
        ("alibi", {"alibi_slopes": SLOPES.double()}, "alibi_slopes must be contiguous torch.float"),
        ("fp8", {"k_scale": NAN}, r"k_scale must be positive and finite, got \[nan\]"),
        ("fp8", {"v_scale": float("inf")}, "v_scale must be positive and finite"),
        ("fp8", {"v_scale": 0.0}, "v_scale must be positive and finite"),
        ("fp8", {"k_scale": torch.tensor([1.0, NAN])}, "k_scale must be positive and finite"),
        ("fp8", {"k_scale": torch.ones(3)}, r"k_scale must be \[1\] or \[2\], got \[3\]"),
        ("fp8", {"k_scale": torch.ones(2).half()}, "k_scale must be float32 on cpu"),
        ("fp8", {"q_scale": 1.0}, "q_scale is for quantised numbers"),
    ],
)
def test_refuses_extras_that_make_no_sense(name, changes, sentence):
    options, extras = CASES[name]
    batch = quantised(paged_batch(heads=HEADS), options)
    wrapper = batch.wrapper(dtype=torch.float32, **options)
    wrapper.plan(batch.block_table, batch.seq_lens)
    with pytest.raises(PrefixShareError, match=sentence):
        wrapper.run(*batch.arguments, extras=extras._replace(**changes))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"kv_dtype": torch.float8_e5m2},
            "kv_dtype must be float8_e4m3fn or None, got float8_e5m2",
        ),
        ({"query_dtype": FP8}, "query_dtype float8_e4m3fn needs kv_dtype float8_e4m3fn"),
        ({"features": ["sink"]}, "features must be some of sinks, soft_cap, alibi, got 'sink'"),
    ],
)
def test_refuses_a_wrapper_that_makes_no_sense(options, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        paged_batch().wrapper(**options)


def test_refuses_tensors_of_other_types():
    batch = paged_batch()
    wrapper = batch.wrapper(kv_dtype=FP8)
    wrapper.plan(batch.block_table, batch.seq_lens)
    with pytest.raises(PrefixShareError, match="k_cache must be float8_e4m3fn on the cpu"):
        wrapper.run(*batch.arguments)
    with pytest.raises(PrefixShareError, match="q must be float32 on the cpu, got"):
        wrapper.run(*batch.as_type(FP8, FP8).arguments)


def test_every_number_of_eight_bits_is_read_as_it_is():
    """One token per request, so that the output is V itself."""
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits[(bits & 0x7F) != 0x7F]  # all but the two NaN values
    values = torch.cat([numbers, numbers[:66]]).view(FP8).view(5, 1, 1, 64)
    batch = paged_batch(documents=1, requests=5, heads=(1, 1))
    table = np.arange(5, dtype=np.int32)[:, None]
    k, v = (torch.zeros(5, 16, 1, 64).to(FP8) for _ in range(2))
    v[:, :1] = values
    wrapper = batch.wrapper(kv_dtype=FP8)
    wrapper.plan(table, np.ones(5, np.int32))
    out = wrapper.run(batch.q[:5], k, v, table, np.ones(5, np.int32))
    assert torch.equal(out.flatten(), values.float().flatten())
