"""Runs the portable kernels on a small batch, from the planner to the merged output."""

from dataclasses import dataclass

import numpy as np
import torch

from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.planning_cases import gpu_config
from vllm_prefixshare.config import AttentionConfig, part_size
from vllm_prefixshare.kernels.catalog import Gpu, QTile, q_tile
from vllm_prefixshare.kernels.common.layout import KvTiling, walk_layout
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras
from vllm_prefixshare.kernels.interface import Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.kernels.portable.launch import portable_partial_attention
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H100_SHARED_MEMORY = 227 << 10
#: error of rounding the attention weights and the result, for one query token, by the type of the
#: queries; with eight bits P is a float16
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float8_e4m3fn: 1e-3}
H100 = Gpu((9, 0), 132, H100_SHARED_MEMORY)


def make_plan(
    batch: PagedBatch,
    divider: str = "flashforge",
    workers: int = 3,
    max_requests: int | None = None,
    window: int | None = None,
    spread: bool = False,
) -> DecodePlan:
    """spread: as in ``TileGeometry``, by the GPU's prices, at which so short runs are cut."""
    heads, head_dim = batch.q.shape[1:]
    block_size, kv_heads = batch.k_cache.shape[1:3]
    name = "float16" if batch.q.element_size() == 1 else str(batch.q.dtype).removeprefix("torch.")
    attention = AttentionConfig(heads, kv_heads, head_dim, block_size, name)
    query_len = int(np.diff(batch.query_start_loc).max())
    rows = query_len * attention.gqa_group_size
    limit = max(1, q_tile(head_dim, H100).rows // rows)
    config = gpu_config(
        divider=divider,
        num_workers=workers,
        max_tile_requests=max_requests or limit,
        share="always",
        cut_size=part_size(block_size),
        sliding_window=window,
        spread=spread,
        check_plans=True,
    )
    cost = analytic_cost(attention, "portable" if spread else "torch")
    planner = DecodePlanner(config, cost, block_size, attention.gqa_group_size)
    return planner.update(batch.block_table, batch.seq_lens, query_len).plan


@dataclass
class Portable:
    """A plan on the device; ``run`` may be called again after lengths have changed.

    tile: the Q tile, of an H100 if None. extras: extras of the layer, with scales as tensors.
    bits: pass quantised numbers as bytes, as for GPUs without the type. window: the layer's sliding
    window.
    """

    plan: DecodePlan
    batch: PagedBatch
    workers: int = 3
    tile: QTile | None = None
    extras: LayerExtras = PLAIN
    bits: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        b = self.batch
        self.query_len = int(np.diff(b.query_start_loc).max())
        heads, self.head_dim = b.q.shape[1:]
        self.tile = self.tile or q_tile(self.head_dim, H100)
        tiling = KvTiling.of(self.tile.kv_tile, b.k_cache.shape[1], self.query_len)
        layout = walk_layout(self.plan, tiling)._asdict()
        self.arrays = {k: torch.from_numpy(v).to(DEVICE) for k, v in layout.items()}
        self.lse = torch.full((len(b.q), heads), torch.nan, device=DEVICE)
        shape = self.plan.num_partials * self.query_len, heads, self.head_dim
        self.partial_out = torch.full(shape, torch.nan, device=DEVICE)
        self.partial_lse = torch.full(shape[:2], torch.nan, device=DEVICE)

    def run(self, tree_mask: np.ndarray | None = None, with_lse: bool = False) -> torch.Tensor:
        """Output on the CPU; rows not written are NaN. ``with_lse`` also fills ``lse``."""
        b = self.batch
        q, k, v = (t.to(DEVICE) for t in (b.q, b.k_cache, b.v_cache))
        out_dtype = torch.float16 if q.element_size() == 1 else q.dtype
        if self.bits:
            q, k, v = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (q, k, v))
        table, lens, starts = (
            torch.from_numpy(x).to(DEVICE) for x in (b.block_table, b.seq_lens, b.query_start_loc)
        )
        mask = None if tree_mask is None else torch.from_numpy(tree_mask).to(DEVICE)
        out = torch.full_like(q, torch.nan, dtype=out_dtype)
        lse = self.lse.fill_(torch.nan) if with_lse else None
        tensors = Tensors(
            q, k, v, table, lens, starts, mask,
            self.partial_out, self.partial_lse, out, lse, self.extras,
        )  # fmt: skip
        scale = self.head_dim**-0.5
        portable_partial_attention(
            self.tile, self.workers, self.query_len, self.arrays, tensors, scale, self.window
        )
        merge_states(
            self.arrays["merge_indptr"],
            self.partial_out,
            self.partial_lse,
            out,
            starts,
            self.query_len,
            lse,
            self.extras.sinks,
        )
        return out.cpu()

    def assert_right(self) -> None:
        """Run, and compare output and log-sum-exp with float64."""
        out = self.run(with_lse=True)
        wanted, lse = self.batch.expected(self.extras, sliding_window=self.window)
        tolerance = TOLERANCE[self.batch.q.dtype]
        assert relative_error(out, wanted) < tolerance
        torch.testing.assert_close(self.lse.cpu().double(), lse, rtol=0, atol=2 * tolerance)


def tree_reference(batch: PagedBatch, tree_mask: np.ndarray) -> torch.Tensor:
    """Attention with token trees in float64; ``tree_mask`` as for the kernel."""
    heads, head_dim = batch.q.shape[1:]
    block_size, kv_heads = batch.k_cache.shape[1:3]
    out = torch.empty(batch.q.shape, dtype=torch.float64)
    for r, length in enumerate(batch.seq_lens.tolist()):
        first, last = batch.query_start_loc[r : r + 2].tolist()
        n = last - first
        ids = torch.from_numpy(batch.block_table[r, : -(-length // block_size)]).long()
        k, v = (
            cache[ids].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1)
            for cache in (batch.k_cache, batch.v_cache)
        )
        sees = np.ones((n, length), bool)
        own = np.arange(n)
        words = tree_mask[first:last].view(np.uint32)
        sees[:, length - n :] = words[:, own // 32] >> (own % 32).astype(np.uint32) & 1
        scores = torch.einsum("qhd,khd->hqk", batch.q[first:last].double(), k) * head_dim**-0.5
        scores = scores.masked_fill(~torch.from_numpy(sees), float("-inf"))
        out[first:last] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)
    return out
