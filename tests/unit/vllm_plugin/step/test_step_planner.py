"""The planner that an engine gets from its settings."""

from types import SimpleNamespace

import pytest

from tests.support.planning_cases import LinearCost
from tests.support.variables import set_variables
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.planning.unshared import NO_COMMON_PREFIX, SHARING_OFF, Unshared
from vllm_prefixshare.vllm_plugin.observability.stats import BackendStats, warming_up
from vllm_prefixshare.vllm_plugin.step import planner

SHAPE = AttentionConfig(4, 2, 64, 16)
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    cache_config=SimpleNamespace(enable_prefix_caching=True),
)


def share(monkeypatch: pytest.MonkeyPatch, asked: str) -> str:
    set_variables(monkeypatch, SHARE=asked)
    return planner.planner_for(TorchExecutor(SHAPE), SHAPE, CONFIG).config.share


def test_torch_operators_share_by_an_estimate_only_if_told_to(monkeypatch):
    assert share(monkeypatch, "auto") == "never"
    assert share(monkeypatch, "always") == "always"


@pytest.mark.parametrize("caching", [True, False])
def test_what_the_engine_knows_of_plans_without_sharing_is_counted(monkeypatch, caching):
    counted = BackendStats()
    monkeypatch.setattr(planner, "STATS", counted)
    monkeypatch.setattr(CONFIG.cache_config, "enable_prefix_caching", caching)
    share(monkeypatch, "auto")
    for reason in (NO_COMMON_PREFIX, SHARING_OFF):
        counted.note_plan(0.001, 1.0, Unshared(reason))
    common = "no common prefix" if caching else "prefix caching is off"
    assert counted.unshared_plans == {common: 1, "no measured cost table": 1}
    assert counted.kernels == ["torch"]


def test_a_measured_table_decides_for_torch_operators(monkeypatch):
    monkeypatch.setattr(planner, "cost_model", lambda *_: LinearCost(launch=1.0))
    assert share(monkeypatch, "auto") == "auto"


def test_plans_of_a_warm_up_are_not_traced():
    class Trace:
        @property
        def is_open(self):
            asked.append(True)
            return False

    asked: list[bool] = []
    traced = SimpleNamespace(_trace=(Trace(), None))
    with warming_up():
        planner.StepPlanner._record(traced, None, None, None)
    assert not asked
    planner.StepPlanner._record(traced, None, None, None)
    assert asked
