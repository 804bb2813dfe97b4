"""A list of token ids that also carries the ids as one array.

vLLM passes prompts as lists. Each consumer of an array (hashing, messages, staged copies) would
convert the same list again, 1 ms per 34k tokens. `TokenIds` is a list in every respect and keeps
the array next to it.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: The array of the ids, int32 [number of ids].
TokenArray = npt.NDArray[np.int32]

#: Hide an object from the garbage collector, which would visit every id of every prompt several
#: times, 0.4 ms per 34k tokens. Integers and an array make no cycle.
untrack = ctypes.pythonapi.PyObject_GC_UnTrack
untrack.argtypes = (ctypes.py_object,)
untrack.restype = None

_MUTATORS = (
    "__delitem__",
    "__iadd__",
    "__imul__",
    "__setitem__",
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
)


def as_array(ids: Sequence[int]) -> TokenArray:
    """The ids as int32 ``[len(ids)]``: the array of a `TokenIds`, which is not to be written to;
    else converted, three times faster than by NumPy.

    Raises:
        OverflowError: an id is not an integer of 32 bits.
    """
    return ids.array if isinstance(ids, TokenIds) else _packed(ids)


def num_common_ids(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix of two arrays."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _packed(ids: Sequence[int]) -> TokenArray:
    try:
        return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), np.int32)
    except struct.error as e:
        raise OverflowError(str(e)) from e


class TokenIds(list[int]):
    """A list of token ids with `array`, the same ids as int32. A mutation drops the array.

    Slices, copies and unpickled objects are plain lists; the sum with a list has an array where
    this one has it. NumPy reads the array instead of the list and returns the dtype that it returns
    for a list of ints.

    Args:
        ids: the ids.
        array: the same ids, int32 [len(ids)], read-only; None to build it when it is needed.
    """

    __slots__ = ("_array",)

    _array: TokenArray | None

    def __init__(self, ids: Iterable[int] = (), array: TokenArray | None = None) -> None:
        super().__init__(ids)
        self._array = array
        untrack(self)

    @property
    def array(self) -> TokenArray:
        """The ids, int32 [len(self)], read-only.

        Raises:
            OverflowError: an id is not an integer of 32 bits.
        """
        array = self._array
        if array is None:
            array = _packed(self)
            self._array = array
        return array

    def __add__(self, other: list[int]) -> "TokenIds":  # type: ignore[override]
        if not isinstance(other, list):
            return NotImplemented
        array = self._array
        if array is not None:
            try:
                array = np.concatenate([array, _packed(other)])
            except OverflowError:  # said where the array is needed
                array = None
        total = type(self)(self, array)
        list.extend(total, other)
        return total

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a list cannot become an array without a copy")
        wanted = np.dtype(np.int64 if dtype is None else dtype)
        try:
            # A list raises where an id does not fit the dtype; casting an array would wrap it.
            if wanted.kind == "i" and wanted.itemsize >= 4:
                return self.array.astype(wanted)
        except (OverflowError, TypeError):
            pass
        return np.array(list(self), dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # outputs reach programs that may not have this package
        return list, (list(self),)


def _dropping_array(name: str) -> Callable[..., Any]:
    mutate = getattr(list, name)

    def wrapper(self: TokenIds, *args: Any, **kwargs: Any) -> Any:
        self._array = None
        return mutate(self, *args, **kwargs)

    wrapper.__name__ = name
    return wrapper


for _name in _MUTATORS:
    setattr(TokenIds, _name, _dropping_array(_name))
