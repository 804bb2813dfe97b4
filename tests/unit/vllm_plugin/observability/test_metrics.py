"""The contents of ``/metrics`` and of the log; ``tests/engine/test_serve.py`` reads a real
server's.
"""

import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm import config as vllm_config

from tests.support.processes import run, run_python
from vllm_prefixshare import prompt_stats
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.planning.unshared import (
    NO_COMMON_PREFIX,
    NO_GAIN,
    ONE_REQUEST,
    PLAN_TOO_LARGE,
    Unshared,
)
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.hooks.selection import check_settings
from vllm_prefixshare.vllm_plugin.observability import metric_files, metrics, stats
from vllm_prefixshare.vllm_plugin.observability.metric_sources import DecodeSteps, PromptParts
from vllm_prefixshare.vllm_plugin.prompts import parts
from vllm_prefixshare.vllm_plugin.step.planner import planner_for

LABELS = {"model_name": "small", "engine": "0"}


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    counted = stats.BackendStats()
    monkeypatch.setattr(stats, "STATS", counted)
    monkeypatch.setattr(metrics, "_publishers", {})
    monkeypatch.setattr(metrics, "_ended", [])
    monkeypatch.setattr(metrics, "_EXPOSED", [])
    monkeypatch.setattr(metrics, "_folder", None)
    monkeypatch.setattr(parts, "COUNTERS", {part: parts.PartCounters() for part in parts.COUNTERS})
    monkeypatch.setenv(metrics.VARIABLE, "")
    monkeypatch.delenv(metrics.SHARED, raising=False)
    return counted


@pytest.fixture
def registry(monkeypatch):
    """In the place of the registry that a server's ``/metrics`` shows."""
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    return registry


def steps(folder: Path | None, labels: dict[str, str] = LABELS) -> metrics.Publisher:
    return metrics.Publisher(DecodeSteps(), folder, labels)


def config(model: str = "small", instance: str = "a", rank: int = 0) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        instance_id=instance,
        parallel_config=types.SimpleNamespace(rank=rank, data_parallel_index=0),
        cache_config=types.SimpleNamespace(enable_prefix_caching=True),
        model_config=types.SimpleNamespace(served_model_name=model),
    )


def test_the_log_has_a_line_for_what_happened_and_none_for_nothing(counted):
    source = DecodeSteps()
    assert source.log_line() is None
    counted.note_plan(0.0005, 1.25, Unshared(PLAN_TOO_LARGE))
    for _ in range(4):
        counted.note_step(1000, 750)
    assert source.log_line() == (
        "PREFIX_SHARE: 4 decode steps, 4 of them shared KV; 1000 KV tokens read, 3000 saved "
        "(share factor 4.00); 1 plans made (0.50 ms each), 3 reused; imbalance 1.25; "
        "fallbacks: plan too large (1)."
    )
    assert source.log_line() is None
    counted.reset()
    counted.note_step(10, 0)
    assert "1 decode steps, 0 of them shared KV; 10 KV tokens read" in source.log_line()


def test_a_warm_up_is_not_counted(counted):
    source = DecodeSteps()
    zero = counted.as_dict()
    with stats.warming_up():
        counted.note_plan(0.0005, 1.25, Unshared(ONE_REQUEST))
        counted.note_step(1000, 750)
    assert counted.as_dict() == zero
    assert source.log_line() is None
    counted.note_step(10, 0)
    assert counted.as_dict()["decode_steps"] == 1


def test_the_log_has_the_kernel_and_the_reasons_of_plans_without_sharing(counted):
    source = DecodeSteps()
    counted.note_engine("native", {NO_COMMON_PREFIX: "prefix caching is off"})
    for unshared in (Unshared(NO_COMMON_PREFIX), Unshared(ONE_REQUEST), Unshared(NO_GAIN, -0.12)):
        counted.note_plan(0.0005, 1.25, unshared)
    counted.note_plan(0.0005, 1.25, Unshared(ONE_REQUEST))
    assert source.log_line() is None, "nothing was decoded"
    counted.note_plan(0.0005, 1.25, Unshared(NO_GAIN, -0.1))
    counted.note_step(10, 0)
    assert source.log_line().endswith(
        "; imbalance 1.25; native kernel; plans without sharing: "
        "no gain expected (1, expected gain -10.0%)."
    )
    assert counted.as_dict()["unshared_plans"] == {
        "prefix caching is off": 1,
        "one request at a time": 2,
        "no gain expected": 2,
    }
    assert counted.as_dict()["kernels"] == ["native"]
    counted.reset()
    assert (counted.unshared_plans, counted.expected_gain) == ({}, None)
    assert counted.kernels == ["native"], "the engine stays"


def test_files_hold_fallbacks_and_the_recent_share_factor(counted, tmp_path):
    publisher = steps(tmp_path)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))

    def value(name, **labels):
        return registry.get_sample_value(metrics.PREFIX + name, {**LABELS, **labels})

    for held, saved, factor in ((1000, 500, 2.0), (1000, 800, 5.0)):
        counted.note_step(held, saved)
        publisher.write(tmp_path)
        assert value("share_factor") == factor
    publisher.write(tmp_path)
    assert value("share_factor") == 5.0, "kept while nothing decodes"
    assert value("kernel_info", kernel="native") is None
    counted.note_engine("native", {})
    counted.note_fallback("a sliding window")
    counted.note_plan(0.0007, 1.5)
    counted.note_plan(3.0, 1.1, Unshared(NO_GAIN, -0.25))
    publisher.write(tmp_path)
    assert value("kernel_info", kernel="native") == 1
    assert value("fallbacks_total", reason="a sliding window") == 1
    assert value("fallbacks_total", reason="planning failed") == 0
    assert value("unshared_plans_total", reason="no gain expected") == 1
    assert value("unshared_plans_total", reason="no common prefix") == 0
    assert value("expected_gain") == -0.25
    assert value("kv_tokens_saved_total") == 1300
    assert value("imbalance") == 1.1
    buckets = [value("plan_seconds_bucket", le=le) for le in ("0.0005", "0.001", "0.1", "+Inf")]
    assert buckets == [0, 1, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_publishes(rank, monkeypatch):
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: config(rank=rank))
    monkeypatch.setattr(metrics.Publisher, "start", lambda self: None)
    metrics.start_in_worker()
    assert not metrics._publishers, "not a worker"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    metrics.start_in_worker()
    assert bool(metrics._publishers) == (rank == 0)


@pytest.mark.parametrize("folder", ["{here}/file", "{here}/file/folder", "/proc"])
def test_a_folder_in_which_no_file_can_be_made_ends_no_engine(
    monkeypatch, tmp_path, caplog, folder
):
    (tmp_path / "file").touch()
    monkeypatch.setenv(metrics.VARIABLE, folder.format(here=tmp_path))
    with pytest.raises(PrefixShareError, match=r"METRICS=.* is not a usable folder \(\w"):
        metrics.named_folder()
    check_settings()
    metrics.expose()
    (warning,) = caplog.messages
    start = "No PREFIX_SHARE metrics on /metrics: VLLM_PREFIXSHARE_METRICS="
    assert warning.startswith(start)
    assert settings().metrics is None, "workers do not try"
    assert not metrics._EXPOSED


def test_the_variable_that_named_the_folder_is_in_the_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(metrics.SHARED, str(tmp_path / "file"))
    with pytest.raises(PrefixShareError, match=f"^{metrics.SHARED}='.*file' is not a usable"):
        metrics.named_folder()


def test_the_share_factor_is_of_whole_seconds_also_where_decodes_pause(counted, tmp_path):
    publisher = steps(tmp_path)
    publisher.write(tmp_path)
    counted.note_step(900, 600)
    publisher.write(tmp_path, second_over=False)
    assert publisher._source._share_factor == 3.0
    counted.note_step(900, 0)
    for second_over in (False, True):
        publisher.write(tmp_path, second_over)
        assert publisher._source._share_factor == 1.5
    counted.note_step(900, 600)
    publisher.write(tmp_path, second_over=False)
    assert publisher._source._share_factor == 3.0, "of the next second"


def test_the_front_end_and_the_workers_have_one_folder(monkeypatch, tmp_path, registry):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(metrics.VARIABLE, "~/counters")
    metrics.expose()
    assert metrics._EXPOSED == [settings().metrics] == [tmp_path / "counters"]
    assert list((tmp_path / "counters").iterdir()) == [], "the check leaves nothing there"


def test_files_of_workers_that_ended_are_removed_and_others_stay(counted, tmp_path):
    publisher = steps(tmp_path)
    counted.note_step(1000, 500)
    publisher.write(tmp_path)
    ended = tmp_path / "counter_prefixshare-host-1-0.db"
    own_of_vllm = tmp_path / "counter_1.db"
    (written,) = tmp_path.glob("counter_prefixshare-*.db")
    for path in (ended, own_of_vllm):
        path.write_bytes(written.read_bytes())
    metric_files.remove_ended(tmp_path)
    assert not ended.exists()
    assert written.exists() and own_of_vllm.exists()
    assert len(list(tmp_path.iterdir())) == 4, "three of this worker, one of vLLM"


def test_two_workers_with_one_process_id_have_files_of_their_own(counted, tmp_path):
    counted.note_step(1000, 500)
    for _ in range(2):  # as in two containers that share a folder
        steps(tmp_path).write(tmp_path)
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    assert registry.get_sample_value(f"{metrics.PREFIX}kv_tokens_saved_total", LABELS) == 1000


def test_counts_are_written_when_decodes_stop(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "WRITE_SECONDS", 3600)
    publisher = steps(tmp_path)
    publisher.start()
    time.sleep(0.3)
    counted.note_step(1000, 400)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("counter_*.db")) and time.monotonic() < until:
        time.sleep(0.05)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    assert registry.get_sample_value(f"{metrics.PREFIX}kv_tokens_read_total", LABELS) == 600


def test_where_vllm_has_a_folder_the_counters_are_there(monkeypatch, tmp_path):
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "theirs"))
    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path / "ours"))
    metrics.expose()
    assert settings().metrics == tmp_path / "theirs"
    assert metrics._EXPOSED == [], "vLLM's own collector reads it, and once is enough"


# -- faults

FULL = Mock(side_effect=OSError(28, "No space left on device"))
FULL_DISK = """
import os, sys, time
from pathlib import Path
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.observability.metric_sources import DecodeSteps
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
os.environ["VLLM_PREFIXSHARE_METRICS"] = sys.argv[1]
folder = metrics.named_folder()
Path(sys.argv[1], "fill").write_bytes(bytes(int(sys.argv[2])))
try:
    with Path(sys.argv[1], "more").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
except OSError:
    pass
publisher = metrics.Publisher(DecodeSteps(), folder, {"model_name": "m", "engine": "0"})
publisher.start()
deadline = time.monotonic() + 60
while not publisher._has_warned and time.monotonic() < deadline:
    time.sleep(0.1)
time.sleep(2.5)
assert len(os.listdir(folder)) == 2, "nothing half written"
Path(sys.argv[1], "fill").unlink()
while len(list(folder.glob("*.db"))) < 3 and time.monotonic() < deadline:
    time.sleep(0.1)
assert len(list(folder.glob("*.db"))) == 3, "written once there is room"
"""


def test_a_full_disk_does_not_end_the_process(tmp_path):
    """On a file system of its own, in a mount namespace of its own."""
    mount = 'mount -t tmpfs -o size=128k none "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*command, "true"]).returncode:
        pytest.skip("no mount namespaces here")
    done = run([*command, sys.executable, "-c", FULL_DISK, tmp_path, "65536"], timeout=120)
    said = done.stdout + done.stderr
    assert said.count("No PREFIX_SHARE metrics on /metrics: [Errno 28]") == 1


def test_a_folder_that_cannot_be_made_costs_the_metrics_alone(monkeypatch, caplog, registry):
    monkeypatch.setattr(metrics.tempfile, "TemporaryDirectory", FULL)
    metrics.expose()
    assert settings().metrics is None
    assert "No PREFIX_SHARE metrics on /metrics: [Errno 28]" in caplog.text


def test_a_named_folder_on_a_full_disk_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path))
    monkeypatch.setattr(metrics.tempfile, "TemporaryFile", FULL)
    assert metrics.named_folder() == tmp_path


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(metrics.PREFIX + name, {**LABELS, **labels})


@pytest.mark.parametrize("fault", ["removed", "replaced by a file", "all files", "damaged"])
def test_a_named_folder_recovers(fault, counted, registry, monkeypatch, tmp_path, caplog):
    folder = tmp_path / "m"
    monkeypatch.setenv(metrics.VARIABLE, str(folder))
    metrics.expose()
    publisher = steps(folder)
    counted.note_step(1000, 500)
    publisher.write(folder)
    if fault in ("removed", "replaced by a file"):
        shutil.rmtree(folder)
        if fault == "replaced by a file":
            folder.touch()
    for path in folder.glob("*.db"):
        path.unlink() if fault == "all files" else path.write_bytes(b"\xff" * 5000)
    assert value(registry, "decode_steps_total") is None
    for _ in range(3):
        publisher._try_to_write(True)
    if fault == "replaced by a file":
        assert caplog.text.count("No PREFIX_SHARE metrics on /metrics: ") == 1
        folder.unlink()
        publisher._try_to_write(True)
    assert value(registry, "decode_steps_total") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"", b"x", bytes(8), b"\xff" * 4096, b"\x10\x27\0\0" + bytes(4092),
        b"\x40\0\0\0\0\0\0\0\xe4\xff\xff\xff" + b"[]" * 40,
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_costs_itself_alone(content, counted, registry, monkeypatch,
                                                      tmp_path, caplog):  # fmt: skip
    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path))
    metrics.expose()
    counted.note_step(1000, 500)
    steps(tmp_path).write(tmp_path)
    (tmp_path / "notes.db").write_bytes(content)
    (tmp_path / "counter_1.db").write_bytes(content)
    (tmp_path / "counter_prefixshare-host-1-0.db").write_bytes(content)
    (tmp_path / "gauge_prefixshare-host-1-0.db").write_bytes(content)
    (tmp_path / "counter_prefixshare-host-2-0.db").mkdir()
    os.mkfifo(tmp_path / "counter_prefixshare-host-3-0.db")
    for _ in range(2):
        assert value(registry, "decode_steps_total") == 1
        generate_latest(registry)
    assert 2 <= caplog.text.count("are left out") <= 4
    metrics.expose()  # which removes what has ended
    assert value(registry, "decode_steps_total") == 1


def test_a_truncated_file_of_a_running_worker_is_left_out(counted, registry, monkeypatch, tmp_path):
    monkeypatch.setenv(metrics.VARIABLE, str(tmp_path))
    metrics.expose()
    steps(tmp_path).write(tmp_path)
    (path,) = tmp_path.glob("counter_*.db")
    content = path.read_bytes()
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        generate_latest(registry)


INHERITS = """
import os, subprocess, sys, time
from pathlib import Path
from prometheus_client import REGISTRY, generate_latest
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.observability.metric_sources import DecodeSteps
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.settings import settings
def shown():
    lines = generate_latest(REGISTRY).decode().splitlines()
    return [float(x.split()[-1]) for x in lines if "decode_steps_total{" in x]
def count(steps):
    metrics.expose()
    STATS.decode_steps += steps
    publisher = metrics.Publisher(DecodeSteps(), settings().metrics, {"model_name": "m"})
    publisher.write(settings().metrics)
    return publisher
if sys.argv[1] == "parent":
    publisher = count(1000)
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "child"], stdin=subprocess.PIPE)
    if (pid := os.fork()) == 0:
        publisher = count(20)
        assert shown() == [20], shown()
        sys.exit(0)  # runs this process's finalizers, not the parent's
    assert os.waitpid(pid, 0)[1] == 0
    assert shown() == [1000], shown()
    print(child.pid)
else:
    publisher = count(7)
    assert shown() == [7], shown()
    sys.stdin.read()  # until the parent has ended
    publisher.write(settings().metrics)
    assert shown() == [7], shown()
    print("child is well")
"""


def test_a_server_started_by_another_has_its_own_counts():
    done = run_python(INHERITS, "parent", INHERITS, timeout=240)
    assert "child is well" in done.stdout, done.stderr


def test_a_second_engine_in_the_process_has_its_own_labels(counted, registry, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    metrics.expose()

    def start(model: str, instance: str) -> None:
        monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: config(model, instance))
        metrics.start_in_worker()

    def shown(model: str) -> float | None:
        metrics._publishers["steps"].write(settings().metrics)
        return value(registry, "decode_steps_total", model_name=model)

    start("small", "a")
    start("draft of small", "a")
    counted.note_step(1000, 500)
    assert shown("small") == 1
    start("large", "b")
    assert shown("large") == 0
    counted.note_step(1000, 500)
    counted.note_step(1000, 500)
    assert (shown("small"), shown("large"), shown("draft of small")) == (1, 2, None)
    start("large", "c")
    assert len(metrics._ended) == 1, "one publisher for each set of labels"
    counted.reset()
    counted.note_step(1000, 500)
    assert shown("large") == 1, "after a reset"
    for publisher in (*metrics._publishers.values(), *metrics._ended):
        publisher.end()


def test_an_engine_whose_layers_vllm_remembers_is_published(monkeypatch):
    """VLLM asks for the backend of a kind of layer once in a process."""
    shape = AttentionConfig(4, 2, 64, 16)
    later = config("later", "b")
    later.parallel_config.pipeline_parallel_size = 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    planner_for(TorchExecutor(shape), shape, later)
    publisher = metrics._publishers["steps"]
    assert publisher.labels == {"model_name": "later", "engine": "0"}
    publisher.end()


# -- shared host work


def count_prompts(seconds: float = 0.5) -> None:
    counters = parts.COUNTERS["tokenization"]
    counters.requests += 4
    counters.fallbacks += 1
    counters.units += 4000
    counters.shared_units += 3000
    counters.seconds += seconds
    counters.cache_bytes = 3 << 20


def test_the_log_has_a_line_for_shared_host_work():
    source = PromptParts("api_server")
    assert source.log_line() is None
    count_prompts()
    assert source.log_line() == (
        "Shared host work, api_server: tokenization of 4 requests, 75.0% shared, 125.00 ms each, "
        "1 left to vLLM; caches 3 MiB."
    )
    assert source.log_line() is None
    parts.COUNTERS["hashes"].requests += 1
    assert "hashes of 1 requests, 0.0% shared" in source.log_line()


def test_counts_can_be_read_and_reset_in_python():
    count_prompts()
    worker = stats.PrefixShareWorkerExtension()
    for read in (prompt_stats, lambda: worker.prefix_share_stats()["prompts"]):
        assert read()["tokenization"]["shared_units"] == 3000
        assert set(read()) == set(parts.COUNTERS)
    worker.prefix_share_stats(reset=True)
    count_prompts()
    assert prompt_stats(reset=True)["tokenization"]["requests"] == 4
    after = prompt_stats()["tokenization"]
    assert after["requests"] == after["seconds"] == 0
    assert after["cache_bytes"] == 3 << 20, "what the cache holds"


def test_without_an_active_part_nothing_is_published(monkeypatch):
    monkeypatch.setattr(parts, "_active", frozenset())
    metrics.start_for_engine("api_server", config(), uses_prefix_share=False)
    assert not metrics._publishers and not metrics._EXPOSED


@pytest.mark.parametrize("process", ["api_server", "engine_core", "worker"])
def test_a_process_publishes_its_parts_from_the_start(process, registry, monkeypatch):
    monkeypatch.setattr(parts, "_active", frozenset(parts.COUNTERS))
    metrics.expose()
    metrics.start_for_engine(process, config(), uses_prefix_share=True)
    metrics.start_for_engine("worker", config(), uses_prefix_share=True)
    (publisher,) = metrics._publishers.values()
    publisher.write(settings().metrics)
    names = {
        (s.name.removeprefix(f"{metrics.PREFIX}prompt_"), s.labels["part"])
        for family in registry.collect()
        for s in family.samples
        if s.labels["process"] == process and s.labels["model_name"] == "small"
    }
    here = {"api_server": {"tokenization", "detokenization", "copies"},
            "engine_core": {"hashes", "lookup", "copies"}, "worker": {"copies"}}  # fmt: skip
    fields = {f"{name}_total" for name in ("requests", "fallbacks", "units", "shared_units")}
    fields |= {"seconds_total", "cache_bytes"}
    assert names == {(name, part) for name in fields for part in here[process]}
    publisher.end()


FORKS = """
import os, sys, time, warnings
from types import SimpleNamespace
from prometheus_client import REGISTRY
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.prompts import parts
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
warnings.simplefilter("ignore", DeprecationWarning)  # of Python: fork with threads
config = SimpleNamespace(
    instance_id="a", model_config=SimpleNamespace(served_model_name="m"))
metrics.start_for_engine("api_server", config, uses_prefix_share=True)
parts.COUNTERS["tokenization"].requests += 3
parts.COUNTERS["copies"].requests += 3
STATS.decode_steps += 1
children = []
for _ in range(20):
    if (pid := os.fork()) == 0:
        try:
            assert STATS.decode_steps == 0
            assert parts.COUNTERS["copies"].requests == 0
            if not children:
                metrics.start_for_engine("engine_core", config, uses_prefix_share=True)
                metrics.start_for_engine("worker", config, uses_prefix_share=True)
                parts.COUNTERS["hashes"].requests += 5
                parts.COUNTERS["copies"].requests += 4
                assert list(REGISTRY.collect()) is not None
                time.sleep(3)
            os._exit(0)
        finally:
            os._exit(1)
    children.append(pid)
name = "vllm_prefixshare_prompt_requests_total"
expected = {("tokenization", "api_server"): 3, ("copies", "api_server"): 3,
            ("hashes", "engine_core"): 5, ("copies", "engine_core"): 4}
deadline = time.monotonic() + 30
while True:
    found = {
        (part, process): REGISTRY.get_sample_value(
            name, {"model_name": "m", "part": part, "process": process})
        for part, process in expected
    }
    if found == expected:
        break
    assert time.monotonic() < deadline, found
    time.sleep(0.05)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 20
metrics.expose()
assert REGISTRY.get_sample_value(
    name, {"model_name": "m", "part": "hashes", "process": "engine_core"}) is None, "it has ended"
assert REGISTRY.get_sample_value(
    name, {"model_name": "m", "part": "tokenization", "process": "api_server"}) == 3
"""


def test_a_front_end_and_an_engine_core_that_it_forked_publish_both():
    run_python(FORKS, timeout=240)


def test_warm_ups_may_overlap_and_a_forked_process_is_in_none():
    first, second = stats.warming_up(), stats.warming_up()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    stats.STATS.note_step(10, 0)
    assert stats.STATS.decode_steps == 0
    second.__exit__(None, None, None)
    stats.STATS.note_step(10, 0)
    assert stats.STATS.decode_steps == 1
    with stats.warming_up():
        stats._start_from_zero()  # what a fork calls
        assert not stats.STATS.is_warming_up
        stats.STATS.warm_ups = 1
