"""Hooks on ``LLM.beam_search``: candidates neither copy the tokens of their beam nor start the
garbage collector.
"""

from itertools import chain
from types import ModuleType
from typing import Any

from vllm_prefixshare.utils.garbage import collection_paused
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, wrap
from vllm_prefixshare.vllm_plugin.prompts import beams
from vllm_prefixshare.vllm_plugin.prompts.copies import PART
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled


def hook_step(module: ModuleType) -> None:
    """Let candidates refer to their beams' lists during a step.

    Thousands of candidates would also start the garbage collector, which takes half of the step in
    this process.
    """

    def wrapper(original: Function) -> Function:
        def step(self: Any, instances_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_enabled(PART):
                return original(self, instances_batch, *args, **kwargs)
            for instance in instances_batch:
                beams.extensible(instance.beams)
            try:
                with collection_paused():
                    return original(self, instances_batch, *args, **kwargs)
            finally:
                for instance in instances_batch:
                    beams.settled(chain(instance.beams, instance.completed))

        return step

    wrap(module.BeamSearchOfflineMixin, "_beam_search_step", wrapper)


def hook_prompt(module: ModuleType) -> None:
    """Give a beam's request a list of ids."""

    def wrapper(original: Function) -> Function:
        def get_prompt(self: Any) -> Any:
            return beams.prompt_of(original, self)

        return get_prompt

    wrap(module.BeamSearchSequence, "get_prompt", wrapper)


_PATCH = "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence.with_last_token"

HOOKS = (
    Hook(
        "vllm.entrypoints.generate.beam_search.offline",
        "BeamSearchOfflineMixin._beam_search_step",
        "every candidate copies all tokens of its beam, though few become beams",
        "candidates are ranked before sequences are made, as in BeamSearchOnlineMixin since 0.33",
        hook_step,
        patch=(_PATCH,),
        parts=("copies",),
    ),
    Hook(
        "vllm.entrypoints.generate.beam_search.utils",
        "BeamSearchSequence.get_prompt",
        "a request must not get the list that candidates extend",
        "as for BeamSearchOfflineMixin._beam_search_step",
        hook_prompt,
        patch=(_PATCH,),
        parts=("copies",),
    ),
)
