"""Hook on the start of the detokenizer."""

from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, wrap


def hook_detokenizer(module: ModuleType) -> None:
    """Start the decode stream from the end of the prompt."""
    from vllm_prefixshare.vllm_plugin.prompts import detokenization

    def wrapper(original: Function) -> Function:
        def init(self: Any, tokenizer: Any, request: Any) -> None:
            detokenization.init(original, self, tokenizer, request)

        return init

    wrap(module.FastIncrementalDetokenizer, "__init__", wrapper)


HOOKS = (
    Hook(
        "vllm.v1.engine.detokenizer",
        "FastIncrementalDetokenizer.__init__",
        "the decode stream decodes the whole prompt with the first output token of each request",
        "vLLM starts the stream from a bounded tail",
        hook_detokenizer,
        parts=("detokenization",),
        switch="vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.starts_at_tail",
    ),
)
