"""The portable kernel and merge states with the extra features of a layer, against float64.

Without a GPU under Triton's interpreter, as in ``test_partial_attention``.
"""

import numpy as np
import pytest
import torch

from tests.support.paged_batches import (
    PagedBatch,
    as_hnd,
    batch_at_boundaries,
    paged_batch,
    relative_error,
)
from tests.support.portable_kernel import DEVICE, TOLERANCE, Portable, make_plan
from vllm_prefixshare.kernels.catalog import SHARED_MEMORY, Gpu, QTile, q_tile
from vllm_prefixshare.kernels.extras import LayerExtras

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    # NaN in unused slots of a quantised cache
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEADS = (6, 2)
SINKS = torch.tensor([3.0, -2.0, 0.0, 6.0, -1.0, 1.0], device=DEVICE)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01], device=DEVICE)
SCALES = {
    "q_scale": torch.tensor([0.9], device=DEVICE).expand(2),
    "k_scale": torch.tensor([0.7, 1.6], device=DEVICE),
    "v_scale": torch.tensor([1.6, 0.7], device=DEVICE),
}
EXTRAS = {
    "sinks": LayerExtras(sinks=SINKS),
    "soft_cap": LayerExtras(soft_cap=2.5),
    "alibi": LayerExtras(alibi_slopes=SLOPES),
    "all": LayerExtras(sinks=SINKS.to(BF16), soft_cap=4.0, alibi_slopes=SLOPES),
}


def layer(dtype: torch.dtype = FP16, cache: torch.dtype | None = None, **shape) -> PagedBatch:
    """A batch whose queries have type ``dtype`` and whose cache has type ``cache``, or ``dtype`` if
    None.
    """
    batch = paged_batch(**{"heads": HEADS, "documents": 1, "dtype": FP16, **shape})
    return batch.as_type(dtype, cache or dtype)


@pytest.mark.parametrize("name", ["sinks", "soft_cap", "alibi"])
@pytest.mark.parametrize(
    ("divider", "queries", "block_size", "hnd"),
    [("per_request", 1, 32, True), ("deft_node", None, 16, False)],
    ids=str,
)
def test_features(name, divider, queries, block_size, hnd):
    """Requests that one tile finishes, and requests that are merged."""
    batch = layer(query_lens=queries, block_size=block_size)
    batch = as_hnd(batch) if hnd else batch
    plan = make_plan(batch, divider)
    assert (plan.num_partials > 0) == (divider != "per_request")
    Portable(plan, batch, extras=EXTRAS[name]).assert_right()


@pytest.mark.parametrize(
    ("block_size", "layout", "queries"),
    [(16, "HND", 3), (32, "NHD", 1)],  # test_features has the other two
    ids=str,
)
@pytest.mark.parametrize("name", ["sinks", "soft_cap", "alibi", "fp8"])
def test_every_length_at_a_boundary(name, block_size, layout, queries):
    batch = batch_at_boundaries(queries, block_size=block_size, heads=HEADS, dtype=FP16)
    extras = EXTRAS.get(name)
    if extras is None:
        extras, batch = LayerExtras(**SCALES), batch.as_type(FP8, FP8)
    batch = as_hnd(batch) if layout == "HND" else batch
    plan = make_plan(batch, "deft_node")
    assert plan.num_partials > 0
    Portable(plan, batch, extras=extras).assert_right()


def test_long_runs_with_all_features():
    batch = layer(requests=2, document_blocks=18, private_blocks=20)
    kernel = Portable(make_plan(batch, "depth_first"), batch, extras=EXTRAS["all"])
    assert kernel.arrays["run_row"].numel() > 0
    kernel.assert_right()


def test_sinks_beyond_all_scores():
    """A head that sees only its sink, and a head without a sink."""
    sinks = torch.tensor([300.0, -torch.inf, 0.0, -300.0, 90.0, 1.0], device=DEVICE)
    batch = layer()
    for divider in ("per_request", "deft_node"):
        kernel = Portable(make_plan(batch, divider), batch, extras=LayerExtras(sinks=sinks))
        out = kernel.run()
        assert out.isfinite().all() and (out[:, 0] == 0).all()
        plain, _ = batch.expected()
        assert relative_error(out[:, [1, 3]], plain[:, [1, 3]]) < TOLERANCE[FP16]


@pytest.mark.parametrize("bits", [False, True], ids=["type", "bits"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "queries"),
    [(FP8, 64, 16, 1), (FP8, 72, 32, None), (BF16, 64, 32, 1), (FP16, 64, 16, None)],
    ids=str,
)
def test_a_quantised_cache(dtype, head_dim, block_size, queries, bits):
    batch = layer(dtype, FP8, head_dim=head_dim, block_size=block_size, query_lens=queries)
    scales = {k: v for k, v in SCALES.items() if dtype == FP8 or k != "q_scale"}
    extras = LayerExtras(sinks=SINKS, soft_cap=20.0 if queries == 1 else 0.0, **scales)
    plan = make_plan(batch, "deft_node")
    assert plan.num_partials > 0
    Portable(plan, batch, extras=extras, bits=bits).assert_right()


@pytest.mark.parametrize("bits", [False, True], ids=["type", "bits"])
def test_every_number_of_eight_bits_is_read_as_it_is(bits):
    """One token per request, so that the output is V itself."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F]  # all but the two NaN values
    batch = paged_batch(documents=1, requests=4, heads=(1, 1), dtype=FP16)
    batch.block_table = np.arange(4, dtype=np.int32)[:, None]
    batch.seq_lens = np.ones(4, np.int32)
    batch.k_cache, batch.v_cache = (torch.zeros(4, 16, 1, 64).to(FP8) for _ in range(2))
    values = torch.cat([numbers, numbers[:2]]).view(FP8).view(4, 1, 64)
    batch.v_cache[:, 0] = values
    one = torch.ones(1, device=DEVICE)
    extras = LayerExtras(k_scale=one, v_scale=one)
    out = Portable(make_plan(batch), batch, extras=extras, bits=bits).run()
    assert torch.equal(out, values.to(FP16))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_wide_heads(capability):
    tile = q_tile(512, Gpu(capability, 132, SHARED_MEMORY[capability] << 10))
    batch = layer(heads=(2, 1), head_dim=512)
    Portable(make_plan(batch, "deft_node", max_requests=4), batch, tile=tile).assert_right()


def test_a_request_in_pieces_with_all_features():
    batch = layer(query_lens=3, heads=(16, 1))
    extras = LayerExtras(
        sinks=torch.linspace(-2, 4, 16, device=DEVICE),
        soft_cap=3.0,
        alibi_slopes=torch.linspace(0.01, 0.5, 16, device=DEVICE),
    )
    plan = make_plan(batch, max_requests=1)
    Portable(plan, batch, tile=QTile(16, 32, 4, 1, 1), extras=extras).assert_right()
