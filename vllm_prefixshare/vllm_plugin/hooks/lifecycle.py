"""Hooks on a worker's sleep and wake-up."""

import sys
from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, wrap

#: Loaded only in workers whose configuration chose the backend.
_PLANNING = "vllm_prefixshare.vllm_plugin.step.gpu_builder"


def hook_wake_up(module: ModuleType) -> None:
    """Make a new plan and clean the KV cache after a worker has woken up."""

    def wrapper(original: Function) -> Function:
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            result = original(self, tags)
            planning = sys.modules.get(_PLANNING)
            if planning is not None and (tags is None or "kv_cache" in tags):
                planning.after_wake_up()
            return result

        return wake_up

    wrap(module.Worker, "wake_up", wrapper)
