"""Prompts that decode together, as the memory of a GPU allows."""

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.cli.batches import MAX_ENTRIES, Batch
from vllm_prefixshare.cli.estimated_model import GpuMemory
from vllm_prefixshare.cli.prefixes import PrefixBlocks, Prompt
from vllm_prefixshare.core import IntArray, PrefixShareError


class DecodeGroup(NamedTuple):
    """Requests that decode together.

    batch: block tables and lengths half way through their outputs.
    kv_bytes: of the KV cache of one GPU when they end.
    is_limited: whether memory, not the batch size, ended the group.
    prompt_tokens, new_tokens: tokens of the prompts, and of these the tokens that no earlier prompt
        of the group has in its prefix.
    attended: KV tokens to which each new token attends, summed.
    """

    batch: Batch
    kv_bytes: float
    is_limited: bool
    prompt_tokens: int
    new_tokens: int
    attended: int


def decode_groups(
    prompts: Iterable[Prompt],
    blocks: PrefixBlocks,
    size: int,
    output_tokens: int,
    memory: GpuMemory,
) -> Iterator[DecodeGroup]:
    """Neighbours that decode together: at most ``size``, and as many as the KV cache holds with all
    their outputs. A prompt that does not fit at all is in no group.

    Raises:
        PrefixShareError: a group is too large for a block table.
    """
    block_size = blocks.block_size
    group: list[Prompt] = []
    num_shared: list[int] = []
    held: set[int] = set()
    used = 0.0

    def ended(is_limited: bool) -> DecodeGroup:
        return _decode_group(group, num_shared, blocks, output_tokens // 2, used, is_limited)

    for prompt in prompts:
        num_tokens = prompt.num_tokens + output_tokens
        in_blocks = -(-num_tokens // block_size) * block_size
        alone = memory.kv_bytes(in_blocks, num_tokens)
        if alone > memory.kv_room:
            continue
        shared = num_held(prompt.blocks, held)
        more = memory.kv_bytes(in_blocks - shared * block_size, num_tokens)
        if group and (len(group) == size or used + more > memory.kv_room):
            yield ended(is_limited=len(group) < size)
            group = []
            num_shared = []
            held.clear()
            used = 0.0
            more = alone
            shared = 0
        group.append(prompt)
        num_shared.append(shared)
        held.update(prompt.blocks[shared:].tolist())
        used += more
    if group:
        yield ended(is_limited=False)


def num_held(blocks: IntArray, held: set[int]) -> int:
    """How many blocks of a prompt are in ``held``, which has all blocks of other prompts: they are
    its first ones, because a block stands for all tokens up to its end.
    """
    return bisect.bisect(blocks, False, key=lambda block: block not in held)


def _decode_group(
    prompts: list[Prompt],
    num_shared: list[int],
    blocks: PrefixBlocks,
    generated: int,
    kv_bytes: float,
    is_limited: bool,
) -> DecodeGroup:
    """The block tables that vLLM's prefix caching would give these prompts.

    Args:
        num_shared: leading blocks of each prompt that an earlier one has.
        generated: tokens that each has generated, besides the one to be computed.
    """
    size = blocks.block_size
    num_tokens = np.array([prompt.num_tokens for prompt in prompts])
    lens = (num_tokens + generated + 1).astype(np.int32)
    counts = -(-lens // size)
    width = int(counts.max())
    if len(prompts) * width > MAX_ENTRIES:
        raise PrefixShareError(
            f"{len(prompts)} requests of up to {int(lens.max())} tokens are too many at a time: "
            "lower --batch."
        )
    table = np.zeros((len(prompts), width), np.int32)
    last = blocks.num_blocks
    for row, prompt, count in zip(table, prompts, counts.tolist(), strict=True):
        known = len(prompt.blocks)
        row[:known] = prompt.blocks
        row[known:count] = np.arange(last + 1, last + 1 + count - known)
        last += count - known
    new = num_tokens - size * np.array(num_shared)
    attended = new * num_tokens - new * (new - 1) // 2
    return DecodeGroup(
        Batch("prompts", table, lens, size),
        kv_bytes,
        is_limited,
        int(num_tokens.sum()),
        int(new.sum()),
        int(attended.sum()),
    )
