"""The counters on the server's ``/metrics`` and, once a minute, in the log.

Workers count, and the front end answers ``/metrics``. The first worker of an engine writes the
counters once a second into files of prometheus_client's multi-process mode, which the front end
reads at every scrape. So a step pays nothing, and no vLLM function is wrapped: vLLM's own channel
for statistics has typed fields only, and an entry point of ``vllm.stat_logger_plugins`` would
switch vLLM's statistics on for users who switched them off.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vllm_prefixshare.integration import ray_metrics
from vllm_prefixshare.integration.log import logger
from vllm_prefixshare.integration.stats import PLAN_BUCKETS, STATS, Since, share_factor
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.settings import settings

VARIABLE = "VLLM_PREFIXSHARE_METRICS"
#: where it is set, as with several API servers, ``/metrics`` shows only the folder that it names
SHARED = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "vllm_prefixshare_"
TICK_SECONDS, WRITE_SECONDS, LOG_SECONDS = 0.02, 1.0, 60.0

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
    """Samples of ``STATS``. Known fallback reasons start at 0, so that an alert on an increase sees
    the first one.
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
    """In the front end: make the folder, name it to the workers, and let ``/metrics`` read it. In a
    Ray process, forward the folder's counters to Ray's own metrics.

    Raises:
        PrefixShareError: see ``named_folder``.
    """
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = str(named_folder() or _temporary_folder())
    os.environ[VARIABLE] = folder
    settings.cache_clear()  # a forked worker inherits the cached settings
    remove_ended(Path(folder))
    if not os.environ.get(SHARED) and folder not in _EXPOSED:
        _EXPOSED.append(folder)
        MultiProcessCollector(REGISTRY, path=folder)
    if _folder is not None and folder == _folder.name:  # others may hold several engines' counters
        ray_metrics.forward(folder)


def named_folder() -> Path | None:
    """The folder that the environment names, made if it is missing; None if it names none.

    Raises:
        PrefixShareError: no file can be made there.
    """
    shared = os.environ.get(SHARED)
    folder = Path(shared) if shared else settings().metrics
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        name = SHARED if shared else VARIABLE
        raise PrefixShareError(
            f"{name}={str(folder)!r} is not a usable folder ({e.strerror}): name another or unset "
            "it."
        ) from None
    return folder


#: Folders that the registry of this process reads.
_EXPOSED: list[str] = []
_folder: tempfile.TemporaryDirectory[str] | None = None


def _temporary_folder() -> str:
    """A folder that is deleted when this process ends."""
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
        return  # not initialized: the front end, or the engine core beside its workers
    config = get_current_vllm_config()
    if config.parallel_config.rank:
        return  # under tensor parallelism all ranks count the same
    labels = {
        "model_name": str(config.model_config.served_model_name),
        "engine": str(config.parallel_config.data_parallel_index),
    }
    folder = settings().metrics
    if folder is None and ray_metrics.connected():  # made by vLLM's Ray executor
        folder = Path(_temporary_folder())
        ray_metrics.forward(str(folder))
    _publisher = Publisher(folder, labels)
    _publisher.start()


def remove_ended(folder: Path) -> None:
    """Remove the files of workers that have ended: this server must not report their counts."""
    for path in folder.glob("*_prefixshare-*.db"):
        # a worker keeps its files locked; where the file system has no locks, all files stay
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


class Publisher(threading.Thread):
    """Writes the counters of this process for ``/metrics``, and to the log.

    Args:
        folder: where ``expose`` looks; None: the log alone.
        labels: added to every sample.
    """

    def __init__(self, folder: Path | None, labels: dict[str, str]) -> None:
        super().__init__(name="prefixshare-metrics", daemon=True)
        self._folder = folder
        self._labels = labels
        self._files: dict[str, Any] = {}
        self._locks: list[BinaryIO] = []
        self._keys: dict[tuple[str, ...], str] = {}
        self._since_write, self._since_log = Since(), Since()
        self._share_factor = 1.0
        self._known_fallbacks: dict[str, int] = {}

    def run(self) -> None:
        """Write once a second and log once a minute, until the process ends. Write at once when
        decodes stop, or a step takes long: the process may be killed right after the last answer,
        as by Ray Data.
        """
        wrote = logged = time.monotonic()
        seen = written = STATS.decode_steps
        while True:
            time.sleep(TICK_SECONDS)
            now, before, seen = time.monotonic(), seen, STATS.decode_steps
            stopped = seen == before != written
            due = now - wrote >= WRITE_SECONDS
            if self._folder is not None and (stopped or due):
                written = seen
                if due:
                    wrote = now
                try:
                    self.write(self._folder, due)
                except OSError as e:  # the folder is on another machine, or the disk is full
                    self._folder = None
                    logger().warning("No PREFIX_SHARE metrics on /metrics: %s.", e)
            if now - logged >= LOG_SECONDS:
                logged = now
                if (line := self.log_line()) is not None:
                    logger().info("%s", line)

    def write(self, folder: Path, second_over: bool = True) -> None:
        """Bring the files up to date.

        Args:
            second_over: the share factor's next second begins here.

        Raises:
            OSError: a file cannot be written.
        """
        from prometheus_client.mmap_dict import mmap_key

        since = self._since_write.take(restart=second_over)
        if since["decode_steps"]:
            self._share_factor = share_factor(since["kv_tokens_stock"], since["kv_tokens_read"])
        for sample in samples(self._share_factor):
            if sample.kind not in self._files:
                self._files[sample.kind] = self._new_file(folder, sample.kind)
            place = sample.metric, sample.suffix, *sample.labels.values()
            if (key := self._keys.get(place)) is None:
                metric = PREFIX + sample.metric
                labels = {**self._labels, **sample.labels}
                key = self._keys[place] = mmap_key(
                    metric, metric + sample.suffix, list(labels), list(labels.values()), sample.help
                )
            self._files[sample.kind].write_value(key, float(sample.value), time.time())

    def _new_file(self, folder: Path, kind: str) -> Any:
        """A file of prometheus_client, locked until this process ends.

        Its name is unique: a folder may serve several hosts and containers, where process ids are
        not. The file gets this name once it is readable, because a scrape may come at any time.
        """
        from prometheus_client.mmap_dict import MmapedDict

        name = f"{kind}_prefixshare-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.db"
        draft = folder / f"{name}.new"
        lock = draft.open("ab")
        self._locks.append(lock)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file = MmapedDict(str(draft))
        draft.rename(folder / name)
        return file

    def log_line(self) -> str | None:
        """The log line for the time since the last call; None if nothing happened."""
        n = self._since_log.take()
        counts, known = dict(STATS.fallbacks), self._known_fallbacks
        fallbacks = {
            reason: count - (known.get(reason, 0) if count > known.get(reason, 0) else 0)
            for reason, count in counts.items()
            if count != known.get(reason, 0)
        }  # a count below the known one was reset in between
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
