"""Every division of a tree that a search can afford, as plans to be timed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.support.trees import Workload
from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.plan import DecodePlan, longest_first
from vllm_prefixshare.planning.planner import DecodePlanner

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHORTEST_PIECE = 128  # tokens; cutting finer gains nothing
PIECES_PER_WORKER = (0.5, 0.75, 1, 2, 3, 4)


def plan_with(
    work: Workload, cost: CostModel, rows_per_request: int, config: PlannerConfig
) -> DecodePlan:
    planner = DecodePlanner(config, cost, work.block_size, rows_per_request)
    return planner.update(work.block_table, work.seq_lens).plan


def node_plans(
    work: Workload, cost: CostModel, rows_per_request: int, config: PlannerConfig
) -> Iterator[tuple[str, DecodePlan]]:
    """One tile per node and per private part, with every combination of split counts per level of a
    regular tree. The longest tile goes first, to the least loaded worker.
    """
    whole = plan_with(work, cost, rows_per_request, replace(config, divider="deft_node"))
    assert whole.num_runs == whole.num_tiles
    starts, level = np.unique(whole.run_kv_start, return_inverse=True)
    lengths = whole.run_lengths(work.seq_lens)
    shortest = [int(lengths[level == i].min()) for i in range(len(starts))]
    counts = [[n for n in SPLITS if n == 1 or n * SHORTEST_PIECE <= m] for m in shortest]
    for splits in itertools.product(*counts):
        yield (
            f"node tiles, splits {splits}",
            cut(whole, np.array(splits)[level], work.seq_lens, cost, rows_per_request),
        )


def cut(
    plan: DecodePlan,
    splits: np.ndarray,
    seq_lens: np.ndarray,
    cost: CostModel,
    rows_per_request: int,
) -> DecodePlan:
    """Cut tile ``i`` of ``plan`` in ``splits[i]`` pieces of whole blocks, and schedule the pieces.
    The tiles of ``plan`` have one run each. A run with fewer blocks than pieces gets fewer pieces.
    """
    size = plan.block_size
    pieces: list[tuple[int, int, int, int]] = []  # tile, start, end, tokens
    for tile, length in enumerate(plan.run_lengths(seq_lens).tolist()):
        start, chunk = int(plan.run_kv_start[tile]), -(-length // int(splits[tile]))
        chunk = max(size, -(-chunk // size) * size)
        for at in range(0, max(length, 1), chunk):
            last = at + chunk >= length
            end = int(plan.run_kv_end[tile]) if last else start + at + chunk
            pieces.append((tile, start + at, end, min(chunk, length - at)))
    tile, start, end, tokens = np.array(pieces, np.int32).T
    members = np.split(plan.tile_req_indices, plan.tile_req_indptr[1:-1])
    rows = np.array([len(members[t]) for t in tile])
    costs = cost.tile(rows * rows_per_request, tokens)
    order, work_indptr, _ = longest_first(costs, plan.num_workers)
    tile, start, end, rows = tile[order], start[order], end[order], rows[order]
    requests = np.concatenate([members[t] for t in tile])
    tiles_of = np.bincount(requests, minlength=plan.num_reqs)
    merge_indptr = np.concatenate([[0], np.cumsum(np.where(tiles_of > 1, tiles_of, 0))])
    partial = np.full(len(requests), -1)
    used = merge_indptr[:-1].copy()
    for slot, request in enumerate(requests.tolist()):
        if tiles_of[request] > 1:
            partial[slot] = used[request]
            used[request] += 1
    return replace(
        plan,
        work_indptr=work_indptr,
        tile_cost=costs[order],
        tile_req_indptr=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        tile_req_indices=requests.astype(np.int32),
        tile_run_indptr=np.arange(len(tile) + 1, dtype=np.int32),
        run_row=plan.run_row[tile],
        run_kv_start=start,
        run_kv_end=end,
        run_reader_start=np.zeros(len(tile), np.int32),
        run_reader_end=rows.astype(np.int32),
        partial_indices=partial.astype(np.int32),
        merge_indptr=merge_indptr.astype(np.int32),
    )


def flattened_plans(
    work: Workload, cost: CostModel, rows_per_request: int, config: PlannerConfig
) -> Iterator[tuple[str, DecodePlan]]:
    """Plans of the depth-first divider with every size of its windows, and with fewer or more
    pieces than workers.
    """
    limit = config.max_tile_requests
    windows = [w for w in (limit >> i for i in range(limit.bit_length())) if w]
    for window, factor in itertools.product(windows, PIECES_PER_WORKER):
        pieces = max(1, int(config.num_workers * factor))
        changed = replace(
            config, divider="depth_first", max_tile_requests=window, num_workers=pieces
        )
        plan = plan_with(work, cost, rows_per_request, changed)
        label = f"depth first, windows of {window}, {pieces} pieces"
        yield label, dealt(plan, config.num_workers)


def dealt(plan: DecodePlan, num_workers: int) -> DecodePlan:
    """Deal the work lists of ``plan``, taken in order, to another number of workers."""
    lists = plan.num_workers
    edges = np.minimum(np.arange(num_workers + 1) * -(-lists // num_workers), lists)
    return replace(plan, work_indptr=plan.work_indptr[edges])
