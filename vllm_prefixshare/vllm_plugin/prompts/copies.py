"""Passes token ids and block ids between processes and to the GPU as arrays.

A prompt passes the API server, the engine core, the scheduler's message to the workers and the
model runner. vLLM handles it as a list everywhere: each process creates the same integers again,
and each step flattens the same list. Here the ids stay one int32 array next to the list, and a
process creates only the integers in which a prompt differs from a recent one.

Why the results are the same:

- *Message to the engine core.* ``encode_ids`` writes the ids as MessagePack integers of one width.
  Every MessagePack decoder reads them, so the receiver may be a vLLM without this plugin.
  ``split_message`` accepts them only if every other byte is the one that ``encode_ids`` writes;
  any other message is left to vLLM's decoder.
- *Lists.* ``RecentIds`` compares arrays element by element and copies the list of a recent prompt
  up to the first difference. Its lists are private, so other code cannot change them.
- *Message to the workers.* The prompt's ids replace the list of all ids of a request only if both
  lists are equal.
- *Staged writes.* ``StagedIds`` concatenates the same ids as vLLM's list.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import part_limit
from vllm_prefixshare.vllm_plugin.prompts.token_ids import (
    TokenArray,
    TokenIds,
    as_array,
    num_common_ids,
    untrack,
)

PART = "copies"

#: Minimum number of token ids; shorter prompts are left to vLLM.
MIN_TOKEN_IDS = 1024
#: Minimum number of block ids of a group; shorter lists are left to vLLM.
MIN_BLOCK_IDS = 256

_ARRAY32 = 0xDD
_NIL = b"\xc0"
_INT32 = 0xD2
#: A MessagePack integer of 32 bits: marker and big-endian value.
_RECORD = np.dtype([("marker", np.uint8), ("value", ">i4")])
#: Bytes of a MessagePack array's marker and length.
_ARRAY32_BYTES = 5

#: Bytes of an id in `RecentIds`: array element, list element and integer object.
_BYTES_PER_ID = 4 + 8 + 32
#: Number of leading ids that two sequences must share to be compared.
_HEAD = 64


def encode_ids(ids: list[int]) -> msgspec.Raw | None:
    """The ids as a MessagePack array of 32-bit integers, or None if vLLM has to encode them."""
    try:
        array = as_array(ids)
    except OverflowError:
        return None
    message = np.empty(_ARRAY32_BYTES + _RECORD.itemsize * len(array), np.uint8)
    message[:_ARRAY32_BYTES] = tuple(struct.pack(">BI", _ARRAY32, len(array)))
    records = message[_ARRAY32_BYTES:].view(_RECORD)
    records["marker"] = _INT32
    records["value"] = array
    return msgspec.Raw(message.data)


class SplitMessage(NamedTuple):
    """An encoded ``EngineCoreRequest`` without its token ids.

    rest: the message with nil in place of the ids.
    array: the ids, int32 ``[number of ids]``.
    """

    rest: bytes
    array: TokenArray


def split_message(message: Any) -> SplitMessage | None:
    """Take the ids that `encode_ids` wrote out of an encoded ``EngineCoreRequest``.

    Args:
        message: a bytes-like object: a MessagePack array whose second element are the ids.

    Returns:
        None if the message has another form.
    """
    view = memoryview(message)
    start = _second_element(view)
    if start is None or len(view) < start + _ARRAY32_BYTES or view[start] != _ARRAY32:
        return None
    num_ids = int.from_bytes(view[start + 1 : start + _ARRAY32_BYTES], "big")
    end = start + _ARRAY32_BYTES + _RECORD.itemsize * num_ids
    if end > len(view):
        return None
    records = np.frombuffer(view[start + _ARRAY32_BYTES : end], _RECORD)
    # Three times faster than comparing the strided markers.
    if records["marker"].copy().tobytes() != bytes([_INT32]) * num_ids:
        return None
    rest = b"".join((view[:start], _NIL, view[end:]))
    return SplitMessage(rest, records["value"].astype(np.int32))


def _second_element(view: memoryview) -> int | None:
    """Start of the second element of a MessagePack array whose first element is a string."""
    header = bytes(view[:8])
    if len(header) < 8:
        return None
    if header[0] & 0xF0 == 0x90:
        start = 1
    elif header[0] == 0xDC:
        start = 3
    else:
        return None
    marker = header[start]
    start += 1
    if marker & 0xE0 == 0xA0:
        return start + (marker & 0x1F)
    if marker == 0xD9:
        return start + 1 + header[start]
    if marker == 0xDA:
        return start + 2 + int.from_bytes(header[start : start + 2], "big")
    return None


class _Recent(NamedTuple):
    array: TokenArray
    ids: list[int]
    head: bytes


class Shared(NamedTuple):
    """A list of ids, and how many of its integer objects it shares with a recent list."""

    ids: "MessageIds"
    num_shared: int


class RecentIds:
    """Recent lists of ids in this process, so that later lists share their integer objects.

    Args:
        max_bytes: bound on the memory of the lists.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_ids = max_bytes // _BYTES_PER_ID
        self._num_ids = 0
        self._recent: list[_Recent] = []
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Current size of the lists in bytes."""
        return self._num_ids * _BYTES_PER_ID

    def ids(self, array: TokenArray) -> Shared:
        """The ids as a list, which the caller owns.

        Args:
            array: int32 ``[number of ids]``; stored, read-only.
        """
        head = array[:_HEAD].tobytes()
        with self._lock:
            recent, num_shared = self._longest(array, head)
            if recent is None:
                ids = MessageIds(array.tolist(), array)
            else:
                ids = MessageIds(recent.ids, array)
                list.__setitem__(ids, slice(num_shared, None), array[num_shared:].tolist())
            if num_shared < len(array) * 7 // 8:
                self._keep(_Recent(array, list(ids), head))
        return Shared(ids, num_shared)

    def _longest(self, array: TokenArray, head: bytes) -> tuple[_Recent | None, int]:
        """The recent list with the longest common prefix, and the prefix's length; the most recent
        list that shares 7/8 of ``array``, if one does.
        """
        best = None
        num_best = 0
        for recent in reversed(self._recent):
            if recent.head != head:
                continue
            num_shared = num_common_ids(array, recent.array)
            if num_shared > num_best:
                best = recent
                num_best = num_shared
                if num_shared >= len(array) * 7 // 8:
                    break
        if best is not None:
            position = next(i for i, recent in enumerate(self._recent) if recent is best)
            self._recent.append(self._recent.pop(position))
        return best, num_best

    def _keep(self, recent: _Recent) -> None:
        if len(recent.ids) > self._max_ids:
            return
        self._recent.append(recent)
        self._num_ids += len(recent.ids)
        while self._num_ids > self._max_ids:
            self._num_ids -= len(self._recent.pop(0).ids)


_recent: RecentIds | None = None


def recent_ids() -> RecentIds:
    """The recent lists of this process."""
    global _recent
    if _recent is None:
        _recent = RecentIds(part_limit(PART))
    return _recent


class MessageIds(TokenIds):
    """Ids in vLLM's own messages. Pickle stores the array; the receiver shares the integers of a
    recent list. The receiver needs this package.
    """

    __slots__ = ()

    def copy(self) -> list[int]:
        """The ids as a plain list, which vLLM's ``Request`` keeps and appends tokens to."""
        ids = super().copy()
        untrack(ids)
        return ids

    def __reduce__(self) -> tuple[Callable[[Any], TokenIds], tuple[Any]]:
        try:
            return _received, (self.array.tobytes(),)
        except OverflowError:
            return MessageIds, (list(self),)


def _received(data: bytes) -> MessageIds:
    return recent_ids().ids(np.frombuffer(data, np.int32)).ids


def with_array(block_ids: list[int]) -> list[int]:
    """The block ids of a group with their array, or a short list as it is."""
    if len(block_ids) < MIN_BLOCK_IDS or isinstance(block_ids, TokenIds):
        return block_ids
    return MessageIds(block_ids, as_array(block_ids))


def all_ids_with_array(all_ids: list[int], prompt_ids: list[int] | None) -> list[int]:
    """The ids of a request that the model runner starts from, with their array.

    Args:
        all_ids: prompt and output so far.
        prompt_ids: the prompt; ignored unless it is a `TokenIds`.

    Returns:
        ``prompt_ids`` if it is equal, or else ``all_ids`` with an array built from the prompt's,
        or ``all_ids`` itself where it does not start with the prompt.
    """
    if not isinstance(prompt_ids, TokenIds) or len(prompt_ids) < MIN_TOKEN_IDS:
        return all_ids
    num_prompt_ids = len(prompt_ids)
    if len(all_ids) == num_prompt_ids:
        return prompt_ids if all_ids == prompt_ids else all_ids
    if all_ids[:num_prompt_ids] != prompt_ids:
        return all_ids
    try:
        output = as_array(all_ids[num_prompt_ids:])
        return MessageIds(all_ids, np.concatenate([prompt_ids.array, output]))
    except OverflowError:
        return all_ids


class StagedIds:
    """The contents of staged writes, in place of vLLM's list: integers and arrays that are
    concatenated once.
    """

    def __init__(self) -> None:
        self._parts: list[list[int] | TokenArray] = []
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    def __iter__(self) -> Iterator[int]:
        ids: list[int] = []
        for part in self._parts:
            ids += part if isinstance(part, list) else part.tolist()
        return iter(ids)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("staged ids cannot become an array without a copy")
        array = np.empty(self._num_ids, np.int32 if dtype is None else dtype)
        start = 0
        for part in self._parts:
            array[start : start + len(part)] = part
            start += len(part)
        return array

    def append(self, value: int) -> None:
        """Add one integer."""
        self.extend([value])

    def extend(self, values: Iterable[int]) -> None:
        """Add integers; a `TokenIds` adds its current array."""
        part: list[int] | TokenArray
        if isinstance(values, TokenIds):
            part = values.array
        elif isinstance(values, np.ndarray):
            part = values.copy()
        else:
            part = list(values)
        last = self._parts[-1] if self._parts else None
        if isinstance(part, list) and isinstance(last, list):
            last += part
        else:
            self._parts.append(part)
        self._num_ids += len(part)

    def clear(self) -> None:
        """Remove all integers."""
        self._parts.clear()
        self._num_ids = 0
