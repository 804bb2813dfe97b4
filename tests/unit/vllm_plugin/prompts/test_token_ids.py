"""Token ids with their array: a list in every respect, and the array is never out of date."""

import copy
import gc
import pickle
from collections.abc import Callable
from operator import add
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_prefixshare.vllm_plugin.prompts.copies import MessageIds
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)

MUTATIONS: dict[str, Callable[[list[int]], Any]] = {
    "append": lambda ids: ids.append(7),
    "extend": lambda ids: ids.extend([7, 8]),
    "insert": lambda ids: ids.insert(1, 7),
    "pop": lambda ids: ids.pop(),
    "remove": lambda ids: ids.remove(ids[0]),
    "clear": lambda ids: ids.clear(),
    "sort": lambda ids: ids.sort(),
    "reverse": lambda ids: ids.reverse(),
    "set": lambda ids: ids.__setitem__(0, 7),
    "set slice": lambda ids: ids.__setitem__(slice(0, 2), [7]),
    "delete": lambda ids: ids.__delitem__(0),
    "add": lambda ids: ids.__iadd__([7]),
    "multiply": lambda ids: ids.__imul__(2),
}


@given(IDS)
def test_it_is_the_list_and_the_array(ids: list[int]) -> None:
    token_ids = TokenIds(ids)
    assert token_ids == ids
    assert token_ids.array.dtype == np.int32
    assert token_ids.array.tolist() == ids
    for copied in (
        copy.copy(token_ids),
        copy.deepcopy(token_ids),
        *(pickle.loads(pickle.dumps(token_ids, protocol)) for protocol in range(6)),
    ):
        assert copied == ids
        assert type(copied) is list
    assert b"prefixshare" not in pickle.dumps(token_ids), "a reader may not have the package"
    assert msgspec.msgpack.encode(token_ids) == msgspec.msgpack.encode(ids)
    assert torch.tensor(token_ids).tolist() == ids


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_drops_the_array(mutation: str) -> None:
    ids = [5, 3, 9, 4]
    token_ids = TokenIds(ids)
    assert token_ids.array.tolist() == ids
    MUTATIONS[mutation](ids)
    MUTATIONS[mutation](token_ids)
    assert token_ids == ids
    assert token_ids.array.tolist() == ids
    assert pickle.loads(pickle.dumps(token_ids)) == ids


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("other", [[4], [], TokenIds([4, 5])])
def test_a_sum_has_the_array_of_its_ids(is_read, other) -> None:
    token_ids = TokenIds([1, 2, 3])
    if is_read:
        assert token_ids.array.tolist() == [1, 2, 3]
    total = token_ids + other
    assert type(total) is TokenIds
    assert total == [1, 2, 3, *other] == total.array.tolist()
    assert token_ids == [1, 2, 3] == token_ids.array.tolist()


def test_a_sum_that_is_no_list_of_ids() -> None:
    token_ids = TokenIds([1])
    token_ids.array  # noqa: B018
    assert add(token_ids, [2**40]) == [1, 2**40]
    with pytest.raises(OverflowError):
        add(token_ids, [2**40]).array  # noqa: B018
    with pytest.raises(TypeError):
        add(token_ids, (2,))


def test_what_it_returns_is_a_plain_list() -> None:
    token_ids = TokenIds([1, 2, 3])
    for derived in (
        token_ids[:2],
        token_ids * 2,
        token_ids.copy(),
    ):
        assert type(derived) is list


def test_the_garbage_collector_does_not_visit_ids() -> None:
    sent = MessageIds([1, 2, 3], np.array([1, 2, 3], np.int32))
    for ids in (TokenIds([1, 2, 3]), sent, sent.copy()):
        assert not gc.is_tracked(ids)
        ids.append(4)
        gc.collect()
        assert ids == [1, 2, 3, 4]
        assert not gc.is_tracked(ids)
    assert type(sent.copy()) is list


@pytest.mark.parametrize("dtype", [None, np.int32, np.int64, np.float32, np.uint16])
def test_numpy_gives_what_it_gives_for_a_list(dtype: Any) -> None:
    ids = [1, 2, 3]
    token_ids = TokenIds(ids)
    from_list = np.array(ids, dtype)
    from_token_ids = np.array(token_ids, dtype)
    assert from_token_ids.dtype == from_list.dtype
    assert from_token_ids.tolist() == from_list.tolist()
    from_token_ids[0] = 7
    assert token_ids.array.tolist() == ids, "numpy's copy is the caller's own"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16])
def test_numpy_rejects_an_id_that_does_not_fit(dtype: Any) -> None:
    """Programs store ids as uint16: an id above 65535 must not become another one."""
    with pytest.raises(OverflowError):
        np.array([1, 70000], dtype)
    with pytest.raises(OverflowError):
        np.array(TokenIds([1, 70000]), dtype)


@pytest.mark.parametrize("ids", [[2**40], [1, "x"]])
def test_ids_that_are_no_int32_behave_as_in_a_list(ids: list[Any]) -> None:
    token_ids = TokenIds(ids)
    assert pickle.loads(pickle.dumps(token_ids)) == ids
    assert np.asarray(token_ids).tolist() == np.asarray(ids).tolist()
