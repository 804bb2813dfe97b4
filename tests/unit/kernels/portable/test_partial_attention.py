"""The portable kernels against attention in float64.

Without a GPU under Triton's interpreter (tests/conftest.py), on shapes as small as the cases
allow. Outputs, partial results and all unused cache slots hold NaN before each run.
"""

import numpy as np
import pytest
import torch

from tests.support.paged_batches import PagedBatch, as_hnd, paged_batch, relative_error
from tests.support.portable_kernel import TOLERANCE, Portable, make_plan, tree_reference
from vllm_prefixshare.kernels.catalog import QTile
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks

# rows without any token divide by zero and are then discarded, as on a GPU
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
BF16, FP16 = torch.bfloat16, torch.float16


def check(batch: PagedBatch, divider: str = "flashforge", workers: int = 3, **plan) -> Portable:
    kernel = Portable(make_plan(batch, divider, workers, **plan), batch, workers)
    assert relative_error(kernel.run(), batch.expected()[0]) < TOLERANCE[batch.q.dtype]
    return kernel


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((2, 2), 64, BF16),
        ((9, 3), 80, FP16),
        ((8, 2), 128, BF16),
        ((7, 1), 96, FP16),
        ((8, 1), 72, BF16),
        ((16, 1), 256, FP16),
        ((32, 1), 64, FP16),
    ],
    ids=str,
)
def test_every_head_shape_and_dtype(heads, head_dim, dtype):
    kernel = check(paged_batch(heads=heads, head_dim=head_dim, dtype=dtype), "deft_node")
    assert kernel.plan.num_partials > 0 and len(kernel.plan.shared_rows) > 0


@pytest.mark.parametrize("divider", DIVIDERS)
@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
def test_the_plans_of_every_divider(divider, queries):
    """The plans include tiles with several runs that different rows read."""
    batch = paged_batch(query_lens=queries, requests=5, dtype=FP16)
    plan = check(batch, divider).plan
    if divider == "deft_flatten":
        assert np.diff(plan.tile_run_indptr).max() > 2


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("divider", ["depth_first", "deft_flatten"])
def test_long_runs_that_some_rows_read(divider, queries):
    """Runs long enough for their own loop: a document's, and a single request's."""
    batch = paged_batch(
        requests=3, document_blocks=18, private_blocks=20, query_lens=queries, dtype=FP16
    )
    kernel = check(batch, divider, workers=1)
    readers = kernel.arrays["run_readers"].cpu().numpy()
    assert np.unique(readers).size > 2


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
def test_pieces_that_are_spread(queries):
    """Each of two pieces reads a part of the document and some of what requests have besides."""
    batch = paged_batch(
        seed=1,
        documents=1,
        document_blocks=64,
        private_blocks=20,
        query_lens=queries,
        heads=(2, 2),
        dtype=FP16,
    )
    plan = check(batch, "depth_first", workers=2, spread=True).plan
    assert plan.num_tiles == 2 and plan.num_partials == 8
    readers = plan.run_reader_end - plan.run_reader_start
    for begin, end in zip(plan.tile_run_indptr[:-1], plan.tile_run_indptr[1:], strict=True):
        assert readers[begin] == 4 and readers[begin + 1 : end].min() < 4


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("divider", ["per_request", "deft_node"])
def test_the_log_sum_exp(divider, queries):
    """Requests with one work tile, written with the output, and requests that are merged."""
    batch = paged_batch(query_lens=queries, requests=3, heads=(6, 2), head_dim=80, dtype=FP16)
    plan = make_plan(batch, divider)
    assert (plan.num_partials > 0) == (divider == "deft_node")
    kernel = Portable(plan, batch)
    plain = kernel.run()
    assert torch.equal(kernel.run(with_lse=True), plain)
    _, expected = batch.expected()
    torch.testing.assert_close(kernel.lse.cpu().double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("block_size", [8, 16, 24, 128])
def test_block_sizes_and_cache_strides(block_size, layout):
    batch = paged_batch(
        block_size=block_size, documents=1, requests=3, document_blocks=3, dtype=FP16
    )
    if layout == "HND":
        batch = as_hnd(batch)
    elif layout == "interleaved":
        batch.k_cache, batch.v_cache = torch.stack([batch.k_cache, batch.v_cache], 1).unbind(1)
    check(batch)


@pytest.mark.parametrize("block_size", [64, 128, 256, 528])
def test_long_runs_that_begin_within_a_block(block_size):
    batch = paged_batch(
        block_size=block_size,
        documents=1,
        requests=3,
        document_blocks=max(5, 2560 // block_size),
        dtype=FP16,
    )
    kernel = check(batch, "depth_first", workers=12, spread=True)
    assert (kernel.arrays["run_start"].cpu().numpy() % block_size > 0).any()


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_tiles_with_few_requests(limit):
    check(paged_batch(requests=6, dtype=FP16), "deft_flatten", max_requests=limit)


def test_workers_without_work_write_nothing():
    batch = paged_batch(documents=1, requests=2, dtype=FP16)
    plan = check(batch, "deft_node", workers=40).plan
    assert np.count_nonzero(np.diff(plan.work_indptr)) < 40


def test_requests_of_one_token():
    batch = paged_batch(dtype=FP16)
    batch.seq_lens[[0, 5]] = 1
    check(batch)


def test_a_plan_serves_sequences_that_grow():
    batch = paged_batch(dtype=FP16, private_blocks=2)
    batch.k_cache.nan_to_num_(0.5)
    batch.v_cache.nan_to_num_(0.25)
    kernel = Portable(make_plan(batch), batch)
    kernel.run()
    free = iter(range(1, 999))
    batch.block_table = np.pad(batch.block_table, ((0, 0), (0, 2)))
    for row in batch.block_table:  # new blocks may repeat ids: their contents do not matter
        row[row == 0] = [next(free) % len(batch.k_cache) for _ in range((row == 0).sum())]
    batch.seq_lens = batch.seq_lens + np.arange(11, 11 + len(batch.seq_lens), dtype=np.int32)
    kernel.partial_out.fill_(torch.nan)
    kernel.partial_lse.fill_(torch.nan)
    assert relative_error(kernel.run(), batch.expected()[0]) < TOLERANCE[FP16]


def test_large_scores_stay_finite():
    batch = paged_batch(dtype=FP16)
    batch.q *= 300
    check(batch)


@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [1, 5, 2, 0]], ids=["even", "ragged"])
def test_several_queries_see_each_other_in_causal_order(counts):
    batch = paged_batch(documents=1, dtype=FP16)
    batch = batch.with_queries(counts)
    check(batch)


@pytest.mark.parametrize("tokens", [70, 130])
@pytest.mark.parametrize("group", [1, 2])
def test_token_trees_wider_than_a_word(tokens, group):
    """130 tokens of two heads each are more rows than a Q tile has."""
    batch = paged_batch(
        documents=1, requests=3, private_blocks=16, heads=(group, 1), dtype=FP16, seed=3
    )
    batch.seq_lens[0] = 5 * 16 + tokens  # the queries begin right behind the shared blocks
    assert np.all(batch.seq_lens >= tokens)
    batch = batch.with_queries([tokens, 1, tokens - 7])
    batch.k_cache.nan_to_num_()
    batch.v_cache.nan_to_num_()
    rng = np.random.default_rng(0)
    parents = np.concatenate(
        [[rng.integers(-1, i) for i in range(n)] for n in (tokens, 1, tokens - 7)]
    )
    mask = ancestor_masks(parents, batch.query_start_loc)
    out = Portable(make_plan(batch), batch).run(mask)
    expected = tree_reference(batch, mask)
    assert relative_error(out, expected) < TOLERANCE[FP16]
    assert relative_error(out, batch.expected()[0]) > 0.1, "the mask must matter"


def test_a_tile_larger_than_its_kernel_is_walked_in_pieces():
    batch = paged_batch(heads=(16, 1), query_lens=3, dtype=FP16)
    plan = make_plan(batch, max_requests=1)
    kernel = Portable(plan, batch, tile=QTile(16, 32, 4, 1, 1))
    assert relative_error(kernel.run(), batch.expected()[0]) < TOLERANCE[FP16]
