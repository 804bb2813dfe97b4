"""The bridge from FlashInfer's batches and caches, and how the operator shows itself."""

import numpy as np
import pytest
import torch

import vllm_prefixshare
from vllm_prefixshare import (
    PrefixShareDecodeWrapper,
    PrefixShareError,
    flashinfer_batch,
    flashinfer_cache,
)

PAGE, HEADS, DIM = 16, 2, 64
#: Three requests; the first two share three pages, and all share two.
INDPTR = [0, 4, 8, 11]
INDICES = [7, 2, 3, 4, 7, 2, 3, 5, 7, 2, 6]
LAST = [12, 4, 16]
LENS = [60, 52, 48]


def wrapper(**options: object) -> PrefixShareDecodeWrapper:
    shape = {"num_qo_heads": 4, "num_kv_heads": HEADS, "head_dim": DIM, "block_size": PAGE}
    return PrefixShareDecodeWrapper(**{**shape, "dtype": torch.float32, **options})


def expected(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention in float64, request by request, from the indices as FlashInfer defines them.

    Args:
        keys, values: ``[pages, PAGE, HEADS, DIM]``.
    """
    rows = []
    for i, query in enumerate(q.double()):
        pages = INDICES[INDPTR[i] : INDPTR[i + 1]]
        length = (len(pages) - 1) * PAGE + LAST[i]
        k, v = (
            torch.cat([x[page] for page in pages])[:length].double().repeat_interleave(2, 1)
            for x in (keys, values)
        )
        weights = (torch.einsum("hd,khd->hk", query, k) * DIM**-0.5).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


@pytest.mark.parametrize("combined", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_attention_of_flashinfers_batch_and_cache(layout, combined, kind):
    torch.manual_seed(0)
    shape = (8, 2, PAGE, HEADS, DIM) if layout == "NHD" else (8, 2, HEADS, PAGE, DIM)
    cache = torch.randn(shape)
    given = cache if combined else (cache[:, 0].contiguous(), cache[:, 1].contiguous())
    k_cache, v_cache = flashinfer_cache(given, layout)
    memory = [cache] * 2 if combined else given
    for view, of in zip((k_cache, v_cache), memory, strict=True):
        assert view.shape == (8, PAGE, HEADS, DIM)
        assert view.untyped_storage().data_ptr() == of.untyped_storage().data_ptr(), "a copy"
    table, lens = flashinfer_batch(*(kind(x) for x in (INDPTR, INDICES, LAST)), page_size=PAGE)
    assert (table.dtype, lens.dtype, lens.tolist()) == (np.int32, np.int32, LENS)
    w = wrapper()
    w.plan(table, lens)
    assert w.stats().kv_tokens_read == 48 + 12 + 4 + 16
    q = torch.randn(3, 4, DIM)
    out = w.run(q, k_cache, v_cache, table, lens)
    keys, values = cache[:, 0], cache[:, 1]
    if layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    torch.testing.assert_close(out.double(), expected(q, keys, values), rtol=1e-5, atol=1e-5)


def test_longer_buffers_and_requests_without_pages():
    """As FlashInfer has them for CUDA graphs."""
    table, lens = flashinfer_batch([0, 2, 2, 3], [5, 6, 7, -1, 99], [3, 0, 16], PAGE)
    assert table.tolist() == [[5, 6], [0, 0], [7, 0]]
    assert lens.tolist() == [19, 0, 16]
    table, lens = flashinfer_batch([0], [], [], PAGE)
    assert table.shape == (0, 0) and lens.shape == (0,)


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "page", "sentence"),
    [
        ([], [], [], 16, "paged_kv_indptr must rise from 0"),
        ([1, 2], [5, 6], [3], 16, "paged_kv_indptr must rise from 0"),
        ([0, 2, 1], [5, 6], [3, 3], 16, "paged_kv_indptr must rise from 0"),
        ([0, 1.5], [5, 6], [3], 16, "paged_kv_indptr must be 1-dimensional integers"),
        ([[0, 1]], [5], [3], 16, "paged_kv_indptr must be 1-dimensional integers"),
        ([0, 3], [5, 6], [3], 16, "paged_kv_indices has 2 entries, but paged_kv_indptr ends at 3"),
        ([0, 1], [-7], [5], 16, r"paged_kv_indices\[0\] must be 0 or more, got -7"),
        ([0, 1], [2**40], [3], 16, "paged_kv_indices has entries beyond 32 bits"),
        ([0, 1, 2], [5, 6], [3], 16, "must have an entry for each of 2 requests, got 1"),
        ([0, 1, 2], [5, 6], [3, 17], 16, r"last_page_len\[1\] must be from 1 to 16, got 17"),
        ([0, 1, 2], [5, 6], [0, 3], 16, r"last_page_len\[0\] must be from 1 to 16, got 0"),
        ([0, 1], [5], [1], 0, "page_size must be an integer of at least 1, got 0"),
        ([0, 1], [5], [1], 16.0, r"page_size must be an integer of at least 1, got 16\.0"),
        ([0, 4], [1] * 4, [1], 2**30, "the lengths has entries beyond 32 bits"),
        (torch.zeros(2, device="meta"), [5], [1], 16, "paged_kv_indptr must be .* on the host"),
    ],
)
def test_batches_that_make_no_sense_are_refused(indptr, indices, last, page, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        flashinfer_batch(indptr, indices, last, page)


@pytest.mark.parametrize(
    ("cache", "layout", "sentence"),
    [
        (torch.zeros(4, 2, 16, 2, 64), "nhd", "kv_layout must be NHD or HND, got 'nhd'"),
        (torch.zeros(4, 3, 16, 2, 64), "NHD", r"must be \[max_num_pages, 2, \.\.\.\] with 5 dim"),
        (torch.zeros(4, 16, 2, 64), "NHD", r"a pair of K and V, got \[4, 16, 2, 64\]"),
        ((torch.zeros(4, 16, 2, 64),), "NHD", "one tensor, or a pair of K and V"),
        ((torch.zeros(4, 16, 2, 64), None), "HND", "one tensor, or a pair of K and V"),
        ((torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 32)), "NHD", "4 dimensions and one sha"),
        (None, "NHD", "one tensor, or a pair of K and V"),
    ],
)
def test_caches_that_make_no_sense_are_refused(cache, layout, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        flashinfer_cache(cache, layout)


def test_a_cache_of_the_other_layout_is_refused_by_its_shape():
    table, lens = flashinfer_batch(INDPTR, INDICES, LAST, PAGE)
    w = wrapper()
    w.plan(table, lens)
    caches = flashinfer_cache(torch.zeros(8, 2, HEADS, PAGE, DIM), "NHD")
    with pytest.raises(PrefixShareError, match=r"k_cache must be \[num_blocks, 16, 2, 64\], got"):
        w.run(torch.zeros(3, 4, DIM), *caches, table, lens)


def test_the_operator_and_its_plan_show_what_they_are_in_a_line():
    w = wrapper()
    shown = "PrefixShareDecodeWrapper(4 query and 2 KV heads, head_dim 64, float32, KV cache "
    shown += "float32, blocks of 16 tokens; torch kernel on cpu, divider flashforge (default); "
    assert repr(w) == f"{shown}no plan yet)"
    plan = w.plan(*flashinfer_batch(INDPTR, INDICES, LAST, PAGE))
    assert repr(w) == f"{shown}share factor 2.00)"
    assert repr(plan) == (
        "DecodePlan(3 requests, blocks of 16 tokens; 5 work tiles in 1 work queues, 8 partial "
        "results; share factor 2.00)"
    )
    assert "; torch kernel on cpu, divider deft_node; " in repr(wrapper(divider="deft_node"))
    assert repr(w.plan(np.zeros((0, 1), np.int32), [])).endswith("share factor 0.00)")


def test_dir_lists_every_public_name():
    assert {*vllm_prefixshare.__all__} <= {*dir(vllm_prefixshare)}
    assert all(hasattr(vllm_prefixshare, name) for name in dir(vllm_prefixshare))
