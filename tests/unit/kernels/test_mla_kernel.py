"""The kernel for latent KV caches against attention in float64.

Without a GPU under Triton's interpreter (tests/conftest.py). Outputs, partial results and all
unused cache slots hold NaN before each run.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.gluon_interpreter import launch_before, load_kernel
from tests.support.latent_batches import (
    RANK,
    SCALE,
    SCALES,
    WIDTH,
    expected,
    latent_batch,
    latents_at_boundaries,
    let_scores_rise,
    quantised,
)
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.planning_cases import gpu_config
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.kernels.common.arrays import NUM_REQS, WORDS
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras, checked_extras
from vllm_prefixshare.kernels.interface import Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.kernels.mla_hopper import launch as hopper
from vllm_prefixshare.kernels.mla_hopper.layout import latent_layout
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.planner import DecodePlanner

# rows without any token divide by zero and are then discarded, as on a GPU
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass
class Latents:
    """A plan of a batch on the device; ``check`` may be called again after lengths have changed."""

    batch: PagedBatch
    divider: str = "depth_first"
    workers: int = 3
    dtype: torch.dtype | None = None  # of outputs; None for that of the queries
    query_len: int = 1  # most query tokens of a request

    def __post_init__(self) -> None:
        b, heads = self.batch, self.batch.q.shape[1]
        of_cache = None if self.dtype is None else FP8
        self.dtype = self.dtype or b.q.dtype
        name = str(self.dtype).removeprefix("torch.")
        size = b.k_cache.shape[1]
        attention = AttentionConfig(
            heads, 1, WIDTH, size, name, of_cache, of_cache, kv_lora_rank=RANK
        )
        self.extras = PLAIN
        if of_cache:
            self.extras = checked_extras(LayerExtras(**SCALES), attention, DEVICE)
        config = gpu_config(
            divider=self.divider,
            num_workers=self.workers,
            max_tile_requests=hopper.requests_of_a_tile(self.query_len * heads),
            share="always",
        )
        planner = DecodePlanner(config, analytic_cost(attention, "mla_hopper"), size, heads)
        self.plan = planner.update(b.block_table, b.seq_lens, self.query_len).plan
        tiling = hopper.kv_tiling(size, self.query_len)
        arrays = latent_layout(self.plan, tiling, config.max_tile_requests)._asdict()
        self.arrays = {k: torch.from_numpy(v).to(DEVICE) for k, v in arrays.items()}

    def check(self) -> None:
        b, heads = self.batch, self.batch.q.shape[1]
        q, cache = b.q.to(DEVICE), b.k_cache.to(DEVICE)
        table, lens = (torch.from_numpy(x).to(DEVICE) for x in (b.block_table, b.seq_lens))
        starts = torch.from_numpy(b.query_start_loc).to(DEVICE)
        shape = self.plan.num_partials * self.query_len, heads, RANK
        partial_out = torch.full(shape, torch.nan, device=DEVICE)
        partial_lse = torch.full(shape[:2], torch.nan, device=DEVICE)
        out = torch.full((len(q), heads, RANK), torch.nan, dtype=self.dtype, device=DEVICE)
        lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
        t = Tensors(
            q, cache, cache[..., :RANK], table, lens, starts, None,
            partial_out, partial_lse, out, lse, self.extras,
        )  # fmt: skip
        if not torch.cuda.is_available():
            launch_before.writes(q)
        fixed = self.workers, self.query_len
        hopper.latent_partial_attention(fixed, self.arrays, t, SCALE)
        indptr, merged = self.arrays["merge_indptr"], (partial_out, partial_lse, out)
        merge_states(indptr, *merged, starts, self.query_len, lse)
        wanted, wanted_lse = expected(b, LayerExtras(**SCALES) if self.extras != PLAIN else PLAIN)
        assert relative_error(out.cpu(), wanted) < TOLERANCE[self.dtype]
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=0, atol=1e-2)


@pytest.fixture
def interpreted(monkeypatch, tmp_path):
    """The kernel's own source, without a GPU under the interpreter."""
    if not torch.cuda.is_available():
        kernel = load_kernel("vllm_prefixshare.kernels.mla_hopper", tmp_path)
        monkeypatch.setattr(hopper, "partial_attention", kernel)


@pytest.mark.parametrize(
    ("heads", "dtype", "divider", "block_size"),
    [
        (16, torch.bfloat16, "depth_first", 16),
        (72, torch.float16, "flashforge", 64),  # two chunks of rows
        (24, torch.float16, "deft_flatten", 8),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_hopper_kernel(heads, dtype, divider, block_size):
    shape = {"documents": 1, "requests": 3, "document_blocks": 3, "private_blocks": 2}
    batch = latent_batch(heads, dtype=dtype, block_size=block_size, **shape)
    batch.q *= torch.linspace(0.2, 4, heads)[None, :, None]  # maxima that rise slowly and fast
    latents = Latents(batch, divider)
    assert not len(latents.arrays["run_row"])
    latents.check()


@pytest.mark.parametrize(
    ("heads", "dtype", "block_size", "documents", "workers"),
    [
        (16, torch.float16, 64, 1, 3),
        (24, torch.float16, 16, 1, 2),
        (72, torch.bfloat16, 8, 1, 3),  # two chunks of rows
        (32, torch.float16, 64, 2, 1),  # one worker has all tiles
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_a_quantised_cache(heads, dtype, block_size, documents, workers):
    shape = {"documents": documents, "requests": 3, "document_blocks": 3, "private_blocks": 2}
    batch = latent_batch(heads, dtype=torch.float16, block_size=block_size, **shape)
    batch.q *= torch.linspace(0.2, 4, heads)[None, :, None]
    Latents(quantised(batch), workers=workers, dtype=dtype).check()


@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
@pytest.mark.parametrize(
    ("heads", "queries", "block_size", "workers"),
    [
        (8, 3, 16, 3),  # ragged: 1 to 3 query tokens
        (16, 2, 64, 2),
        (24, 3, 8, 3),  # two chunks of rows
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_several_query_tokens(heads, queries, block_size, workers, fp8):
    shape = {"documents": 1, "requests": 4, "document_blocks": 3, "private_blocks": 2}
    shape |= {"dtype": torch.float16, "block_size": block_size, "query_lens": queries}
    batch = latent_batch(heads, **shape)
    counts = np.arange(len(batch.seq_lens)) % queries + 1
    batch.query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    batch.q = batch.q[: batch.query_start_loc[-1]]
    if fp8:
        batch = quantised(batch)
    Latents(batch, "flashforge", workers, torch.float16 if fp8 else None, queries).check()


@pytest.mark.parametrize("queries", [2, 3])
@pytest.mark.usefixtures("interpreted")
def test_query_tokens_at_every_boundary(queries):
    batch = latents_at_boundaries(queries, 8, 16, torch.float16)
    Latents(batch, "deft_node", query_len=queries).check()


@pytest.mark.usefixtures("interpreted")
def test_every_number_of_eight_bits_is_read_as_it_is():
    """One token a request, so that the output is its latent."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F]  # all but the two NaN values
    batch = quantised(latent_batch(1, documents=1, requests=2, dtype=torch.float16))
    batch.block_table = np.arange(2, dtype=np.int32)[:, None]
    batch.seq_lens = np.ones(2, np.int32)
    for number in range(2):
        token = batch.k_cache[number, 0, 0].view(torch.uint8)
        token[:] = 0
        token[:254] = numbers.roll(number)
    Latents(batch, dtype=torch.float16).check()


@pytest.mark.usefixtures("interpreted")
def test_maxima_that_rise_late_over_a_quantised_cache():
    shape = {"documents": 1, "requests": 3, "document_blocks": 3, "private_blocks": 2}
    b = latent_batch(16, dtype=torch.float16, block_size=64, **shape)
    let_scores_rise(b.q, b.k_cache, b.block_table, b.seq_lens)
    Latents(quantised(b), workers=1, dtype=torch.float16).check()


@pytest.mark.usefixtures("interpreted")
def test_maxima_that_rise_late():
    shape = {"documents": 1, "requests": 3, "document_blocks": 3, "private_blocks": 2}
    b = latent_batch(16, dtype=torch.float16, block_size=64, **shape)
    let_scores_rise(b.q, b.k_cache, b.block_table, b.seq_lens)
    Latents(b, workers=1).check()


@pytest.mark.usefixtures("interpreted")
def test_sequences_grow_under_a_plan_of_the_hopper_kernel():
    batch = latent_batch(8, documents=1, dtype=torch.float16)
    latents = Latents(batch)
    batch.k_cache.nan_to_num_(0.5)
    batch.block_table[:, 9:] = batch.block_table[:, :2]
    for added in (5, 18):
        batch.seq_lens[:2] += added
        latents.check()


@pytest.mark.parametrize("workers", [3, 40])
def test_the_first_tile_of_a_worker_has_its_number(workers):
    latents = Latents(latent_batch(16, documents=2, requests=9), "flashforge", workers)
    plan, arrays = latents.plan, {k: v.cpu().numpy() for k, v in latents.arrays.items()}
    room = hopper.requests_of_a_tile(16)
    info = arrays["tile_info"].reshape(-1, WORDS)
    assert plan.num_tiles != workers
    for worker, (begin, end) in enumerate(pairwise(plan.work_indptr)):
        after = arrays["work_indptr"][worker : worker + 2]
        places = [worker, *range(*after)]
        assert len(places) == max(1, end - begin)
        for place, tile in zip(places, range(begin, end), strict=False):
            slots = slice(*plan.tile_req_indptr[tile : tile + 2])
            mine = slice(place * room, place * room + info[place, NUM_REQS])
            assert np.array_equal(arrays["slot_row"][mine], plan.tile_req_indices[slots])
            assert np.array_equal(arrays["slot_partial"][mine], plan.partial_indices[slots])
        if begin == end:
            assert info[worker, NUM_REQS] == 0
