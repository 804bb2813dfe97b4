"""Compiling the loops of planning with Numba: once per machine, then from its cache."""

from collections.abc import Callable
from typing import TypeVar

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """``function`` as machine code. It lets other threads run meanwhile.

    The cache notices a change to the function's own file, not to a file that it calls into:
    after editing one of those, touch the file of the caller.
    """
    try:
        compiled_function: F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in: compile anew in each process
        compiled_function = njit(nogil=True)(function)
    return compiled_function
