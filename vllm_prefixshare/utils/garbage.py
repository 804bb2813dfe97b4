"""Python's cyclic garbage collection, which passes over all objects of a process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no cyclic garbage in this context, which makes many objects and no cycles. Objects
    without a cycle are still freed at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
