"""Dividers of other papers, and simple ones: for comparison."""

import numpy as np

from vllm_prefixshare.planning.dividers.problem import (
    DivisionProblem,
    alone,
    by_chunk,
    indptr_of,
    split,
)
from vllm_prefixshare.records import OPEN_END, IntArray, KVSegment, WorkTiles


def fasttree(problem: DivisionProblem) -> WorkTiles:
    """FastTree: edge assignment (4.2), then splitting of contexts above a threshold (4.3),
    here the length that gives every worker a tile."""
    groups = problem.groups(True)
    return by_chunk(problem, groups, problem.even_chunk(groups))


def deft_node(problem: DivisionProblem) -> WorkTiles:
    """DeFT-Node (section 3.3): one tile per tree node, however long."""
    groups = problem.groups(False)
    return split(problem, groups, np.ones(len(groups), np.int64))


def deft_node_chunk(problem: DivisionProblem) -> WorkTiles:
    """DeFT-Node-Chunk (section 3.3): nodes cut into chunks of ``kv_chunk_size`` tokens."""
    groups = problem.groups(False)
    return by_chunk(problem, groups, problem.round_up(problem.config.kv_chunk_size))


def deft_flatten(problem: DivisionProblem) -> WorkTiles:
    """DeFT-Flatten (section 3.3): the tree laid out depth first and cut into equal chunks,
    across node borders. Depth-first order turns each bit mask into one interval."""
    forest = problem.forest
    limit = problem.config.max_tile_requests
    windows = [(p, min(p + limit, forest.num_reqs)) for p in range(0, forest.num_reqs, limit)]
    pieces = [piece for window in windows for piece in _depth_first(problem, *window)]
    total = sum(problem.round_up(length) for *_, length in pieces)
    chunk = problem.round_up(-(-total // problem.config.num_workers))
    rows: list[IntArray] = []
    runs: list[list[tuple[int, ...]]] = []
    lengths: list[int] = []
    pending: list[tuple[int, int, int, int, int]] = []
    window, room, used = -1, chunk, 0

    def flush() -> None:
        nonlocal room, used
        if not pending:
            return
        low = min(first for *_, first, _ in pending)
        high = max(last for *_, last in pending)
        rows.append(forest.request_rows[low:high])
        runs.append([(*run, first - low, last - low) for *run, first, last in pending])
        lengths.append(used)
        pending.clear()
        room, used = chunk, 0

    for (row, start, end), first, last, length in pieces:
        if first // limit != window:
            flush()
            window = first // limit
        while length > room:
            if room and len(pending) < problem.config.max_tile_runs:
                pending.append((row, start, start + room, first, last))
                used += room
                start, length = start + room, length - room
            flush()
        if len(pending) == problem.config.max_tile_runs:
            flush()
        pending.append((row, start, end, first, last))
        used += length
        room -= problem.round_up(length)
        room = max(room, 0)
    flush()
    counts = np.array([len(r) for r in rows])
    return WorkTiles(
        row_indptr=indptr_of(counts),
        rows=np.concatenate(rows),
        run_indptr=indptr_of(np.array([len(r) for r in runs])),
        runs=np.array([run for tile in runs for run in tile], np.int32),
        cost=problem.tile_cost(counts, np.array(lengths)),
    )


def _depth_first(
    problem: DivisionProblem, low: int, high: int
) -> list[tuple[KVSegment, int, int, int]]:
    """(segment, first, last, length) of nodes and private parts, depth first, clipped to the
    depth-first positions ``[low, high)``."""
    forest = problem.forest
    pieces: list[tuple[int, int, tuple[KVSegment, int, int, int]]] = []
    for v in range(forest.num_nodes):
        first, last = max(low, int(forest.node_first[v])), min(high, int(forest.node_last[v]))
        if first < last:
            start, end = int(forest.node_start[v]), int(forest.node_end[v])
            segment = KVSegment(int(forest.request_rows[first]), start, end)
            pieces.append((first, v, (segment, first, last, end - start)))
    for p in range(low, high):
        row, start = int(forest.request_rows[p]), int(forest.private_start[p])
        length = max(1, int(problem.kv_lens[row]) - start)
        pieces.append((p, forest.num_nodes, (KVSegment(row, start, OPEN_END), p, p + 1, length)))
    return [piece for *_, piece in sorted(pieces, key=lambda item: item[:2])]


def fixed(problem: DivisionProblem) -> WorkTiles:
    """Every group in ``num_splits`` pieces, whatever it costs."""
    groups = problem.groups(problem.config.grouping)
    lens = np.array([g.kv_len for g in groups])
    most = np.maximum(1, lens // problem.block_size)
    return split(problem, groups, np.minimum(most, problem.config.num_splits))


def per_request(problem: DivisionProblem) -> WorkTiles:
    """Flash-decoding: nothing is shared; long requests are split to fill the workers."""
    groups = alone(problem)
    return by_chunk(problem, groups, problem.even_chunk(groups))
