"""Hooks where a process learns of an engine: they activate shared host work."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_prefixshare.settings import PROMPT_PARTS
from vllm_prefixshare.vllm_plugin.hooks.selection import chosen_in
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, extend, wrap
from vllm_prefixshare.vllm_plugin.observability import metrics


def _start(process: str, vllm_config: Any) -> None:
    """Activate shared host work where an engine core or a worker is made.

    Args:
        process: ``engine_core`` or ``worker``.
    """
    metrics.start_for_engine(process, vllm_config, chosen_in(vllm_config.attention_config))


def _activating(process: str) -> Callable[[Function], Function]:
    """Wrapper of an ``__init__`` that takes a ``VllmConfig`` first."""

    def wrapper(original: Function) -> Function:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            _start(process, vllm_config)
            original(self, vllm_config, *args, **kwargs)

        return init

    return wrapper


def hook_engine_core(module: ModuleType) -> None:
    """Activate shared host work in the engine core's process."""
    if not extend(module, "engine_process_starts", _start):
        wrap(module.EngineCore, "__init__", _activating("engine_core"))


def hook_worker(module: ModuleType) -> None:
    """Activate shared host work in a worker's process."""
    if not extend(module, "engine_process_starts", _start):
        wrap(module.WorkerBase, "__init__", _activating("worker"))


_WHY = "shared host work is active only in processes of an engine that asked for it"
_UNTIL = "vLLM has this work itself, or calls plugins with the configuration of an engine"

HOOKS = (
    Hook(
        "vllm.v1.engine.core",
        "EngineCore.__init__",
        _WHY,
        _UNTIL,
        hook_engine_core,
        parts=PROMPT_PARTS,
    ),
    Hook(
        "vllm.v1.worker.worker_base",
        "WorkerBase.__init__",
        _WHY,
        _UNTIL,
        hook_worker,
        parts=PROMPT_PARTS,
    ),
)
