"""How plans for a kernel are made."""

from typing import Any

from vllm_prefixshare.config import AttentionConfig, PlannerConfig, part_size
from vllm_prefixshare.kernels.catalog import KernelLimits
from vllm_prefixshare.planning.dividers.registry import get_divider


def planner_config(
    limits: KernelLimits,
    attention: AttentionConfig,
    divider: str | None = None,
    share: str = "always",
    **options: Any,
) -> PlannerConfig:
    """The configuration of a planner for a kernel.

    Args:
        limits: of the kernel's plans.
        divider: name of a divider; None for the kernel's.
        options: other fields of ``PlannerConfig``.
    """
    divider = divider or limits.divider
    if share == "auto" and get_divider(divider).decides_sharing:
        share = "always"
    latent = attention.kv_lora_rank is not None
    return PlannerConfig(
        geometry=limits.geometry,
        divider=divider,
        share=share,
        num_workers=limits.num_workers,
        max_tile_requests=limits.max_tile_requests,
        max_tile_runs=limits.max_tile_runs,
        sliding_window=attention.sliding_window,
        cut_size=None if latent else part_size(attention.block_size),
        **options,
    )
