"""Which tokens of a request each rank holds."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from vllm_prefixshare.core import IntArray, PrefixShareError, host_integers


class Shard(NamedTuple):
    """The KV of one layer that a rank holds, on its device.

    k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
    block_table: int32 ``[num_reqs, max_blocks]`` block ids of the rank's own cache.
    seq_lens: int32 ``[num_reqs]`` tokens that the rank holds; 0 where it holds none.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def shard(
    block_table: ArrayLike, seq_lens: ArrayLike, block_size: int, rank: int, world_size: int
) -> tuple[IntArray, IntArray]:
    """The part of a batch that ``rank`` holds: every ``world_size``-th block of each request,
    the ``rank``-th first. Any world size works, ranks differ by a block at most, and
    requests that share blocks share them on every rank.

    With one query per request, which sees all tokens, their order does not matter.

    Args:
        block_table: host ``[num_reqs, max_blocks]`` of the whole sequences.
        seq_lens: host ``[num_reqs]`` tokens.

    Returns:
        The block table ``[num_reqs, ceil(max_blocks / world_size)]`` and the lengths of the
        shard, which may be 0.

    Raises:
        PrefixShareError: ``rank`` is not below ``world_size``, or negative; a length is negative or
            beyond the table.
    """
    if min(world_size, block_size) < 1:
        raise PrefixShareError(
            f"world_size and block_size must be at least 1, got {world_size} and {block_size}."
        )
    if not 0 <= rank < world_size:
        raise PrefixShareError(f"rank must be from 0 to {world_size - 1}, got {rank}.")
    table = host_integers(block_table, "block_table", 2)
    lens = host_integers(seq_lens, "seq_lens", 1)
    max_len = table.shape[1] * block_size
    if len(table) != len(lens) or not np.all((lens >= 0) & (lens <= max_len)):
        # here, where all ranks see the same: a shard may hide it
        raise PrefixShareError(
            f"seq_lens must be {len(table)} lengths from 0 to {max_len}, for as many rows of "
            f"{table.shape[1]} blocks of {block_size} tokens."
        )
    padding = -table.shape[1] % world_size
    table = np.pad(table, ((0, 0), (0, padding)))[:, rank::world_size]
    blocks, rest = np.divmod(lens, block_size)
    rounds, owner = np.divmod(blocks, world_size)
    lens = (rounds + (rank < owner)) * block_size + np.where(owner == rank, rest, 0)
    return np.ascontiguousarray(table, np.int32), lens.astype(np.int32)
