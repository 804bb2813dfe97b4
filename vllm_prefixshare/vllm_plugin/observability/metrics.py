"""The counters on the server's ``/metrics`` and, once a minute, in the log.

Several processes count, and the front end answers ``/metrics``. Each counting process writes its
counters once a second, in a thread, into files of prometheus_client's multi-process mode, which the
front end reads at every scrape. A step pays nothing, and no vLLM function is wrapped: vLLM's own
channel for statistics has typed fields only, and an entry point of ``vllm.stat_logger_plugins``
would enable vLLM's statistics for users who disabled them.

A failure of a file or folder does not reach the engine: it is logged once, and writing is retried.
"""

import contextlib
import errno
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import PROMPT_PARTS, settings
from vllm_prefixshare.vllm_plugin.observability import ray_metrics
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.metric_files import (
    PREFIX,
    TEMPORARY,
    FileCollector,
    MetricFile,
    is_temporary,
    remove_ended,
)
from vllm_prefixshare.vllm_plugin.observability.metric_sources import (
    DecodeSteps,
    PromptParts,
    Source,
)
from vllm_prefixshare.vllm_plugin.prompts import parts

VARIABLE = "VLLM_PREFIXSHARE_METRICS"
#: If it is set, as with several API servers, ``/metrics`` shows only the folder that it names.
SHARED = "PROMETHEUS_MULTIPROC_DIR"
TICK_SECONDS, WRITE_SECONDS, LOG_SECONDS = 0.02, 1.0, 60.0


def expose() -> None:
    """In the front end: create the folder, pass its name to the workers in the environment, and
    let ``/metrics`` read it. In a Ray process, forward the folder's counters to Ray's metrics.
    Where the folder cannot be used, there are no metrics, and the log has the reason.
    """
    from prometheus_client import REGISTRY

    try:
        folder = named_folder() or _temporary_folder()
    except (OSError, PrefixShareError) as e:
        os.environ.pop(VARIABLE, None)  # workers inherit it
        settings.cache_clear()
        logger().warning("No PREFIX_SHARE metrics on /metrics: %s.", str(e).removesuffix("."))
        return
    os.environ[VARIABLE] = str(folder)
    settings.cache_clear()  # a forked worker inherits the cached settings
    remove_ended(folder)
    if not os.environ.get(SHARED) and folder not in _EXPOSED:
        _EXPOSED.append(folder)
        REGISTRY.register(FileCollector(folder))
    if is_temporary(folder):  # another folder may hold the counters of several engines
        ray_metrics.forward(folder)


def named_folder() -> Path | None:
    """The folder that the user names in the environment, created if it is missing, or None. The
    temporary folder of a parent process does not count: the parent removes it, and the counts in it
    are another server's.

    Raises:
        PrefixShareError: no file can be created there, for another reason than a full disk.
    """
    shared = os.environ.get(SHARED)
    folder = Path(shared) if shared else settings().metrics
    if folder is None or (not shared and is_temporary(folder)):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return folder
        name = SHARED if shared else VARIABLE
        raise PrefixShareError(
            f"{name}={str(folder)!r} is not a usable folder ({e.strerror}): name another or unset "
            "it."
        ) from None
    return folder


#: Folders that the registry of this process reads.
_EXPOSED: list[Path] = []
_folder: "tempfile.TemporaryDirectory[str] | None" = None


def _temporary_folder() -> Path:
    """A folder that is deleted when this process ends.

    Raises:
        OSError: it cannot be created.
    """
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix=TEMPORARY)
    return Path(_folder.name)


def start_in_worker(config: Any = None) -> None:
    """Publish the decode steps if this process is the first worker of an engine. May be called
    again.

    Args:
        config: the ``VllmConfig``; None for vLLM's current one.
    """
    import torch.distributed
    from vllm.config import get_current_vllm_config

    if not torch.distributed.is_initialized():
        return  # the front end, or an engine core with workers in other processes
    if config is None:
        config = get_current_vllm_config()
    if config.parallel_config.rank:
        return  # under tensor parallelism all ranks have equal counts
    _publish(DecodeSteps, config, {"engine": str(config.parallel_config.data_parallel_index)})


def start_for_engine(process: str, config: Any, uses_prefix_share: bool) -> None:
    """Activate shared host work in a process of an engine, and publish its counters. May be called
    again; if one process has several roles, the first call names it.

    Args:
        process: ``api_server``, ``engine_core`` or ``worker``. ``api_server`` also exposes the
            metrics.
        config: the finished ``VllmConfig``.
        uses_prefix_share: whether the engine's attention backend is PREFIX_SHARE.

    Raises:
        PrefixShareError: a setting is not valid.
    """
    parts.activate(uses_prefix_share)
    active = any(map(parts.is_enabled, PROMPT_PARTS))
    if process == "api_server" and (uses_prefix_share or active):
        expose()
    if not active:
        return
    _publish(lambda: PromptParts(process), config, {"process": process}, kind="prompts")


def _publish(make_source: Any, config: Any, labels: dict[str, str], kind: str = "steps") -> None:
    """Start a ``Publisher``. It replaces the publisher of this kind of an earlier engine in this
    process, if that has other labels: later counts have the new labels.

    Args:
        make_source: returns the ``Source``.
        config: the engine's; a draft model has another ``VllmConfig`` with the same instance_id.
    """
    earlier = _publishers.get(kind)
    if earlier is not None and earlier.instance == config.instance_id:
        return
    labels = {"model_name": str(config.model_config.served_model_name), **labels}
    if earlier is not None and earlier.labels == labels:
        earlier.instance = config.instance_id
        return
    folder = settings().metrics
    if folder is None and ray_metrics.connected():  # a worker of vLLM's Ray executor
        with contextlib.suppress(OSError):
            folder = _temporary_folder()
            ray_metrics.forward(folder)
    if earlier is not None:
        earlier.end()
        _ended.append(earlier)
    publisher = Publisher(make_source(), folder, labels, follows=earlier is not None)
    publisher.instance = config.instance_id
    _publishers[kind] = publisher
    publisher.start()


class Publisher(threading.Thread):
    """Writes the counters of a source for ``/metrics``, and to the log.

    Args:
        source: counters of this process.
        folder: where ``expose`` looks for files; None to write the log only.
        labels: added to every sample.
        follows: whether the counts so far were published with other labels; they are subtracted.

    Attributes:
        instance: ``VllmConfig.instance_id`` of the engine that is published.
    """

    def __init__(
        self, source: Source, folder: Path | None, labels: dict[str, str], follows: bool = False
    ) -> None:
        super().__init__(name="prefixshare-metrics", daemon=True)
        self.labels = labels
        self.instance = ""
        self._source = source
        self._folder = folder
        self._end = threading.Event()
        self._files: dict[str, MetricFile] = {}
        self._keys: dict[tuple[str, ...], str] = {}
        self._has_warned = False
        self._base = (
            {s.place: s.value for s in source.samples(True) if not s.kind.startswith("gauge")}
            if follows
            else {}
        )
        self._last = dict(self._base)

    def run(self) -> None:
        """Write once a second and log once a minute, until the process ends or ``end`` is called.
        Write immediately when counting stops or a step takes long: the process may be killed right
        after the last answer, for example by Ray Data.
        """
        wrote = logged = time.monotonic()
        seen = written = self._source.progress()
        while not self._end.wait(TICK_SECONDS):
            now = time.monotonic()
            before = seen
            seen = self._source.progress()
            stopped = seen == before != written
            due = now - wrote >= WRITE_SECONDS
            if stopped or due:
                written = seen
                if due:
                    wrote = now
                with _ticking:
                    self._try_to_write(due)
            if now - logged >= LOG_SECONDS:
                logged = now
                with _ticking:
                    if (line := self._source.log_line()) is not None:
                        logger().info("%s", line)

    def end(self) -> None:
        """Write a last time and stop. The files stay locked."""
        self._end.set()
        if self.is_alive():
            self.join(WRITE_SECONDS)
        with _ticking:
            self._try_to_write(True)

    def _try_to_write(self, second_over: bool) -> None:
        if self._folder is None:
            return
        try:
            self.write(self._folder, second_over)
        except OSError as e:  # a folder on another machine, a removed folder, a full disk
            if not self._has_warned:
                self._has_warned = True
                logger().warning("No PREFIX_SHARE metrics on /metrics: %s.", e)

    def write(self, folder: Path, second_over: bool = True) -> None:
        """Bring the files up to date.

        Args:
            second_over: the next second of recent values begins here.

        Raises:
            OSError: a file cannot be written.
        """
        from prometheus_client.mmap_dict import mmap_key

        for sample in self._source.samples(second_over):
            if sample.kind not in self._files:
                self._files[sample.kind] = MetricFile(folder, sample.kind)
            place = sample.place
            if (key := self._keys.get(place)) is None:
                metric = PREFIX + sample.metric
                labels = {**self.labels, **sample.labels}
                key = self._keys[place] = mmap_key(
                    metric, metric + sample.suffix, list(labels), list(labels.values()), sample.help
                )
            if sample.value < self._last.get(place, 0.0):  # the counters were reset
                self._base.pop(place, None)
            self._last[place] = sample.value
            value = sample.value - self._base.get(place, 0.0)
            self._files[sample.kind].samples[key] = float(value)
        if not is_temporary(folder) and str(folder) != os.environ.get(SHARED):
            folder.mkdir(parents=True, exist_ok=True)  # a named folder that was removed
        for file in self._files.values():
            file.write()

    def close(self) -> None:
        """Close the files in a forked child, which would otherwise keep them locked."""
        for file in self._files.values():
            file.close()


_publishers: dict[str, Publisher] = {}
_ended: list[Publisher] = []
#: Held while a thread writes or logs and during a fork: a child would inherit the locks that the
#: parent's thread holds at that moment, and has no thread to release them.
_ticking = threading.Lock()
_forking = threading.local()


def _before_fork() -> None:
    _forking.has_lock = _ticking.acquire(timeout=1.0)  # a write may wait for the disk


def _after_fork_in_parent() -> None:
    if _forking.has_lock:
        _ticking.release()


def _after_fork_in_child() -> None:
    """Forget the parent's publishers and its folder, which the parent removes."""
    global _folder, _ticking
    _ticking = threading.Lock()
    for publisher in (*_publishers.values(), *_ended):
        publisher.close()
    _publishers.clear()
    _ended.clear()
    _EXPOSED.clear()
    if _folder is not None:
        _folder._finalizer.detach()  # type: ignore[attr-defined]
        _folder = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
