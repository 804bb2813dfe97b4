"""Limits of plans, tile sizes and arguments of launches that several kernels share."""

from dataclasses import dataclass

import torch

from vllm_prefixshare.core import PieceLimits
from vllm_prefixshare.kernels.common.arrays import sizes
from vllm_prefixshare.kernels.common.constants import LOG2E
from vllm_prefixshare.kernels.common.layout import KvTiling, max_parts_of
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.interface import Capacity


@dataclass(frozen=True, slots=True)
class QTile:
    """Tile sizes and occupancy of a kernel.

    rows: query rows of a tile; a power of two of at least 16.
    kv_tile: tokens that one step of the inner loop multiplies.
    warps, stages: warps of a CTA; KV tiles in flight.
    blocks_per_sm: CTAs that share a multiprocessor.
    columns: maximum number of columns of queries, K and V in one product; a power of two.
    hoist: which loops LICM may hoist out of (0 none, 1 KV loops, 2 all). A hoisted value takes a
        register throughout the loop.
    """

    rows: int
    kv_tile: int
    warps: int
    stages: int
    blocks_per_sm: int
    columns: int = 64
    hoist: int = 2

    def num_workers(self, multiprocessors: int, num_kv_heads: int, rows_per_request: int) -> int:
        """Work queues whose CTAs fill the GPU."""
        per_worker = num_kv_heads * self.chunks(rows_per_request)
        workers = max(1, multiprocessors * self.blocks_per_sm // per_worker)
        # even: two windows with equally many KV splits read their shared KV in lockstep
        return workers - workers % 2 if workers > 2 else workers

    def chunks(self, rows_per_request: int) -> int:
        """Tiles that the query rows of a request fill."""
        return -(-rows_per_request // self.rows)


def plan_limits(
    num_reqs: int, num_workers: int, max_tile_requests: int, pieces: PieceLimits | None
) -> tuple[int, int]:
    """Maximum number of work tiles and of partial results of a plan.

    Args:
        pieces: limits of the divider ``batch_invariant``; None for ``depth_first``.
    """
    # depth first makes a tile for every request at worst, and at most two for each work queue
    # where windows are split: only those leave partial results
    max_tiles = num_reqs + 2 * num_workers
    max_partials = 2 * num_workers * max_tile_requests
    if pieces is not None:
        max_tiles = max(max_tiles, pieces.max_tiles(num_reqs, max_tile_requests))
        max_partials = max(max_partials, num_reqs * pieces.per_request)
    return max_tiles, max_partials


def walk_capacity(
    num_reqs: int,
    num_workers: int,
    max_tile_requests: int,
    tiling: KvTiling,
    pieces: PieceLimits | None = None,
    spread: bool = False,
) -> Capacity:
    """Room for plans of up to ``num_reqs`` requests in ``common.arrays.PlanArrays``; spread: as in
    ``TileGeometry``.
    """
    max_tiles, max_partials = plan_limits(num_reqs, num_workers, max_tile_requests, pieces)
    # n requests share at most n - 1 nodes, and a cut divides a KV range; one of a spread window
    # divides two, and where windows are cut there are at most two tiles for each work queue
    max_runs = 2 * num_reqs + max(max_tiles, 4 * num_workers if spread else 0)
    max_parts = max_parts_of(tiling, max_runs, max_tiles)
    slots = num_reqs + max_partials
    room = sizes(num_workers, max_tiles, slots, max_runs, max_parts, num_reqs)
    return Capacity(max_tiles, max_runs, max_partials, room._asdict())


def score_factors(soft_cap: float, sm_scale: float) -> tuple[float, float | None]:
    """Factor of scores that makes them exponents of two, and the kernels' ``cap_rate``: None
    without a soft cap, else what scores are multiplied with before the hyperbolic tangent.
    """
    log2e = LOG2E.value
    if not soft_cap:
        return sm_scale * log2e, None
    return soft_cap * log2e, 2 * sm_scale / soft_cap * log2e


def scales_and_strides(extras: LayerExtras) -> tuple[torch.Tensor | float | int | None, ...]:
    """Scales of quantised queries, keys and values, then the stride of each; None where values are
    not quantised.
    """
    scales = extras.q_scale, extras.k_scale, extras.v_scale
    return *scales, *(x.stride(0) if isinstance(x, torch.Tensor) else None for x in scales)
