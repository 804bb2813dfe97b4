"""The prefix tree, compared with an oracle that checks every prefix of every request."""

from math import log
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_oracle import assert_forest
from tests.support.planning_cases import block_ids, forest_of_ids, quick
from vllm_prefixshare.core import Forest
from vllm_prefixshare.planning.forest import prefix_tree
from vllm_prefixshare.planning.forest.prefix_tree import first_difference

BLOCK_SIZE = 16


def forest_of(*requests: list[int]) -> Forest:
    return forest_of_ids(list(requests), BLOCK_SIZE)


def depth_first(requests: list[list[int]], rows: list[int], depth: int = 0) -> list[int]:
    """The rows in depth-first order, by definition; they have ``depth`` blocks in common."""
    if len(rows) == 1:
        return rows
    order = [row for row in rows if len(requests[row]) == depth]
    children: dict[int, list[int]] = {}
    for row in rows:
        if len(requests[row]) > depth:
            children.setdefault(requests[row][depth], []).append(row)
    return sum((depth_first(requests, child, depth + 1) for child in children.values()), order)


def comb(teeth: int, first: int = 0) -> list[list[int]]:
    """Request ``r`` leaves the common prefix after ``r + 1`` blocks; all have the same length.
    Block ids begin at ``first``.
    """
    spine = list(range(first, first + teeth + 1))
    own = range(first + teeth + 1, first + 2 * teeth + 1)
    return [spine[: r + 1] + [own[r]] * (teeth - r) for r in range(teeth)]


def comb_of_combs(teeth: int) -> list[list[int]]:
    """Each request of a comb is followed by a comb."""
    stems = comb(teeth)
    combs = [comb(teeth, 10_000 * (r + 1)) for r in range(teeth)]
    return [stems[r] + tooth for r in range(teeth) for tooth in combs[r]]


def in_order(requests: list[list[int]], order: str) -> list[list[int]]:
    if order == "shuffled":
        return Random(0).sample(requests, len(requests))
    return {
        "up": requests,
        "down": requests[::-1],
        "least in the middle": requests[::2][::-1] + requests[1::2],
        "least at the ends": requests[::2] + requests[1::2][::-1],
    }[order]


COMBS = {"comb": comb(144), "comb of combs": comb_of_combs(12)}
ORDERS = ["up", "down", "shuffled", "least in the middle", "least at the ends"]


@quick(300)
@given(st.lists(block_ids(4, 5), max_size=16), st.sampled_from([1, 3, 40, 70]))
def test_forest_of_any_requests(words, stretch):
    requests = [[s * stretch + i for s in word for i in range(stretch)] for word in words]
    assert_forest(forest_of(*requests), requests, BLOCK_SIZE)


@pytest.mark.parametrize("seed", range(10))
def test_forest_of_many_requests_with_ids_that_collide_in_the_hash_table(seed):
    random = Random(seed)
    symbols = [random.getrandbits(31) for _ in range(60)]
    symbols += [s ^ (1 << random.randrange(31)) for s in symbols]
    requests = [random.choices(symbols[: random.randint(2, 120)], k=3) for _ in range(150)]
    assert_forest(forest_of(*requests), requests, BLOCK_SIZE)


@quick(150)
@given(st.lists(block_ids(5, 5), max_size=10), st.integers(1, 5))
def test_a_null_block_ends_what_a_row_shares(requests, null):
    """The result is the same as if the filled blocks ended there."""
    cut = [ids[: ids.index(null)] if null in ids else ids for ids in requests]
    found = forest_of_ids(requests, BLOCK_SIZE, null)
    assert_forest(found, cut, BLOCK_SIZE)
    for array, expected in zip(found, forest_of(*cut), strict=True):
        assert array.tolist() == expected.tolist()


@quick(100)
@given(st.lists(block_ids(3, 4), max_size=12))
def test_rows_and_nodes_are_depth_first_and_siblings_in_the_order_of_rows(requests):
    forest = forest_of(*requests)
    assert forest.request_rows.tolist() == depth_first(requests, list(range(len(requests))))
    starts = list(zip(forest.node_reader_start, forest.node_start, strict=True))
    assert starts == sorted(starts)
    lowest = [
        int(forest.request_rows[a:b].min())
        for a, b in zip(forest.node_reader_start, forest.node_reader_end, strict=True)
    ]
    for v in range(forest.num_nodes):
        for w in range(v):
            if forest.node_parent[v] == forest.node_parent[w]:
                assert lowest[w] < lowest[v]
            readers = forest.node_reader_start[v], forest.node_reader_end[v]
            assert readers != (forest.node_reader_start[w], forest.node_reader_end[w]), (
                "one node, not two"
            )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", COMBS)
def test_as_many_nodes_as_requests_one_below_the_other(kind, order):
    requests = in_order(COMBS[kind], order)
    found = forest_of(*requests)
    assert found.num_nodes > len(requests) - 15
    assert_forest(found, requests, BLOCK_SIZE)
    assert found.request_rows.tolist() == depth_first(requests, list(range(len(requests))))


class CountedTable:
    """A block table that counts how often a row, or a block of it, is looked up."""

    def __init__(self, table: np.ndarray):
        self.table, self.count = table, 0

    def __getitem__(self, where: int | tuple[int, int]) -> np.ndarray:
        self.count += 1
        return self.table[where]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", COMBS)
def test_the_work_does_not_grow_with_the_depth_of_the_tree(kind, order, monkeypatch):
    """Each shared block of a request is compared once at most, and a request is looked up twice in
    each of 1 + ln(num_reqs) groups on average.
    """
    blocks = 0

    def counted_difference(a, b, start, stop):
        nonlocal blocks
        end = first_difference(a, b, start, stop)
        blocks += end - start
        return end

    monkeypatch.setattr(prefix_tree, "first_difference", counted_difference)
    monkeypatch.setattr(prefix_tree, "_split", prefix_tree._split.py_func)
    table = CountedTable(np.array(in_order(COMBS[kind], order), np.int32))
    n, length = table.table.shape
    lens = np.full(n, length, np.int32)
    _, private, nodes = prefix_tree._forest.py_func(table, np.arange(n), lens, -1)
    assert nodes.shape[1] > n - 15
    assert 0 < blocks <= private.sum()
    assert table.count <= n + 2 * n * (1 + log(n))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_the_first_difference_is_found_wherever_it_is(length):
    a = np.arange(250, dtype=np.int32)
    assert first_difference(a, a.copy(), 0, length) == length
    for where in range(length):
        b = a.copy()
        b[where::3] = -1
        for start in (0, min(where, 5), where):
            assert first_difference(a, b, start, length) == where
