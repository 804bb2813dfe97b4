"""Beam search that ranks the best candidates only: the same sequences as vLLM's own."""

import copy
import gc
import math
import pickle

import numpy as np
import pytest
from vllm.entrypoints.generate.beam_search import offline, online, utils
from vllm.logprobs import FlatLogprobs
from vllm.tokenizers import get_tokenizer

from examples.embedded_model import embedded_model_path
from tests.support.beam_search import (
    EOS,
    VOCABULARY,
    RandomModel,
    search,
    search_offline,
    search_online,
    step,
)
from tests.support.shared_prefixes import install_hook
from vllm_prefixshare.vllm_plugin.hooks import beams as hooks
from vllm_prefixshare.vllm_plugin.prompts import beams, detokenization, parts
from vllm_prefixshare.vllm_plugin.prompts.copies import PART
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

#: Log-probabilities of the integers from 1 to 6.
SCORES = {
    "ties": lambda number: -number / 4,
    "almost equal": lambda number: -1.0 - number * 2.0**-52,
    "different": lambda number: -math.log(1 + number * math.pi),
    "impossible": lambda number: -math.inf if number > 2 else -0.25,
    "undefined": lambda number: math.nan if number == 3 else -number / 4,
}


@pytest.fixture(autouse=True)
def _installed():
    for hook in hooks.HOOKS:
        install_hook(hook)


def run(monkeypatch, on, *options, **changes):
    monkeypatch.setattr(parts, "_active", frozenset({PART} if on else ()))
    instances, prompts = search(offline.BeamSearchOfflineMixin, *options, **changes)
    for instance in instances:
        for beam in (*instance.beams, *instance.completed):
            beams.with_dictionaries(beam)
            assert all(type(entry) is dict for entry in beam.logprobs)
    return instances, prompts


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_sequences_match_vllm(monkeypatch, scores, width, ignore_eos):
    (ours, our_prompts), (theirs, their_prompts) = (
        run(monkeypatch, on, width, ignore_eos=ignore_eos, score=SCORES[scores])
        for on in (True, False)
    )
    assert our_prompts == their_prompts
    for one, other in zip(ours, theirs, strict=True):
        # NaN differs from itself
        assert repr(one.beams) == repr(other.beams)
        assert repr(one.completed) == repr(other.completed)
        assert len(one.beams) == width
    ended = sum(len(instance.completed) for instance in ours)
    assert (ended == 0) == ignore_eos or width == 1


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    "changes",
    [{"ignore_eos": True}, {}, {"include_stop_str_in_output": True, "length_penalty": 0.3}],
    ids=["no end", "ends", "ends with their token"],
)
def test_a_servers_sequences_match_vllm(monkeypatch, width, changes):
    found = []
    for on in (True, False):
        monkeypatch.setattr(parts, "_active", frozenset({PART} if on else ()))
        found.append(search_online(online.BeamSearchOnlineMixin, width, **changes))
    (ours, our_prompts), (theirs, their_prompts) = found
    assert sorted(our_prompts) == sorted(their_prompts)
    assert len(ours) == width
    for one, other in zip(ours, theirs, strict=True):
        assert one == other
        assert all(type(entry) is dict for entry in one.logprobs)
    if not changes:
        assert width == 1 or {"stop"} == {o.finish_reason for o in ours if o.stop_reason == EOS}


def test_a_servers_search_ranks_as_many_candidates_as_there_are_beams(monkeypatch):
    made = []
    items = beams.Candidates.items
    monkeypatch.setattr(
        beams.Candidates, "items", lambda self: iter(made.append(1) or pair for pair in items(self))
    )
    monkeypatch.setattr(parts, "_active", frozenset({PART}))
    search_online(online.BeamSearchOnlineMixin, 16, 3, ignore_eos=True)
    # in each step the width, and at most two tokens a beam that may end it
    assert 3 * 16 <= len(made) <= 3 * 16 + 2 * (1 + 16 + 16)


def test_beams_of_one_candidate_share_a_dictionary(monkeypatch):
    """As vLLM's do: 16 beams of 32 candidates each would make 512 objects a step."""
    ours, _ = run(monkeypatch, on=True, width=16, ignore_eos=True)
    for instance in ours:
        first = {id(beam.logprobs[0]) for beam in instance.beams}
        assert len(first) == 1


@pytest.mark.parametrize("active", [{PART}, {detokenization.PART}, {PART, detokenization.PART}])
def test_sequences_have_the_text_of_their_prompt(monkeypatch, active):
    """Random tokens below 40 are special tokens and punctuation."""
    tokenizer = get_tokenizer(str(embedded_model_path()))
    prompts = [
        tokenizer.encode(text * 20) for text in ("The lamp is red. ", "A \N{ROCKET} flies. ")
    ]
    found = []
    for names in (active, ()):
        monkeypatch.setattr(parts, "_active", frozenset(names))
        counters = parts.PartCounters()
        monkeypatch.setattr(parts, "COUNTERS", {detokenization.PART: counters})
        found.append(
            search_offline(offline.BeamSearchOfflineMixin, tokenizer, prompts, ignore_eos=True)
        )
        is_once = detokenization.PART in names
        assert (counters.fallbacks, counters.requests) == ((2, 8) if is_once else (0, 0))
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.text == other.text and one.tokens == other.tokens
            assert one.logprobs == other.logprobs and one.cum_logprob == other.cum_logprob
            assert type(other.logprobs) is list, "what is switched off changes nothing"


def test_log_probabilities_become_dictionaries_when_they_are_read(monkeypatch):
    made = []
    as_dict = beams.Candidates.as_dict
    monkeypatch.setattr(beams.Candidates, "as_dict", lambda self: made.append(1) or as_dict(self))
    found = []
    for on in (True, False):
        monkeypatch.setattr(parts, "_active", frozenset({PART} if on else ()))
        instances, _ = search(offline.BeamSearchOfflineMixin, 4, ignore_eos=True)
        found.append([beam for instance in instances for beam in instance.beams])
    ours, theirs = found
    for beam in ours:
        beams.with_dictionaries(beam)
    assert not made
    read = [copy.copy(ours[0].logprobs), *(beam.logprobs for beam in ours)]
    wanted = [theirs[0].logprobs, *(beam.logprobs for beam in theirs)]
    assert len(read[0]) == len(made) > 1
    assert read == wanted and wanted == read
    pickled = pickle.loads(pickle.dumps(read))
    assert pickled == wanted and all(type(logprobs) is list for logprobs in pickled)


def test_arrays_agree_with_the_tokens(monkeypatch):
    instances, prompts = run(monkeypatch, on=True)
    for ids in (*prompts, *(beam.tokens for i in instances for beam in i.beams)):
        assert isinstance(ids, TokenIds)
        assert np.asarray(ids).tolist() == list(ids)


def test_an_aborted_step_ends_as_in_vllm(monkeypatch):
    ours, _ = run(monkeypatch, on=True, num_steps=1, finish_reason="abort")
    theirs, _ = run(monkeypatch, on=False, num_steps=1, finish_reason="abort")
    assert [i.completed for i in ours] == [i.completed for i in theirs]


def test_a_failing_step_leaves_lists(monkeypatch):
    monkeypatch.setattr(RandomModel, "_answer", lambda *_: 1 / 0)
    monkeypatch.setattr(parts, "_active", frozenset({PART}))
    model = type("Search", (RandomModel, offline.BeamSearchOfflineMixin), {})(2)
    instance = utils.BeamSearchInstance({"type": "token", "prompt_token_ids": [1, 2]})
    with pytest.raises(ZeroDivisionError):
        step(model, [instance], ignore_eos=True)
    assert instance.beams[0].tokens == [1, 2]
    assert gc.isenabled()


def test_no_garbage_is_collected_within_a_step(monkeypatch):
    """A collection passes over all objects of the process, and candidates are no garbage."""
    enabled = []
    answer = RandomModel._answer

    def noted(*args):
        enabled.append(gc.isenabled())
        return answer(*args)

    monkeypatch.setattr(RandomModel, "_answer", noted)
    run(monkeypatch, on=True, width=16, num_steps=3, ignore_eos=True)
    assert enabled and not any(enabled)
    assert gc.isenabled()
    enabled.clear()
    run(monkeypatch, on=False, width=16, num_steps=1, ignore_eos=True)
    assert all(enabled)


@pytest.mark.parametrize("scores", ["ties", "different"])
def test_vllm_ranks_as_many_candidates_as_there_are_beams(monkeypatch, scores):
    ranked = []
    choose = beams.Step.choose

    def noted(step):
        searched = [candidates for _, candidates in step._beams]
        choose(step)
        if searched:
            ranked.append((sum(len(c.chosen) for c in searched), len(searched)))

    monkeypatch.setattr(beams.Step, "choose", noted)
    run(monkeypatch, on=True, width=16, num_steps=4, ignore_eos=True, score=SCORES[scores])
    # a candidate that could end its beam is chosen as well
    assert ranked and all(16 <= total <= 16 + number for total, number in ranked)


@pytest.mark.parametrize("restriction", ["grammar", "tokens"])
def test_a_restricted_step_is_left_to_vllm(monkeypatch, restriction):
    """A grammar or a list of allowed tokens ranks other candidates than the best."""
    if restriction == "tokens" and not hasattr(offline.SamplingParams(), "logprob_token_ids"):
        pytest.skip("this release does not rank a list of tokens")
    monkeypatch.setattr(parts, "_active", frozenset({PART}))
    seen = []

    def original(
        self, instances_batch, base_sampling_params, beam_width, structured_output_backend
    ):
        seen.append((self, base_sampling_params.flat_logprobs))

    holder = type("Module", (), {})
    holder.BeamSearchOfflineMixin = type("Mixin", (), {"_beam_search_step": original})
    hooks.hook_step(holder)
    params = offline.SamplingParams(logprobs=4)
    if restriction == "tokens":
        params.logprob_token_ids = [1, 2]
    llm = holder.BeamSearchOfflineMixin()
    llm._beam_search_step(
        instances_batch=[],
        base_sampling_params=params,
        beam_width=2,
        structured_output_backend=object() if restriction == "grammar" else None,
    )
    llm._beam_search_step([], params, 2, None)  # by position, as no release does
    assert seen == [(llm, False)] * 2


def test_positions_match_vllm(monkeypatch):
    """Also where the engine returns more log-probabilities than were asked for."""
    monkeypatch.setattr(parts, "_active", frozenset())
    ours, theirs = FlatLogprobs(), FlatLogprobs()
    for width in (2, VOCABULARY):
        ids, values = list(range(width)), [-0.5 * i for i in range(width)]
        for decoded in (iter([None] * width), [str(i) for i in ids]):
            decoded = list(decoded)
            beams.append_position(ours, ids, values, iter((7, 1, 2)), iter(decoded))
            theirs.append_fast(ids, values, iter((7, 1, 2)), iter(decoded))
    assert ours == theirs and len(ours) == 4
