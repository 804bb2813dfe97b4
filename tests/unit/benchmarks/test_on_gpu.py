"""The runner of published figures (``benchmarks.on_gpu``), with commands that need no GPU."""

import json
import math
import os
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.engine import bench as bench_engine
from benchmarks.kernel import bench as bench_kernel
from benchmarks.support.prompt_trees import FLASHFORGE
from benchmarks.support.workload_sets import FASTTREE


def test_what_fails_is_named(tmp_path, capsys):
    deadline = time.monotonic() + 60
    assert on_gpu.run("right", ["-c", "print('3 passed')"], tmp_path, deadline)
    assert not on_gpu.run("wrong", ["-c", "raise SystemExit('1 failed')"], tmp_path, deadline)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("right: status 0, ") and first.endswith(" s: 3 passed")
    assert second.startswith("wrong: status 1, ") and second.endswith(" s: 1 failed")
    assert (tmp_path / "wrong.log").read_text() == "1 failed\n"


def test_what_does_not_end_in_time_is_interrupted_and_ended_with_its_children(tmp_path, capsys):
    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path('{child}').write_text(str(p.pid))\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('2 passed, interrupted in the third')"
    )
    assert not on_gpu.run("endless", ["-c", code], tmp_path, time.monotonic() + 3)
    assert not on_gpu.run("never", ["-c", "pass"], tmp_path, -math.inf)
    said = capsys.readouterr().out
    assert "endless: time was up, 3 s: 2 passed, interrupted in the third" in said
    assert "never: not started" in said
    pid = int(child.read_text())
    for _ in range(100):  # the process is reaped by whoever adopted it
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the process still runs")


def test_figures_are_taken_again_by_their_published_commands(tmp_path):
    paths = {"FASTTREE": "/peers/fasttree", "DEFT": "/d", "PAT": "/p"}
    command = " ".join(on_gpu.figure("kernel", tmp_path, paths))
    published = json.loads((on_gpu.PUBLISHED / "kernel.json").read_text())["command"]
    assert command.startswith("-m benchmarks.kernel --workloads anchors")
    assert f"--out {tmp_path}/kernel.json" in command and "published" in published
    assert "--fasttree /peers/fasttree" in command
    with pytest.raises(ValueError, match="where is PAT"):
        on_gpu.figure("kernel", tmp_path, {"FASTTREE": "/f", "DEFT": "/d"})


def test_figures_resume_what_their_benchmark_can(tmp_path):
    for name in ("kernel_fp8", "engine_cascade"):
        assert on_gpu.figure(name, tmp_path, {}, resume=True)[-1] == "--resume"
    assert "--resume" not in on_gpu.figure("fidelity_gpu", tmp_path, {}, resume=True)


@pytest.mark.parametrize("name", ["nope", "startup"])
def test_an_unknown_name_is_refused(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        on_gpu.main(["figures", name, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "no such file with a command" in capsys.readouterr().err


DEFT_TASKS = ("SORTING", "DOCUMENTS", "KEYWORD", "SET")
CHECKOUTS = {"FASTTREE": "fasttree", "DEFT": "deft"} | {
    name: f"deft/{name.lower()}ToT.json" for name in DEFT_TASKS
}


def arguments_of(name: str) -> list[str]:
    """What the program of a figure is given."""
    return on_gpu.figure(name, Path("results"), CHECKOUTS)[2:]


def test_what_was_not_published_yet_has_arguments_that_its_program_takes(monkeypatch):
    monkeypatch.setattr(bench_engine, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(bench_engine, "check_baseline", lambda parser, args: None)
    apart = ("engine_fasttree_llama2", "engine_fasttree_mistral")
    names = [n for n in on_gpu.NEW if "engine" in n]
    engines = {n: bench_engine.parse(arguments_of(n)) for n in (*names, *apart)}
    for name, heads in zip(apart, (32, 8), strict=True):
        args = engines[name]
        assert sorted(args.workloads) == [f"fasttree_{x}" for x in "abcd"] and args.breakdown
        shape = bench_engine.SHAPES[args.shape].fields
        assert shape.get("num_key_value_heads", 8) == heads
    for name in ("flashinfer", "triton_attn", "cascade"):
        args = engines[f"engine_{name}"]
        assert (args.baseline, args.workloads[:2]) == (name, ["doc32k", "docs8k"])
    assert "doc32k" in engines["engine_long"].workloads
    args = engines["engine_flashforge"]
    assert args.workloads == list(FLASHFORGE) and args.breakdown
    # of 128 KiB each, next to another engine on an H200
    assert max(w.distinct_tokens(args.tokens) for w in FLASHFORGE.values()) < 300_000
    args = bench_kernel.parse(arguments_of("kernel_fasttree"))
    assert [w.name for w in bench_kernel.workloads(args)] == list(FASTTREE)
    assert args.heads == [(16, 1), (32, 8), (32, 32)]
    assert {"ours", "fasttree", "deft", "fa2", "fa3", "flashinfer_cascade"} <= set(args.peers)


def test_an_engine_has_a_row_for_each_of_defts_tasks():
    args = bench_engine.parse(arguments_of("engine_deft"))
    tasks = [f"deft:{name.lower()}ToT" for name in DEFT_TASKS]
    assert args.workloads == ["fewshot20", "fewshot30", "fewshot50", *tasks]
    bench = bench_engine.Bench.__new__(bench_engine.Bench)
    bench.args, asked = args, []
    bench.deft = asked.append
    for task in tasks:
        bench.measure(task)
    assert asked == args.deft
