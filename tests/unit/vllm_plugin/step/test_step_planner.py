"""The planner that an engine gets from its settings."""

from types import SimpleNamespace

import pytest

from tests.support.planning_cases import LinearCost
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.step import planner

SHAPE = AttentionConfig(4, 2, 64, 16)
CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))


def share(monkeypatch: pytest.MonkeyPatch, asked: str) -> str:
    monkeypatch.setenv("VLLM_PREFIXSHARE_SHARE", asked)
    settings.cache_clear()
    return planner.planner_for(TorchExecutor(SHAPE), SHAPE, CONFIG).config.share


def test_torch_operators_share_by_an_estimate_only_if_told_to(monkeypatch):
    assert share(monkeypatch, "auto") == "never"
    assert share(monkeypatch, "always") == "always"


def test_a_measured_table_decides_for_torch_operators(monkeypatch):
    monkeypatch.setattr(planner, "cost_model", lambda *_: LinearCost(launch=1.0))
    assert share(monkeypatch, "auto") == "auto"
