"""The prefix tree against an oracle that keeps nothing but each request's block ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_prefixshare.planning.prefix_tree import PrefixTree
from vllm_prefixshare.types import Forest, PrefixShareError

from .oracle import assert_forest, shared_runs
from .strategies import block_ids, quick

BLOCK_SIZE = 16


def build(requests: dict[str, list[int]]) -> PrefixTree:
    tree = PrefixTree(BLOCK_SIZE)
    for request, ids in requests.items():
        tree.add(request, ids)
    return tree


def nodes(forest: Forest) -> list[tuple[int, int, int]]:
    """(parent, start, end) of each node, in blocks."""
    columns = (
        forest.node_parent,
        forest.node_start // BLOCK_SIZE,
        forest.node_end // BLOCK_SIZE,
    )
    return list(zip(*(c.tolist() for c in columns), strict=True))


class PrefixTreeMachine(RuleBasedStateMachine):
    """Any sequence of events, and after each of them the forest and the version."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(BLOCK_SIZE)
        self.blocks: dict[int, list[int]] = {}
        self.next_request = 0

    def expect(self, before: tuple, version: int) -> None:
        """The version moved exactly if the shared part or the set of requests did."""
        changed = before != self.visible()
        assert (self.tree.version != version) == changed

    def visible(self) -> tuple:
        return frozenset(self.blocks), shared_runs(self.blocks)

    @rule(ids=block_ids(6, 6))
    def add(self, ids: list[int]) -> None:
        before, version = self.visible(), self.tree.version
        self.tree.add(self.next_request, ids)
        self.blocks[self.next_request] = ids
        self.next_request += 1
        self.expect(before, version)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), ids=block_ids(6, 3))
    def append_anything(self, data: st.DataObject, ids: list[int]) -> None:
        request = data.draw(st.sampled_from(sorted(self.blocks)))
        self.append(request, [i for i in ids if i not in self.blocks[request]])

    @precondition(lambda self: len(self.blocks) > 1)
    @rule(data=st.data(), count=st.integers(1, 4))
    def append_what_another_has(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.blocks)))
        mine = self.blocks[request]
        ahead = [
            ids[len(mine) : len(mine) + count]
            for ids in self.blocks.values()
            if len(ids) > len(mine) and ids[: len(mine)] == mine
        ]
        if ahead:
            self.append(request, data.draw(st.sampled_from(ahead)))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), count=st.integers(1, 3))
    def append_new_blocks(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.blocks)))
        fresh = 100 + sum(map(len, self.blocks.values()))
        used = self.blocks[request]
        self.append(request, [i for i in range(fresh, fresh + count) if i not in used])

    def append(self, request: int, ids: list[int]) -> None:
        before, version = self.visible(), self.tree.version
        self.tree.append(request, ids)
        self.blocks[request] = self.blocks[request] + ids
        self.expect(before, version)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.blocks)))
        before, version = self.visible(), self.tree.version
        self.tree.remove(request)
        del self.blocks[request]
        self.expect(before, version)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(sorted(self.blocks)))
        version = self.tree.version
        assert_forest(self.tree.forest(order), self.blocks, order, BLOCK_SIZE)
        assert self.tree.version == version

    @invariant()
    def forest_is_the_shared_part(self) -> None:
        order = list(self.blocks)
        assert_forest(self.tree.forest(order), self.blocks, order, BLOCK_SIZE)

    @invariant()
    def knows_its_requests(self) -> None:
        assert len(self.tree) == len(self.blocks)
        for request, ids in self.blocks.items():
            assert request in self.tree
            assert self.tree.num_blocks(request) == len(ids)


TestAnyHistoryOfEvents = PrefixTreeMachine.TestCase
TestAnyHistoryOfEvents.settings = quick(120, stateful_step_count=30)


@quick(120)
@given(st.lists(block_ids(3, 3), max_size=12), st.data())
def test_forest_of_any_requests_in_any_order(requests, data):
    blocks = dict(enumerate(requests))
    tree = PrefixTree(BLOCK_SIZE)
    for request in data.draw(st.permutations(sorted(blocks))):
        tree.add(request, blocks[request])
    order = data.draw(st.permutations(sorted(blocks)))
    assert_forest(tree.forest(order), blocks, order, BLOCK_SIZE)


@quick(60)
@given(st.integers(0, 70), st.integers(1, 70), st.integers(1, 70))
def test_long_runs_part_at_the_right_block(common, rest_a, rest_b):
    shared = list(range(common))
    blocks = {
        "a": shared + list(range(1000, 1000 + rest_a)),
        "b": shared + list(range(2000, 2000 + rest_b)),
    }
    forest = build(blocks).forest(["a", "b"])
    assert forest.private_start.tolist() == [common * BLOCK_SIZE] * 2
    assert nodes(forest) == ([(-1, 0, common)] if common else [])


@quick(60)
@given(st.integers(1, 50), st.data())
def test_one_different_block_ends_the_sharing(length, data):
    a = list(range(length))
    where = data.draw(st.integers(0, length - 1))
    b = [*a[:where], 999, *a[where + 1 :]]
    forest = build({"a": a, "b": b}).forest(["a", "b"])
    assert forest.private_start.tolist() == [where * BLOCK_SIZE] * 2


def test_three_levels_are_written_parents_first():
    tree = build(
        {
            "a": [1, 2, 3, 4],
            "b": [1, 2, 3, 5],
            "c": [1, 2, 6],
            "d": [1, 7],
            "e": [8, 9],
            "f": [8, 9],
        }
    )
    forest = tree.forest("abcdef")
    assert nodes(forest) == [(-1, 0, 1), (0, 1, 2), (1, 2, 3), (-1, 0, 2)]
    assert (forest.node_last - forest.node_first).tolist() == [4, 3, 2, 2]
    private = dict(zip(forest.request_rows.tolist(), forest.private_start.tolist(), strict=True))
    expected = {0: 3, 1: 3, 2: 2, 3: 1, 4: 2, 5: 2}
    assert private == {row: depth * BLOCK_SIZE for row, depth in expected.items()}


def test_an_empty_tree_has_an_empty_forest():
    forest = PrefixTree(BLOCK_SIZE).forest([])
    assert (forest.num_reqs, forest.num_nodes) == (0, 0)


def test_requests_without_blocks_share_nothing():
    forest = build({"a": [], "b": [], "c": [1]}).forest("abc")
    assert forest.num_nodes == 0
    assert forest.private_start.tolist() == [0, 0, 0]


def test_identical_requests_are_one_node_with_empty_private_parts():
    forest = build({"a": [1, 2], "b": [1, 2], "c": [1, 2]}).forest("abc")
    assert nodes(forest) == [(-1, 0, 2)]
    assert forest.private_start.tolist() == [2 * BLOCK_SIZE] * 3


def test_a_request_that_is_a_prefix_of_others_ends_inside_their_tree():
    forest = build({"a": [1], "b": [1, 2, 3], "c": [1, 2, 4]}).forest("abc")
    assert nodes(forest) == [(-1, 0, 1), (0, 1, 2)]


def test_the_same_id_after_another_prefix_is_not_shared():
    forest = build({"a": [1, 5], "b": [2, 5]}).forest("ab")
    assert forest.num_nodes == 0


def test_private_growth_leaves_the_version_alone():
    tree = build({"a": [1, 2], "b": [1, 2]})
    version = tree.version
    for block in range(10, 40, 2):
        tree.append("a", [block])
        tree.append("b", [block + 1])
    assert tree.version == version


def test_growing_into_blocks_that_another_holds_changes_the_version():
    tree = build({"a": [1], "b": [1, 2]})
    version = tree.version
    tree.append("a", [2])
    assert tree.version != version
    assert nodes(tree.forest("ab")) == [(-1, 0, 2)]


def test_a_node_that_lost_its_reason_joins_its_only_child():
    tree = build({"a": [1, 2, 3], "b": [1, 2, 4], "c": [1, 5]})
    assert nodes(tree.forest("abc")) == [(-1, 0, 1), (0, 1, 2)]
    tree.remove("c")
    assert nodes(tree.forest("ab")) == [(-1, 0, 2)]


def test_a_request_may_come_back_with_other_blocks():
    tree = build({"a": [1, 2], "b": [1, 3]})
    tree.remove("a")
    tree.add("a", [4, 2])
    forest = tree.forest("ab")
    assert forest.num_nodes == 0
    assert tree.num_blocks("a") == 2


def test_the_caller_may_reuse_the_list_it_passed():
    ids = [1, 2]
    tree = build({"a": ids, "b": [1, 2, 3]})
    ids.append(3)
    assert tree.num_blocks("a") == 2
    tree.append("a", ids[2:])
    assert nodes(tree.forest("ab")) == [(-1, 0, 3)]


def test_array_rows_do_as_well_as_lists():
    tree = PrefixTree(BLOCK_SIZE)
    tree.add("a", np.array([1, 2], np.int32))
    tree.add("b", [1, 2])
    assert nodes(tree.forest("ab")) == [(-1, 0, 2)]


def test_adding_a_request_twice_is_refused_and_changes_nothing():
    tree = build({"a": [1, 2], "b": [1, 3]})
    version = tree.version
    with pytest.raises(PrefixShareError, match=r"'a'.*remove it first"):
        tree.add("a", [1, 3])
    assert tree.version == version
    assert_forest(tree.forest("ab"), {"a": [1, 2], "b": [1, 3]}, "ab", BLOCK_SIZE)


@pytest.mark.parametrize("order", ["", "a", "abc", "ac", "aab", "abab"])
def test_an_order_that_does_not_name_every_request_once_is_refused(order):
    with pytest.raises(PrefixShareError, match="exactly once"):
        build({"a": [1], "b": [1]}).forest(order)
