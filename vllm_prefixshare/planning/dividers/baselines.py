"""Dividers of other papers, and simple ones: for comparison."""

from dataclasses import replace

import numpy as np

from vllm_prefixshare.core import WorkTiles
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.cuts import (
    COLUMNS,
    END_RUN,
    END_TOKEN,
    FIRST_RUN,
    FIRST_TOKEN,
    Limits,
    as_tiles,
    tile_end,
)
from vllm_prefixshare.planning.dividers.kv_list import list_runs, window_ends
from vllm_prefixshare.planning.dividers.problem import (
    DivisionProblem,
    by_chunk,
    split,
    unshared_groups,
)

#: a price of 1 per token, whichever requests read it
_ONE = np.ones(2)
TOKENS = TileRates(
    memory=_ONE,
    cached=_ONE,
    lines=np.ones((4, 1)),
    overhead=0.0,
    merge=0.0,
    partial_write=0.0,
    merge_launch=0.0,
    min_merge=0.0,
    max_merge=0.0,
)


def fasttree(problem: DivisionProblem) -> WorkTiles:
    """FastTree: edge assignment (4.2), then splitting of contexts above a threshold (4.3),
    here the length that gives every worker a tile.
    """
    groups = problem.groups(problem.config.grouping)
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
    """DeFT-Flatten (section 3.3): the tree laid out depth first and cut into equal chunks, one per
    worker, across node borders. Depth-first order turns each bit mask into one interval.
    """
    return _flattened(problem, None)


def deft_flatten_chunk(problem: DivisionProblem) -> WorkTiles:
    """As ``deft_flatten``, with chunks of ``kv_chunk_size`` tokens. DeFT's programs take 128,
    whatever the number of workers.
    """
    return _flattened(problem, problem.config.kv_chunk_size)


def _flattened(problem: DivisionProblem, chunk_tokens: int | None) -> WorkTiles:
    """The tree laid out depth first, in chunks of so many tokens; None for one per worker."""
    limits = Limits.of(problem, kv_tile=1)
    half_rows = problem.config.geometry.half_rows
    ends, _ = window_ends(problem.forest, limits.max_tile_requests, TOKENS)
    runs = list_runs(
        problem.forest, problem.planned_seq_lens, ends, 1, half_rows, limits.cut_size, TOKENS
    )
    # chunks are equal in tokens, also where a list prices what half of a tile reads at half
    before = np.concatenate([[0.0], np.cumsum(runs.tokens)])
    runs = runs._replace(rate=np.ones(len(runs.tokens)), before=before)
    total = int(before[-1])
    chunk = problem.round_up(chunk_tokens or -(-total // limits.num_workers))
    # a tile that does not end with its range has more than half a chunk, for cuts are rounded
    tiles = np.zeros((len(runs.tokens) + 2 * -(-total // chunk), COLUMNS), np.int32)
    tokens = np.empty(len(tiles))
    count = 0
    run = 0
    done = 0
    while run < len(runs.tokens):
        tile = tiles[count]
        tile[FIRST_RUN] = run
        tile[FIRST_TOKEN] = done
        goal = runs.before[run] + done + chunk
        run, done, tokens[count] = tile_end(runs, limits, run, done, goal)
        tile[END_RUN] = run
        tile[END_TOKEN] = done
        count += 1
    rows = problem.forest.request_rows
    divided = WorkTiles(*as_tiles(runs, tiles[:count], tokens[:count], rows)[:5])
    counts = np.diff(divided.row_indptr)
    return replace(divided, cost=problem.tile_cost(counts, divided.cost))


def fixed(problem: DivisionProblem) -> WorkTiles:
    """Cut every group into ``num_splits`` KV splits, whatever their cost."""
    groups = problem.groups(problem.config.grouping)
    lens = np.array([g.kv_len for g in groups])
    max_splits = np.maximum(1, lens // problem.block_size)
    return split(problem, groups, np.minimum(max_splits, problem.config.num_splits))


def per_request(problem: DivisionProblem) -> WorkTiles:
    """Flash-decoding: nothing is shared; long requests are split to fill the workers."""
    groups = unshared_groups(problem)
    return by_chunk(problem, groups, problem.even_chunk(groups))
