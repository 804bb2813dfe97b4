"""The native executor on CPU_ATTN's cache layout, against float64 and the torch executor."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.native_executor import needs_native
from tests.support.paged_batches import PagedBatch, paged_batch, total_error
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import OPEN_END, PrefixShareError, WorkTiles
from vllm_prefixshare.kernels.cpu import native_executor
from vllm_prefixshare.kernels.cpu.executor import cache_views, cpu_executor
from vllm_prefixshare.kernels.cpu.native_executor import NativeExecutor
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.interface import Executor, HostBatch
from vllm_prefixshare.planning.plan import DecodePlan, build_plan

#: weights are rounded to bfloat16 before the second product, as on GPUs
TOLERANCE = 4e-3


def packed(batch: PagedBatch) -> torch.Tensor:
    """The batch's caches in the layout of CPU_ATTN."""
    blocks, size, heads, dim = batch.k_cache.shape
    cache = torch.empty(blocks, heads, size, 2 * dim, dtype=batch.k_cache.dtype)
    for view, source in zip(cache_views(cache), (batch.k_cache, batch.v_cache), strict=True):
        view.copy_(source)
    return cache


def run_on_packed_cache(
    executor: Executor,
    plan: DecodePlan,
    batch: PagedBatch,
    out: torch.Tensor,
    rows: np.ndarray | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    tables = batch.block_table, batch.seq_lens
    executor.prepare(plan, HostBatch(*tables, batch.query_start_loc, rows=rows))
    scale = batch.q.shape[-1] ** -0.5
    return executor.run(batch.q, *cache_views(packed(batch)), *tables, out, scale, lse=lse)


def run(batch: PagedBatch, rows: np.ndarray | None = None, **planning: object) -> torch.Tensor:
    _, heads, dim = batch.q.shape
    _, size, kv_heads, _ = batch.k_cache.shape
    plan = batch.wrapper(**planning).plan(batch.block_table, batch.seq_lens, batch.query_start_loc)
    dtype = str(batch.q.dtype).removeprefix("torch.")
    executor = NativeExecutor(AttentionConfig(heads, kv_heads, dim, size, dtype))
    return run_on_packed_cache(executor, plan, batch, torch.full_like(batch.q, torch.nan), rows)


@needs_native
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((9, 3), 64), ((4, 4), 96), ((8, 1), 128), ((16, 2), 128), ((2, 2), 256)],
    ids=["gqa3", "mha", "mqa", "gqa8", "wide"],
)
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("queries", [1, None], ids=["one", "ragged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_matches_float64(heads, head_dim, block_size, queries, dtype):
    batch = paged_batch(
        heads=heads, head_dim=head_dim, block_size=block_size, query_lens=queries, dtype=dtype
    )
    tolerance = TOLERANCE if dtype == torch.bfloat16 else 2e-6
    assert total_error(run(batch), batch.expected()[0]) < tolerance


@needs_native
@pytest.mark.parametrize("divider", ["flashforge", "deft_flatten", "fixed", "per_request"])
def test_matches_float64_for_every_kind_of_plan(divider):
    batch = paged_batch(block_size=32, dtype=torch.bfloat16, documents=3)
    out = run(batch, divider=divider, num_workers=7)
    assert total_error(out, batch.expected()[0]) < TOLERANCE


@pytest.mark.parametrize("make", [pytest.param(NativeExecutor, marks=needs_native), TorchExecutor])
def test_the_log_sum_exp(make):
    batch = paged_batch(block_size=32, dtype=torch.bfloat16, query_lens=None)
    plan = batch.wrapper().plan(batch.block_table, batch.seq_lens, batch.query_start_loc)
    executor = make(AttentionConfig(4, 2, 64, 32))
    lse = torch.full(batch.q.shape[:2], torch.nan)
    run_on_packed_cache(executor, plan, batch, torch.empty_like(batch.q), lse=lse)
    _, expected = batch.expected()
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=2e-5)
    with pytest.raises(PrefixShareError, match=r"lse must be contiguous float32 \[\d+, 4\]"):
        run_on_packed_cache(executor, plan, batch, torch.empty_like(batch.q), lse=lse.T)


@needs_native
def test_long_runs_and_many_readers_are_cut_into_pieces(monkeypatch):
    batch = paged_batch(
        block_size=32, dtype=torch.bfloat16, requests=14, document_blocks=40, private_blocks=9
    )
    whole = run(batch)
    monkeypatch.setattr(native_executor, "MIN_TOKENS", 64)
    monkeypatch.setattr(native_executor, "MAX_ROWS", 8)
    pieces = run(batch)
    assert total_error(pieces, batch.expected()[0]) < TOLERANCE
    assert not torch.equal(pieces, whole)


@needs_native
def test_a_subset_of_rows_writes_only_their_tokens():
    batch = paged_batch(documents=1, block_size=32, dtype=torch.bfloat16, query_lens=2)
    out = run(batch, rows=np.array([1, 3]))
    tokens = [2, 3, 6, 7]
    assert total_error(out[tokens], batch.expected()[0][tokens]) < TOLERANCE
    assert torch.isnan(out[[0, 1, 4, 5]]).all()


@needs_native
@pytest.mark.parametrize("factor", [0.0, 1e-3, 200.0])
def test_flat_and_sharp_scores(factor):
    batch = paged_batch(block_size=32, dtype=torch.bfloat16)
    batch.q *= factor
    out = run(batch)
    assert torch.isfinite(out).all()
    # with one weight of nearly 1, only the rounding of the result remains
    assert total_error(out, batch.expected()[0]) < TOLERANCE


@needs_native
def test_the_same_plan_gives_the_same_bits():
    batch = paged_batch(block_size=32, dtype=torch.bfloat16, document_blocks=40)
    assert torch.equal(run(batch), run(batch))


@needs_native
def test_a_request_that_sees_nothing_of_a_piece_is_not_spoilt():
    # two pieces of one request, the second empty for its first query
    batch = paged_batch(documents=1, requests=1, block_size=32, dtype=torch.bfloat16, query_lens=4)
    length = int(batch.seq_lens[0])
    cut = (length - 2) // 32 * 32
    each = np.arange(3, dtype=np.int32)
    runs = np.array([[0, 0, cut, 0, 1], [0, cut, OPEN_END, 0, 1]], np.int32)
    tiles = WorkTiles(each, np.zeros(2, np.int32), each, runs, np.ones(2))
    plan = build_plan(tiles, 1, 32, batch.seq_lens)
    executor = NativeExecutor(AttentionConfig(4, 2, 64, 32))
    out = run_on_packed_cache(executor, plan, batch, torch.empty_like(batch.q))
    assert total_error(out, batch.expected()[0]) < TOLERANCE


def test_the_torch_executor_takes_over_where_the_native_one_cannot_run(monkeypatch):
    def attention(dtype: str, block_size: int = 128) -> AttentionConfig:
        return AttentionConfig(4, 2, 64, block_size, dtype)

    said: list[str] = []
    assert cpu_executor(attention("float16"), said.append).name == "torch"
    assert "bfloat16 or float32, not float16" in said[-1]
    assert cpu_executor(attention("bfloat16", 16), said.append).name == "torch"
    assert "multiples of 32" in said[-1]

    native_executor._find_library.cache_clear()
    monkeypatch.setattr(native_executor.shutil, "which", lambda name: None)
    if "avx512bw" in Path("/proc/cpuinfo").read_text():
        assert cpu_executor(attention("bfloat16"), said.append).name == "torch"
        assert "no C compiler" in said[-1]
    native_executor._find_library.cache_clear()


def test_the_torch_executor_runs_on_the_packed_cache():
    batch = paged_batch(block_size=32, dtype=torch.bfloat16)
    plan = batch.wrapper().plan(batch.block_table, batch.seq_lens)
    executor = TorchExecutor(AttentionConfig(4, 2, 64, 32))
    out = run_on_packed_cache(executor, plan, batch, torch.empty_like(batch.q))
    assert total_error(out, batch.expected()[0]) < 2.5e-3
