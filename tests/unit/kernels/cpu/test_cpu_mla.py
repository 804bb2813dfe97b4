"""The operator over a latent KV cache on a CPU, against float64."""

import numpy as np
import pytest
import torch

from tests.support.latent_batches import (
    RANK,
    SCALE,
    WIDTH,
    expected,
    latent_batch,
    latents_at_boundaries,
)
from tests.support.paged_batches import PagedBatch
from vllm_prefixshare import PrefixShareDecodeWrapper, PrefixShareError, merge_states
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.planning.costs.roofline import AnalyticCost, Roofline

#: reading costs, arithmetic does not: all that can be shared is
READING = AnalyticCost(
    AttentionConfig(8, 1, WIDTH, 16, kv_lora_rank=RANK), Roofline(0.1, 1.0, 1.0, 1e9, 1e9, 0.1)
)
SHAPE = {"num_kv_heads": 1, "head_dim": WIDTH, "kv_lora_rank": RANK, "block_size": 16}


def wrapper(heads: int = 8, **options) -> PrefixShareDecodeWrapper:
    return PrefixShareDecodeWrapper(
        **{"num_qo_heads": heads, "sm_scale": SCALE, "cost": READING, **SHAPE, **options}
    )


def run(batch: PagedBatch, made: PrefixShareDecodeWrapper) -> tuple[torch.Tensor, torch.Tensor]:
    made.plan(batch.block_table, batch.seq_lens, batch.query_start_loc)
    tensors = batch.q, batch.k_cache[:, :, 0], None, batch.block_table, batch.seq_lens
    return made.run(*tensors, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (3, None), (16, 1)])
def test_matches_float64(dtype, heads, queries):
    batch = latent_batch(heads, dtype=dtype, query_lens=queries)
    made = wrapper(heads, dtype=dtype)
    out, lse = run(batch, made)
    wanted, wanted_lse = expected(batch)
    assert made.stats().share_factor > 1.3
    assert out.shape == (*batch.q.shape[:2], RANK) and out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("block_size", [8, 16, 64, 272])
def test_every_length_at_a_boundary(block_size, heads, queries):
    batch = latents_at_boundaries(queries, heads, block_size, torch.float32)
    made = wrapper(heads, dtype=torch.float32, block_size=block_size, divider="deft_node")
    out, lse = run(batch, made)
    wanted, wanted_lse = expected(batch)
    assert made.stats().share_factor > 1.3
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=0)


def test_states_of_latents_merge():
    batch = latent_batch(8, dtype=torch.float32)
    states = []
    for columns in (slice(0, 2), slice(2, None)):
        lens = np.clip(batch.seq_lens - columns.start * 16, 0, (columns.stop or 99) * 16)
        part = PagedBatch(
            np.ascontiguousarray(batch.block_table[:, columns]), lens.astype(np.int32),
            batch.query_start_loc, batch.q, batch.k_cache, batch.v_cache,
        )  # fmt: skip
        states.append(run(part, wrapper(dtype=torch.float32)))
    merged, _ = merge_states(*zip(*states, strict=True))
    torch.testing.assert_close(merged.double(), expected(batch)[0], atol=1e-5, rtol=1e-5)


def test_an_empty_batch_has_the_width_of_latents():
    made = wrapper()
    made.plan(np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
    cache = torch.zeros(2, 16, WIDTH, dtype=torch.bfloat16)
    out = made.run(torch.zeros(0, 8, WIDTH, dtype=torch.bfloat16), cache, None, [[]], [])
    assert out.shape == (0, 8, RANK)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sm_scale": None}, "kv_lora_rank needs sm_scale"),
        ({"head_dim": 128}, "head_dim must be 576 and kv_lora_rank 512, got 128 and 512"),
        ({"kv_lora_rank": 256}, "got 576 and 256"),
        ({"kv_lora_rank": None}, "head_dim must be a multiple of 8 from 64 to 512, got 576"),
        ({"num_kv_heads": 2}, "kv_lora_rank needs one KV head, got num_kv_heads=2"),
        ({"features": ["sinks"]}, "goes with neither features nor"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_dtype and query_dtype must be the same"),
    ],
)
def test_shapes_that_are_not_latents_are_refused(options, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        wrapper(**options)


def test_a_second_cache_is_refused():
    batch = latent_batch(8)
    made = wrapper()
    made.plan(batch.block_table, batch.seq_lens)
    tables = batch.block_table, batch.seq_lens
    with pytest.raises(PrefixShareError, match="v_cache None"):
        made.run(batch.q, batch.k_cache, batch.v_cache, *tables)
    with pytest.raises(PrefixShareError, match="k_cache must be"):
        made.run(batch.q, batch.k_cache[:, :, 0, :512], None, *tables)
