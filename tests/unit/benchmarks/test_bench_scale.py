"""What ``benchmarks.kernel.scale`` refuses, and how it ends when a rank fails."""

import sys

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from benchmarks.kernel import scale as bench_scale


@pytest.mark.parametrize("heads", ["7:3", "32:0", "0:8", "-8:-8", "32", "a:b", "8:4:2"])
def test_heads_that_cannot_be_are_refused(heads, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_scale.parse(["--device", "cpu", f"--heads={heads}"])
    assert ended.value.code == 2
    sentence = "--heads: must be query:KV heads such as 32:8, the first a multiple of the second"
    assert sentence in capsys.readouterr().err
    args = bench_scale.parse(["--device", "cpu", "--heads", "6:3"])
    assert (args.qo_heads, args.kv_heads, args.heads) == (6, 3, "6:3")


def test_blocks_without_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_scale.parse(["--device", "cpu", "--block-size", "0"])
    assert "--block-size: must be 1 or more" in capsys.readouterr().err


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
