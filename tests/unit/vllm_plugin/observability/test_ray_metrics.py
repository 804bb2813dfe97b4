"""The counters as metrics of Ray. What Ray's own ``/metrics`` has is read by
``tests/examples/test_ray.py``.
"""

import sys
import types
from typing import ClassVar

import pytest

from vllm_prefixshare.vllm_plugin.observability import metrics, ray_metrics, stats
from vllm_prefixshare.vllm_plugin.observability.metric_sources import DecodeSteps

LABELS = {"model_name": "small", "engine": "0"}


class Recorded:
    """In the place of Ray's metrics: what they would show."""

    shown: ClassVar[dict[str, float]] = {}

    def __init__(self, name, description, tag_keys):
        assert description
        self.name, self.tag_keys = name, tag_keys

    def set(self, value, tags):
        assert set(tags) == set(self.tag_keys) and tags["ReplicaId"] == "abc"
        self.shown[self.name + tags.get("reason", "")] = value

    def inc(self, value, tags):
        assert value > 0, "Ray refuses others"
        self.set(self.shown.get(self.name + tags.get("reason", ""), 0) + value, tags)


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray, of which this process is a replica."""
    replica = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id="abc"))
    ray = types.SimpleNamespace(is_initialized=lambda: True)
    util = types.ModuleType("ray.util")
    util.metrics = types.SimpleNamespace(Gauge=Recorded, Counter=Recorded)
    serve = types.SimpleNamespace(get_replica_context=lambda: replica)
    monkeypatch.setattr(Recorded, "shown", {})
    for name, module in (("ray", ray), ("ray.util", util), ("ray.serve", serve)):
        monkeypatch.setitem(sys.modules, name, module)
    return ray


def test_ray_shows_what_the_workers_counted(ray, monkeypatch, tmp_path):
    counted = stats.BackendStats()
    monkeypatch.setattr(stats, "STATS", counted)
    publisher = metrics.Publisher(DecodeSteps(), tmp_path, LABELS)
    forwarder = ray_metrics.Forwarder(tmp_path)
    forwarder.forward()
    assert Recorded.shown == {}, "no worker has written"
    for _ in range(2):
        counted.note_step(1000, 600)
        counted.note_plan(0.5, 1.5)
        publisher.write(tmp_path)
        forwarder.forward()
    forwarder.forward()
    shown = {name.removeprefix(metrics.PREFIX): v for name, v in Recorded.shown.items()}
    assert shown["kv_tokens_read"] == 800 and shown["kv_tokens_saved"] == 1200
    assert shown["share_factor"] == 2.5 and shown["imbalance"] == 1.5
    assert shown["plans"] == 2 and shown["plan_seconds"] == 1.0


def test_only_a_process_of_ray_forwards(ray, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(ray_metrics, "_forwarder", None)
    monkeypatch.setattr(ray_metrics.Forwarder, "start", lambda self: started.append(self))
    ray.is_initialized = lambda: False
    ray_metrics.forward(tmp_path)
    assert started == []
    ray.is_initialized = lambda: True
    ray_metrics.forward(tmp_path)
    ray_metrics.forward(tmp_path)
    assert len(started) == 1
    monkeypatch.delitem(sys.modules, "ray")
    assert not ray_metrics.connected()
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # a folder of that name
    assert not ray_metrics.connected()
