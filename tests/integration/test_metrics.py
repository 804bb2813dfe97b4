"""The contents of ``/metrics`` and of the log; ``tests/engine/test_serve.py`` reads a real
server's.
"""

import time
import types

import pytest
import torch
from prometheus_client import CollectorRegistry, multiprocess
from prometheus_client.multiprocess import MultiProcessCollector
from vllm import config as vllm_config

from vllm_prefixshare.integration import metrics, stats
from vllm_prefixshare.integration.hooks.selection import check_settings
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.settings import settings

LABELS = {"model_name": "small", "engine": "0"}


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    counted = stats.BackendStats()
    monkeypatch.setattr(stats, "STATS", counted)
    monkeypatch.setattr(metrics, "STATS", counted)
    return counted


def test_the_log_has_a_line_for_what_happened_and_none_for_nothing(counted):
    publisher = metrics.Publisher(None, LABELS)
    assert publisher.log_line() is None
    counted.note_plan(0.0005, 1.25, "plan too large")
    for _ in range(4):
        counted.note_step(1000, 750)
    assert publisher.log_line() == (
        "PREFIX_SHARE: 4 decode steps, 4 of them shared KV; 1000 KV tokens read, 3000 saved "
        "(share factor 4.00); 1 plans made (0.50 ms each), 3 reused; imbalance 1.25; "
        "fallbacks: plan too large (1)."
    )
    assert publisher.log_line() is None
    counted.reset()
    counted.note_step(10, 0)
    assert "1 decode steps, 0 of them shared KV; 10 KV tokens read" in publisher.log_line()


def test_files_hold_fallbacks_and_the_recent_share_factor(counted, tmp_path):
    publisher = metrics.Publisher(tmp_path, LABELS)
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
    counted.note_fallback("a sliding window")
    counted.note_plan(0.0007, 1.5)
    counted.note_plan(3.0, 1.1)
    publisher.write(tmp_path)
    assert value("fallbacks_total", reason="a sliding window") == 1
    assert value("fallbacks_total", reason="planning failed") == 0
    assert value("kv_tokens_saved_total") == 1300
    assert value("imbalance") == 1.1
    buckets = [value("plan_seconds_bucket", le=le) for le in ("0.0005", "0.001", "0.1", "+Inf")]
    assert buckets == [0, 1, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_publishes(rank, monkeypatch):
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(rank=rank, data_parallel_index=3),
        model_config=types.SimpleNamespace(served_model_name="small"),
    )
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(metrics.Publisher, "start", lambda self: None)
    monkeypatch.setattr(metrics, "_publisher", None)
    metrics.start_in_worker()
    assert metrics._publisher is None, "not a worker"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    metrics.start_in_worker()
    assert (metrics._publisher is None) == (rank != 0)


@pytest.mark.parametrize("folder", ["{here}/file", "{here}/file/folder", "/proc"])
def test_a_folder_in_which_no_file_can_be_made_is_refused(monkeypatch, tmp_path, folder):
    (tmp_path / "file").touch()
    monkeypatch.setenv(metrics.VARIABLE, folder.format(here=tmp_path))
    for check in (check_settings, metrics.expose):
        with pytest.raises(PrefixShareError, match=r"METRICS=.* is not a usable folder \(\w"):
            check()


def test_the_variable_that_named_the_folder_is_in_the_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(metrics.SHARED, str(tmp_path / "file"))
    with pytest.raises(PrefixShareError, match=f"^{metrics.SHARED}='.*file' is not a usable"):
        metrics.named_folder()


def test_the_share_factor_is_of_whole_seconds_also_where_decodes_pause(counted, tmp_path):
    publisher = metrics.Publisher(tmp_path, LABELS)
    publisher.write(tmp_path)
    counted.note_step(900, 600)
    publisher.write(tmp_path, second_over=False)
    assert publisher._share_factor == 3.0
    counted.note_step(900, 0)
    for second_over in (False, True):
        publisher.write(tmp_path, second_over)
        assert publisher._share_factor == 1.5
    counted.note_step(900, 600)
    publisher.write(tmp_path, second_over=False)
    assert publisher._share_factor == 3.0, "of the next second"


def test_the_front_end_and_the_workers_have_one_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(metrics.VARIABLE, "~/counters")
    monkeypatch.setattr(metrics, "_EXPOSED", [])
    monkeypatch.setattr(multiprocess, "MultiProcessCollector", lambda *_, **__: None)
    metrics.expose()
    assert metrics._EXPOSED == [str(settings().metrics)] == [str(tmp_path / "counters")]
    assert list((tmp_path / "counters").iterdir()) == [], "the check leaves nothing there"


def test_files_of_workers_that_ended_are_removed_and_others_stay(counted, tmp_path):
    publisher = metrics.Publisher(tmp_path, LABELS)
    counted.note_step(1000, 500)
    publisher.write(tmp_path)
    ended = tmp_path / "counter_prefixshare-host-1-0.db"
    own_of_vllm = tmp_path / "counter_1.db"
    (written,) = tmp_path.glob("counter_prefixshare-*.db")
    for path in (ended, own_of_vllm):
        path.write_bytes(written.read_bytes())
    metrics.remove_ended(tmp_path)
    assert not ended.exists()
    assert written.exists() and own_of_vllm.exists()
    assert len(list(tmp_path.iterdir())) == 4, "three of this worker, one of vLLM"


def test_two_workers_with_one_process_id_have_files_of_their_own(counted, tmp_path):
    counted.note_step(1000, 500)
    for _ in range(2):  # as in two containers that share a folder
        metrics.Publisher(tmp_path, LABELS).write(tmp_path)
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    assert registry.get_sample_value(f"{metrics.PREFIX}kv_tokens_saved_total", LABELS) == 1000


def test_counts_are_written_when_decodes_stop(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "WRITE_SECONDS", 3600)
    publisher = metrics.Publisher(tmp_path, LABELS)
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
    monkeypatch.setattr(metrics, "_EXPOSED", [])
    metrics.expose()
    assert settings().metrics == tmp_path / "theirs"
    assert metrics._EXPOSED == [], "vLLM's own collector reads it, and once is enough"
