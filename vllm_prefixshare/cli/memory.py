"""Refuses what does not fit into memory, before it is allocated."""

from pathlib import Path

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError


def check_room(tokens: int, attention: AttentionConfig) -> None:
    """Check that there is room for a KV cache of random numbers.

    Args:
        tokens: of the cache of one layer.

    Raises:
        PrefixShareError: less memory is free.
    """
    import torch

    size = getattr(torch, attention.dtype).itemsize + 4  # the numbers are made in float32
    free = _available()
    needed = tokens * attention.num_kv_heads * 2 * attention.head_dim * size
    if free is not None and needed > free:
        raise PrefixShareError(
            f"{tokens} KV tokens of one layer with {attention.num_kv_heads} KV heads need "
            f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free: name a "
            "smaller batch or model."
        )


def _available() -> int | None:
    """Bytes that can be allocated without swapping; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
