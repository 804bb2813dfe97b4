"""Query groups: which requests read a KV segment together.

One group per tree node is the start (FlashForge section 4.1, DeFT-Node). FastTree section
4.2 then decides, edge by edge from the root, whether a child reads its parent's segment
again as part of its own: a short parent costs its readers one more partial result each,
and that can cost more than reading it twice.
"""

from collections.abc import Sequence

import numpy as np

from vllm_prefixshare.core import OPEN_END, Forest, IntArray, KVSegment, QueryGroup
from vllm_prefixshare.planning.costs.model import CostModel


def group_queries(
    forest: Forest,
    planned_seq_lens: IntArray,
    cost: CostModel,
    rows_per_request: int,
    concatenate: bool = True,
) -> list[QueryGroup]:
    """Query groups that together read every token of every request once.

    Args:
        forest: the shared part of the batch.
        planned_seq_lens: ``[num_reqs]`` planned length of each batch row, in tokens.
        cost: cost model that decides the edges.
        rows_per_request: query rows of one request on one KV head.
        concatenate: FastTree's edge assignment; without it every node is a group.
    """
    children: list[list[int]] = [[] for _ in range(forest.num_nodes)]
    for node, parent in enumerate(forest.node_parent):
        if parent >= 0:
            children[parent].append(node)

    starts = forest.node_start.tolist()  # where the group of a node starts reading
    private = forest.private_start.tolist()  # the same for each private part
    lens = planned_seq_lens[forest.request_rows].tolist()
    rows = forest.request_rows
    groups: list[QueryGroup] = []

    for v in range(forest.num_nodes):  # parents come before their children
        low, high, end = (
            int(x[v]) for x in (forest.node_reader_start, forest.node_reader_end, forest.node_end)
        )
        keep = np.ones(high - low, bool)
        if concatenate:
            kids = _readers(forest, children[v], low, high, end, lens)
            length = end - starts[v]
            for child, a, b, _ in _edges_to_cut(kids, high - low, length, cost, rows_per_request):
                keep[a - low : b - low] = False
                if child >= 0:
                    starts[child] = starts[v]
                else:
                    private[a] = starts[v]
        members = rows[low:high][keep]
        if len(members):
            groups.append(
                QueryGroup(KVSegment(int(members[0]), starts[v], end), members, end - starts[v])
            )
    for position, row in enumerate(rows.tolist()):
        start = private[position]
        groups.append(
            QueryGroup(
                KVSegment(row, start, OPEN_END),
                rows[position : position + 1],
                max(1, lens[position] - start),
            )
        )
    return groups


Reader = tuple[int, int, int, int]  # child node or -1, depth-first positions from and to, KV length


def _readers(
    forest: Forest, children: list[int], low: int, high: int, end: int, lens: Sequence[int]
) -> list[Reader]:
    """What continues below a node: shared children and the private parts that start there."""
    readers: list[Reader] = []
    position = low
    for child in [*children, -1]:
        stop = int(forest.node_reader_start[child]) if child >= 0 else high
        readers += [(-1, p, p + 1, max(1, lens[p] - end)) for p in range(position, stop)]
        if child >= 0:
            position = int(forest.node_reader_end[child])
            length = int(forest.node_end[child] - forest.node_start[child])
            readers.append((child, stop, position, length))
    return readers


def _edges_to_cut(
    readers: list[Reader], num_reqs: int, length: int, cost: CostModel, rows_per_request: int
) -> list[Reader]:
    """FastTree, algorithm 1, with the cost model in place of its padding formulas: the
    readers that should read the parent's ``length`` tokens themselves.
    """
    counts = np.array([b - a for _, a, b, _ in readers])
    kid_lens = np.array([n for *_, n in readers])
    own = cost.tile(np.arange(num_reqs + 1) * rows_per_request, length)
    own[0] = 0.0  # a parent without readers needs no tile
    kid_rows = counts * rows_per_request
    apart = cost.tile(kid_rows, kid_lens) + cost.merge(kid_rows)
    joined = cost.tile(kid_rows, kid_lens + length)

    cut = []
    left = num_reqs
    for reader, n, split_kv, split_q in zip(readers, counts.tolist(), apart, joined, strict=True):
        if own[left] + split_kv > own[left - n] + split_q:
            cut.append(reader)
            left -= n
    return cut
