"""Prefix-shared decode attention for vLLM.

``import vllm_prefixshare`` is free of torch, triton and vllm: vLLM imports this package
in every process to find the plugin. What needs torch is loaded on first use.
"""

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


def __getattr__(name: str) -> Any:
    if name == "prompt_stats":
        from vllm_prefixshare.vllm_plugin.observability.stats import prompt_stats

        return prompt_stats
    if name in ("LayerExtras", "PrefixShareDecodeWrapper", "merge_states"):
        try:
            from vllm_prefixshare import merging, wrapper
        except ModuleNotFoundError as e:
            raise PrefixShareError(f"{name} needs {e.name}: install it with pip first.") from None
        return getattr(merging if name == "merge_states" else wrapper, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
