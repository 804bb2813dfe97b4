"""How plans for a kernel are made."""

from typing import Any

from vllm_prefixshare.config import AttentionConfig, PlannerConfig, part_size
from vllm_prefixshare.kernels.contract import Kernel

#: most tokens that a kernel multiplies at once; a power of two
KV_TILE = 128


def planner_config(
    kernel: Kernel,
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
    if share == "auto" and divider in ("depth_first", "batch_invariant"):
        # unshared KV is read by the same kernel, and depth first weighs both at every cut:
        # deciding beforehand as well takes a third of a plan's time and drops no tree. Pieces
        # that are not shared would exceed the room for tiles.
        share = "always"
    latent = attention.kv_lora_rank is not None
    return PlannerConfig(
        divider=divider,
        share=share,
        num_workers=kernel.num_workers,
        max_tile_requests=kernel.max_tile_requests,
        max_tile_runs=kernel.max_tile_runs,
        sliding_window=attention.sliding_window,
        cut_size=None if latent else part_size(attention.block_size),
        query_cut_size=KV_TILE if kernel.name == "hopper" else None,
        spread=kernel.spread,
        **options,
    )
