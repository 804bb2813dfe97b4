"""Compiling the loops of planning with Numba: once per machine, then from its cache."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
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


@contextlib.contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Let the workers of one machine compile in turn, so that one does and the others find it.

    Two processes that add to Numba's cache at the same time can give their functions the same
    file name, and the next process then calls the wrong code.
    """
    path = Path(tempfile.gettempdir()) / f"vllm_prefixshare-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
