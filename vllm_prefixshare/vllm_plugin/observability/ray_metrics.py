"""The counters as metrics of Ray, whose ``/metrics`` covers every process of a node.

Ray does not scrape the front end's ``/metrics``. A thread of the front end, which is a Ray actor,
therefore reads the files of the engine's workers and sets Ray's metrics once a second. A worker of
vLLM's Ray executor is an actor itself and forwards its own files.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.metric_files import FileCollector

SECONDS = 1.0


def connected() -> bool:
    """Whether this process belongs to Ray: an actor, a task or a driver."""
    # without Ray, vLLM's attempt to import it finds any folder of that name, such as /tmp/ray
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def forward(folder: Path) -> None:
    """Start the ``Forwarder`` of this process, if it belongs to Ray and has none yet."""
    global _forwarder
    if _forwarder is None and connected():
        _forwarder = Forwarder(folder)
        _forwarder.start()


class Forwarder(threading.Thread):
    """Sets Ray's metrics from the files in ``folder``.

    Ray names them ``ray_vllm_prefixshare_...`` and adds the process and its node. ``ReplicaId`` is
    Ray Serve's, empty elsewhere, as in vLLM's metrics under Ray. A Ray histogram takes single
    observations, which the files do not have, so plan time is exported as a sum.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(name="prefixshare-ray-metrics", daemon=True)
        self._collector = FileCollector(folder)
        self._metrics: dict[str, Any] = {}
        self._values: dict[tuple[str, ...], float] = {}

    def run(self) -> None:
        """Forward once a second while the process belongs to Ray."""
        while connected():
            time.sleep(SECONDS)
            try:
                self.forward()
            except Exception as e:  # Ray is shutting down, or the folder was removed
                logger().warning("No PREFIX_SHARE metrics in Ray: %s.", e)
                return

    def forward(self) -> None:
        """Bring Ray's metrics up to date."""
        from ray.util import metrics

        replica = _replica_id()
        for family in self._collector.collect():
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_count")):
                    continue
                name = sample.name.removesuffix("_total").removesuffix("_sum")
                labels = {**sample.labels, "ReplicaId": replica}
                if (metric := self._metrics.get(name)) is None:
                    kind = metrics.Gauge if family.type == "gauge" else metrics.Counter
                    metric = kind(name, family.documentation, tuple(labels))
                    self._metrics[name] = metric
                if family.type == "gauge":
                    metric.set(sample.value, labels)
                    continue
                place = name, *labels.values()
                before = self._values.get(place, 0.0)
                self._values[place] = sample.value
                if sample.value > before:
                    metric.inc(sample.value - before, labels)


def _replica_id() -> str:
    """The id of this process's Ray Serve replica; empty outside Ray Serve."""
    serve = sys.modules.get("ray.serve")
    if serve is None:
        return ""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except serve.exceptions.RayServeException:
        return ""


_forwarder: Forwarder | None = None
