"""Which parts of the shared host work are active in this process, and what they counted."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from vllm_prefixshare.settings import PROMPT_PARTS, settings
from vllm_prefixshare.vllm_plugin.observability.log import logger


@dataclass(slots=True)
class PartCounters:
    """Counters of one part in one process.

    requests: requests that reached the part.
    fallbacks: requests that vLLM's own code handled instead.
    units: what the part had to provide: characters of text (tokenization), prompt tokens
        (detokenization, copies), blocks (hashes, lookup).
    shared_units: those of ``units`` that were taken from earlier work.
    seconds: host time in the part, vLLM's own code included where it ran.
    cache_bytes: bytes that the part's caches hold now.
    """

    requests: int = 0
    fallbacks: int = 0
    units: int = 0
    shared_units: int = 0
    seconds: float = 0.0
    cache_bytes: int = 0

    def as_dict(self) -> dict[str, float]:
        """Every field by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def reset(self) -> None:
        """Set the counters to zero; the caches hold what they held."""
        for f in fields(self):
            if f.name != "cache_bytes":
                setattr(self, f.name, f.default)


#: Part -> its counters in this process.
COUNTERS: dict[str, PartCounters] = {part: PartCounters() for part in PROMPT_PARTS}

#: asks for parts with any backend
VARIABLE = "VLLM_PREFIXSHARE_PROMPTS"

_active: frozenset[str] = frozenset()
_unavailable: set[str] = set()
_reported: set[tuple[str, str]] = set()


def is_enabled(part: str) -> bool:
    """Whether a part is active in this process: an engine with PREFIX_SHARE runs in it, or
    ``VLLM_PREFIXSHARE_PROMPTS`` names the part.
    """
    return part in _active and part not in _unavailable


def activate(uses_prefix_share: bool) -> None:
    """Activate the parts that the setting asks for. Called where a process learns of an engine;
    parts stay active until the process ends.

    Args:
        uses_prefix_share: whether the engine's attention backend is PREFIX_SHARE.
    """
    global _active
    if not uses_prefix_share and VARIABLE not in os.environ:
        return  # who did not choose the plugin is not asked for valid settings
    wanted = settings().prompts
    if wanted is None:
        wanted = frozenset(PROMPT_PARTS) if uses_prefix_share else frozenset()
    _active |= wanted


def deactivate(part: str, reason: str) -> None:
    """Switch a part off in this process, for a vLLM whose code is not the one it was written
    for.
    """
    _unavailable.add(part)
    report_once(part, reason)


def report_once(part: str, reason: str) -> None:
    """Log why a part is left to vLLM, once for each reason."""
    if (part, reason) not in _reported:
        _reported.add((part, reason))
        logger().info("Shared %s is left to vLLM: %s.", part, reason)


@contextmanager
def measured(part: str) -> Iterator[PartCounters]:
    """Count a request of ``part``, and the host time until the end of the block."""
    counters = COUNTERS[part]
    counters.requests += 1
    start = time.perf_counter()
    try:
        yield counters
    finally:
        counters.seconds += time.perf_counter() - start


def _reset_all() -> None:
    for counters in COUNTERS.values():
        counters.reset()


# A forked engine core or worker starts from zero.
os.register_at_fork(after_in_child=_reset_all)
