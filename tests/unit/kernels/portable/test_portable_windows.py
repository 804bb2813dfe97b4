"""The portable kernel and merge states with a sliding window, against float64.

Without a GPU under Triton's interpreter, as in ``test_partial_attention``. Blocks that no query
sees are gone from the block table.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.paged_batches import paged_batch
from tests.support.portable_kernel import DEVICE, Portable, make_plan
from vllm_prefixshare.kernels.extras import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("divider", ["depth_first", "deft_node", "per_request"])
@pytest.mark.parametrize("window", [1, 16, 33, 64, 200])
def test_windows(window, divider, queries):
    batch = paged_batch(query_lens=queries, requests=3, dtype=torch.float16)
    batch = batch.without_passed_blocks(window)
    Portable(make_plan(batch, divider, window=window), batch, window=window).assert_right()


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
def test_long_runs_that_a_window_begins_in(queries):
    batch = paged_batch(
        requests=3, documents=1, document_blocks=30, query_lens=queries, dtype=torch.float16
    )
    window = 410
    batch = batch.without_passed_blocks(window)
    plan = make_plan(batch, "depth_first", workers=1, window=window)
    kernel = Portable(plan, batch, workers=1, window=window)
    assert len(kernel.arrays["run_row"]), "no run is long enough for its own loop"
    assert plan.shared_rows.size == 3
    kernel.assert_right()


def test_a_window_with_extras():
    """A window in which some pieces have no visible token, and a sink in each head."""
    batch = paged_batch(requests=3, heads=(6, 2), dtype=torch.float16)
    batch = batch.without_passed_blocks(40)
    extras = PLAIN._replace(sinks=torch.linspace(-2, 4, 6, device=DEVICE), soft_cap=3.0)
    Portable(
        make_plan(batch, "deft_node", window=40), batch, extras=extras, window=40
    ).assert_right()


@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("window", [1, 40, 200])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN in the cache
def test_a_window_with_a_quantised_cache(window, queries):
    batch = paged_batch(query_lens=queries, requests=3, heads=(6, 2), dtype=torch.float16)
    fp8 = torch.float8_e4m3fn
    batch = batch.as_type(fp8, fp8).without_passed_blocks(window)
    scales = (torch.tensor(x, device=DEVICE) for x in ([0.9, 0.9], [0.7, 1.6], [1.6, 0.7]))
    extras = PLAIN._replace(**dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)))
    plan = make_plan(batch, "deft_node", window=window)
    Portable(plan, batch, extras=extras, window=window).assert_right()


def test_a_plan_serves_windows_that_move():
    batch = paged_batch(requests=4, documents=1, dtype=torch.float16)
    batch.k_cache.nan_to_num_(0.5)
    batch.v_cache.nan_to_num_(0.25)
    window, grown, held = 60, batch.seq_lens, batch.block_table
    plan = None
    for missing in (9, 4, 0):
        batch = replace(batch, seq_lens=grown - missing, block_table=held)
        batch = batch.without_passed_blocks(window)
        plan = plan or make_plan(batch, "depth_first", window=window)
        Portable(plan, batch, window=window).assert_right()
