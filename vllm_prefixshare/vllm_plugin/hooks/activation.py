"""Hooks where a process learns of an engine: they activate shared host work."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_prefixshare.settings import PROMPT_PARTS
from vllm_prefixshare.vllm_plugin.hooks.selection import chosen_in
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Hook, before, extend, wrap
from vllm_prefixshare.vllm_plugin.observability import metrics


def _start(process: str, vllm_config: Any) -> None:
    """Activate shared host work where an engine core or a worker is made.

    Args:
        process: ``engine_core`` or ``worker``.
    """
    metrics.start_for_engine(process, vllm_config, chosen_in(vllm_config.attention_config))


def _hook(process: str, class_name: str) -> Callable[[ModuleType], None]:
    """Returns the function that activates shared host work where a class is made with a
    ``VllmConfig``.
    """

    def start(self: Any, vllm_config: Any, *_: Any, **__: Any) -> None:
        _start(process, vllm_config)

    def install(module: ModuleType) -> None:
        if not extend(module, "engine_process_starts", _start):
            wrap(getattr(module, class_name), "__init__", before(start))

    return install


HOOKS = tuple(
    Hook(
        module,
        f"{class_name}.__init__",
        "shared host work is active only in processes of an engine that asked for it",
        "vLLM has this work itself, or calls plugins with the configuration of an engine",
        _hook(process, class_name),
        parts=PROMPT_PARTS,
    )
    for module, class_name, process in (
        ("vllm.v1.engine.core", "EngineCore", "engine_core"),
        ("vllm.v1.worker.worker_base", "WorkerBase", "worker"),
    )
)
