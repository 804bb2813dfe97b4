"""Samples for ``/metrics`` and lines for the log, of decode steps and of shared host work."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from vllm_prefixshare.planning.unshared import FALLBACK_REASONS, NO_GAIN, UNSHARED_REASONS
from vllm_prefixshare.vllm_plugin.observability import stats
from vllm_prefixshare.vllm_plugin.observability.stats import PLAN_BUCKETS, Since, share_factor
from vllm_prefixshare.vllm_plugin.prompts import parts

#: Key of ``BackendStats.as_dict`` -> help text on ``/metrics``.
COUNTERS = {
    "decode_steps": "Engine steps with a decode, for each KV-cache group.",
    "shared_steps": "Decode steps in which requests shared KV.",
    "kv_tokens_read": "KV tokens per layer that decodes read.",
    "kv_tokens_saved": "KV tokens per layer that decodes did not read again.",
    "plans": "Plans made.",
    "plans_reused": "Decode steps that ran under a plan made earlier.",
}
SHARE_FACTOR = "Times that a KV token was used for each read, in the last second with decodes."
IMBALANCE = "Load of the busiest CTA over the mean, of the last plan."
PLAN_SECONDS = "Time to make a plan and put it on the device."
FALLBACKS = "Kinds of layers left to vLLM's own backend, and plans that share nothing, by reason."
UNSHARED_PLANS = "Plans that share nothing, by reason."
EXPECTED_GAIN = "Fraction of attention time that sharing would save, in the last plan without gain."
KERNEL = "1 for each kernel, or CPU executor, that decodes."
#: Counts by reason: known reasons start at 0, so that an alert on an increase sees the first one.
KNOWN_REASONS = {"fallbacks": FALLBACK_REASONS, "unshared_plans": UNSHARED_REASONS}
#: Field of ``PartCounters`` -> help text on ``/metrics``.
PROMPT_COUNTERS = {
    "requests": "Requests that reached a part of the shared host work.",
    "fallbacks": "Requests that vLLM's own code handled instead.",
    "units": "Characters, tokens or blocks that a part had to provide.",
    "shared_units": "Units that were taken from earlier work.",
    "seconds": "Host time in a part, vLLM's own code included.",
}
CACHE_BYTES = "Bytes that the caches of a part hold."
#: Process -> the parts whose work is done there.
PARTS_OF = {
    "api_server": ("tokenization", "detokenization", "copies"),
    "engine_core": ("hashes", "lookup", "copies"),
    "worker": ("copies",),
}


class Sample(NamedTuple):
    """One line of ``/metrics``. metric: its family, without a suffix such as ``_total``."""

    kind: str
    metric: str
    suffix: str
    help: str
    value: float
    labels: dict[str, str] = {}  # noqa: RUF012  never changed

    @property
    def place(self) -> tuple[str, ...]:
        """Identifies the sample within its source."""
        return self.metric, self.suffix, *self.labels.values()


class Source(Protocol):
    """Counters of this process that a ``Publisher`` reads."""

    def progress(self) -> int:
        """A number that changes with every count."""

    def samples(self, second_over: bool) -> Iterator[Sample]:
        """The current counters. second_over: whether a new second of recent values begins."""

    def log_line(self) -> str | None:
        """The log line for the time since the last call; None if nothing was counted."""


class DecodeSteps:
    """The counters ``STATS`` of the attention backend."""

    def __init__(self) -> None:
        self._since_write = Since(stats.backend_counters)
        self._since_log = Since(stats.backend_counters)
        self._since_write.take()
        self._since_log.take()
        self._share_factor = 1.0
        self._reasons_since_log = Since(_counts_by_reason)
        self._reasons_since_log.take()

    def progress(self) -> int:
        """Decode steps so far."""
        return stats.STATS.decode_steps

    def samples(self, second_over: bool) -> Iterator[Sample]:
        """See ``Source``."""
        since = self._since_write.take(restart=second_over)
        if since["decode_steps"]:
            self._share_factor = share_factor(since["kv_tokens_stock"], since["kv_tokens_read"])
        values = stats.STATS.as_dict()
        for name, meaning in COUNTERS.items():
            yield Sample("counter", name, "_total", meaning, values[name])
        for name, meaning in (("fallbacks", FALLBACKS), ("unshared_plans", UNSHARED_PLANS)):
            known = dict.fromkeys(KNOWN_REASONS[name], 0)
            for reason, count in {**known, **values[name]}.items():
                yield Sample("counter", name, "_total", meaning, count, {"reason": reason})
        yield Sample("gauge_mostrecent", "share_factor", "", SHARE_FACTOR, self._share_factor)
        yield Sample("gauge_mostrecent", "imbalance", "", IMBALANCE, values["imbalance"])
        gain = values["expected_gain"] or 0.0
        yield Sample("gauge_mostrecent", "expected_gain", "", EXPECTED_GAIN, gain)
        for kernel in list(stats.STATS.kernels):  # grows in another thread
            yield Sample("gauge_mostrecent", "kernel_info", "", KERNEL, 1, {"kernel": kernel})
        for end, count in zip(PLAN_BUCKETS, values["plans_by_time"], strict=True):
            le = {"le": "+Inf" if end == PLAN_BUCKETS[-1] else str(end)}
            yield Sample("histogram", "plan_seconds", "_bucket", PLAN_SECONDS, count, le)
        yield Sample("histogram", "plan_seconds", "_sum", PLAN_SECONDS, values["plan_seconds"])

    def log_line(self) -> str | None:
        """See ``Source``."""
        n = self._since_log.take()
        by_reason = {key: count for key, count in self._reasons_since_log.take().items() if count}
        if not n["decode_steps"] and not any(name == "fallbacks" for name, _ in by_reason):
            return None
        steps, plans, read, stock = (
            int(n[k]) for k in ("decode_steps", "plans", "kv_tokens_read", "kv_tokens_stock")
        )
        line = (
            f"PREFIX_SHARE: {steps} decode steps, {int(n['shared_steps'])} of them shared KV; "
            f"{read} KV tokens read, {stock - read} saved "
            f"(share factor {share_factor(stock, read):.2f}); {plans} plans made "
            f"({1e3 * n['plan_seconds'] / max(1, plans):.2f} ms each), {steps - plans} reused; "
            f"imbalance {stats.STATS.imbalance:.2f}"
        )
        if stats.STATS.kernels:
            line += f"; {' and '.join(stats.STATS.kernels)} kernel"
        for name, title in (
            ("unshared_plans", "plans without sharing"),
            ("fallbacks", "fallbacks"),
        ):
            texts = [
                f"{reason} ({int(count)}{_gain_of(reason)})"
                for (kind, reason), count in by_reason.items()
                if kind == name
            ]
            if texts:
                line += f"; {title}: {', '.join(texts)}"
        return f"{line}."


def _counts_by_reason() -> dict[tuple[str, str], float]:
    """The counts of ``KNOWN_REASONS`` and others, by field and reason."""
    return {
        (name, reason): count
        for name in KNOWN_REASONS
        for reason, count in dict(getattr(stats.STATS, name)).items()  # grows in another thread
    }


def _gain_of(reason: str) -> str:
    gain = stats.STATS.expected_gain
    return f", expected gain {gain:+.1%}" if reason == NO_GAIN and gain is not None else ""


class PromptParts:
    """The counters of shared host work in this process.

    Args:
        process: a key of ``PARTS_OF``. Its parts are published from the start, so that a rate
            includes the first requests; other parts once a request has reached them.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._since_log = Since(_prompt_counts)
        self._since_log.take()

    def progress(self) -> int:
        """Requests so far, summed over the parts."""
        return sum(counters.requests for counters in parts.COUNTERS.values())

    def samples(self, second_over: bool) -> Iterator[Sample]:
        """See ``Source``."""
        for part, counters in parts.COUNTERS.items():
            if part not in PARTS_OF[self._process] and not counters.requests:
                continue
            labels = {"part": part}
            values = counters.as_dict()
            for name, meaning in PROMPT_COUNTERS.items():
                yield Sample("counter", f"prompt_{name}", "_total", meaning, values[name], labels)
            held = values["cache_bytes"]
            yield Sample("gauge_sum", "prompt_cache_bytes", "", CACHE_BYTES, held, labels)

    def log_line(self) -> str | None:
        """See ``Source``."""
        n = self._since_log.take()
        texts = [
            f"{part} of {int(n[part, 'requests'])} requests, "
            f"{n[part, 'shared_units'] / max(1, n[part, 'units']):.1%} shared, "
            f"{1e3 * n[part, 'seconds'] / n[part, 'requests']:.2f} ms each"
            + (f", {int(n[part, 'fallbacks'])} left to vLLM" if n[part, "fallbacks"] else "")
            for part in parts.COUNTERS
            if n[part, "requests"]
        ]
        if not texts:
            return None
        held = sum(counters.cache_bytes for counters in parts.COUNTERS.values())
        line = f"Shared host work, {self._process}: {'; '.join(texts)}; caches {held >> 20} MiB"
        return f"{line}."


def _prompt_counts() -> dict[tuple[str, str], float]:
    """The counters of each part that add up."""
    return {
        (part, name): value
        for part, counters in parts.COUNTERS.items()
        for name, value in counters.as_dict().items()
        if name in PROMPT_COUNTERS
    }
