"""vLLM's beam search with random log-probabilities in place of an engine."""

import asyncio
import inspect
from itertools import repeat
from types import SimpleNamespace

import numpy as np
from vllm.entrypoints.generate.beam_search import utils
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
from vllm.sampling_params import BeamSearchParams, SamplingParams

from vllm_prefixshare.vllm_plugin.prompts.beams import BeamIds
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

VOCABULARY, EOS = 40, 7
#: Lists whose sum with a list is a list.
PLAIN = (list, TokenIds, BeamIds)
_INPUT_PROCESSOR = SimpleNamespace(
    generation_config_fields={"eos_token_id": [EOS, EOS + 1]},
    resolve_watermarking=lambda params: None,
    vllm_config=None,
)


class RandomModel:
    """Random log-probabilities that depend on a beam's tokens only.

    Args:
        score: log-probability of a number from 1 to 6.
        number: random number of a generator; few integers, so that candidates tie.
    """

    def __init__(
        self,
        width,
        finish_reason="length",
        score=lambda number: -number / 4,
        number=lambda rng: rng.integers(1, 6),
    ):
        self.width, self.finish_reason, self.score, self.number = (
            width, finish_reason, score, number,
        )  # fmt: skip
        self.prompts = []

    def _render_and_run_requests(self, prompts, params, **kwargs):
        return [
            self._answer(prompt["prompt_token_ids"], p.flat_logprobs)
            for prompt, p in zip(prompts, params, strict=True)
        ]

    def _params_to_seq(self, params, num_requests):
        return [params] * num_requests

    def _answer(self, ids, is_flat):
        self.prompts.append(ids)
        assert type(ids) in PLAIN
        rng = np.random.default_rng(ids)
        best = rng.choice(VOCABULARY, 2 * self.width, replace=False).tolist()
        scores = dict.fromkeys(range(VOCABULARY), self.score(6))
        scores.update((t, float(self.score(self.number(rng)))) for t in best)
        # vLLM puts the sampled token first, which the best may name again
        returned = [int(rng.integers(VOCABULARY)), *best]
        logprobs = FlatLogprobs() if is_flat else []
        append_logprobs_for_next_position(
            logprobs, returned, [scores[t] for t in returned], repeat(None), 1, len(best)
        )
        output = SimpleNamespace(logprobs=logprobs, finish_reason=self.finish_reason)
        return SimpleNamespace(outputs=[output])


def search(mixin, width=4, num_steps=6, ignore_eos=False, **changes):
    """The instances of a beam search, and the prompts that were run.

    Args:
        mixin: a ``BeamSearchOfflineMixin``.
        changes: arguments of `RandomModel`.
    """
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    instances = [
        utils.BeamSearchInstance({"type": "token", "prompt_token_ids": p}, logprobs=None)
        for p in prompts
    ]
    model = type("Search", (RandomModel, mixin), {})(width, **changes)
    for _ in range(num_steps):
        step(model, instances, ignore_eos)
        for beam in (beam for i in instances for beam in (*i.beams, *i.completed)):
            assert type(beam.tokens) in PLAIN and type(beam.logprobs) is list
    return instances, model.prompts


def search_offline(mixin, tokenizer, prompts, width=4, num_steps=6, **changes):
    """The sequences that ``LLM.beam_search`` returns for each prompt of token ids.

    Args:
        mixin: a ``BeamSearchOfflineMixin``.
        changes: of `BeamSearchParams`.
    """

    class Searched(RandomModel, mixin):
        renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        llm_engine = SimpleNamespace(input_processor=_INPUT_PROCESSOR)

        def _preprocess_cmpl(self, prompts):
            return [{"type": "token", "prompt_token_ids": ids} for ids in prompts]

        def _lora_request_to_seq(self, lora_request, num_requests):
            return [lora_request] * num_requests

        def _priority_to_seq(self, priority, num_requests):
            return [priority or 0] * num_requests

    params = BeamSearchParams(beam_width=width, max_tokens=num_steps, **changes)
    return [found.sequences for found in Searched(width).beam_search(prompts, params)]


def search_online(mixin, width=4, num_steps=6, **changes):
    """The outputs of a server's beam search, and the prompts that were run.

    Args:
        mixin: a ``BeamSearchOnlineMixin``.
        changes: of `BeamSearchParams`.
    """
    # a server's ranking of equal sums is not stable
    model = RandomModel(width, number=lambda rng: rng.uniform(1, 6))

    class Engine:
        input_processor = _INPUT_PROCESSOR

        async def generate(self, prompt, sampling_params, request_id, **kwargs):
            await asyncio.sleep(0)
            answered = model._answer(prompt["prompt_token_ids"], sampling_params.flat_logprobs)
            for entry in answered.outputs[0].logprobs if not sampling_params.flat_logprobs else ():
                assert type(entry) is dict
            yield answered

    class Served(mixin):
        engine_client = Engine()
        renderer = SimpleNamespace(
            get_tokenizer=lambda: SimpleNamespace(
                eos_token_id=EOS, decode=lambda ids, **kwargs: " ".join(map(str, ids))
            )
        )

    async def collected():
        params = BeamSearchParams(beam_width=width, max_tokens=num_steps, **changes)
        prompt = {"type": "token", "prompt_token_ids": [1, 2, 3], "prompt": "text"}
        return [result async for result in Served().beam_search(prompt, "id", params)]

    ((result,), prompts) = asyncio.run(collected()), model.prompts
    return result.outputs, prompts


def step(model, instances, ignore_eos):
    """A step of this beam search."""
    for instance in instances:
        instance.priority = 0  # which releases up to 0.29 do not have
    model._beam_search_step(
        instances_batch=instances,
        base_sampling_params=SamplingParams(logprobs=2 * model.width, max_tokens=1),
        ignore_eos=ignore_eos,
        beam_width=model.width,
        sort_beams_key=score,
        structured_output_backend=None,
        structured_output_key=None,
        structured_output_bitmask=None,
        **eos_argument(type(model)._beam_search_step),
    )


def eos_argument(function):
    """The tokens that end a beam, as this release takes them."""
    parameters = inspect.signature(function).parameters
    return {"eos_token_ids": {EOS}} if "eos_token_ids" in parameters else {"eos_token_id": EOS}


def score(beam):
    """VLLM's score with a length penalty."""
    function = utils.get_beam_search_score
    if "tokens" in function.__code__.co_varnames:
        return function(beam.tokens, beam.cum_logprob, EOS, 0.7)
    return function(len(beam.logprobs), beam.cum_logprob, 0.7)
