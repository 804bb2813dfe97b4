"""What the GPU executor needs to know of each kernel: limits of a plan, layout, launch."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.executors.layout import layout_by_size, linked_layout
from vllm_prefixshare.kernels.launch import CacheView, HopperShape, hopper_partial_attention
from vllm_prefixshare.kernels.partial_attention import partial_attention, q_tiles
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.types import IntArray

HOPPER_BLOCK_SIZES = (16, 32, 64, 128)


class Tensors(NamedTuple):
    """Arguments of one launch, on the device and checked."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    tree_mask: torch.Tensor | None
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    out: torch.Tensor


class Capacity(NamedTuple):
    """Room for the plans of a number of requests.

    max_tiles, max_runs, max_partials: most work tiles, runs and partial results of a plan.
    sizes: entries of each array of its layout.
    """

    max_tiles: int
    max_runs: int
    max_partials: int
    sizes: dict[str, int]


class Kernel(Protocol):
    """Partial attention as one kernel does it.

    divider: the one that measures best with it.
    num_workers, max_tile_requests, max_tile_runs: what its plans must keep to.
    """

    name: str
    divider: str
    num_workers: int
    max_tile_requests: int
    max_tile_runs: int

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """The plan as int32 arrays for the device."""
        ...

    def capacity(self, num_reqs: int) -> Capacity:
        """Room for all plans of at most ``num_reqs`` requests; at the very least for one tile
        each, which leaves no partial results."""
        ...

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """Write ``out`` where a request has one tile, else partial results."""
        ...


class HopperKernel:
    """``kernels.partial_attention_hopper``, for compute capability 9.0."""

    name, divider = "hopper", "depth_first"

    def __init__(self, attention: AttentionConfig, query_len: int, device: torch.device) -> None:
        self.shape = hopper_shape(attention, query_len)
        self.max_tile_requests = self.shape.max_tile_requests
        self.max_tile_runs = self.shape.max_tile_runs
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_workers = max(1, multiprocessors // (attention.num_kv_heads * self.shape.chunks))

    @staticmethod
    def serves(attention: AttentionConfig, capability: tuple[int, int]) -> bool:
        size, kv_tile = attention.block_size, hopper_shape(attention, 1).kv_tile
        return capability[0] == 9 and size in HOPPER_BLOCK_SIZES and size <= kv_tile

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        return linked_layout(plan, self.shape.rows, self.max_tile_requests, self.max_tile_runs)

    def capacity(self, num_reqs: int) -> Capacity:
        # a tile for each request at worst, and one more where a worker's part ends; both sides
        # of such a cut leave partial results
        max_tiles = num_reqs + self.num_workers
        places = max_tiles + self.num_workers  # idle workers have a tile, too
        slots, runs = places * self.max_tile_requests, places * self.max_tile_runs
        sizes = {
            "tile_info": places * 8,
            "slot_row": slots,
            "slot_partial": slots,
            "run_row": runs,
            "run_kv_start": runs,
            "run_kv_end": runs,
            "run_readers": runs,
            "merge_indptr": num_reqs + 1,
        }
        return Capacity(max_tiles, runs, 2 * self.num_workers * self.max_tile_requests, sizes)

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        hopper_partial_attention(
            self.shape,
            self.num_workers,
            plan,
            t.q,
            CacheView("k_cache", t.k_cache, self.shape.padded_dim),
            CacheView("v_cache", t.v_cache, self.shape.padded_dim),
            t.block_table,
            t.seq_lens,
            t.query_start_loc,
            t.tree_mask,
            t.partial_out,
            t.partial_lse,
            t.out,
            sm_scale,
        )


def hopper_shape(attention: AttentionConfig, query_len: int) -> HopperShape:
    return HopperShape(
        attention.num_qo_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.block_size,
        query_len,
    )


class PortableKernel:
    """``kernels.partial_attention``, for every NVIDIA GPU from compute capability 8.0 on."""

    name, divider = "portable", "flashforge"

    def __init__(self, attention: AttentionConfig, query_len: int, device: torch.device) -> None:
        self.rows = query_len * attention.gqa_group_size
        self.query_len = query_len
        properties = torch.cuda.get_device_properties(device)
        tiles = q_tiles(attention.head_dim, self.rows, properties.shared_memory_per_block_optin)
        self.tiles = [
            (
                tile,
                tile.num_workers(
                    properties.multi_processor_count, attention.num_kv_heads, self.rows
                ),
            )
            for tile in tiles
        ]
        self.num_workers = self.tiles[-1][1]
        self.max_tile_requests = max(1, tiles[-1].rows // self.rows)
        self.max_tile_runs = 1 << 30

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        return layout_by_size(plan, self.rows, [(tile.rows, n) for tile, n in self.tiles])

    def capacity(self, num_reqs: int) -> Capacity:
        # there is no bound for every divider: plans that want more are made anew without
        max_tiles = 2 * num_reqs + 8 * self.num_workers
        max_partials = max_tiles * min(4, self.max_tile_requests)
        max_runs = 4 * max_tiles
        sizes = {f"work_indptr_{tile.rows}": workers + 1 for tile, workers in self.tiles}
        sizes |= {
            "tile_info": max_tiles * 8,
            "slot_row": num_reqs + max_partials,
            "slot_partial": num_reqs + max_partials,
            **dict.fromkeys(("run_row", "run_kv_start", "run_kv_end", "run_readers"), max_runs),
            "merge_indptr": num_reqs + 1,
        }
        return Capacity(max_tiles, max_runs, max_partials, sizes)

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        partial_attention(
            self.tiles,
            self.query_len,
            plan,
            t.q,
            t.k_cache,
            t.v_cache,
            t.block_table,
            t.seq_lens,
            t.query_start_loc,
            t.tree_mask,
            t.partial_out,
            t.partial_lse,
            t.out,
            sm_scale,
        )
