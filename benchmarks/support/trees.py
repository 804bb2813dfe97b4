"""Batches with shared prefixes, made from forests.

A batch is a forest of token nodes whose leaves are the requests. vLLM shares whole blocks only.
Where a node ends inside a block, each of its children holds a copy of that block's first tokens,
because the block's content differs from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.support.prompt_trees import level_nodes
from vllm_prefixshare.cli.batches import tree_levels
from vllm_prefixshare.core import IntArray, PrefixShareError


class BlockNode(NamedTuple):
    """Block-table columns ``[start, end)`` that hold the same blocks for the requests
    ``[first, last)``. parent: index of the parent node, -1 for a root.
    """

    parent: int
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch as vLLM would hold it, its requests in depth-first order.

    block_table: ``[num_reqs, max_blocks]`` physical ids, scattered; block 0 stays unused.
    seq_lens: ``[num_reqs]`` tokens, the queries included.
    num_blocks: size of its cache.
    nodes: the forest of blocks, parents first, each request's private blocks included.
    query_len: query tokens of each request.
    query_parents: ``[query_len]``, their token tree, the same in each request (-1: a root);
        a chain if None.
    """

    name: str
    block_table: IntArray
    seq_lens: IntArray
    block_size: int
    num_blocks: int
    nodes: tuple[BlockNode, ...]
    query_len: int = 1
    query_parents: IntArray | None = None

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.seq_lens)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache, each counted once however many requests share it."""
        blocks = sum((n.end - n.start) for n in self.nodes)
        filled = -(-self.seq_lens // self.block_size) * self.block_size
        return blocks * self.block_size - int((filled - self.seq_lens).sum())

    @property
    def share_factor(self) -> float:
        """Sum of all requests' tokens, over ``kv_tokens``."""
        return float(self.seq_lens.sum()) / self.kv_tokens


def forest(
    name: str,
    parents: Sequence[int],
    tokens: Sequence[int],
    block_size: int = 16,
    *,
    spare: int = 0,
    seed: int = 0,
    query_len: int = 1,
    query_parents: IntArray | None = None,
) -> Workload:
    """A workload from any forest of token nodes.

    Args:
        parents: parent of each node, -1 for a root; parents come first. Nodes without children
            are the requests.
        tokens: tokens of each node.
        spare: tokens of extra room in each row of the block table.
        seed: seed of the permutation that scatters the blocks over the cache.
        query_len, query_parents: see ``Workload``; the queries are the last of the tokens.

    Raises:
        PrefixShareError: a parent after its child, or a request without tokens for its queries.
    """
    children: list[list[int]] = [[] for _ in parents]
    ends: list[int] = []
    for i, (parent, length) in enumerate(zip(parents, tokens, strict=True)):
        if not -1 <= parent < i or length < 0:
            raise PrefixShareError(
                f"node {i} of {name!r} has parent {parent} and {length} tokens: a parent must "
                "come before its children, and tokens cannot be negative."
            )
        ends.append(length + (ends[parent] if parent >= 0 else 0))
        if parent >= 0:
            children[parent].append(i)
    requests = _depth_first_leaves(parents, children)
    if not requests or min(min(ends[i], tokens[i]) for i in requests) < query_len:
        raise PrefixShareError(
            f"{name!r} is not valid: give each request at least {query_len} tokens of its own."
        )
    spans = _spans_below(parents, requests)
    nodes: list[BlockNode] = []
    # for each token node: the block node above its children, and the column they start at
    above: list[tuple[int, int]] = []
    for i, parent in enumerate(parents):
        node, start = above[parent] if parent >= 0 else (-1, 0)
        last = not children[i]
        end = -(-ends[i] // block_size) if last else ends[i] // block_size
        if last or (len(children[i]) > 1 and end > start):
            nodes.append(BlockNode(node, start, end, *spans[i]))
            above.append((len(nodes) - 1, end))
        else:  # no whole block of its own, or an only child continues it
            above.append((node, start))
    return _place(
        name,
        nodes,
        np.array([ends[i] for i in requests], np.int32),
        block_size,
        -(-spare // block_size),
        seed,
        query_len,
        query_parents,
    )


def _depth_first_leaves(parents: Sequence[int], children: list[list[int]]) -> list[int]:
    leaves = []
    stack = [i for i, parent in enumerate(parents) if parent < 0][::-1]
    while stack:
        i = stack.pop()
        stack.extend(children[i][::-1])
        if not children[i]:
            leaves.append(i)
    return leaves


def _spans_below(parents: Sequence[int], leaves: list[int]) -> list[tuple[int, int]]:
    """``[first, last)`` of the leaves below each node."""
    first = np.full(len(parents), len(leaves))
    last = np.zeros(len(parents), int)
    first[leaves] = np.arange(len(leaves))
    last[leaves] = np.arange(len(leaves)) + 1
    for i in range(len(parents) - 1, -1, -1):
        if parents[i] >= 0:
            first[parents[i]] = min(first[parents[i]], first[i])
            last[parents[i]] = max(last[parents[i]], last[i])
    return list(zip(first.tolist(), last.tolist(), strict=True))


def _place(
    name: str,
    nodes: list[BlockNode],
    seq_lens: IntArray,
    block_size: int,
    spare_blocks: int,
    seed: int,
    query_len: int,
    query_parents: IntArray | None,
) -> Workload:
    """Give every node blocks scattered over a cache; block 0 stays unused."""
    num_reqs = len(seq_lens)
    width = max(n.end for n in nodes)
    total = sum(n.end - n.start for n in nodes) + num_reqs * spare_blocks
    ids = np.random.default_rng(seed).permutation(total).astype(np.int32) + 1
    table = np.zeros((num_reqs, width + spare_blocks), np.int32)
    used = 0
    for node in nodes:
        count = node.end - node.start
        table[node.first : node.last, node.start : node.end] = ids[used : used + count]
        used += count
    columns = -(-seq_lens[:, None] // block_size) + np.arange(spare_blocks)
    table[np.arange(num_reqs)[:, None], columns] = ids[used:].reshape(num_reqs, spare_blocks)
    return Workload(
        name, table, seq_lens, block_size, total + 1, tuple(nodes), query_len, query_parents
    )


def tree(spec: str, block_size: int = 16, spare: int = 0, seed: int = 0) -> Workload:
    """A regular tree, or forest: ``"1,4,16_1024,256,64"`` has 1, 4 and 16 nodes on its levels,
    of 1024, 256 and 64 tokens each; the nodes of the last level are the requests.

    Args:
        spec: nodes per level, ``_``, tokens per node of that level.
        spare, seed: see ``forest``.

    Raises:
        PrefixShareError: the description is not of that form.
    """
    return forest(spec, *level_nodes(tree_levels(spec)), block_size, spare=spare, seed=seed)
