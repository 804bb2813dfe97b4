"""Dividing KV segments into work tiles: one strategy per paper, behind one call.

Minimising the slowest thread block over all splits and assignments is NP-hard (FlashForge,
section 5.1). Every strategy here splits along KV only and leaves the assignment to
``scheduler``, but for ``depth_first``, which schedules what it cuts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.costs.cost_table import CostModel, TileRates
from vllm_prefixshare.planning.dividers.depth_first import SmallTiles, divide
from vllm_prefixshare.planning.grouping import group_queries
from vllm_prefixshare.planning.scheduler import longest_first
from vllm_prefixshare.records import (
    OPEN_END,
    FloatArray,
    Forest,
    IntArray,
    KVSegment,
    PrefixShareError,
    QueryGroup,
    WorkTiles,
)


@dataclass(frozen=True, slots=True)
class DivisionProblem:
    """One batch to divide.

    kv_lens: ``[num_reqs]`` planned length of each batch row, in tokens.
    rows_per_request: query rows of one request on one KV head.
    rates: of ``cost``, if they are at hand.
    """

    forest: Forest
    kv_lens: IntArray
    cost: CostModel
    rows_per_request: int
    block_size: int
    config: PlannerConfig
    rates: TileRates | None = None

    def groups(self, concatenate: bool) -> list[QueryGroup]:
        """Query groups, each with no more requests than a work tile takes."""
        limit = self.config.max_tile_requests
        groups = group_queries(
            self.forest, self.kv_lens, self.cost, self.rows_per_request, concatenate
        )
        if all(len(g.rows) <= limit for g in groups):
            return groups
        return [
            group._replace(rows=part, segment=group.segment._replace(row=int(part[0])))
            for group in groups
            for part in np.array_split(group.rows, -(-len(group.rows) // limit))
        ]

    def tile_cost(self, rows: FloatArray | IntArray, kv_len: FloatArray | IntArray) -> FloatArray:
        """Microseconds of tiles that read ``kv_len`` tokens for ``rows`` requests."""
        return self.cost.tile(rows * self.rows_per_request, kv_len)

    def even_chunk(self, groups: list[QueryGroup]) -> int:
        """Tokens per tile that give every worker about one, in whole blocks."""
        total = sum(g.kv_len for g in groups)
        return self.round_up(-(-total // self.config.num_workers))

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_size


Divider = Callable[[DivisionProblem], WorkTiles]


def _indptr(counts: IntArray) -> IntArray:
    out = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def _split(problem: DivisionProblem, groups: list[QueryGroup], splits: IntArray) -> WorkTiles:
    """Cut each group into (at most) that many pieces of whole blocks, equal but the last."""
    counts = np.array([len(g.rows) for g in groups])
    lens = np.array([g.kv_len for g in groups])
    row, start, end = np.array([g.segment for g in groups]).T
    chunks = -(-lens // splits // problem.block_size) * problem.block_size
    chunks = np.where(splits > 1, np.maximum(chunks, problem.block_size), lens)
    pieces = -(-lens // chunks)
    group = np.repeat(np.arange(len(groups)), pieces)
    last = np.cumsum(pieces) - 1
    index = np.arange(len(group)) - (last - pieces + 1)[group]
    runs = np.zeros((len(group), 5), np.int32)
    runs[:, 0] = row[group]
    runs[:, 1] = start[group] + index * chunks[group]
    runs[:, 2] = runs[:, 1] + chunks[group]
    runs[last, 2] = end
    runs[:, 4] = counts[group]
    return WorkTiles(
        row_indptr=_indptr(counts[group]),
        rows=np.concatenate([groups[g].rows for g in group]),
        run_indptr=np.arange(len(group) + 1, dtype=np.int32),
        runs=runs,
        cost=problem.tile_cost(counts, chunks)[group],
    )


def _by_chunk(problem: DivisionProblem, groups: list[QueryGroup], chunk: int) -> WorkTiles:
    lens = np.array([g.kv_len for g in groups])
    return _split(problem, groups, np.maximum(1, -(-lens // chunk)))


def flashforge(problem: DivisionProblem) -> WorkTiles:
    """FlashForge, section 5.1: bound each group's splits, pick greedily within the bound.

    The lower bound on the slowest worker is the average load, found by bisection because
    finer division only adds to it (equation 4); equation 5 then bounds the splits. Within
    the bound, one threshold on tile cost is swept, and the division with the least estimated
    finish, merges included, is kept.
    """
    groups = problem.groups(problem.config.grouping)
    counts = np.array([len(g.rows) for g in groups])
    lens = np.array([g.kv_len for g in groups])
    whole = problem.tile_cost(counts, lens)
    most_splits = np.maximum(1, lens // problem.block_size)
    workers = problem.config.num_workers
    if workers == 1:
        return _split(problem, groups, np.ones_like(lens))

    def splits_at(threshold: float) -> IntArray:
        return np.minimum(most_splits, np.maximum(1, np.ceil(whole / threshold))).astype(np.int64)

    def average_load(threshold: float) -> float:
        splits = splits_at(threshold)
        return float((splits * problem.tile_cost(counts, lens / splits)).sum() / workers)

    low, high = float(whole.sum()) / workers, max(float(whole.max()), float(whole.sum()) / workers)
    for _ in range(12):
        mid = (low + high) / 2
        low, high = (mid, high) if average_load(mid) > mid else (low, mid)
    bound = splits_at(high)

    best: tuple[float, IntArray] | None = None
    merge = problem.cost.merge(counts * problem.rows_per_request)
    for factor in (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0):
        splits = np.minimum(bound, splits_at(high * factor))
        if best is not None and np.array_equal(splits, best[1]):
            continue
        costs = np.repeat(problem.tile_cost(counts, lens / splits), splits)
        finish = longest_first(costs, workers)[2] + float((splits * merge).sum()) / workers
        if best is None or finish < best[0]:
            best = finish, splits
    assert best is not None
    return _split(problem, groups, best[1])


def fasttree(problem: DivisionProblem) -> WorkTiles:
    """FastTree: edge assignment (4.2), then splitting of contexts above a threshold (4.3),
    here the length that gives every worker a tile."""
    groups = problem.groups(True)
    return _by_chunk(problem, groups, problem.even_chunk(groups))


def deft_node(problem: DivisionProblem) -> WorkTiles:
    """DeFT-Node (section 3.3): one tile per tree node, however long."""
    groups = problem.groups(False)
    return _split(problem, groups, np.ones(len(groups), np.int64))


def deft_node_chunk(problem: DivisionProblem) -> WorkTiles:
    """DeFT-Node-Chunk (section 3.3): nodes cut into chunks of ``kv_chunk_size`` tokens."""
    groups = problem.groups(False)
    return _by_chunk(problem, groups, problem.round_up(problem.config.kv_chunk_size))


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
        row_indptr=_indptr(counts),
        rows=np.concatenate(rows),
        run_indptr=_indptr(np.array([len(r) for r in runs])),
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
    return _split(problem, groups, np.minimum(most, problem.config.num_splits))


def per_request(problem: DivisionProblem) -> WorkTiles:
    """Flash-decoding: nothing is shared; long requests are split to fill the workers."""
    groups = _alone(problem)
    return _by_chunk(problem, groups, problem.even_chunk(groups))


def one_tile_each(problem: DivisionProblem) -> WorkTiles:
    """Nothing is shared and nothing split: the plan that always fits."""
    groups = _alone(problem)
    return _split(problem, groups, np.ones(len(groups), np.int64))


def _alone(problem: DivisionProblem) -> list[QueryGroup]:
    return [
        QueryGroup(KVSegment(row, 0, OPEN_END), np.array([row], np.int32), max(1, length))
        for row, length in enumerate(problem.kv_lens.tolist())
    ]


def depth_first(problem: DivisionProblem) -> WorkTiles:
    """DeFT-Flatten with costs for lengths, windows that follow the tree, and a schedule: see
    the module of that name."""
    config = problem.config
    rates = problem.rates or TileRates.of(problem.cost)
    small = None
    if config.num_small_workers:
        # costs are of the GPU's share that one worker of the large size has
        share = config.num_small_workers / config.num_workers
        small = SmallTiles(
            config.num_small_workers,
            config.small_tile_requests,
            rates.small * share,
            rates.overhead,
        )
    return divide(
        problem.forest,
        problem.kv_lens,
        rates,
        problem.rows_per_request,
        problem.block_size,
        config.num_workers,
        config.max_tile_requests,
        config.max_tile_runs,
        small,
    )


DIVIDERS: dict[str, Divider] = {
    f.__name__: f
    for f in (
        flashforge,
        fasttree,
        deft_node,
        deft_node_chunk,
        deft_flatten,
        fixed,
        per_request,
        depth_first,
    )
}


def get_divider(name: str) -> Divider:
    """The strategy called ``name``.

    Raises:
        PrefixShareError: unknown name; the sentence lists the known ones.
    """
    if name not in DIVIDERS:
        raise PrefixShareError(f"divider {name!r} is unknown: use one of {', '.join(DIVIDERS)}.")
    return DIVIDERS[name]
