"""Query groups, and FastTree's edge assignment compared with every other assignment."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_oracle import shared_runs
from tests.support.planning_cases import COSTS, LinearCost, block_ids, forest_of_ids, quick
from vllm_prefixshare.core import OPEN_END, Forest, QueryGroup
from vllm_prefixshare.planning.grouping import group_queries

BLOCK_SIZE = 16


@dataclass(frozen=True)
class PaddedCost(LinearCost):
    """Rows are padded to whole tiles, FastTree's reason not to concatenate (equation 5)."""

    tile_rows: int = 8

    def tile(self, rows, kv_len, readers=1):
        tiles = np.ceil(np.asarray(rows, float) / self.tile_rows)
        return tiles * (self.launch + self.per_token * np.asarray(kv_len, float))


LINEAR = {
    "launch": st.floats(0.1, 500),
    "per_token": st.floats(0, 2),
    "per_row_token": st.floats(0, 0.2),
    "merge_per_row": st.floats(0, 100),
}
MODELS = (
    st.sampled_from(sorted(COSTS)).map(COSTS.get)
    | st.builds(LinearCost, **LINEAR)
    | st.builds(PaddedCost, **LINEAR, tile_rows=st.sampled_from([3, 8, 16]))
)


def forest_of(requests: list[list[int]], tails: list[int]) -> tuple[Forest, np.ndarray]:
    """The forest and lengths of requests, for rows in the given order."""
    lens = [len(ids) * BLOCK_SIZE + tail for ids, tail in zip(requests, tails, strict=True)]
    return forest_of_ids(requests, BLOCK_SIZE), np.array(lens, np.int32)


@st.composite
def trees(draw: st.DrawFn, max_reqs: int = 8) -> tuple[list[list[int]], list[int]]:
    lengths = [draw(st.sampled_from([1, 2, 20, 60])) for _ in range(4)]
    words = draw(st.lists(block_ids(3, 3), min_size=1, max_size=max_reqs))
    requests = [[s * 100 + i for s in word for i in range(lengths[s])] for word in words]
    tails = draw(st.lists(st.integers(1, 100), min_size=len(requests), max_size=len(requests)))
    return requests, tails


def modelled_cost(groups: list[QueryGroup], cost: object, gqa: int) -> float:
    """Cost of one tile per group, plus one partial result to merge per request of the group."""
    rows = np.array([len(g.rows) * gqa for g in groups])
    lens = np.array([g.kv_len for g in groups])
    return float((cost.tile(rows, lens) + cost.merge(rows)).sum())


def assert_covers(groups: list[QueryGroup], requests: list[list[int]], kv_lens: np.ndarray) -> None:
    """Assert that each request reads each of its tokens in one group, from its own blocks."""
    counts = [np.zeros(n, int) for n in kv_lens.tolist()]
    for group in groups:
        row, start, stop = group.segment
        assert row in group.rows
        assert len(set(group.rows.tolist())) == len(group.rows) > 0
        if stop == OPEN_END:
            assert group.rows.tolist() == [row]
            stop = int(kv_lens[row])
        assert group.kv_len == stop - start
        for reader in group.rows.tolist():
            if reader != row:
                columns = slice(start // BLOCK_SIZE, stop // BLOCK_SIZE)
                assert stop % BLOCK_SIZE == start % BLOCK_SIZE == 0
                assert requests[reader][columns] == requests[row][columns]
            counts[reader][start:stop] += 1
    assert all(np.all(reads == 1) for reads in counts)


def every_edge_assignment(
    requests: list[list[int]], kv_lens: np.ndarray, cost: object, gqa: int
) -> list[float]:
    """Modelled cost of all 2^E assignments (FastTree, section 4.1), computed on the oracle's tree:
    an edge leads from a node to a child or to a private part.
    """
    runs = shared_runs(requests)
    nodes = sorted(runs, key=lambda s: runs[s][0])  # parents first

    def parent(readers: frozenset, start: int) -> frozenset | None:
        above = [s for s in nodes if s >= readers and runs[s][1] <= start]
        return max(above, key=lambda s: runs[s][1]) if start and above else None

    edges: list[tuple[frozenset, frozenset, bool]] = []  # parent, reader, reader is private
    private_start = {}
    for node in nodes:
        above = parent(node, runs[node][0])
        if above is not None:
            edges.append((above, node, False))
    for row in range(len(requests)):
        row_set = frozenset([row])
        over = [s for s in nodes if row in s]
        private_start[row] = max((runs[s][1] for s in over), default=0) * BLOCK_SIZE
        if over:
            edges.append((max(over, key=lambda s: runs[s][1]), row_set, True))

    totals = []
    for values in product((0, 1), repeat=len(edges)):
        starts = {node: runs[node][0] * BLOCK_SIZE for node in nodes}
        left = {node: set(node) for node in nodes}
        own = dict(private_start)
        for node in nodes:
            for (above, reader, is_private), value in zip(edges, values, strict=True):
                if above == node and value:
                    left[node] -= reader
                    if is_private:
                        own[next(iter(reader))] = starts[node]
                    else:
                        starts[reader] = starts[node]
        sizes = [(len(left[n]), runs[n][1] * BLOCK_SIZE - starts[n]) for n in nodes if left[n]]
        sizes += [(1, int(kv_lens[row]) - start) for row, start in own.items()]
        rows, lens = (np.array(x) for x in zip(*sizes, strict=True))
        totals.append(float((cost.tile(rows * gqa, lens) + cost.merge(rows * gqa)).sum()))
    return totals


@quick(100)
@given(trees(), MODELS, st.sampled_from([1, 4]))
def test_without_concatenation_there_is_one_group_per_node_and_private_part(tree, cost, gqa):
    requests, tails = tree
    forest, kv_lens = forest_of(*tree)
    groups = group_queries(forest, kv_lens, cost, gqa, concatenate=False)
    assert_covers(groups, requests, kv_lens)
    runs = shared_runs(requests)
    expected = {
        (readers, start * BLOCK_SIZE, end * BLOCK_SIZE) for readers, (start, end) in runs.items()
    }
    shared = [g for g in groups if g.segment.kv_end != OPEN_END]
    found = {(frozenset(g.rows.tolist()), *g.segment[1:]) for g in shared}
    assert found == expected
    assert len(shared) == len(expected)
    private = sorted(g.segment.row for g in groups if g.segment.kv_end == OPEN_END)
    assert private == list(range(len(requests)))
    assert len(tails) == len(private)


@quick(150)
@given(trees(), MODELS, st.sampled_from([1, 4]))
def test_with_concatenation_every_token_is_still_covered_once(tree, cost, gqa):
    forest, kv_lens = forest_of(*tree)
    groups = group_queries(forest, kv_lens, cost, gqa)
    assert_covers(groups, tree[0], kv_lens)


@quick(150)
@given(trees(), MODELS, st.sampled_from([1, 4]))
def test_concatenation_never_adds_to_the_modelled_cost(tree, cost, gqa):
    """An edge is cut only where that is cheaper with all edges before it fixed, and merging costs
    the same for each row. So the sum only falls.
    """
    forest, kv_lens = forest_of(*tree)
    together = group_queries(forest, kv_lens, cost, gqa)
    apart = group_queries(forest, kv_lens, cost, gqa, concatenate=False)
    assert modelled_cost(together, cost, gqa) <= modelled_cost(apart, cost, gqa) * (1 + 1e-9)


@quick(60)
@given(trees(max_reqs=5), MODELS, st.sampled_from([1, 4]))
def test_concatenation_is_one_of_all_edge_assignments(tree, cost, gqa):
    forest, kv_lens = forest_of(*tree)
    every = np.array(every_edge_assignment(tree[0], kv_lens, cost, gqa))
    apart = group_queries(forest, kv_lens, cost, gqa, concatenate=False)
    assert modelled_cost(apart, cost, gqa) == pytest.approx(every[0])
    greedy = modelled_cost(group_queries(forest, kv_lens, cost, gqa), cost, gqa)
    assert np.min(np.abs(every - greedy)) <= 1e-6 * greedy


def test_the_gap_between_greedy_and_the_best_edge_assignment(record_property):
    """Records the gap; FastTree promises no bound."""
    rng = np.random.default_rng(0)
    for name, cost in COSTS.items():
        gaps, gains = [], []
        for _ in range(25):
            stretch = int(rng.choice([1, 4, 32]))
            requests = []
            for _ in range(rng.integers(3, 6)):
                word = rng.permutation(3)[: rng.integers(1, 4)]
                requests.append([int(s) * stretch + i for s in word for i in range(stretch)])
            forest, kv_lens = forest_of(requests, [20] * len(requests))
            every = every_edge_assignment(requests, kv_lens, cost, 4)
            greedy = modelled_cost(group_queries(forest, kv_lens, cost, 4), cost, 4)
            gaps.append(greedy / min(every))
            gains.append(every[0] / min(every))
        record_property(f"greedy/best, {name}", (float(np.mean(gaps)), float(max(gaps))))
        print(
            f"{name:7} greedy/best mean {np.mean(gaps):.3f} max {max(gaps):.3f}, "
            f"uncut/best max {max(gains):.3f}"
        )
        assert min(gaps) >= 1 - 1e-9


def segments(groups: list[QueryGroup]) -> set[tuple[frozenset, int]]:
    """Readers and first block of each group."""
    return {(frozenset(g.rows.tolist()), g.segment.kv_start // BLOCK_SIZE) for g in groups}


def test_a_short_parent_above_long_children_is_read_by_them_where_merging_is_dear():
    """Figure 4 (e) of FastTree: A1 is read again in A1+B1 and A1+B2."""
    left = [[1, *range(100, 200)]] * 3
    right = [[1, *range(200, 300)]] * 3
    forest, kv_lens = forest_of(left + right, [8] * 6)
    dear = LinearCost(launch=1.0, per_token=1.0, merge_per_row=1000.0)
    groups = group_queries(forest, kv_lens, dear, 4)
    assert (frozenset(range(6)), 0) not in segments(groups)
    cheap = LinearCost(launch=1.0, per_token=1.0, merge_per_row=0.0)
    groups = group_queries(forest, kv_lens, cheap, 4)
    assert segments(groups) >= {
        (frozenset(range(6)), 0),
        (frozenset(range(3)), 1),
        (frozenset(range(3, 6)), 1),
    }


def test_a_parent_is_absorbed_by_children_that_stay_shared():
    left = [[1, *range(100, 200)]] * 3
    right = [[1, *range(200, 300)]] * 3
    forest, kv_lens = forest_of(left + right, [8] * 6)
    cost = LinearCost(launch=1.0, per_token=1.0, merge_per_row=10.0)
    groups = group_queries(forest, kv_lens, cost, 4)
    assert segments(groups) >= {(frozenset(range(3)), 0), (frozenset(range(3, 6)), 0)}
    assert (frozenset(range(6)), 0) not in segments(groups)


def test_a_long_parent_with_many_children_stays_a_group():
    """Figure 4 (d) of FastTree: reading A1 again would cost more than merging."""
    document = list(range(1000, 1500))
    requests = [[*document, 1 + i // 2] for i in range(20)]
    forest, kv_lens = forest_of(requests, [8] * 20)
    cost = LinearCost(launch=1.0, per_token=1.0, merge_per_row=10.0)
    groups = group_queries(forest, kv_lens, cost, 4)
    assert (frozenset(range(20)), 0) in segments(groups)


@pytest.mark.parametrize("cost", ["h200", "cpu", "paper"])
def test_a_long_document_stays_a_group_on_real_costs(cost):
    requests = [list(range(1, 501))] * 16
    forest, kv_lens = forest_of(requests, [30] * 16)
    groups = group_queries(forest, kv_lens, COSTS[cost], 4)
    assert (frozenset(range(16)), 0) in segments(groups)


def test_a_chain_of_short_nodes_is_read_as_one():
    """A private part may take over its whole chain of ancestors."""
    requests = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    forest, kv_lens = forest_of(requests, [40] * 4)
    dear = LinearCost(launch=1.0, per_token=1.0, merge_per_row=1e6)
    groups = group_queries(forest, kv_lens, dear, 1)
    assert segments(groups) == {(frozenset([row]), 0) for row in range(4)}


def test_a_private_part_takes_over_a_short_node_below_a_long_one():
    long, short = list(range(1000, 1400)), [7]
    requests = [[*long, *short]] * 2 + [[*long, 8]] * 6
    forest, kv_lens = forest_of(requests, [40] * 8)
    cost = LinearCost(launch=1.0, per_token=1.0, merge_per_row=100.0)
    groups = group_queries(forest, kv_lens, cost, 1)
    assert_covers(groups, requests, kv_lens)
    expected = {(frozenset(range(8)), 0), *((frozenset([row]), 400) for row in range(8))}
    assert segments(groups) == expected


def test_the_last_reader_of_a_parent_takes_it_over():
    """Then the parent's own tile, launch and all, is saved."""
    requests = [[1, *range(100, 140)]] * 3 + [[1, *range(200, 240)]]
    forest, kv_lens = forest_of(requests, [8] * 4)
    cost = LinearCost(launch=1.0, per_token=1.0, merge_per_row=8.0)
    groups = group_queries(forest, kv_lens, cost, 1)
    assert segments(groups) >= {(frozenset(range(3)), 0), (frozenset([3]), 0)}
    assert len(groups) == 5


def test_padding_keeps_the_queries_of_two_children_together():
    """Figure 4 (d) of FastTree: eight queries each, and tiles of sixteen."""
    requests = [
        [*range(1000, 1040), 1 + i // 8, *range(i // 8 * 100, i // 8 * 100 + 40)] for i in range(16)
    ]
    forest, kv_lens = forest_of(requests, [8] * 16)
    cost = PaddedCost(launch=1.0, per_token=1.0, merge_per_row=1.0, tile_rows=16)
    groups = group_queries(forest, kv_lens, cost, 1)
    assert (frozenset(range(16)), 0) in segments(groups)


def test_requests_that_share_nothing_are_left_alone():
    forest, kv_lens = forest_of([[1], [2], []], [5, 6, 7])
    for concatenate in (False, True):
        groups = group_queries(forest, kv_lens, COSTS["h200"], 4, concatenate)
        assert segments(groups) == {(frozenset([row]), 0) for row in range(3)}
        assert sorted(g.kv_len for g in groups) == [7, 21, 22]
