"""The backend's counters that the loggers of a patched vLLM get."""

import pytest

from vllm_prefixshare.vllm_plugin.observability import stats


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(stats, "STATS", stats.BackendStats())
    monkeypatch.setattr(stats, "_LOGGED", stats.Since(stats.backend_counters))


def test_each_step_is_told_once():
    stats.STATS.note_step(100, 40)
    assert stats.take_stats() == {
        "prefix_share_decode_steps": 1,
        "prefix_share_shared_steps": 1,
        "prefix_share_kv_tokens_stock": 100,
        "prefix_share_kv_tokens_read": 60,
    }
    assert stats.take_stats() == {}


def test_a_reset_takes_nothing_from_the_loggers():
    stats.STATS.note_step(100, 40)
    stats.take_stats()
    stats.STATS.reset()
    stats.STATS.note_step(30, 0)
    taken = stats.take_stats()
    assert taken["prefix_share_kv_tokens_stock"] == taken["prefix_share_kv_tokens_read"] == 30
