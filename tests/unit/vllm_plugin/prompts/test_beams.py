"""Beam search whose candidates refer to their beams: the same sequences as vLLM's own."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.entrypoints.generate.beam_search import offline, utils
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams

from tests.support.shared_prefixes import install_hook
from vllm_prefixshare.vllm_plugin.hooks import beams as hooks
from vllm_prefixshare.vllm_plugin.prompts import beams, parts
from vllm_prefixshare.vllm_plugin.prompts.copies import PART
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

VOCABULARY, EOS = 40, 7
#: Lists whose sum with a list is a list.
PLAIN = (list, TokenIds)


@pytest.fixture(autouse=True)
def _installed():
    for hook in hooks.HOOKS:
        install_hook(hook)


class Search(offline.BeamSearchOfflineMixin):
    """vLLM's beam search on random log-probabilities that depend on a beam's tokens only."""

    def __init__(self, width, finish_reason="length"):
        self.width, self.finish_reason, self.prompts = width, finish_reason, []

    def _render_and_run_requests(self, prompts, **kwargs):
        return [self._answer(prompt["prompt_token_ids"]) for prompt in prompts]

    def _params_to_seq(self, params, num_requests):
        return [params] * num_requests

    def _answer(self, ids):
        self.prompts.append(ids)
        assert type(ids) in PLAIN
        rng = np.random.default_rng(ids)
        chosen = rng.choice(VOCABULARY, 2 * self.width, replace=False).tolist()
        # few distinct values, so that candidates tie
        scores = {t: Logprob(-float(rng.integers(1, 6)) / 4) for t in chosen}
        output = SimpleNamespace(logprobs=[scores], finish_reason=self.finish_reason)
        return SimpleNamespace(outputs=[output])


def run(monkeypatch, on, width=4, num_steps=6, ignore_eos=False, finish_reason="length"):
    monkeypatch.setattr(parts, "_active", frozenset({PART} if on else ()))
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    instances = [
        utils.BeamSearchInstance({"type": "token", "prompt_token_ids": p}, logprobs=None)
        for p in prompts
    ]
    for instance in instances:
        instance.priority = 0  # which releases up to 0.29 do not have
    search = Search(width, finish_reason)
    for _ in range(num_steps):
        step(search, instances, ignore_eos)
        for beam in (beam for i in instances for beam in (*i.beams, *i.completed)):
            assert type(beam.tokens) in PLAIN and type(beam.logprobs) is list
    return instances, search.prompts


def step(search, instances, ignore_eos):
    search._beam_search_step(
        instances_batch=instances,
        base_sampling_params=SamplingParams(logprobs=2 * search.width, max_tokens=1),
        ignore_eos=ignore_eos,
        beam_width=search.width,
        sort_beams_key=score,
        structured_output_backend=None,
        structured_output_key=None,
        structured_output_bitmask=None,
        **eos_argument(),
    )


def eos_argument():
    """The tokens that end a beam, as this release takes them."""
    parameters = offline.BeamSearchOfflineMixin._beam_search_step.__wrapped__.__code__.co_varnames
    return {"eos_token_ids": {EOS}} if "eos_token_ids" in parameters else {"eos_token_id": EOS}


def score(beam):
    """VLLM's score with a length penalty."""
    function = utils.get_beam_search_score
    if "tokens" in function.__code__.co_varnames:
        return function(beam.tokens, beam.cum_logprob, EOS, 0.7)
    return function(len(beam.logprobs), beam.cum_logprob, 0.7)


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_sequences_are_those_of_vllm(monkeypatch, width, ignore_eos):
    (ours, our_prompts), (theirs, their_prompts) = (
        run(monkeypatch, on, width, ignore_eos=ignore_eos) for on in (True, False)
    )
    assert our_prompts == their_prompts
    for one, other in zip(ours, theirs, strict=True):
        assert one.beams == other.beams and one.completed == other.completed
        assert len(one.beams) == width
    ended = sum(len(instance.completed) for instance in ours)
    assert (ended == 0) == ignore_eos or width == 1


def test_arrays_agree_with_the_tokens(monkeypatch):
    instances, prompts = run(monkeypatch, on=True)
    for ids in (*prompts, *(beam.tokens for i in instances for beam in i.beams)):
        assert np.asarray(ids).tolist() == list(ids)


def test_an_aborted_step_leaves_lists(monkeypatch):
    ours, _ = run(monkeypatch, on=True, num_steps=1, finish_reason="abort")
    theirs, _ = run(monkeypatch, on=False, num_steps=1, finish_reason="abort")
    assert [i.completed for i in ours] == [i.completed for i in theirs]


def test_a_failing_step_leaves_lists(monkeypatch):
    monkeypatch.setattr(Search, "_answer", lambda self, ids: 1 / 0)
    monkeypatch.setattr(parts, "_active", frozenset({PART}))
    instance = utils.BeamSearchInstance({"type": "token", "prompt_token_ids": [1, 2]})
    with pytest.raises(ZeroDivisionError):
        step(Search(2), [instance], ignore_eos=True)
    assert type(instance.beams[0].tokens) in PLAIN


def test_candidates_copy_nothing(monkeypatch):
    """Of 16 beams with 32 candidates each, 16 become lists."""
    made = 0
    as_list = beams.Extension.as_list

    def counted(self):
        nonlocal made
        made += 1
        return as_list(self)

    monkeypatch.setattr(beams.Extension, "as_list", counted)
    run(monkeypatch, on=True, width=16, num_steps=3, ignore_eos=True)
    assert made == 3 * 3 * 16 * 2  # prompts, steps, beams; tokens and log-probabilities
