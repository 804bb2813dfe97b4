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
    units: characters of text (tokenization), prompt tokens (detokenization, copies) or blocks
        (hashes, lookup) that the part had to provide.
    shared_units: how many of the units were taken from earlier work.
    seconds: host time in the part, including vLLM's own code.
    cache_bytes: current size of the part's caches.
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
        """Set the counters to zero, except the size of the caches."""
        for f in fields(self):
            if f.name != "cache_bytes":
                setattr(self, f.name, f.default)


#: Part -> its counters in this process.
COUNTERS: dict[str, PartCounters] = {part: PartCounters() for part in PROMPT_PARTS}

#: The variable that activates parts with any backend.
VARIABLE = "VLLM_PREFIXSHARE_PROMPTS"

_active: frozenset[str] = frozenset()
_unavailable: set[str] = set()
_reported: set[tuple[str, str]] = set()


def is_enabled(part: str) -> bool:
    """Whether a part is active in this process: an engine with PREFIX_SHARE runs in it, or
    ``VLLM_PREFIXSHARE_PROMPTS`` names the part.
    """
    return part in _active and part not in _unavailable


def is_switched_on(part: str) -> bool:
    """Whether a patched vLLM does the work of a part: with any backend, unless
    ``VLLM_PREFIXSHARE_PROMPTS`` is set and leaves the part out.
    """
    if VARIABLE not in os.environ:
        return True  # who did not choose the plugin is not asked for valid settings
    wanted = settings().prompts
    return wanted is None or part in wanted


def activate(uses_prefix_share: bool) -> None:
    """Activate the parts that the setting asks for. Called where a process learns of an engine;
    parts stay active until the process ends.

    Args:
        uses_prefix_share: whether the engine's attention backend is PREFIX_SHARE.
    """
    global _active
    if not uses_prefix_share and VARIABLE not in os.environ:
        return  # settings are not checked for users who did not choose the plugin
    wanted = settings().prompts
    if wanted is None:
        wanted = frozenset(PROMPT_PARTS) if uses_prefix_share else frozenset()
    _active |= wanted


def deactivate(part: str, reason: str) -> None:
    """Disable a part in this process, because this vLLM's code is not supported."""
    _unavailable.add(part)
    report_once(part, reason)


def report_once(part: str, reason: str) -> None:
    """Log why a part is left to vLLM, once per reason."""
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
