"""Ancestor masks, compared with a walk up the tree, one token after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks


def starts_of(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def walked(parents: np.ndarray, counts: list[int]) -> list[set[int]]:
    """Tokens of its request that each token sees: itself and all its ancestors."""
    found, begin = [], 0
    for count in counts:
        for token in range(count):
            seen, at = set(), token
            while at >= 0:
                seen.add(at)
                at = int(parents[begin + at])
            found.append(seen)
        begin += count
    return found


def bits(row: np.ndarray) -> set[int]:
    words = [int(word) & 0xFFFFFFFF for word in row]
    return {32 * w + bit for w, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def check(parents: list[int], counts: list[int]) -> None:
    array = np.array(parents, np.int32)
    masks = ancestor_masks(array, starts_of(counts))
    assert masks.dtype == np.int32
    assert masks.shape == (sum(counts), max(1, -(-max(counts, default=1) // 32)))
    assert [bits(row) for row in masks] == walked(array, counts)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_forest_of_token_trees(data):
    counts = data.draw(st.lists(st.integers(1, 150), max_size=5))
    parents = [data.draw(st.integers(-1, i - 1)) for n in counts for i in range(n)]
    check(parents, counts)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 128, 256])
def test_chains_and_stars_to_the_last_bit_of_a_word(tokens):
    check(list(range(-1, tokens - 1)), [tokens])
    check([-1] + [0] * (tokens - 1), [tokens])
    check([-1] * tokens, [tokens])


@pytest.mark.parametrize(
    ("parents", "counts", "sentence"),
    [
        ([-1, 0], [3], "query_parents has 2 entries, the batch 3 query tokens"),
        ([-1, 1, 0], [3], r"query_parents\[1\] = 1: a parent must come before its child"),
        ([-1, 0, 5], [3], r"query_parents\[2\] = 5: .* here among 0 to 1, or be -1"),
        ([-1, -2, 0], [3], r"query_parents\[1\] = -2"),
        # a token of another request is not a parent
        ([-1, 0, 1, 0], [2, 2], r"query_parents\[2\] = 1"),
    ],
)
def test_refuses_parents_that_are_none(parents, counts, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        ancestor_masks(np.array(parents, np.int32), starts_of(counts))
