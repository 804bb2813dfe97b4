"""Baselines by name (``benchmarks/support/baselines.py``), in engines and in whole calls."""

import pytest

from benchmarks.engine import bench as bench_engine
from benchmarks.support import baselines
from benchmarks.support.baselines import BASELINES
from benchmarks.whole_call import bench as bench_whole_call
from benchmarks.whole_call import serving
from benchmarks.whole_call.rows import ALL_ROWS
from vllm_prefixshare import PrefixShareError

NAMES = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "cascade")


@pytest.fixture
def release(monkeypatch):
    """Sets the installed release of vLLM, on a machine with a GPU."""

    def install(version: str) -> None:
        monkeypatch.setattr(baselines, "version", lambda name: version)
        monkeypatch.setattr(bench_engine.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(bench_whole_call, "has_gpu", lambda: True)

    return install


@pytest.mark.parametrize("name", NAMES)
def test_every_baseline_has_a_name_in_both_benchmarks(name, release):
    release("0.31.0")
    args = bench_engine.parse(["--baseline", name, "--workloads", "doc32k"])
    backend = "FLASH_ATTN" if name == "cascade" else name
    stock = bench_engine.stock_arguments(args.baseline, {})
    row = ALL_ROWS[bench_whole_call.parse(["--rows", name, "--shape", "8b"]).rows[0]]
    assert stock.pop("attention_backend") == row.backend_on(gpu=True) == backend
    assert stock == row.arguments() == BASELINES[args.baseline].arguments()
    assert row.environment().items() >= BASELINES[args.baseline].environment().items()


def test_cascade_attention_has_the_runner_and_the_releases_that_it_needs(release, capsys):
    release("0.31.0")
    row = ALL_ROWS["cascade"]
    assert row.environment()["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "--no-disable-cascade-attn" in serving.flags(row.arguments())
    with pytest.raises(SystemExit):
        bench_engine.parse(["--baseline", "cascade", "--runner", "v2"])
    assert "needs the V1 runner" in capsys.readouterr().err
    release("0.32.0+cpu")
    sentence = "cascade attention needs vLLM 0.29 to 0.31, installed is 0.32.0+cpu"
    assert row.unavailable() == sentence
    for parse, arguments in (
        (bench_engine.parse, ["--baseline", "cascade"]),
        (bench_whole_call.parse, ["--rows", "flash_attn,cascade"]),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert sentence in capsys.readouterr().err


def test_a_wrong_baseline_is_named_in_one_sentence(release, capsys):
    release("0.33.0")
    for parse, arguments in (
        (bench_engine.parse, ["--baseline", "FLASH_ATN"]),
        (bench_whole_call.parse, ["--rows", "FLASH_ATN"]),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        last = capsys.readouterr().err.splitlines()[-1]
        assert "'flash_atn'" in last and "triton_attn" in last
    with pytest.raises(PrefixShareError, match="MLA layers have no baseline flashinfer"):
        bench_engine.stock_arguments("flashinfer", {"kv_lora_rank": 512})


def test_without_a_gpu_the_baseline_is_vllms_own(monkeypatch, capsys):
    monkeypatch.setattr(bench_engine.torch.cuda, "is_available", lambda: False)
    assert bench_engine.parse([]).baseline == "flash_attn"
    with pytest.raises(SystemExit):
        bench_engine.parse(["--baseline", "triton_attn"])
    assert "needs a GPU" in capsys.readouterr().err
