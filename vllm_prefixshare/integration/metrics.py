"""The counters on the server's ``/metrics`` and, once a minute, in the log.

They are counted in a worker, and ``/metrics`` is answered in the front end. The first worker of an
engine writes them once a second into files as those of prometheus_client's multi-process mode,
which the front end reads at every scrape. So a step pays nothing, and nothing of vLLM is wrapped:
its own channel for statistics has typed fields only, and an entry point of
``vllm.stat_logger_plugins`` would switch vLLM's statistics on for everybody who switched them off.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_prefixshare.integration.log import logger
from vllm_prefixshare.integration.stats import PLAN_BUCKETS, STATS, Since, share_factor
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.settings import settings

VARIABLE = "VLLM_PREFIXSHARE_METRICS"
PREFIX = "vllm_prefixshare_"
WRITE_SECONDS, LOG_SECONDS = 1.0, 60.0

#: Key of ``BackendStats.as_dict`` -> what ``/metrics`` says of it.
COUNTERS = {
    "decode_steps": "Engine steps with a decode, for each KV-cache group.",
    "shared_steps": "Decode steps in which requests shared KV.",
    "kv_tokens_read": "KV tokens per layer that decodes read.",
    "kv_tokens_saved": "KV tokens per layer that decodes did not read again.",
    "plans": "Plans made.",
    "plans_reused": "Decode steps that ran under a plan made earlier.",
}
SHARE_FACTOR = "Times that a KV token was used for each read, in the last second with decodes."
IMBALANCE = "Load of the busiest worker over the mean, of the last plan."
PLAN_SECONDS = "Time to make a plan and put it on the device."
FALLBACKS = "Kinds of layers left to vLLM's own backend, and plans that share nothing, by reason."


class Sample(NamedTuple):
    """One line of ``/metrics``. metric: its family, without a suffix such as ``_total``."""

    kind: str
    metric: str
    suffix: str
    help: str
    value: float
    labels: dict[str, str] = {}  # noqa: RUF012  never changed


def samples(recent_share_factor: float) -> Iterator[Sample]:
    """What ``STATS`` holds. Known reasons are there from the start: an alert on an increase would
    not see the first one otherwise.
    """
    from vllm_prefixshare.planning.planner import PLAN_TOO_LARGE, PLANNING_FAILED

    values = STATS.as_dict()
    for name, meaning in COUNTERS.items():
        yield Sample("counter", name, "_total", meaning, values[name])
    known = dict.fromkeys((PLANNING_FAILED, PLAN_TOO_LARGE), 0)
    for reason, count in {**known, **values["fallbacks"]}.items():
        yield Sample("counter", "fallbacks", "_total", FALLBACKS, count, {"reason": reason})
    yield Sample("gauge_mostrecent", "share_factor", "", SHARE_FACTOR, recent_share_factor)
    yield Sample("gauge_mostrecent", "imbalance", "", IMBALANCE, values["imbalance"])
    for end, count in zip(PLAN_BUCKETS, values["plans_by_time"], strict=True):
        le = {"le": "+Inf" if end == PLAN_BUCKETS[-1] else str(end)}
        yield Sample("histogram", "plan_seconds", "_bucket", PLAN_SECONDS, count, le)
    yield Sample("histogram", "plan_seconds", "_sum", PLAN_SECONDS, values["plan_seconds"])


def expose() -> None:
    """In the front end: make the folder, name it to the workers, and let ``/metrics`` read it.

    Raises:
        PrefixShareError: the folder cannot be used.
    """
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    # where vLLM has several API servers, each of them reads this folder
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = shared or _temporary_folder()
        settings.cache_clear()  # a forked worker inherits what was read
    folder = os.environ[VARIABLE]
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as e:
        raise PrefixShareError(
            f"{VARIABLE}={folder!r} is not a usable folder ({e.strerror}): name another or unset "
            "it."
        ) from None
    if folder not in (shared, *_EXPOSED):
        _EXPOSED.append(folder)
        MultiProcessCollector(REGISTRY, path=folder)


#: Folders that the registry of this process reads.
_EXPOSED: list[str] = []
_folder: tempfile.TemporaryDirectory[str] | None = None


def _temporary_folder() -> str:
    """One that goes with this process."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="vllm-prefixshare-metrics-")
    return _folder.name


def start_in_worker() -> None:
    """Start a ``Publisher`` if this process is the first worker of an engine, and has none."""
    import torch.distributed
    from vllm.config import get_current_vllm_config

    global _publisher
    if _publisher is not None or not torch.distributed.is_initialized():
        return  # the latter: the front end, or the engine core beside its workers
    config = get_current_vllm_config()
    if config.parallel_config.rank:
        return  # under tensor parallelism all ranks count the same
    labels = {
        "model_name": str(config.model_config.served_model_name),
        "engine": str(config.parallel_config.data_parallel_index),
    }
    _publisher = Publisher(settings().metrics, labels)
    _publisher.start()


class Publisher(threading.Thread):
    """Writes the counters of this process for ``/metrics``, and to the log.

    Args:
        folder: where ``expose`` looks; None: the log alone.
        labels: of every sample.
    """

    def __init__(self, folder: Path | None, labels: dict[str, str]) -> None:
        super().__init__(name="prefixshare-metrics", daemon=True)
        self._folder = folder
        self._labels = labels
        self._files: dict[str, Any] = {}
        self._keys: dict[tuple[str, ...], str] = {}
        self._since_write, self._since_log = Since(), Since()
        self._share_factor = 1.0
        self._known_fallbacks: dict[str, int] = {}

    def run(self) -> None:
        """Write once a second and log once a minute, as long as the process lives."""
        logged = time.monotonic()
        while True:
            time.sleep(WRITE_SECONDS)
            if self._folder is not None:
                try:
                    self.write(self._folder)
                except OSError as e:  # the folder is on another machine, or the disk is full
                    self._folder = None
                    logger().warning("No PREFIX_SHARE metrics on /metrics: %s.", e)
            if time.monotonic() - logged >= LOG_SECONDS:
                logged = time.monotonic()
                if (line := self.log_line()) is not None:
                    logger().info("%s", line)

    def write(self, folder: Path) -> None:
        """Bring the files up to date.

        Raises:
            OSError: a file cannot be written.
        """
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        since = self._since_write.take()
        if since["decode_steps"]:
            self._share_factor = share_factor(since["kv_tokens_stock"], since["kv_tokens_read"])
        for sample in samples(self._share_factor):
            if sample.kind not in self._files:
                # prometheus_client's own file of this process has no such infix
                path = folder / f"{sample.kind}_prefixshare-{os.getpid()}.db"
                self._files[sample.kind] = MmapedDict(str(path))
            place = sample.metric, sample.suffix, *sample.labels.values()
            if (key := self._keys.get(place)) is None:
                metric = PREFIX + sample.metric
                labels = {**self._labels, **sample.labels}
                key = self._keys[place] = mmap_key(
                    metric, metric + sample.suffix, list(labels), list(labels.values()), sample.help
                )
            self._files[sample.kind].write_value(key, float(sample.value), time.time())

    def log_line(self) -> str | None:
        """What happened since it was last asked; None if nothing did."""
        n = self._since_log.take()
        counts, known = dict(STATS.fallbacks), self._known_fallbacks
        fallbacks = {
            reason: count - (known.get(reason, 0) if count > known.get(reason, 0) else 0)
            for reason, count in counts.items()
            if count != known.get(reason, 0)
        }  # a count below the known one: it was reset in between
        self._known_fallbacks = counts
        if not n["decode_steps"] and not fallbacks:
            return None
        steps, plans, read, stock = (
            int(n[k]) for k in ("decode_steps", "plans", "kv_tokens_read", "kv_tokens_stock")
        )
        line = (
            f"PREFIX_SHARE: {steps} decode steps, {int(n['shared_steps'])} of them shared KV; "
            f"{read} KV tokens read, {stock - read} saved "
            f"(share factor {share_factor(stock, read):.2f}); {plans} plans made "
            f"({1e3 * n['plan_seconds'] / max(1, plans):.2f} ms each), {steps - plans} reused; "
            f"imbalance {STATS.imbalance:.2f}"
        )
        if fallbacks:
            line += f"; fallbacks: {', '.join(f'{k} ({v})' for k, v in fallbacks.items())}"
        return f"{line}."


_publisher: Publisher | None = None
