"""The training example with TRL, in an environment that ``make trl`` sets up."""

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.examples.test_examples import EXAMPLES
from tests.support.dummy_model import write_small_llama
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.processes import run

BESIDE = EXAMPLES.parent / ".venv-trl" / "bin" / "python"
PYTHON = BESIDE if importlib.util.find_spec("trl") is None else Path(sys.executable)
SCRIPT = EXAMPLES / "grpo_training.py"
NUM_STEPS = 3


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(SCRIPT))


@pytest.mark.engine
@pytest.mark.skipif(not PYTHON.exists() and "CI" not in os.environ, reason="needs TRL: make trl")
def test_both_backends_train_alike(tmp_path):
    model = write_small_llama(tmp_path / "model", num_layers=2)
    picture, log = tmp_path / "picture.png", tmp_path / "log"
    options = {
        "--model": model,
        "--steps": NUM_STEPS,
        "--max-tokens": 12,
        "--learning-rate": 1e-4,
        "--plot": picture,
        "--log": log,
    }
    command = [PYTHON, SCRIPT, *(word for option in options.items() for word in option)]
    variables = {**DEFAULT_ENVIRONMENT, "PYTHONPATH": str(EXAMPLES.parent)}
    done = run(command, status=None, cwd=tmp_path, timeout=600, **variables)
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()[-4000:]
    rows = re.findall(r"^ +(\d)((?: +\S+){6})$", done.stdout, re.M)
    assert [int(step) for step, _ in rows] == list(range(1, 1 + NUM_STEPS))
    cells = [[float(cell) for cell in row.split()] for _, row in rows]
    rewards, divergences, gaps = (
        [row[column : column + 2] for row in cells] for column in (0, 2, 4)
    )
    # the same seeds and the same policy give the same samples, but for a tie
    assert all(a == pytest.approx(b, abs=0.02) for a, b in rewards)
    assert divergences[0] == [0, 0]
    # the policy has moved, and the engine with it: with the old weights the gap would be as large
    assert min(divergences[-1]) > 0.05
    assert max(max(row) for row in gaps) < 1e-4
    ((read, alone),) = re.findall(r"by count: ([\d,]+); ([\d,]+) without", done.stdout)
    assert int(alone.replace(",", "")) > 2 * int(read.replace(",", ""))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "reward"), [("x" * 20, 1.0), (" twenty characters... ", 1.0), ("", 0.6), ("x" * 90, 0)]
)
def test_the_reward_is_for_the_length(text, reward, example):
    assert example["reward"]([text]) == [pytest.approx(reward)]


def found(gap: float) -> dict[str, dict]:
    """Metrics of two steps; with PREFIX_SHARE the engine is ``gap`` nats from the trainer."""
    run = {"reward": [0.5, 0.75], "KL": [0.0, 0.25]}
    stats = {"kv_tokens_read": 100, "kv_tokens_stock": 300}
    return {
        "PREFIX_SHARE": {**run, "gap": [gap, gap], "stats": stats},
        "baseline": {**run, "gap": [1e-3, 1e-3]},
    }


@pytest.mark.parametrize(("gap", "status"), [(1e-3, 0), (3e-3, 1)])
def test_an_engine_far_from_the_trainer_is_exit_status_1(gap, status, example, capsys):
    assert example["show"](found(gap)) == status
    printed = capsys.readouterr().out
    assert re.search(r"^ +2 +0.75 +0.75 +0.25 +0.25 +0.00\d +0.001$", printed, re.M)
    assert "by count: 100; 300 without sharing" in printed


def test_the_picture_has_both_runs(example, tmp_path):
    example["plot"](found(1e-3), tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()
    assert picture.count("<!-- PREFIX_SHARE -->") == picture.count("<!-- baseline -->") == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--samples 1", "--samples must be at least 2, got 1"),
        ("--plot /nowhere/x.png", "--plot /nowhere/x.png cannot be written (No such"),
        ("", "TRL is not installed: run `make trl`, or `pip install '.[trl]'`"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments.split()])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in printed and len(printed.splitlines()) == 1
