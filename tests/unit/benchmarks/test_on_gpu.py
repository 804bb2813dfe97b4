"""The runner of what needs a GPU (``benchmarks.on_gpu``), with steps that need none."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.support.prompt_trees import FLASHFORGE
from benchmarks.support.workload_sets import FASTTREE
from vllm_prefixshare.config import FP8, LATENT_SHAPE, AttentionConfig
from vllm_prefixshare.kernels.catalog import Gpu, candidates

STEPS = {"right": "print('3 passed')", "wrong": "raise SystemExit('1 failed')"}


def steps(**code: str) -> list[on_gpu.Step]:
    return [on_gpu.Step(name, f'-c "{text}"') for name, text in code.items()]


def test_what_fails_is_named_and_the_rest_runs(tmp_path, capsys):
    assert on_gpu.run(steps(wrong=STEPS["wrong"], right=STEPS["right"]), tmp_path, 2, 60) == [
        "wrong"
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert any("right: status 0" in line and "3 passed" in line for line in lines)
    assert any("wrong: status 1" in line and "1 failed" in line for line in lines)
    assert (tmp_path / "wrong.log").read_text() == "1 failed\n"


def test_figures_show_their_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "PROGRESS", 0.0)
    code = "import time; print('cell 1', flush=True); time.sleep(1); print('cell 2')"
    on_gpu.run([on_gpu.Step("figure", f'-c "{code}"', cores=sys.maxsize)], tmp_path, 1, 60)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("figure, ") and first.endswith(" s: cell 1")
    assert last.startswith("figure: status 0, ") and last.endswith(" s: cell 2")


def test_steps_share_the_cores(tmp_path):
    """Two of one core meet; one that asks for more than there are runs alone."""
    meet = (
        "import pathlib, time; pathlib.Path('{0}').touch()\n"
        "while not pathlib.Path('{1}').exists(): time.sleep(0.01)"
    )
    one, other = tmp_path / "one", tmp_path / "other"
    pair = steps(one=meet.format(one, other), other=meet.format(other, one))
    wide = on_gpu.Step("wide", "-c pass", cores=sys.maxsize)
    assert on_gpu.run([*pair, wide], tmp_path, 2, 60) == []


def test_what_does_not_end_in_time_is_ended_with_its_children(tmp_path, capsys):
    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path('{child}').write_text(str(p.pid)); time.sleep(600)"
    )
    found = on_gpu.run(steps(endless=code, never="pass"), tmp_path, 1, 3)
    assert found == ["endless", "never"]
    said = capsys.readouterr().out
    assert "endless: time was up" in said and "never: not started" in said
    assert_ended(int(child.read_text()))


def test_an_interrupt_ends_what_runs(tmp_path):
    """The steps' processes are in sessions of their own, which an interrupt does not reach."""
    child = tmp_path / "child"
    code = f"import os, pathlib, time; pathlib.Path('{child}').write_text(str(os.getpid()))"
    command = f'-c "{code}; time.sleep(600)"'
    runner = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path[:0] = {sys.path!r}\nimport pathlib\nfrom benchmarks import on_gpu\n"
        f"step = on_gpu.Step('endless', {command!r})\n"
        f"on_gpu.run([step], pathlib.Path({str(tmp_path)!r}), 1, 600)"
    )
    with subprocess.Popen([sys.executable, "-c", runner], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert_ended(int(child.read_text()))


def assert_ended(pid: int) -> None:
    for _ in range(100):  # the process is reaped by whoever adopted it
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the process still runs")


def test_what_does_not_end_in_time_can_say_where_it_is(tmp_path, capsys):
    code = (
        "import time\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('2 passed, interrupted in the third')"
    )
    assert on_gpu.run(steps(slow=code), tmp_path, 1, 3) == ["slow"]
    assert "slow: time was up, 3 s: 2 passed, interrupted in the third" in capsys.readouterr().out


def test_steps_are_spread_over_the_gpus(tmp_path, monkeypatch):
    """Four that need one GPU run at once, two on each; one that needs several sees all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"
    meet = (
        f"{code}; import pathlib, time; pathlib.Path('{tmp_path}/here{{0}}').touch()\n"
        f"while len(list(pathlib.Path('{tmp_path}').glob('here*'))) < 4: time.sleep(0.01)"
    )
    four = steps(**{f"one_{i}": meet.format(i) for i in range(4)})
    several = on_gpu.Step("several", f'-c "{code}"', gpus=2)
    assert on_gpu.run([*four, several], tmp_path, 4, 60, ["4", "7"]) == []
    saw = [(tmp_path / f"{step.name}.log").read_text().strip() for step in four]
    assert sorted(saw) == ["4", "4", "7", "7"]
    assert (tmp_path / "several.log").read_text().strip() == "all"


def test_figures_have_the_threads_of_their_published_commands(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = "import os; print(os.environ.get('OMP_NUM_THREADS', 'as by default'))"
    figure = on_gpu.figure("kernel_mla_heads", tmp_path, {})
    figure.command = f'-c "{code}"'
    assert on_gpu.run([*steps(test=code), figure], tmp_path, 1, 60) == []
    assert (tmp_path / "test.log").read_text().strip() == "1"
    assert (tmp_path / f"{figure.name}.log").read_text().strip() == "as by default"


def test_what_needs_two_gpus_sees_all(tmp_path):
    several = {step.name for step in on_gpu.tests(tmp_path) if step.gpus > 1}
    of_files = {
        "test_gpu_ranks", "test_gpu_ray", "test_gpu_data_parallel", "test_gpu_engine_mla",
    }  # fmt: skip
    assert several == {*of_files, "test_gpu_engine_3", "test_gpu_mixed_graphs_1"}
    for path in Path(__file__).parents[2].glob("gpu/test_*.py"):
        if "two_gpus" in path.read_text() or "TWO_GPUS" in path.read_text():
            assert any(name.startswith(path.stem) for name in several), path


def test_every_test_file_that_needs_a_gpu_has_a_step(tmp_path):
    commands = " ".join(step.command for step in on_gpu.tests(tmp_path))
    files = sorted(Path(__file__).parents[2].glob("gpu/test_*.py"))
    assert len(files) > 10
    assert all(f"tests/gpu/{path.name}" in commands for path in files)


def test_figures_are_taken_anew_by_their_published_commands(tmp_path):
    paths = {"FASTTREE": "/peers/fasttree", "DEFT": "/d", "PAT": "/p"}
    step = on_gpu.figure("kernel", tmp_path, paths)
    published = json.loads((on_gpu.PUBLISHED / "kernel.json").read_text())["command"]
    assert step.command.startswith("-m benchmarks.kernel --workloads anchors")
    assert f"--out {tmp_path}/kernel.json" in step.command and "published" in published
    assert "--fasttree /peers/fasttree" in step.command
    with pytest.raises(ValueError, match="where is PAT"):
        on_gpu.figure("kernel", tmp_path, {"FASTTREE": "/f", "DEFT": "/d"})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["figures", "nope"], "no such file with a command"),
        (["figures", "startup"], "no such file with a command"),
        (["figures"], "name the published files"),
        (["tests", "nope"], "nope is none of test_"),
    ],
)
def test_an_unknown_name_is_refused(arguments, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        on_gpu.main([*arguments, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_names_may_stand_behind_options(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert on_gpu.main(["tests", "--list", "test_gpu_mla", *out, "test_gpu_windows"]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_the_list_has_commands_that_a_shell_takes(tmp_path, capsys):
    assert on_gpu.main(["fuzz", "--list", "--out", str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    command = f"python -m benchmarks.quality.sanitize --out {tmp_path}/new/sanitize.json"
    assert f"sanitize: {command}" in lines
    assert not (tmp_path / "new").exists()


def test_figures_that_were_not_published_yet_have_commands_too(tmp_path):
    steps = [on_gpu.figure(name, tmp_path, CHECKOUTS) for name in on_gpu.NEW]
    assert all(step.command.endswith(f"--out {tmp_path}/{step.name}.json") for step in steps)
    published = {path.stem for path in on_gpu.PUBLISHED.glob("*.json")}
    named = {*ENGINES, *KERNELS, *OF_FASTTREE, *OPPONENTS, *TASKS}
    assert {step.name for step in steps} == named - published


def arguments_of(name: str) -> list[str]:
    """What the program of a figure is given."""
    return shlex.split(on_gpu.figure(name, Path("results"), CHECKOUTS).command)[2:]


DEFT_TASKS = ("SORTING", "DOCUMENTS", "KEYWORD", "SET")
CHECKOUTS = {"FASTTREE": "fasttree", "DEFT": "deft"} | {
    name: f"deft/{name.lower()}ToT.json" for name in DEFT_TASKS
}
#: FlashForge's figure 7, DeFT's table 5
TASKS = ("engine_flashforge", "engine_deft")
#: other baselines than FLASH_ATTN
OPPONENTS = ("engine_flashinfer", "engine_triton_attn", "engine_cascade")
#: FastTree's figures 9 and 10
OF_FASTTREE = ("kernel_fasttree", "engine_fasttree_llama2", "engine_fasttree_mistral")
#: figures of engines -> the shape of the model
ENGINES = {
    "engine_long": "8b",
    "engine_gpt_oss": "gpt-oss-20b",
    "engine_qwen3_next": "qwen3-next",
    "engine_mla": "deepseek-v2-lite",
}
#: figures of layers -> blocks, head_dim, heads, and the kernel that serves them on an H200
KERNELS = {
    "kernel_soft_cap": (16, 128, [(32, 16)], "hopper"),
    "kernel_alibi": (16, 128, [(32, 32)], "portable"),
    "kernel_head_dim_512": (16, 512, [(16, 2), (16, 8)], "portable"),
    "kernel_hybrid": (544, 256, [(16, 2), (24, 4)], "hopper"),
    "kernel_mla_heads": (64, LATENT_SHAPE[0], [(24, 1), (32, 1), (64, 1)], "mla_hopper"),
    "kernel_mla_fp8": (64, LATENT_SHAPE[0], [(16, 1), (8, 1), (32, 1)], "mla_hopper"),
    "kernel_mla_drafts": (64, LATENT_SHAPE[0], [(16, 1), (8, 1)], "mla_hopper"),
}


def test_fasttrees_figures_have_its_trees_workloads_and_models(monkeypatch):
    from benchmarks.engine import bench as bench_engine
    from benchmarks.kernel import bench as bench_kernel

    kernel, llama, mistral = (arguments_of(name) for name in OF_FASTTREE)
    args = bench_kernel.parse(kernel)
    assert [w.name for w in bench_kernel.workloads(args)] == list(FASTTREE)
    assert args.heads == [(16, 1), (32, 8), (32, 32)]
    assert {"ours", "fasttree", "deft", "fa2", "fa3", "flashinfer_cascade"} <= set(args.peers)
    monkeypatch.setattr(bench_engine, "visible_gpus", lambda: ["0", "1"])
    for arguments, heads in ((llama, 32), (mistral, 8)):
        args = bench_engine.parse(arguments)
        assert args.workloads == [f"fasttree_{x}" for x in "abcd"] and args.breakdown
        shape = bench_engine.SHAPES[args.shape].fields
        assert shape.get("num_key_value_heads", 8) == heads


def test_flashforges_sweeps_fit_an_engine():
    from benchmarks.engine import bench as bench_engine

    args = bench_engine.parse(arguments_of("engine_flashforge"))
    assert args.workloads == list(FLASHFORGE) and args.breakdown
    # of 128 KiB each, next to another engine on an H200
    assert max(w.distinct_tokens(args.tokens) for w in FLASHFORGE.values()) < 300_000


def test_an_engine_has_a_row_for_each_of_defts_tasks():
    from benchmarks.engine import bench as bench_engine

    args = bench_engine.parse(arguments_of("engine_deft"))
    tasks = [f"deft:{name.lower()}ToT" for name in DEFT_TASKS]
    assert args.workloads == ["fewshot20", "fewshot30", "fewshot50", *tasks]
    bench = bench_engine.Bench.__new__(bench_engine.Bench)
    bench.args, asked = args, []
    bench.deft = asked.append
    for task in tasks:
        bench.measure(task)
    assert asked == args.deft


@pytest.mark.parametrize("name", ENGINES)
def test_engines_take_the_commands_of_figures(name):
    from benchmarks.engine import bench as bench_engine

    args = bench_engine.parse(arguments_of(name))
    assert args.shape == ENGINES[name]
    assert "doc32k" in args.workloads


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_serve_the_layers_of_figures(name):
    from benchmarks.kernel import bench as bench_kernel

    args = bench_kernel.parse(arguments_of(name))
    block_size, head_dim, heads, kernel = KERNELS[name]
    assert (args.block_size, args.head_dim, args.heads) == (block_size, head_dim, heads)
    assert args.peers[0] == "ours"
    features = {"sinks": args.sinks, "soft_cap": args.soft_cap, "alibi": args.alibi}
    for num_qo_heads, num_kv_heads in args.heads:
        attention = AttentionConfig(
            num_qo_heads,
            num_kv_heads,
            args.head_dim,
            args.block_size,
            args.dtype,
            kv_dtype=FP8 if args.kv_dtype else None,
            query_dtype=FP8 if args.kv_dtype and args.mla else None,
            features=tuple(name for name, there in features.items() if there),
            kv_lora_rank=LATENT_SHAPE[1] if args.mla else None,
        )
        assert candidates(attention, Gpu((9, 0), 132, 1 << 18))[0] == kernel
    assert [w.block_size for w in bench_kernel.workloads(args)] == [block_size] * len(args.tree)
