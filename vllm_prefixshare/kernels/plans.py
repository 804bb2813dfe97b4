"""How plans for a kernel are made."""

from typing import Any

from vllm_prefixshare.config import AttentionConfig, PlannerConfig, part_size
from vllm_prefixshare.kernels.catalog import PlanLimits
from vllm_prefixshare.planning.dividers.registry import get_divider


def planner_config(
    kernel: PlanLimits,
    attention: AttentionConfig,
    divider: str | None = None,
    share: str = "always",
    **options: Any,
) -> PlannerConfig:
    """The configuration of a planner whose plans ``kernel`` walks; ``divider`` None takes the
    kernel's.

    Args:
        options: other fields of ``PlannerConfig``.
    """
    divider = divider or kernel.divider
    if share == "auto" and get_divider(divider).decides_sharing:
        share = "always"
    latent = attention.kv_lora_rank is not None
    return PlannerConfig(
        geometry=kernel.geometry,
        divider=divider,
        share=share,
        num_workers=kernel.num_workers,
        max_tile_requests=kernel.max_tile_requests,
        max_tile_runs=kernel.max_tile_runs,
        sliding_window=attention.sliding_window,
        cut_size=None if latent else part_size(attention.block_size),
        **options,
    )
