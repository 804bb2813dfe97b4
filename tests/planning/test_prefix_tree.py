"""The prefix tree, compared with an oracle that checks every prefix of every request."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_prefixshare.records import Forest
from vllm_prefixshare.tree.prefix_tree import first_difference

from .oracle import assert_forest
from .strategies import block_ids, forest_of_ids, quick

BLOCK_SIZE = 16


def forest_of(*requests: list[int]) -> Forest:
    return forest_of_ids(list(requests), BLOCK_SIZE)


def nodes(forest: Forest) -> list[tuple[int, int, int]]:
    """(parent, start, end) of each node, in blocks."""
    columns = (
        forest.node_parent,
        forest.node_start // BLOCK_SIZE,
        forest.node_end // BLOCK_SIZE,
    )
    return list(zip(*(c.tolist() for c in columns), strict=True))


@quick(300)
@given(st.lists(block_ids(4, 5), max_size=16), st.sampled_from([1, 3, 40, 70]))
def test_forest_of_any_requests(words, stretch):
    requests = [[s * stretch + i for s in word for i in range(stretch)] for word in words]
    blocks = dict(enumerate(requests))
    assert_forest(forest_of(*requests), blocks, list(blocks), BLOCK_SIZE)


@pytest.mark.parametrize("seed", range(10))
def test_forest_of_many_requests_with_ids_that_collide_in_the_hash_table(seed):
    random = Random(seed)
    symbols = [random.getrandbits(31) for _ in range(60)]
    symbols += [s ^ (1 << random.randrange(31)) for s in symbols]
    requests = [random.choices(symbols[: random.randint(2, 120)], k=3) for _ in range(150)]
    blocks = dict(enumerate(requests))
    assert_forest(forest_of(*requests), blocks, list(blocks), BLOCK_SIZE)


@quick(150)
@given(st.lists(block_ids(5, 5), max_size=10), st.integers(1, 5))
def test_a_null_block_ends_what_a_row_shares(requests, null):
    """The result is the same as if the filled blocks ended there."""
    cut = [ids[: ids.index(null)] if null in ids else ids for ids in requests]
    found = forest_of_ids(requests, BLOCK_SIZE, null)
    assert_forest(found, dict(enumerate(cut)), list(range(len(cut))), BLOCK_SIZE)


@quick(100)
@given(st.lists(block_ids(3, 4), max_size=12))
def test_rows_and_nodes_are_depth_first_and_siblings_in_the_order_of_rows(requests):
    forest = forest_of(*requests)
    assert np.all(np.diff(forest.node_reader_start) >= 0)
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


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_the_first_difference_is_found_wherever_it_is(length):
    a = np.arange(250, dtype=np.int32)
    assert first_difference(a, a.copy(), 0, length) == length
    for where in range(length):
        b = a.copy()
        b[where::3] = -1
        for start in (0, min(where, 5), where):
            assert first_difference(a, b, start, length) == where


@quick(60)
@given(st.integers(0, 70), st.integers(1, 70), st.integers(1, 70))
def test_long_runs_part_at_the_right_block(common, rest_a, rest_b):
    shared = list(range(common))
    forest = forest_of(
        shared + list(range(1000, 1000 + rest_a)), shared + list(range(2000, 2000 + rest_b))
    )
    assert forest.private_start.tolist() == [common * BLOCK_SIZE] * 2
    assert nodes(forest) == ([(-1, 0, common)] if common else [])


@quick(60)
@given(st.integers(1, 50), st.data())
def test_one_different_block_ends_the_sharing(length, data):
    a = list(range(length))
    where = data.draw(st.integers(0, length - 1))
    b = [*a[:where], 999, *a[where + 1 :]]
    forest = forest_of(a, b)
    assert forest.private_start.tolist() == [where * BLOCK_SIZE] * 2


def test_three_levels_are_written_parents_first():
    forest = forest_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 7], [8, 9], [8, 9])
    assert nodes(forest) == [(-1, 0, 1), (0, 1, 2), (1, 2, 3), (-1, 0, 2)]
    assert (forest.node_reader_end - forest.node_reader_start).tolist() == [4, 3, 2, 2]
    private = dict(zip(forest.request_rows.tolist(), forest.private_start.tolist(), strict=True))
    expected = {0: 3, 1: 3, 2: 2, 3: 1, 4: 2, 5: 2}
    assert private == {row: depth * BLOCK_SIZE for row, depth in expected.items()}


def test_an_empty_tree_has_an_empty_forest():
    forest = forest_of()
    assert (forest.num_reqs, forest.num_nodes) == (0, 0)


def test_requests_without_blocks_share_nothing():
    forest = forest_of([], [], [1])
    assert forest.num_nodes == 0
    assert forest.private_start.tolist() == [0, 0, 0]


def test_identical_requests_are_one_node_with_empty_private_parts():
    forest = forest_of([1, 2], [1, 2], [1, 2])
    assert nodes(forest) == [(-1, 0, 2)]
    assert forest.private_start.tolist() == [2 * BLOCK_SIZE] * 3


def test_a_request_that_is_a_prefix_of_others_ends_inside_their_tree():
    forest = forest_of([1], [1, 2, 3], [1, 2, 4])
    assert nodes(forest) == [(-1, 0, 1), (0, 1, 2)]


def test_the_same_id_after_another_prefix_is_not_shared():
    forest = forest_of([1, 5], [2, 5])
    assert forest.num_nodes == 0
