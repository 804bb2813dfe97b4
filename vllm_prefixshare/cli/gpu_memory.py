"""Which prompts of a file the memory of a GPU holds at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.cli.batches import Batch
from vllm_prefixshare.cli.prefixes import PrefixBlocks, Prompt, num_held

#: Part of a GPU's memory that vLLM takes by default (``gpu_memory_utilization``).
UTILIZATION = 0.92


class KvLayers(NamedTuple):
    """Layers with KV caches of one kind.

    bytes_per_token: of all these layers. window: tokens that are kept of a request; None for all.
    """

    bytes_per_token: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU for weights and KV cache, in bytes.

    total: what vLLM takes of the GPU. kv_layers: with the KV heads that the GPU has.
    """

    total: float
    weights: float
    kv_layers: tuple[KvLayers, ...]

    @property
    def kv_room(self) -> float:
        """Bytes for the KV cache; below 0 if the weights do not fit."""
        return self.total - self.weights

    def kv_bytes(self, new_tokens: int, num_tokens: int) -> float:
        """Bytes of the KV cache that a request adds.

        Args:
            new_tokens: KV tokens in blocks that no running request holds.
            num_tokens: all KV tokens of the request; windows are not shared here.
        """
        return sum(
            layers.bytes_per_token
            * (new_tokens if layers.window is None else min(num_tokens, layers.window))
            for layers in self.kv_layers
        )


class Group(NamedTuple):
    """Prompts that decode together.

    kv_bytes: of the KV cache of one GPU when they end. is_limited: whether memory, not the batch
        size, ended the group.
    """

    prompts: list[Prompt]
    kv_bytes: float
    is_limited: bool


def groups_that_fit(
    prompts: Iterable[Prompt],
    blocks: PrefixBlocks,
    size: int,
    output_tokens: int,
    memory: GpuMemory,
) -> Iterator[Group]:
    """Neighbours that decode together: at most ``size``, and as many as the KV cache holds with all
    their outputs. A prompt that does not fit at all is in no group.
    """
    group: list[Prompt] = []
    held: set[int] = set()
    used = 0.0
    for prompt in prompts:
        num_tokens = prompt.num_tokens + output_tokens
        in_blocks = -(-num_tokens // blocks.block_size) * blocks.block_size
        alone = memory.kv_bytes(in_blocks, num_tokens)
        if alone > memory.kv_room:
            continue
        shared = num_held(prompt.blocks, held)
        more = memory.kv_bytes(in_blocks - shared * blocks.block_size, num_tokens)
        if group and (len(group) == size or used + more > memory.kv_room):
            yield Group(group, used, len(group) < size)
            group = []
            held.clear()
            used = 0.0
            more = alone
            shared = 0
        group.append(prompt)
        held.update(prompt.blocks[shared:].tolist())
        used += more
    if group:
        yield Group(group, used, False)


def batch_bytes(batch: Batch, memory: GpuMemory) -> float:
    """Bytes of the KV cache that a batch holds on one GPU."""
    counts = -(-batch.seq_lens // batch.block_size)
    rows = zip(batch.block_table, counts.tolist(), strict=True)
    distinct = len(np.unique(np.concatenate([row[:count] for row, count in rows])))
    shared = sum(layers.bytes_per_token for layers in memory.kv_layers if layers.window is None)
    windows = sum(
        layers.bytes_per_token * int(np.minimum(batch.seq_lens, layers.window).sum())
        for layers in memory.kv_layers
        if layers.window is not None
    )
    return shared * distinct * batch.block_size + windows
