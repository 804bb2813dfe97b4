"""Batch invariance: what the backend does where VLLM_BATCH_INVARIANT=1.

vLLM then runs operators whose rows do not depend on each other. For attention to be such an
operator, prompt tokens run in FLASH_ATTN, which splits no request in this mode, and all others in
the kernels of this package under plans of the divider ``batch_invariant``. Both parts must hold for
every token in every batch: ``docs/fidelity.md`` says what follows.
"""

import functools
import os
from typing import Any

from vllm_prefixshare.core import PieceLimits, PrefixShareError
from vllm_prefixshare.kernels.geometry import GPU
from vllm_prefixshare.settings import settings

DIVIDER = "batch_invariant"
#: Tokens of a piece, and how many pieces the longest request may have before pieces get longer.
#: Each needs room for a partial result. Pieces are multiples of the kernels' longest KV tile.
MIN_PIECE = 512
MAX_PIECES = 64
KV_TILE = GPU.kv_tile


def wanted() -> bool:
    """Whether VLLM_BATCH_INVARIANT=1; not where vLLM is not installed."""
    if not os.environ.get("VLLM_BATCH_INVARIANT"):
        return False  # without importing vLLM, which takes the command line seconds
    try:
        from vllm import envs
    except ImportError:
        return False
    return bool(envs.VLLM_BATCH_INVARIANT)


@functools.cache
def is_possible() -> bool:
    """Whether this vLLM lets the backend hold what it must: FLASH_ATTN is invariant. Steps with
    prompt tokens are kept from FULL CUDA graphs by hooks, or by a patch.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return bool(FlashAttentionBackend.supports_batch_invariance())


def check_divider(divider: str) -> None:
    """Refuse another divider than the one that batch invariance needs.

    Raises:
        PrefixShareError: naming both variables.
    """
    if divider != DIVIDER and wanted():
        raise PrefixShareError(
            f"VLLM_BATCH_INVARIANT=1 needs the divider {DIVIDER}: unset "
            f"VLLM_PREFIXSHARE_DIVIDER={divider}, or VLLM_BATCH_INVARIANT."
        )


def piece_tokens(config: Any) -> int:
    """Tokens of a piece in this engine.

    Args:
        config: a ``VllmConfig``.
    """
    step = KV_TILE * MAX_PIECES
    return max(MIN_PIECE, -(-int(config.model_config.max_model_len) // step) * KV_TILE)


def piece_limits(config: Any, block_size: int = 0) -> PieceLimits | None:
    """Limits of plans where batch invariance is wanted, else None.

    Args:
        config: a ``VllmConfig``.
        block_size: tokens of a block of the KV-cache group.
    """
    if not wanted():
        return None
    piece, cache = piece_tokens(config), config.cache_config
    per_request = -(-int(config.model_config.max_model_len) // piece)
    in_cache = config.scheduler_config.max_num_seqs * per_request
    if cache.num_gpu_blocks is not None and settings().share != "never":
        block_size = max(block_size, cache.block_size or 0)
        in_cache = min(in_cache, cache.num_gpu_blocks * block_size // piece)
    return PieceLimits(per_request, in_cache)
