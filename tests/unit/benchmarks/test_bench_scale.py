"""What ``benchmarks.kernel.scale`` refuses, and how it ends when a rank fails."""

import sys

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from benchmarks.kernel import scale as bench_scale


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ("7:3", "the query heads a multiple of the KV heads"),
        ("32:0", "--heads must be positive"),
        ("0:8", "--heads must be positive"),
        ("-8:-8", "--heads must be positive"),
        ("32", "--heads must be such as 32:8"),
    ],
)
def test_heads_that_cannot_be_are_refused(heads, text, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_scale.parse(["--device", "cpu", f"--heads={heads}"])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert bench_scale.parse(["--device", "cpu", "--heads", "6:3"]).qo_heads == 6


def test_blocks_without_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_scale.parse(["--device", "cpu", "--block-size", "0"])
    assert "--block-size must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failed", "sentence"),
    [
        (
            ProcessRaisedException("\n\n-- Process 1:\nTraceback\nValueError: no room.\n", 1, 99),
            "benchmarks.kernel.scale: rank 1: ValueError: no room.",
        ),
        (
            ProcessExitedException("process 0 terminated with signal SIGKILL", 0, 99, -9),
            "benchmarks.kernel.scale: rank 0: process 0 terminated with signal SIGKILL",
        ),
    ],
)
def test_a_rank_that_fails_is_one_sentence(failed, sentence, monkeypatch):
    def spawn(*_, **__):
        raise failed

    monkeypatch.setattr(bench_scale.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(sys, "argv", ["scale.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        bench_scale.main()
    assert ended.value.code == sentence
