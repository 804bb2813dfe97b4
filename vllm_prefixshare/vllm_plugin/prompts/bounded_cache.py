"""A thread-safe LRU cache bounded in bytes."""

from collections.abc import Hashable
from operator import itemgetter
from threading import Lock
from typing import Generic, TypeVar

from cachetools import LRUCache

from vllm_prefixshare.settings import settings

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: Bytes of an entry in addition to the data of its key and value: tuples, object headers and the
#: cache's two dictionaries.
ENTRY_BYTES = 600


#: Part -> 32nds of ``VLLM_PREFIXSHARE_PROMPTS_CACHE_MIB`` that it may hold in a process. Together
#: they are the whole setting.
SHARES = {"tokenization": 13, "hashes": 13, "lookup": 2, "copies": 4}


def part_limit(part: str) -> int:
    """Bytes that a part of the shared host work may hold in a process."""
    return (settings().prompts_cache_mib << 20) * SHARES[part] // 32


class BoundedCache(Generic[Key, Value]):
    """A mapping that holds at most ``max_bytes`` bytes.

    Args:
        max_bytes: bound on the sum of the sizes that `put` is given, `ENTRY_BYTES` per entry
            included.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._entries: LRUCache[Key, tuple[Value, int]] = LRUCache(max_bytes, itemgetter(1))

    @property
    def bytes(self) -> int:
        """Bytes that the entries hold now."""
        return int(self._entries.currsize)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """The value of ``key``, or None."""
        with self._lock:
            try:
                return self._entries[key][0]  # `get` would look twice
            except KeyError:
                return None

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Store ``value``, which holds ``num_bytes`` together with its key. A value larger than the
        cache is not stored.
        """
        num_bytes += ENTRY_BYTES
        if num_bytes <= self.max_bytes:
            with self._lock:
                self._entries[key] = (value, num_bytes)

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._entries.clear()
