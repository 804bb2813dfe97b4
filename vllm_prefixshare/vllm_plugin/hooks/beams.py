"""Hooks on beam search, offline and in a server: vLLM ranks only the candidates that can become a
beam. Offline, no garbage is collected among them.
"""

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

from vllm_prefixshare.utils.garbage import collection_paused
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, wrap
from vllm_prefixshare.vllm_plugin.prompts import detokenization
from vllm_prefixshare.vllm_plugin.prompts.copies import PART
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds


class _Substitute:
    """An object of vLLM with other attributes.

    Args:
        original: has all attributes but these.
    """

    def __init__(self, original: Any, **attributes: Any) -> None:
        self._original = original
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _with_candidates(llm: Any, arguments: dict[str, Any]) -> _Substitute:
    """An ``LLM`` for a step of beam search: of what it returns, candidates are chosen.

    Args:
        arguments: of the step, by name.
    """
    from vllm_prefixshare.vllm_plugin.prompts.beams import Step

    eos = arguments.get("eos_token_id")  # one token in releases up to 0.32
    eos_token_ids = arguments.get("eos_token_ids", () if eos is None else (eos,))

    def run(*args: Any, **kwargs: Any) -> Any:
        results = llm._render_and_run_requests(*args, **kwargs)
        of_beams = iter(results)
        for instance in arguments["instances_batch"]:
            step = Step(arguments["beam_width"], eos_token_ids)
            for beam in instance.beams:
                step.add(beam.cum_logprob, next(of_beams).outputs[0])
        return results

    return _Substitute(llm, _render_and_run_requests=run)


def _decoding_once(llm: Any, params: Any) -> Any:
    """An ``LLM`` for a beam search: its tokenizer decodes what beams have in common once. A search
    with a grammar needs the tokenizer itself.
    """
    if not is_enabled(detokenization.PART) or params.structured_outputs is not None:
        return llm
    tokenizer = llm.renderer.get_tokenizer()
    decoder = detokenization.CommonPrefixDecoder(tokenizer)
    tokenizer = _Substitute(tokenizer, decode=decoder.decode)
    return _Substitute(llm, renderer=_Substitute(llm.renderer, get_tokenizer=lambda: tokenizer))


def _with_candidates_online(serving: Any, beam_width: int) -> _Substitute:
    """A server's endpoint for one beam search: its engine returns candidates."""
    from vllm.sampling_params import SamplingParams

    client = serving.engine_client
    # tokens that may end a beam: releases up to 0.32 take the first alone and rank the others
    ending = SamplingParams()
    ending.update_from_generation_config(
        client.input_processor.generation_config_fields,
        serving.renderer.get_tokenizer().eos_token_id,
    )
    generate = _Generating(client.generate, beam_width, ending.all_stop_token_ids)
    return _Substitute(serving, engine_client=_Substitute(client, generate=generate))


class _Generating:
    """``generate`` of an engine's client during a beam search."""

    def __init__(self, generate: Function, beam_width: int, eos_token_ids: set[int]) -> None:
        self._generate = generate
        self._beam_width = beam_width
        self._eos_token_ids = eos_token_ids
        self._step: Any = None
        self._step_name = ""

    async def __call__(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        from vllm_prefixshare.vllm_plugin.prompts.beams import Step

        # the requests of a step have one name, and a number after "-beam-"
        name = request_id.rpartition("-beam-")[0]
        if name != self._step_name:
            self._step_name = name
            self._step = Step(self._beam_width, self._eos_token_ids)
        ids, step = prompt["prompt_token_ids"], self._step
        sampling_params.flat_logprobs = True
        async for result in self._generate(prompt, sampling_params, request_id, **kwargs):
            ids.next_logprobs = result.outputs[0].logprobs
            step.add(ids.logprob, result.outputs[0])
            yield result


def _ranks_all_tokens(arguments: dict[str, Any]) -> bool:
    """Whether the candidates of a step are the best of all tokens: without a grammar, and without a
    list of tokens.
    """
    needed = {"instances_batch", "base_sampling_params", "beam_width", "structured_output_backend"}
    return (
        arguments.keys() >= needed
        and arguments["structured_output_backend"] is None
        and getattr(arguments["base_sampling_params"], "logprob_token_ids", None) is None
    )


def hook_step(module: ModuleType) -> None:
    """Choose the candidates that vLLM ranks, from flat log-probabilities.

    A step that ranks other candidates than the best is left to vLLM. The many objects of a step
    would also start the garbage collector, which visits all objects of this process.
    """
    from vllm.logprobs import FlatLogprobs

    from vllm_prefixshare.vllm_plugin.prompts.beams import append_position

    def appending(original: Function) -> Function:
        def append_fast(self: Any, *args: Any, **kwargs: Any) -> None:
            (append_position if is_enabled(PART) else original)(self, *args, **kwargs)

        return append_fast

    def wrapper(original: Function) -> Function:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_enabled(PART):
                return original(self, *args, **kwargs)
            with collection_paused():
                if not _ranks_all_tokens(kwargs):
                    return original(self, *args, **kwargs)
                kwargs["base_sampling_params"].flat_logprobs = True
                for beam in (beam for i in kwargs["instances_batch"] for beam in i.beams):
                    if not isinstance(beam.tokens, TokenIds):
                        beam.tokens = TokenIds(beam.tokens)
                return original(_with_candidates(self, kwargs), *args, **kwargs)

        return step

    wrap(module.BeamSearchOfflineMixin, "_beam_search_step", wrapper)
    wrap(FlatLogprobs, "append_fast", appending)


def hook_search(module: ModuleType) -> None:
    """Decode the prompt of beams once, and return the log-probabilities as vLLM does."""

    def wrapper(original: Function) -> Function:
        def beam_search(self: Any, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm_prefixshare.vllm_plugin.prompts.beams import with_dictionaries

            outputs = original(_decoding_once(self, params), prompts, params, *args, **kwargs)
            for output in outputs:
                for beam in output.sequences:
                    with_dictionaries(beam)
            return outputs

        return beam_search

    wrap(module.BeamSearchOfflineMixin, "beam_search", wrapper)


def hook_online_search(module: ModuleType) -> None:
    """Choose the candidates of a server's search. One with a list of tokens, or with an encoder, is
    left to vLLM.
    """

    def wrapper(original: Function) -> Function:
        async def beam_search(
            self: Any, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any
        ) -> AsyncIterator[Any]:
            from vllm_prefixshare.vllm_plugin.prompts.beams import BeamIds, with_dictionaries

            searched = self
            is_left = getattr(params, "allowed_token_ids", None) or "prompt_token_ids" not in prompt
            if is_enabled(PART) and not is_left:
                searched = _with_candidates_online(self, params.beam_width)
                prompt = {**prompt, "prompt_token_ids": BeamIds(prompt["prompt_token_ids"])}
            async for result in original(searched, prompt, request_id, params, *args, **kwargs):
                for output in result.outputs:
                    with_dictionaries(output)
                yield result

        return beam_search

    wrap(module.BeamSearchOnlineMixin, "beam_search", wrapper)


HOOKS = (
    Hook(
        "vllm.entrypoints.generate.beam_search.offline",
        "BeamSearchOfflineMixin._beam_search_step",
        "2 x beam_width candidates of each beam become objects, though few become beams",
        "candidates are ranked as arrays",
        hook_step,
        parts=("copies",),
    ),
    Hook(
        "vllm.entrypoints.generate.beam_search.offline",
        "BeamSearchOfflineMixin.beam_search",
        "the prompt is decoded for each beam; the log-probabilities of beams must be dictionaries",
        "as for BeamSearchOfflineMixin._beam_search_step",
        hook_search,
        parts=("copies", "detokenization"),
    ),
    Hook(
        "vllm.entrypoints.generate.beam_search.online",
        "BeamSearchOnlineMixin.beam_search",
        "as for BeamSearchOfflineMixin._beam_search_step",
        "candidates are ranked as arrays",
        hook_online_search,
        parts=("copies",),
    ),
)
