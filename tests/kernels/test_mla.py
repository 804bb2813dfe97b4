"""The kernel for latent KV caches against attention in float64.

Without a GPU under Triton's interpreter (tests/conftest.py). Outputs, partial results and all
unused cache slots hold NaN before each run.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.batches import PagedBatch
from tests.mla import RANK, SCALE, WIDTH, expected, latent_batch
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.costs.roofline import analytic_cost
from vllm_prefixshare.kernels.contract import Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.kernels.mla_hopper import launch as hopper
from vllm_prefixshare.kernels.portable.layout import Grid
from vllm_prefixshare.planning.planner import DecodePlanner

from .gluon_interpreter import load_kernel
from .portable import relative_error

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

    def __post_init__(self) -> None:
        b, heads = self.batch, self.batch.q.shape[1]
        name = str(b.q.dtype).removeprefix("torch.")
        size = b.k_cache.shape[1]
        attention = AttentionConfig(heads, 1, WIDTH, size, name, kv_lora_rank=RANK)
        config = PlannerConfig(
            divider=self.divider,
            num_workers=self.workers,
            max_tile_requests=max(1, hopper.TILE.rows // heads),
            share="always",
        )
        planner = DecodePlanner(config, analytic_cost(attention, "mla_hopper"), size, heads)
        self.plan = planner.update(b.block_table, b.seq_lens, 1)
        arrays = hopper.latent_layout(self.plan, Grid.of(hopper.TILE.kv_tile, size, 1))._asdict()
        self.arrays = {k: torch.from_numpy(v).to(DEVICE) for k, v in arrays.items()}

    def check(self) -> None:
        b, heads = self.batch, self.batch.q.shape[1]
        q, cache = b.q.to(DEVICE), b.k_cache.to(DEVICE)
        table, lens = (torch.from_numpy(x).to(DEVICE) for x in (b.block_table, b.seq_lens))
        shape = self.plan.num_partials, heads, RANK
        partial_out = torch.full(shape, torch.nan, device=DEVICE)
        partial_lse = torch.full(shape[:2], torch.nan, device=DEVICE)
        out = torch.full((len(q), heads, RANK), torch.nan, dtype=q.dtype, device=DEVICE)
        lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
        t = Tensors(
            q, cache, cache[..., :RANK], table, lens, None, None, partial_out, partial_lse, out, lse
        )
        hopper.latent_partial_attention(self.workers, self.arrays, t, SCALE)
        merge_states(self.arrays["merge_indptr"], partial_out, partial_lse, out, out_lse=lse)
        wanted, wanted_lse = expected(b)
        assert relative_error(out.cpu(), wanted) < TOLERANCE[q.dtype]
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


@pytest.mark.usefixtures("interpreted")
def test_sequences_grow_under_a_plan_of_the_hopper_kernel():
    batch = latent_batch(8, documents=1, dtype=torch.float16)
    latents = Latents(batch)
    batch.k_cache.nan_to_num_(0.5)
    batch.block_table[:, 9:] = batch.block_table[:, :2]
    for added in (5, 18):
        batch.seq_lens[:2] += added
        latents.check()
