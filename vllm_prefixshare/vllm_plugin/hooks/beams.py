"""Hooks on ``LLM.beam_search``: vLLM ranks only the candidates that can become a beam, and starts
no garbage collection among them.
"""

import inspect
from types import ModuleType
from typing import Any

from vllm_prefixshare.utils.garbage import collection_paused
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, wrap
from vllm_prefixshare.vllm_plugin.prompts.copies import PART
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds


class _StepOf:
    """An ``LLM`` during a step of beam search."""

    def __init__(self, llm: Any, arguments: dict[str, Any]) -> None:
        self._llm = llm
        self._instances = arguments["instances_batch"]
        self._beam_width = arguments["beam_width"]
        eos = arguments.get("eos_token_id")  # one token in releases up to 0.32
        self._eos_token_ids = arguments.get("eos_token_ids", () if eos is None else (eos,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def _render_and_run_requests(self, *args: Any, **kwargs: Any) -> Any:
        from vllm_prefixshare.vllm_plugin.prompts.beams import choose_candidates

        results = self._llm._render_and_run_requests(*args, **kwargs)
        begin = 0
        for beams in (instance.beams for instance in self._instances):
            end = begin + len(beams)
            choose_candidates(beams, results[begin:end], self._beam_width, self._eos_token_ids)
            begin = end
        return results


def hook_step(module: ModuleType) -> None:
    """Choose the candidates that vLLM ranks, from flat log-probabilities.

    A step with a grammar, or with a list of allowed tokens, is left to vLLM: it ranks other
    candidates than the best. The many objects of a step would also start the garbage collector,
    which visits all objects of this process.
    """
    from vllm.logprobs import FlatLogprobs

    def wrapper(original: Function) -> Function:
        signature = inspect.signature(original)

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_enabled(PART):
                return original(self, *args, **kwargs)
            arguments = signature.bind(self, *args, **kwargs).arguments
            params = arguments["base_sampling_params"]
            is_restricted = (
                arguments["structured_output_backend"] is not None
                or getattr(params, "logprob_token_ids", None) is not None
            )
            with collection_paused():
                if is_restricted:
                    return original(self, *args, **kwargs)
                params.flat_logprobs = True
                for beam in (beam for i in arguments["instances_batch"] for beam in i.beams):
                    if not isinstance(beam.tokens, TokenIds):
                        beam.tokens = TokenIds(beam.tokens)
                return original(_StepOf(self, arguments), *args, **kwargs)

        return step

    wrap(module.BeamSearchOfflineMixin, "_beam_search_step", wrapper)
    wrap(FlatLogprobs, "append_fast", _appending_at_once)


def _appending_at_once(original: Function) -> Function:
    def append_fast(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_prefixshare.vllm_plugin.prompts.beams import append_position

        (append_position if is_enabled(PART) else original)(self, *args, **kwargs)

    return append_fast


def hook_search(module: ModuleType) -> None:
    """Return the log-probabilities as vLLM does."""

    def wrapper(original: Function) -> Function:
        def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_prefixshare.vllm_plugin.prompts.beams import with_dictionaries

            outputs = original(self, *args, **kwargs)
            for output in outputs:
                for beam in output.sequences:
                    with_dictionaries(beam)
            return outputs

        return beam_search

    wrap(module.BeamSearchOfflineMixin, "beam_search", wrapper)


_PATCH = "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence.with_last_token"

HOOKS = (
    Hook(
        "vllm.entrypoints.generate.beam_search.offline",
        "BeamSearchOfflineMixin._beam_search_step",
        "2 x beam_width candidates of each beam become objects, though few become beams",
        "candidates are ranked as arrays",
        hook_step,
        patch=(_PATCH,),
        parts=("copies",),
    ),
    Hook(
        "vllm.entrypoints.generate.beam_search.offline",
        "BeamSearchOfflineMixin.beam_search",
        "the log-probabilities of beams must be dictionaries",
        "as for BeamSearchOfflineMixin._beam_search_step",
        hook_search,
        patch=(_PATCH,),
        parts=("copies",),
    ),
)
