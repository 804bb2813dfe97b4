"""Exact solutions of small cases, to see how far the heuristics are from the optimum."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def optimal_makespan(costs: list[float], num_workers: int) -> float:
    """Least load of the busiest worker over every assignment, by branch and bound."""
    costs = sorted(costs, reverse=True)
    best = float(sum(costs))
    loads = [0.0] * num_workers

    def place(i: int) -> None:
        nonlocal best
        if i == len(costs):
            best = min(best, max(loads))
            return
        for load in sorted(set(loads)):  # workers of equal load are interchangeable
            if load + costs[i] < best:
                worker = loads.index(load)
                loads[worker] = load + costs[i]
                place(i + 1)
                loads[worker] = load

    place(0)
    return best


def optimal_division(
    split_costs: np.ndarray, num_workers: int, split_bound: np.ndarray | None = None
) -> tuple[float, list[int]]:
    """FlashForge, equation 3, with the queries undivided, as a mixed integer program.

    Args:
        split_costs: ``[num_groups, max_splits]`` time of one piece of a group cut into
            ``column + 1`` pieces.
        split_bound: ``[num_groups]`` bound on the pieces of each group, such as equation 5.

    Returns:
        The least load of the busiest worker, and the number of pieces of each group.
    """
    num_groups, max_splits = split_costs.shape
    options = num_groups * max_splits
    # variables: chosen[group, splits], then pieces[worker, group, splits], then the finish
    size = options + num_workers * options + 1
    rows, low, high = [], [], []

    def constrain(entries: dict[int, float], at_least: float, at_most: float) -> None:
        row = np.zeros(size)
        for index, value in entries.items():
            row[index] = value
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    for group in range(num_groups):
        constrain({group * max_splits + s: 1.0 for s in range(max_splits)}, 1, 1)
    for option in range(options):
        entries = {options * (1 + worker) + option: 1.0 for worker in range(num_workers)}
        entries[option] = -float(option % max_splits + 1)
        constrain(entries, 0, 0)
    for worker in range(num_workers):
        entries = {options * (1 + worker) + o: float(split_costs.flat[o]) for o in range(options)}
        constrain({**entries, size - 1: -1.0}, -np.inf, 0)

    upper = np.full(size, float(max_splits))
    upper[:options] = 1
    if split_bound is not None:
        allowed = np.arange(1, max_splits + 1)[None, :] <= split_bound[:, None]
        upper[:options] = allowed.ravel()
    upper[-1] = np.inf
    integrality = np.ones(size)
    integrality[-1] = 0
    result = milp(
        c=np.eye(size)[-1],
        integrality=integrality,
        bounds=Bounds(np.zeros(size), upper),
        constraints=LinearConstraint(np.array(rows), low, high),
        options={"mip_rel_gap": 1e-3, "time_limit": 20},
    )
    assert result.status == 0, result.message
    chosen = result.x[:options].reshape(num_groups, max_splits)
    return float(result.fun), (chosen.argmax(axis=1) + 1).tolist()
