"""Prefix-shared decode attention for vLLM.

``import vllm_prefixshare`` is free of torch, triton and vllm: vLLM imports this package
in every process to find the plugin. What needs torch is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LayerExtras",
    "PrefixShareDecodeWrapper",
    "PrefixShareError",
    "__version__",
    "merge_states",
    "prompt_stats",
]

from vllm_prefixshare.core import PrefixShareError

if TYPE_CHECKING:
    from vllm_prefixshare.merging import merge_states
    from vllm_prefixshare.vllm_plugin.observability.stats import prompt_stats
    from vllm_prefixshare.wrapper import LayerExtras, PrefixShareDecodeWrapper

#: Names that need torch, and their modules.
_TORCH_NAMES = {
    "LayerExtras": "wrapper",
    "PrefixShareDecodeWrapper": "wrapper",
    "merge_states": "merging",
}


def __getattr__(name: str) -> Any:
    if name == "prompt_stats":
        from vllm_prefixshare.vllm_plugin.observability.stats import prompt_stats

        return prompt_stats
    if module := _TORCH_NAMES.get(name):
        try:
            return getattr(import_module(f"vllm_prefixshare.{module}"), name)
        except ModuleNotFoundError as e:
            raise PrefixShareError(f"{name} needs {e.name}: install it with pip first.") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
