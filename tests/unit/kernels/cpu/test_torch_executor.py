"""The torch executor against attention in float64, through the operator."""

import numpy as np
import pytest
import torch

from tests.support.paged_batches import PagedBatch, paged_batch, total_error
from vllm_prefixshare import merge_states
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu import torch_executor
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.dividers.registry import DIVIDERS

#: relative error of rounding the result, with a margin
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((9, 3), 64), ((4, 4), 80), ((8, 1), 96), ((8, 2), 128), ((2, 2), 256)],
    ids=["gqa3", "mha", "mqa", "gqa4", "wide"],
)
def test_matches_float64_for_every_head_shape_and_dtype(dtype, heads, head_dim):
    batch = paged_batch(heads=heads, head_dim=head_dim, dtype=dtype)
    wrapper = batch.wrapper()
    assert total_error(batch.run(wrapper), batch.expected()[0]) < TOLERANCE[dtype]
    assert wrapper.stats().share_factor > 1.5


@pytest.mark.parametrize("divider", DIVIDERS)
@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("queries", [1, 3, None], ids=["one", "three", "ragged"])
def test_matches_float64_for_every_divider(divider, workers, queries):
    batch = paged_batch(query_lens=queries, seed=workers)
    wrapper = batch.wrapper(divider=divider, num_workers=workers)
    assert total_error(batch.run(wrapper), batch.expected()[0]) < TOLERANCE[torch.float32]
    shared = wrapper.stats().share_factor > 1
    # batch_invariant shares whole pieces of 512 tokens, and no prefix here is as long
    assert shared == (divider not in ("per_request", "batch_invariant"))


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("layout", ["NHD", "HND", "tokens innermost"])
def test_cache_strides_do_not_matter(block_size, layout):
    batch = paged_batch(block_size=block_size)
    expected = batch.expected()[0]
    order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "tokens innermost": (0, 2, 3, 1)}[layout]
    back = np.argsort(order).tolist()
    batch.k_cache = batch.k_cache.permute(order).contiguous().permute(back)
    batch.v_cache = batch.v_cache.permute((0, 2, 1, 3)).contiguous().permute((0, 2, 1, 3))
    assert total_error(batch.run(batch.wrapper()), expected) < TOLERANCE[torch.float32]


def test_long_work_is_cut_into_pieces_without_changing_the_result(monkeypatch):
    batch = paged_batch(document_blocks=20, private_blocks=9)
    whole = batch.run(batch.wrapper())
    monkeypatch.setattr(torch_executor, "MAX_SCORES", 2000)
    pieces = batch.run(batch.wrapper())
    assert total_error(pieces, whole.double()) < TOLERANCE[torch.float32]


def test_large_scores_and_a_custom_scale_stay_finite():
    batch = paged_batch()
    batch.q *= 300
    out = batch.run(batch.wrapper(sm_scale=0.5))
    assert total_error(out, batch.expected(sm_scale=0.5)[0]) < 1e-4


def test_the_same_plan_gives_the_same_bits():
    batch = paged_batch(dtype=torch.bfloat16)
    wrapper = batch.wrapper(num_workers=5)
    assert torch.equal(batch.run(wrapper), batch.run(wrapper))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_a_tensor_that_requires_grad_gives_the_same_bits(name):
    batch = paged_batch()
    expected = batch.run(batch.wrapper())
    wrapper = batch.wrapper()
    wrapper.plan(batch.block_table, batch.seq_lens)
    tensors = {x: getattr(batch, x) for x in ("q", "k_cache", "v_cache")}
    tensors["out"] = torch.empty_like(batch.q)
    with_grad = tensors | {name: tensors[name].clone().requires_grad_()}
    tables = {"block_table": batch.block_table, "seq_lens": batch.seq_lens}
    for given in (tensors, with_grad, tensors):
        out = wrapper.run(**given, **tables)
        assert torch.equal(out, expected) and out.grad_fn is None


def test_a_wrapper_can_be_part_of_a_compiled_function():
    batch = paged_batch()
    wrapper = batch.wrapper()
    expected = batch.run(wrapper)
    compiled = torch.compile(lambda q: wrapper.run(q, *batch.arguments[1:]), backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(batch.q), expected)


def test_a_wrapper_used_in_inference_mode_serves_outside_too():
    batch = paged_batch()
    with torch.inference_mode():
        wrapper = batch.wrapper()
        expected = batch.run(wrapper)
    assert torch.equal(batch.run(wrapper), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
def test_the_log_sum_exp(dtype, queries):
    batch = paged_batch(heads=(6, 2), head_dim=80, dtype=dtype, query_lens=queries)
    wrapper = batch.wrapper(num_workers=3)
    plain = batch.run(wrapper)
    out, lse = wrapper.run(*batch.arguments, return_lse=True)
    assert torch.equal(out, plain)
    _, expected = batch.expected()
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("interleave", [1, 16])
def test_interleaved_shards_merge_to_the_whole(interleave):
    size, block_size = 2, 16
    whole = paged_batch(block_size=size * block_size)
    positions = np.arange(whole.seq_lens.max())
    parts = []
    for rank in range(size):
        owned = positions // interleave % size == rank
        own = np.flatnonzero(owned[: size * block_size])
        held = np.array([owned[:n].sum() for n in whole.seq_lens], np.int32)
        caches = whole.k_cache[:, own], whole.v_cache[:, own]
        shard = PagedBatch(whole.block_table, held, whole.query_start_loc, whole.q, *caches)
        wrapper = shard.wrapper()
        wrapper.plan(shard.block_table, held)
        tables = map(torch.from_numpy, (shard.block_table, held))
        parts.append(wrapper.run(whole.q, *caches, *tables, return_lse=True))
        assert wrapper.stats().share_factor > 1.3
    out, _ = merge_states(*zip(*parts, strict=True))
    assert total_error(out, whole.expected()[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("divider", ["flashforge", "depth_first"])
@pytest.mark.parametrize("empty", [[1, 6], range(8)], ids=["some", "all"])
def test_a_request_without_tokens_has_no_weight(empty, divider):
    batch = paged_batch()
    expected = batch.run(batch.wrapper())
    rows = list(empty)
    seen = np.setdiff1d(np.arange(len(batch.seq_lens)), rows)
    batch.seq_lens[rows] = 0
    batch.block_table[rows] = -1
    wrapper = batch.wrapper(divider=divider)
    wrapper.plan(batch.block_table, batch.seq_lens)
    given = torch.full_like(batch.q, torch.nan), torch.full(batch.q.shape[:2], torch.nan)
    out, lse = wrapper.run(*batch.arguments, given[0], lse=given[1], return_lse=True)
    assert (out is given[0] and lse is given[1]) and (out[rows] == 0).all()
    assert lse.isneginf().all(1).nonzero().flatten().tolist() == rows
    torch.testing.assert_close(out[seen], expected[seen], rtol=1e-5, atol=1e-5)
    assert wrapper.run(*batch.arguments, lse=given[1].fill_(0)).equal(out) and lse.isneginf().any()


def test_a_plan_serves_growing_sequences():
    batch = paged_batch(requests=3)
    wrapper = batch.wrapper()
    plan = wrapper.plan(batch.block_table, batch.seq_lens)
    caches = batch.k_cache, batch.v_cache
    batch.block_table = np.pad(batch.block_table, ((0, 0), (0, 3)))
    for _ in range(40):  # beyond the planned blocks into new ones
        batch.seq_lens = batch.seq_lens + 1
        for row, length in zip(batch.block_table, batch.seq_lens.tolist(), strict=True):
            block, offset = divmod(length - 1, 16)
            if row[block] == 0:
                row[block] = caches[0].shape[0]
                fresh = torch.full((1, *caches[0].shape[1:]), torch.nan)
                caches = tuple(torch.cat([cache, fresh]) for cache in caches)
            for cache in caches:
                cache[row[block], offset] = torch.randn(cache.shape[2:])
        batch.k_cache, batch.v_cache = caches
        out = wrapper.run(*batch.arguments)
        assert total_error(out, batch.expected()[0]) < TOLERANCE[torch.float32]
    assert wrapper.plan(batch.block_table, batch.seq_lens) is plan
    assert wrapper.stats().plans == 1


def test_a_table_changed_in_place_is_planned_again():
    batch = paged_batch(requests=3)
    wrapper = batch.wrapper()
    for row, column in ((0, 0), (1, 6)):  # a block of the document, and one of its own
        before = batch.run(wrapper)
        batch.block_table[row, column] = batch.block_table[-1, 0]
        out = batch.run(wrapper)
        assert total_error(out, batch.expected()[0]) < TOLERANCE[torch.float32]
        assert not torch.equal(out[row], before[row])


def test_a_subset_of_rows_writes_only_their_tokens():
    batch = paged_batch(documents=1, query_lens=2)
    wrapper = batch.wrapper()
    plan = wrapper.plan(batch.block_table, batch.seq_lens, batch.query_start_loc)
    executor = torch_executor.TorchExecutor(AttentionConfig(4, 2, 64, 16, "float32"))
    tables = batch.block_table, batch.seq_lens
    executor.prepare(plan, HostBatch(*tables, batch.query_start_loc, rows=np.array([1, 3])))
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan)
    executor.run(batch.q, batch.k_cache, batch.v_cache, *tables, out, 64**-0.5, lse=lse)
    tokens = [2, 3, 6, 7]
    assert total_error(out[tokens], batch.expected()[0][tokens]) < TOLERANCE[torch.float32]
    untouched = [t for t in range(len(out)) if t not in tokens]
    assert torch.isnan(out[untouched]).all()
    assert lse[tokens].isfinite().all() and lse[untouched].isnan().all()


def test_the_reference_agrees_with_torch_attention():
    batch = paged_batch(documents=1, requests=1, query_lens=3)
    length = int(batch.seq_lens[0])
    ids = torch.from_numpy(batch.block_table[0, : -(-length // 16)]).long()
    k, v = (c[ids].flatten(0, 1)[:length].double() for c in (batch.k_cache, batch.v_cache))
    hidden = torch.arange(length) > torch.arange(length - 3, length)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        batch.q.double().transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=~hidden,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(batch.expected()[0], expected)
