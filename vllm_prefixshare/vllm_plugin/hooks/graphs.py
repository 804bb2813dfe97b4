"""Hooks on the choice of a CUDA graph: under batch invariance no step with prompt tokens replays a
FULL graph of decodes.

vLLM replays one for a step in which each request has one token, even if that is a prompt's. Such a
token then runs as a decode, where in another batch it belongs to a longer piece of its prompt.
"""

import sys
from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, wrap

#: Loaded only in workers whose configuration chose the backend.
_PLANNING = "vllm_prefixshare.vllm_plugin.step.gpu_builder"


def _is_invariant() -> bool:
    """Whether the backend serves a layer of this process under batch invariance."""
    planning = sys.modules.get(_PLANNING)
    return planning is not None and planning.is_invariant()


def hook_v1_graph_choice(module: ModuleType) -> None:
    """V1 model runner: say that a batch with prompt tokens is not uniform."""

    def wrapper(original: Function) -> Function:
        def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
            # given for dummy batches only
            if kwargs.get("force_uniform_decode") is None and _is_invariant():
                batch, n = self.input_batch, kwargs["num_reqs"]
                if (batch.num_computed_tokens_cpu[:n] < batch.num_prompt_tokens[:n]).any():
                    kwargs["force_uniform_decode"] = False
            return original(self, *args, **kwargs)

        return choose

    wrap(module.GPUModelRunner, "_determine_batch_execution_and_padding", wrapper)


def hook_v2_graph_choice(module: ModuleType) -> None:
    """V2 model runner: the same."""

    def wrapper(original: Function) -> Function:
        def gather_batch_req_state(self: Any, *args: Any, **kwargs: Any) -> Any:
            state, tokens_each = original(self, *args, **kwargs)
            if state is not None and state.has_prefill and _is_invariant():
                tokens_each = None
            return state, tokens_each

        return gather_batch_req_state

    wrap(module.GPUModelRunner, "gather_batch_req_state", wrapper)
