"""Beam search whose candidates refer to their beams: the same sequences as vLLM's own."""

import gc

import numpy as np
import pytest
from vllm.entrypoints.generate.beam_search import offline, utils

from tests.support.beam_search import PLAIN, RandomModel, search, step
from tests.support.shared_prefixes import install_hook
from vllm_prefixshare.vllm_plugin.hooks import beams as hooks
from vllm_prefixshare.vllm_plugin.prompts import beams, parts
from vllm_prefixshare.vllm_plugin.prompts.copies import PART


@pytest.fixture(autouse=True)
def _installed():
    for hook in hooks.HOOKS:
        install_hook(hook)


def run(monkeypatch, on, *options, **changes):
    monkeypatch.setattr(parts, "_active", frozenset({PART} if on else ()))
    return search(offline.BeamSearchOfflineMixin, *options, **changes)


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
    monkeypatch.setattr(RandomModel, "_answer", lambda self, ids: 1 / 0)
    monkeypatch.setattr(parts, "_active", frozenset({PART}))
    model = type("Search", (RandomModel, offline.BeamSearchOfflineMixin), {})(2)
    instance = utils.BeamSearchInstance({"type": "token", "prompt_token_ids": [1, 2]})
    with pytest.raises(ZeroDivisionError):
        step(model, [instance], ignore_eos=True)
    assert type(instance.beams[0].tokens) in PLAIN


def test_no_garbage_is_collected_within_a_step(monkeypatch):
    """A collection passes over all objects of the process, and candidates are no garbage."""
    enabled = []
    answer = RandomModel._answer

    def noted(self, ids):
        enabled.append(gc.isenabled())
        return answer(self, ids)

    monkeypatch.setattr(RandomModel, "_answer", noted)
    run(monkeypatch, on=True, width=16, num_steps=3, ignore_eos=True)
    assert enabled and not any(enabled)
    assert gc.isenabled()
    enabled.clear()
    run(monkeypatch, on=False, width=16, num_steps=1, ignore_eos=True)
    assert all(enabled)


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
