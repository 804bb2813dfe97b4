"""FlashForge's divider.

FlashForge makes one query group of each tree node, as this divider does without
``PlannerConfig.grouping``. With it, which is the default, FastTree's edge assignment (section 4.2)
merges short nodes into their children first.
"""

import numpy as np

from vllm_prefixshare.core import IntArray, WorkTiles
from vllm_prefixshare.planning.dividers.problem import DivisionProblem, split
from vllm_prefixshare.planning.plan import longest_first


def flashforge(problem: DivisionProblem) -> WorkTiles:
    """FlashForge, section 5.1: bound each group's splits, pick greedily within the bound.

    The lower bound on the slowest worker is the average load, found by bisection because
    finer division only adds to it (equation 4); equation 5 then bounds the splits. Within
    the bound, one threshold on tile cost is swept, and the division with the lowest estimated
    finish, merges included, wins.

    Deviations: the paper searches the number of splits of every node; here nine thresholds give
    the splits of all nodes. Equation 5 is the paper's and may exclude the best division: nodes that
    each cost less than the average load stay whole, however unevenly they fill the workers.
    """
    groups = problem.groups(problem.config.grouping)
    counts = np.array([len(g.rows) for g in groups])
    lens = np.array([g.kv_len for g in groups])
    whole = problem.tile_cost(counts, lens)
    max_splits = np.maximum(1, lens // problem.block_size)
    workers = problem.config.num_workers
    if workers == 1:
        return split(problem, groups, np.ones_like(lens))

    def splits_at(threshold: float) -> IntArray:
        return np.minimum(max_splits, np.maximum(1, np.ceil(whole / threshold))).astype(np.int64)

    def average_load(threshold: float) -> float:
        splits = splits_at(threshold)
        return float((splits * problem.tile_cost(counts, lens / splits)).sum() / workers)

    low = float(whole.sum()) / workers
    high = max(float(whole.max()), float(whole.sum()) / workers)
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
    return split(problem, groups, best[1])
