"""Batches with shared prefixes, described in one line."""

from dataclasses import dataclass

import numpy as np

from vllm_prefixshare.types import IntArray, PrefixShareError


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch as vLLM would hold it. block_table ``[num_reqs, max_blocks]``; seq_lens
    ``[num_reqs]``; num_blocks: size of the cache it lives in (block 0 stays unused)."""

    block_table: IntArray
    seq_lens: IntArray
    block_size: int
    num_blocks: int


def tree(spec: str, block_size: int = 16, spare: int = 0, seed: int = 0) -> Workload:
    """A regular tree: ``"1,4,16_1024,256,64"`` has 1, 4 and 16 nodes on its levels, of 1024,
    256 and 64 tokens each; the nodes of the last level are the requests.

    Args:
        spec: nodes per level, ``_``, tokens per node of that level. All but the last level
            must be whole blocks.
        spare: further tokens of room that each row of the block table has.
        seed: of the permutation that scatters the blocks over the cache.

    Raises:
        PrefixShareError: the description is not of that form.
    """
    try:
        counts, lengths = (
            [int(x) for x in part.split(",")] for part in spec.split("_", maxsplit=1)
        )
        if len(counts) != len(lengths) or min(counts + lengths) < 1 or counts != sorted(counts):
            raise ValueError
        if any(length % block_size for length in lengths[:-1]):
            raise ValueError
    except ValueError:
        raise PrefixShareError(
            f"tree {spec!r} is not valid: write nodes per level, '_', tokens per node, such as "
            f"1,4,16_1024,256,64; inner levels in multiples of {block_size} tokens."
        ) from None
    num_reqs = counts[-1]
    blocks_of = [-(-length // block_size) for length in lengths]
    total = sum(n * b for n, b in zip(counts, blocks_of, strict=True))
    ids = np.random.default_rng(seed).permutation(total + num_reqs * spare).astype(np.int32) + 1
    width = sum(blocks_of) + -(-spare // block_size)
    table = np.zeros((num_reqs, width), np.int32)
    used = column = 0
    for count, blocks in zip(counts, blocks_of, strict=True):
        level = ids[used : used + count * blocks].reshape(count, blocks)
        table[:, column : column + blocks] = level[np.arange(num_reqs) * count // num_reqs]
        used, column = used + count * blocks, column + blocks
    extra = width - column
    table[:, column:] = ids[used : used + num_reqs * extra].reshape(num_reqs, extra)
    seq_lens = np.full(num_reqs, sum(lengths), np.int32)
    return Workload(table, seq_lens, block_size, int(ids.max()) + 1)
