"""``bench``: correct results are timed, wrong results are reported."""

import json

import pytest
import torch

from tests.support.cli_runs import run
from vllm_prefixshare.cli import bench
from vllm_prefixshare.cli.batches import tree_batch
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.executor import cpu_executor

SMALL = ["--num-qo-heads", "4", "--num-kv-heads", "2", "--head-dim", "64", "--seconds", "0.1"]
ATTENTION = AttentionConfig(4, 2, 64, 128)
SHARED, ALONE = "1,4_512,40", "3_200"


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["bench", "--json", "--device", "cpu", *SMALL, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_one_table():
    done = run("bench", "--device", "cpu", *SMALL, "--tree", SHARED, "--tree", ALONE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("attention of one layer on ")
    assert lines[1].startswith("unshared: vLLM's CPU_ATTN; shared: ")
    assert lines[2].endswith("share  unshared ms  shared ms  gain")
    assert lines[3].split()[:4] == ["tree", SHARED, "4", "2208"]
    assert lines[4].split()[:5] == ["tree", ALONE, "3", "600", "1.00"]
    assert "[" not in done.stderr, "no progress bar without a terminal"


def test_both_ways_are_compared_and_timed(capsys, monkeypatch):
    monkeypatch.setattr(bench, "MIN_PAIRS", 3)
    found = report(capsys, "--tree", SHARED, "--tree", ALONE)
    assert found["right"]
    for row in found["rows"]:
        assert row["pairs"] >= 3
        assert min(row["unshared_ms"], row["shared_ms"], row["gain"]) > 0
        assert max(row["errors"].values()) <= 0.03
    alone = found["rows"][1]
    assert alone["share_factor"] == 1.0
    assert alone["errors"]["shared"] == alone["errors"]["unshared"], "both are CPU_ATTN"


@pytest.mark.parametrize(("others", "noisy"), [(0.0, False), (9.0, True)])
def test_a_gain_that_other_work_disturbed_is_noisy(others, noisy):
    """Of five pairs four meet other work in one of their halves or both."""
    times = {
        "unshared": iter([2.0, 2.0, 2.0, 2.0 + others, 2.0 + others]),
        "shared": iter([1.0, 1.0 + others, 1.0 + others, 1.0 + others, 1.0]),
    }
    expected = torch.ones(1, 1, 1)

    def side(name: str) -> bench.Side:
        out = torch.empty_like(expected)
        return bench.Side(out, lambda: out.copy_(expected), times[name].__next__, 16)

    sides = bench.Sides(side("unshared"), side("shared"), "kernel", "same", [0], expected.double())
    row = bench._measure(tree_batch("1_16", 16), sides, ATTENTION, seconds=0.0)
    assert row["noisy"] == noisy
    assert row["gain"] == (1.1 if noisy else 2.0)


def test_without_vllm_the_same_kernel_is_the_baseline(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_cpu_attn", lambda *_: None)
    found = report(capsys, "--tree", SHARED, "--dtype", "float16")
    assert found["unshared"] == "the same kernel, one by one"
    assert found["shared"].startswith("torch. Shared decode runs in torch operators")
    assert max(found["rows"][0]["errors"].values()) <= 0.01


@pytest.mark.parametrize("wrong", ["zero", "nan", "stale"])
def test_a_wrong_result_is_not_timed(capsys, monkeypatch, wrong):
    monkeypatch.setattr(bench, "_cpu_attn", lambda *_: None)

    class Wrong(type(cpu_executor(ATTENTION))):  # type: ignore[misc]
        def run(self, *tensors: torch.Tensor) -> torch.Tensor:
            out = tensors[5]
            if wrong == "stale":  # writes nothing
                return out
            super().run(*tensors)
            return out.mul_(0.0 if wrong == "zero" else float("nan"))

    monkeypatch.setattr("vllm_prefixshare.kernels.cpu.executor.TorchExecutor", Wrong)
    monkeypatch.setattr("vllm_prefixshare.kernels.cpu.executor.NativeExecutor", Wrong)
    assert main(["bench", "--device", "cpu", *SMALL, "--tree", SHARED]) == 1
    assert "WRONG: off the reference by unshared " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seconds", "0"], "--seconds must be more than 0 and at most 3600, got 0.0"),
        (["--seconds", "nan"], "--seconds must be more than 0 and at most 3600, got nan"),
        (["--tree", "4,1_16,16"], "tree '4,1_16,16' is not valid"),
        (["--head-dim", "48"], "head_dim must be"),
        (["--head-dim", "72"], "no kernel for a head_dim of 72: name one of 64, 80, 96"),
        (["--block-size", "0"], "block_size must be at least 1, got 0"),
        (["--block-size", "7"], "no kernel for blocks of 7 tokens: name a --block-size that is"),
        (
            ["--num-qo-heads", "4096", "--num-kv-heads", "4096", "--block-size", "65536",
             "--tree", "1,4_65536,65536"],
            "GiB of memory, and",
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_gets_one_sentence(arguments, sentence, capsys):
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert sentence in capsys.readouterr().err
