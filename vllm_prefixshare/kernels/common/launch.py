"""Limits of plans, tile sizes and arguments of launches that several kernels share."""

import torch

from vllm_prefixshare.core import PieceLimits
from vllm_prefixshare.kernels.catalog import KernelLimits
from vllm_prefixshare.kernels.common.arrays import sizes
from vllm_prefixshare.kernels.common.constants import LOG2E
from vllm_prefixshare.kernels.common.layout import KvTiling, max_parts_of
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.interface import Capacity


def plan_limits(num_reqs: int, limits: KernelLimits, pieces: PieceLimits | None) -> tuple[int, int]:
    """Maximum number of work tiles and of partial results of a plan.

    Args:
        pieces: limits of the divider ``batch_invariant``; None for ``depth_first``.
    """
    # depth first makes a tile for every request at worst, and at most two for each work queue
    # where windows are split: only those leave partial results
    max_tiles = num_reqs + 2 * limits.num_workers
    max_partials = 2 * limits.num_workers * limits.max_tile_requests
    if pieces is not None:
        max_tiles = max(max_tiles, pieces.max_tiles(num_reqs, limits.max_tile_requests))
        max_partials = max(max_partials, num_reqs * pieces.per_request)
    return max_tiles, max_partials


def walk_capacity(
    num_reqs: int, limits: KernelLimits, tiling: KvTiling, pieces: PieceLimits | None = None
) -> Capacity:
    """Room for plans of up to ``num_reqs`` requests in ``common.arrays.PlanArrays``."""
    num_workers = limits.num_workers
    max_tiles, max_partials = plan_limits(num_reqs, limits, pieces)
    # n requests share at most n - 1 nodes, and a cut divides a KV range; one of a spread window
    # divides two, and where windows are cut there are at most two tiles for each work queue
    max_runs = 2 * num_reqs + max(max_tiles, 4 * num_workers if limits.geometry.spread else 0)
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


def scale_strides(extras: LayerExtras) -> list[int | None]:
    """Strides of the scales of queries, keys and values; None where they are not quantised."""
    scales = extras.q_scale, extras.k_scale, extras.v_scale
    return [x.stride(0) if isinstance(x, torch.Tensor) else None for x in scales]
