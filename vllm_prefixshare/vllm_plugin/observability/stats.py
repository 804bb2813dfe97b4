"""Counters of the backend in each worker, read with vLLM's ``collective_rpc``."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from vllm_prefixshare.planning.unshared import FALLBACK_REASONS, NO_GAIN, Unshared

#: Upper ends of the ranges in which plans are counted by their time, in seconds.
PLAN_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, float("inf"))


@dataclass(slots=True)
class BackendStats:
    """Counters of one worker process, summed over its KV-cache groups; times in seconds.

    decode_steps: engine steps with at least one decode, counted once per KV-cache group. Here and
        below, new requests that are planned with the decodes count as decodes.
    shared_steps: decode steps in which requests shared KV.
    layer_calls, layer_seconds: attention layers that ran shared decodes, and their time (CPU only).
    kv_tokens_read: KV tokens per layer that decodes read.
    kv_tokens_stock: KV tokens per layer that decodes would read without sharing.
    plans, plan_seconds: plans made and copied to the device, and their time.
    build_seconds: time that planning adds to building metadata (CPU only).
    imbalance: load of the busiest CTA over the mean, in the last plan; 0 before the first.
    plans_by_time: plans in each of ``PLAN_BUCKETS``.
    fallbacks: counts by reason: kinds of layers that keep vLLM's own backend, and plans that share
        nothing because a sharing plan could not be used.
    unshared_plans: counts by reason: the other plans that share nothing.
    expected_gain: fraction of the attention time that sharing would have saved by the cost model,
        in the last plan for which it expected no gain; None if there was none.
    kernels: names of the kernels in use, in the order in which they were chosen.
    causes: reason of the planner -> its cause in this engine, which is counted instead.
    warm_ups: contexts of ``warming_up`` in which steps and plans are not counted.
    """

    decode_steps: int = 0
    shared_steps: int = 0
    layer_calls: int = 0
    layer_seconds: float = 0.0
    kv_tokens_read: int = 0
    kv_tokens_stock: int = 0
    plans: int = 0
    plan_seconds: float = 0.0
    build_seconds: float = 0.0
    imbalance: float = 0.0
    plans_by_time: list[int] = field(default_factory=lambda: [0] * len(PLAN_BUCKETS))
    fallbacks: dict[str, int] = field(default_factory=dict)
    unshared_plans: dict[str, int] = field(default_factory=dict)
    expected_gain: float | None = None
    kernels: list[str] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    warm_ups: int = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether a worker of this process warms up."""
        return self.warm_ups > 0

    def note_engine(self, kernel: str, causes: Mapping[str, str]) -> None:
        """Note a kernel in use, and causes that the planner does not know."""
        if kernel not in self.kernels:
            self.kernels.append(kernel)
        self.causes = dict(causes)

    def note_plan(self, seconds: float, imbalance: float, unshared: Unshared | None = None) -> None:
        """Count a plan. unshared: why it shares nothing; None if it shares."""
        if self.is_warming_up:
            return
        self.plans += 1
        self.plan_seconds += seconds
        self.plans_by_time[bisect_left(PLAN_BUCKETS, seconds)] += 1
        self.imbalance = imbalance
        if unshared is None:
            return
        if unshared.reason in FALLBACK_REASONS:
            self.note_fallback(unshared.reason)
            return
        reason = self.reason_of(unshared)
        self.unshared_plans[reason] = self.unshared_plans.get(reason, 0) + 1
        if unshared.reason == NO_GAIN:
            self.expected_gain = unshared.expected_gain

    def reason_of(self, unshared: Unshared) -> str:
        """Why a plan shares nothing: its cause in this engine, where the planner does not know."""
        return self.causes.get(unshared.reason, unshared.reason)

    def note_fallback(self, reason: str) -> None:
        """Count a fallback by its ``reason``."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def note_step(self, tokens: int, saved: int) -> None:
        """Count a step whose decodes have ``tokens`` of KV and read all but ``saved`` of them."""
        if self.is_warming_up:
            return
        self.decode_steps += 1
        self.shared_steps += saved > 0
        self.kv_tokens_stock += tokens
        self.kv_tokens_read += tokens - saved

    def counters(self) -> dict[str, float]:
        """The counters that add up, as plain numbers."""
        return {f.name: getattr(self, f.name) for f in fields(self)[:9]}

    def as_dict(self) -> dict[str, Any]:
        """Every count, and the derived kv_tokens_saved, share_factor, plans_reused."""
        values = {f.name: copy(getattr(self, f.name)) for f in fields(self)}
        del values["causes"], values["warm_ups"]
        return {
            **values,
            "kv_tokens_saved": self.kv_tokens_stock - self.kv_tokens_read,
            "share_factor": share_factor(self.kv_tokens_stock, self.kv_tokens_read),
            "plans_reused": self.decode_steps - self.plans,
        }

    def reset(self) -> None:
        """Set every counter to zero; what is known of the engine stays."""
        fresh = BackendStats(kernels=self.kernels, causes=self.causes, warm_ups=self.warm_ups)
        for f in fields(self):
            setattr(self, f.name, getattr(fresh, f.name))


def share_factor(stock: float, read: float) -> float:
    """Uses of a KV token per read; 1 if nothing was read."""
    return stock / read if read else 1.0


#: The counters of this process.
STATS = BackendStats()


@contextmanager
def warming_up() -> Iterator[None]:
    """While a worker warms up: the V2 model runner makes up requests, which it prefills and decodes
    as any other, and steps and plans with them are not counted.
    """
    STATS.warm_ups += 1
    try:
        yield
    finally:
        STATS.warm_ups -= 1


def _start_from_zero() -> None:
    """In a forked engine core or worker, which does not leave its parent's contexts."""
    STATS.reset()
    STATS.warm_ups = 0


os.register_at_fork(after_in_child=_start_from_zero)

Name = TypeVar("Name")


class Since(Generic[Name]):
    """Increases of counters between calls of ``take``.

    Args:
        counters: returns the current value of each counter.
    """

    def __init__(self, counters: Callable[[], Mapping[Name, float]]) -> None:
        self._counters = counters
        self._before: Mapping[Name, float] = {}

    def take(self, restart: bool = True) -> dict[Name, float]:
        """Increase of each counter since the last call with ``restart``, or since its reset."""
        now, before = self._counters(), self._before
        if restart:
            self._before = now
        return {
            name: value - before.get(name, 0) if value >= before.get(name, 0) else value
            for name, value in now.items()
        }


def backend_counters() -> dict[str, float]:
    """``BackendStats.counters`` of this process."""
    return STATS.counters()


_LOGGED = Since(backend_counters)


def take_stats() -> dict[str, float]:
    """Increases of this process's counters since the last call, for loggers of a patched vLLM."""
    return {f"prefix_share_{name}": since for name, since in _LOGGED.take().items() if since}


def prompt_stats(reset: bool = False) -> dict[str, dict[str, float]]:
    """Counters of shared host work in the calling process, such as the front end.

    Args:
        reset: whether to set them to zero afterwards, except ``cache_bytes``.

    Returns:
        ``PartCounters`` as a dictionary for each part: requests, fallbacks, units, shared_units,
        seconds, cache_bytes.
    """
    from vllm_prefixshare.vllm_plugin.prompts import parts

    result = {part: counters.as_dict() for part, counters in parts.COUNTERS.items()}
    if reset:
        for counters in parts.COUNTERS.values():
            counters.reset()
    return result


class PrefixShareWorkerExtension:
    """Mixed into vLLM's worker: ``llm.collective_rpc("prefix_share_stats")``."""

    def prefix_share_stats(self, reset: bool = False) -> dict[str, Any]:
        """``BackendStats.as_dict`` since the start or the last reset, and ``prompt_stats`` of this
        process as "prompts".
        """
        result = {**STATS.as_dict(), "prompts": prompt_stats(reset)}
        if reset:
            STATS.reset()
        return result
