"""A short run of ``benchmarks/soak.py engine``: random events against a real engine."""

from random import Random

import pytest

from tests.support import chaos
from tests.support.engine import PREFIX_SHARE, EngineProcess
from tests.support.processes import held_by

from .conftest import DOCUMENT

pytestmark = pytest.mark.engine

BATCHES = 3


def test_chaos_leaves_tokens_right_and_nothing_behind(model, stock):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text, eos = tokenizer.encode(DOCUMENT), tokenizer.eos_token_id
    cases = [chaos.Case(prompt) for prompt in chaos.prompts(text, 9, Random(0))]
    cases = chaos.answered_alone(stock, cases, longest=20)
    with EngineProcess(**chaos.spec(PREFIX_SHARE, model), pause=True) as ours:
        reports = chaos.endure(ours, cases, eos, seed=0, batch=24)
        open_files = []
        for _ in range(BATCHES):  # each batch ends with no block in use
            report = next(reports)
            open_files.append(held_by(ours.pid).open_files)
    assert report.wrong == []
    assert report.greedy == report.equal + report.ties > 20
    assert report.aborted and report.preemptions > 5 and report.shared_steps > 50
    assert open_files[-1] == open_files[0]
