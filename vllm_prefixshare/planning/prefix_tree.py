"""Radix tree over physical KV block ids, kept by events.

The tree of FlashForge (section 4.1) and of DeFT, taken from vLLM's automatic prefix
caching: two requests share a prefix exactly when their block tables start with the same
physical block ids. Several roots are normal, so this is a forest.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from vllm_prefixshare.types import Forest, PrefixShareError


class _Node:
    """A run of blocks with the same requests below every block of it."""

    __slots__ = ("blocks", "children", "ends", "num_reqs", "parent", "start")

    def __init__(self, parent: "_Node | None", start: int, blocks: list[int]) -> None:
        self.parent = parent
        self.start = start  # depth of the first block, in blocks
        self.blocks = blocks
        self.children: dict[int, _Node] = {}  # by first block id
        self.ends: dict[Hashable, None] = {}  # requests whose shareable blocks end here
        self.num_reqs = 0  # requests at or below this node

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


def _common_length(a: list[int], b: list[int]) -> int:
    """Number of leading equal ids, by bisection on slice comparisons (which run in C)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        mid = (low + high) // 2
        if a[low:mid] == b[low:mid]:
            low = mid
        else:
            high = mid
    return low if a[low : low + 1] != b[low : low + 1] else low + 1


class PrefixTree:
    """Which requests share which blocks.

    Only whole, filled blocks are given to the tree. ``version`` changes when, and only
    when, the shared part or the set of requests does: growth of a private part leaves it
    alone, and with it every plan made from the tree.

    Args:
        block_size: tokens in a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.version = 0
        self._root = _Node(None, 0, [])
        self._node_of: dict[Hashable, _Node] = {}

    def __len__(self) -> int:
        return len(self._node_of)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._node_of

    def num_blocks(self, request: Hashable) -> int:
        """Blocks of ``request`` that the tree knows."""
        return self._node_of[request].end

    def add(self, request: Hashable, block_ids: Sequence[int]) -> None:
        """A request joins with its filled blocks, root first.

        Raises:
            PrefixShareError: the request is in the tree already.
        """
        if request in self._node_of:
            raise PrefixShareError(f"request {request!r} is in the tree: remove it first.")
        self._settle(request, self._root, list(block_ids))
        self.version += 1

    def append(self, request: Hashable, block_ids: Sequence[int]) -> None:
        """Blocks of ``request`` were filled. Cheap while nobody else shares them."""
        ids = list(block_ids)
        node = self._node_of[request]
        if not ids:
            return
        if node.num_reqs == 1 and node is not self._root:
            node.blocks.extend(ids)
            return
        shares = ids[0] in node.children
        del node.ends[request]
        self._count(node, -1)
        self._settle(request, node, ids)
        self._prune(node)
        self.version += shares

    def remove(self, request: Hashable) -> None:
        """A request leaves: finished, aborted or pre-empted."""
        node = self._node_of.pop(request)
        del node.ends[request]
        self._count(node, -1)
        self._prune(node)
        self.version += 1

    def _settle(self, request: Hashable, node: _Node, ids: list[int]) -> None:
        """Walk down from ``node`` along ``ids``, splitting where they part, and end there."""
        while ids:
            child = node.children.get(ids[0])
            if child is None:
                child = _Node(node, node.end, ids)
                node.children[ids[0]] = child
                node = child
                break
            common = _common_length(child.blocks, ids)
            if common < len(child.blocks):
                child = self._split(child, common)
            node = child
            ids = ids[common:]
        node.ends[request] = None
        self._node_of[request] = node
        self._count(node, +1)

    @staticmethod
    def _split(lower: _Node, length: int) -> _Node:
        """Put the first ``length`` blocks of ``lower`` into a new parent of it."""
        parent = lower.parent
        assert parent is not None
        upper = _Node(parent, lower.start, lower.blocks[:length])
        upper.num_reqs = lower.num_reqs
        parent.children[upper.blocks[0]] = upper
        lower.parent, lower.start, lower.blocks = upper, upper.end, lower.blocks[length:]
        upper.children[lower.blocks[0]] = lower
        return upper

    @staticmethod
    def _count(node: _Node, change: int) -> None:
        up: _Node | None = node
        while up is not None:
            up.num_reqs += change
            up = up.parent

    def _prune(self, node: _Node) -> None:
        """Drop what no request uses and join a node to its only child, going up."""
        while node.parent is not None:
            parent = node.parent
            if node.num_reqs == 0:
                del parent.children[node.blocks[0]]
            elif not node.ends and len(node.children) == 1:
                (child,) = node.children.values()
                child.blocks = node.blocks + child.blocks
                child.start, child.parent = node.start, parent
                parent.children[child.blocks[0]] = child
            node = parent

    def forest(self, order: Iterable[Hashable]) -> Forest:
        """The shared part, flattened depth first.

        Args:
            order: every request of the tree; position = batch row. A reordered batch needs
                no event of its own, only another ``order``.

        Raises:
            PrefixShareError: ``order`` does not name every request exactly once.
        """
        order = list(order)
        row_of = {request: row for row, request in enumerate(order)}
        if len(order) != len(row_of) or row_of.keys() != self._node_of.keys():
            raise PrefixShareError("order must name every request of the tree exactly once.")
        rows: list[int] = []
        private: list[int] = []
        nodes: list[list[int]] = []  # parent, start, end, first, last

        stack: list[tuple[_Node, int]] = [(self._root, -1)]
        while stack:
            node, parent = stack.pop()
            index = parent
            if node.num_reqs > 1 and node is not self._root:
                index = len(nodes)
                nodes.append([parent, node.start, node.end, len(rows), len(rows) + node.num_reqs])
            # a request alone in its node is private from where that node starts
            start = node.start if node.num_reqs == 1 else node.end
            rows.extend(row_of[request] for request in node.ends)
            private.extend([start] * len(node.ends))
            stack.extend((child, index) for child in reversed(node.children.values()))

        table = np.array(nodes, np.int32).reshape(-1, 5).T
        return Forest(
            request_rows=np.array(rows, np.int32),
            private_start=np.array(private, np.int32) * self.block_size,
            node_parent=table[0].copy(),
            node_start=table[1] * self.block_size,
            node_end=table[2] * self.block_size,
            node_first=table[3].copy(),
            node_last=table[4].copy(),
        )
