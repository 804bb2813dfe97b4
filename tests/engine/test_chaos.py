"""A short run of ``benchmarks.quality.soak engine``: random events against a real engine."""

from random import Random

import pytest

from tests.support import chaos
from tests.support.dummy_model import SMALL, SMALL_VOCAB, write_small_llama
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, STOCK, EngineProcess
from tests.support.processes import held_by

pytestmark = pytest.mark.engine

BATCHES = 3


def test_chaos_leaves_tokens_right_and_nothing_behind(tmp_path):
    model = write_small_llama(tmp_path)
    text = Random(1).choices(range(3, SMALL_VOCAB), k=1500)
    cases = [chaos.Case(prompt) for prompt in chaos.prompts(text, 9, Random(0))]
    alone = chaos.spec(STOCK, model, alone=True, environment=ONE_PROCESS)
    with EngineProcess(**alone) as stock:
        cases = chaos.answered_alone(stock, cases, longest=20)
    with EngineProcess(**chaos.spec(PREFIX_SHARE, model, environment=ONE_PROCESS)) as ours:
        reports = chaos.endure(ours, cases, SMALL["eos_token_id"], seed=0, batch=24)
        open_files = []
        for _ in range(BATCHES):  # each batch ends with no block in use
            report = next(reports)
            open_files.append(held_by(ours.pid).open_files)
    assert report.wrong == []
    assert report.greedy == report.equal + report.ties > 20
    assert report.aborted and report.preemptions > 5 and report.shared_steps > 50
    assert open_files[-1] == open_files[0]
