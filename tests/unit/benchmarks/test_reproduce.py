"""``benchmarks.reproduce``: its registry, its bytes, and that it goes on where it stopped."""

import json
import math
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from benchmarks import reproduce
from benchmarks.engine import bench as bench_engine
from benchmarks.engine import workloads as engine_workloads
from benchmarks.kernel.bench import make_case, reference, relative_error
from benchmarks.papers import (
    EXPERIMENTS,
    LEFT_OUT,
    PAPERS,
    accounting,
    counters,
    deft,
    engine,
    fasttree,
    flashforge,
    merging,
    methods,
    recordings,
    reduction,
    timing,
    tree_attention,
)
from benchmarks.papers import tables as papers_tables
from benchmarks.papers.experiment import CPU, TEXTS, Experiment, Point, Setting
from benchmarks.support import program, published
from benchmarks.support import workload_sets as sets
from benchmarks.support.trees import forest, tree
from tests.support import decode_paths as paths
from tests.support import processes
from tests.support.gpu_layer import KERNELS, ON_GPU
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.hopper.launch import HopperKernel
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.planner import DecodePlanner

ROOT = Path(__file__).parents[3]

H200 = Gpu((9, 0), 132, 227 << 10)
TINY = Setting("cpu", tiny=True, repeats=1)
#: of Nsight Compute's table
HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
READ = '"0","{}","dram__bytes_read.sum","byte","7"'
WRITTEN = '"0","{}","dram__bytes_write.sum","byte","0"'
#: a layer's line of it, whole
LAYER = "\n".join(line.format("partial_attention") for line in (READ, WRITTEN))


def run(*arguments: str) -> int:
    return reproduce.main(list(map(str, arguments)))


def stand_in(
    name: str, points: list[Point], like: str = "flashforge-figure-6", **changes
) -> Experiment:
    """An experiment with these points, whose findings are those of another one.

    Args:
        changes: of its fields.
    """
    return replace(EXPERIMENTS[like], name=name, points=lambda _: iter(points), **changes)


def silent(name: str, points: list[Point], **changes) -> Experiment:
    """As ``stand_in``, with points that have no figures of the experiment."""
    return stand_in(name, points, ours=lambda found: "", **changes)


def begun(some: Experiment, folder: Path, setting: Setting = TINY) -> reproduce.Progress:
    return reproduce.begin(some, setting, folder, fresh=False)


def carry_out(*runs: reproduce.Progress, setting: Setting = TINY, left: float = math.inf) -> bool:
    """left: seconds until nothing begins any more."""
    return reproduce.carry_out(list(runs), setting, time.monotonic() + left)


def peers(**milliseconds: float) -> dict:
    """The figures of a point with the times of some ways."""
    return {"peers": {way: {"status": "ok", "ms": ms} for way, ms in milliseconds.items()}}


def test_everything_runs_in_miniature(tmp_path, capsys):
    assert run("--tiny", "--out", tmp_path) == 0
    said = capsys.readouterr().out
    for name, experiment in EXPERIMENTS.items():
        expected = [p.name for p in experiment.points(TINY)]
        if not expected:
            assert f"{name}: nothing to run here, it has no miniature" in said
            continue
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert list(result["points"]) == expected, name
        assert result["complete"] and result["tiny"], name
        for figures in result["points"].values():
            assert "failed" not in figures, (name, figures)
            for way, found in figures.get("peers", {}).items():
                no_trees = found.get("reason") == "token trees need a GPU"
                assert found["status"] == "ok" or no_trees, (name, way, found)
        if experiment.table:
            lines = experiment.table(result["points"])
            assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_the_page_names_what_has_no_miniature():
    page = (ROOT / "docs" / "notes" / "papers.md").read_text()
    sentence = re.search(r"^- `--tiny` .* all but (.*?), which", page, re.M)[1]
    without = [n for n, e in EXPERIMENTS.items() if not list(e.points(TINY))]
    assert re.findall(r"`(\S+)`", sentence) == without


def test_a_run_goes_on_where_it_stopped(tmp_path, capsys):
    name = "flashforge-figure-6"
    arguments = (name, "--tiny", "--out", tmp_path)
    assert run(*arguments) == 0
    files = sorted((tmp_path / "points" / name).iterdir())
    before = [f.read_text() for f in files]
    lost, failed, kept = files[:3]
    lost.unlink()
    failed.write_text(json.dumps({**json.loads(failed.read_text()), "figures": {"failed": "x"}}))
    kept.write_text(kept.read_text().replace('"requests": ', '"requests": 1000'))
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "[2/2 " in (said := capsys.readouterr().out)
    assert "[3/" not in said
    assert lost.read_text() == before[0]
    assert failed.read_text() == before[1]
    assert '"requests": 1000' in kept.read_text()
    assert run(*arguments, "--fresh") == 0
    assert [f.read_text() for f in files] == before


def test_a_run_that_is_interrupted_says_what_is_left_and_goes_on(tmp_path, monkeypatch, capsys):
    def interrupt() -> dict:
        raise KeyboardInterrupt

    points = [Point("a", dict), Point("b", interrupt), Point("c", dict)]
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {"x": silent("x", points)})
    assert run("--tiny", "--out", tmp_path) == 130
    said = capsys.readouterr().out
    assert "stopped\n" in said
    assert "x, points left: 2\n" in said
    assert said.endswith("points left: 2; the same command goes on with them\n")
    points[1] = Point("b", dict)
    assert run("--tiny", "--out", tmp_path) == 0
    said = capsys.readouterr().out
    assert "[1/2 " in said
    assert "left" not in said


def test_what_the_minutes_left_no_time_for_is_named(tmp_path, monkeypatch, capsys):
    some = {n: silent(n, [Point("a", dict)], seconds=s) for n, s in (("x", 0), ("y", 99))}
    monkeypatch.setattr(reproduce, "EXPERIMENTS", some)
    assert run("--tiny", "--out", tmp_path, "--minutes", "1") == 0
    said = capsys.readouterr().out
    assert "\ny, points left: 1\n" in said
    assert "x, points left" not in said


def test_points_that_fail_or_are_wrong_end_in_1_and_run_again(tmp_path, capsys):
    def refuse() -> dict:
        raise PrefixShareError("this machine cannot.")

    points = {
        "a": refuse,
        "b": lambda: {"peers": {"ours": {"status": "wrong"}}},
        "c": lambda: {"figure": 1},
        "d": lambda: {"failed": "a program of its own ended with 1"},
        "e": lambda: {"peers": {"ours": {"status": "failed", "reason": "x"}}},
        "f": lambda: {"peers": {"fa3, expanded branches": {"status": "failed", "reason": "x"}}},
    }
    setting = replace(TINY, peers=("fa3",))

    def progress(*names: str) -> reproduce.Progress:
        some = silent("".join(names), [Point(n, points[n]) for n in names])
        return begun(some, tmp_path, setting)

    assert [n for n in points if not carry_out(progress(n), setting=setting)] == ["b", "d", "e"]
    assert "] b: b: ours WRONG\n" in capsys.readouterr().out
    assert not carry_out(progress(*points), setting=setting)
    result = json.loads((tmp_path / "abcdef.json").read_text())
    assert result["points"]["a"] == {"failed": "PrefixShareError: this machine cannot."}
    assert result["points"]["c"] == {"figure": 1}
    assert not result["complete"]
    assert [p.name for p in progress(*points).left] == ["a", "b", "d", "e"]


def test_wrong_results_are_in_no_figure(tmp_path, monkeypatch, capsys):
    row = EXPERIMENTS["tree-attention-figure-3"]
    figures = next(iter(papers_tables.ran(row.name)["points"].values()))
    slow = dict.fromkeys(figures["us"], 1e9)
    points = [
        Point("good", lambda: {**figures, "right": True}),
        Point("bad", lambda: {**figures, "us": slow, "right": False}),
    ]
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {"x": stand_in("x", points, row.name)})
    assert run("--tiny", "--out", tmp_path) == 1
    said = capsys.readouterr().out
    assert "] x: bad: WRONG\n" in said
    assert "\nx, wrong: 1\n" in said
    assert f"  here: {row.ours({'good': figures})}\n" in said
    assert ">good<" in (tmp_path / "x.svg").read_text()
    assert ">bad<" not in (tmp_path / "x.svg").read_text()
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    (tmp_path / "papers").mkdir()
    (tmp_path / "x.json").rename(tmp_path / "papers" / "x.json")
    assert list(papers_tables.ran("x")["points"]) == ["good"]


@pytest.mark.parametrize("bad", ["ours", "fasttree"])
def test_a_kernel_that_failed_in_a_published_cell_is_in_no_ratio(bad):
    result = published.load("kernel")
    few = [
        cell
        for cell in result["cells"]
        if cell["workload"] in fasttree.TREES and cell["heads"] != "64:8"
    ]
    row = "| FastTree | 1 | - | {} |"

    def table() -> str:
        return papers_tables.fasttree_kernels_table(result)

    whole = table()
    for peers in (c["peers"] for c in few[1:]):
        peers[bad] = {"status": "failed", "reason": "out of memory"}
    ratio = few[0]["peers"]["fasttree"]["ms"] / few[0]["peers"]["ours"]["ms"]
    alone = f"{ratio:.1f} to {ratio:.1f} times, {ratio:.1f} on average, "
    alone += f"{ratio:.1f} in the arithmetic mean"
    assert row.format(alone) in table() and row.format(alone) not in whole
    few[0]["peers"][bad] = {"status": "wrong", "error": 1.0}
    assert row.format("no cell of both") in table()


@pytest.mark.parametrize(
    ("what", "now"), [("versions", {"torch": "99"}), ("sources", "of another day")]
)
def test_points_of_another_version_or_of_other_sources_run_again(what, now, tmp_path, monkeypatch):
    some = silent("x", [Point("a", dict)])
    assert carry_out(begun(some, tmp_path))
    assert json.loads((tmp_path / "x.json").read_text())["sources"] == reproduce.sources()
    assert not begun(some, tmp_path).left
    monkeypatch.setattr(reproduce, what, lambda: now)
    assert begun(some, tmp_path).left


def test_the_sources_are_known_by_names_and_contents(tmp_path):
    (tmp_path / "inner").mkdir()
    files = [tmp_path / "a.py", tmp_path / "inner" / "b.py"]

    def digest() -> str:
        return reproduce.digest_of(tmp_path, tmp_path.rglob("*.py"))

    for file in files:
        file.write_text("1")
    before = digest()
    os.utime(files[0], (0, 0))
    assert digest() == before
    files[1].write_text("2")
    assert digest() != before
    files[1].write_text("1")
    files[1].rename(tmp_path / "inner" / "c.py")
    assert digest() != before


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "",
        "[]",
        "{}",
        '"x"',
        '{"setting": {}, "command": "", "date": "", "figures": 1}',
        b"\xff",
    ],
)
def test_a_damaged_point_runs_again(damage, tmp_path):
    some = silent("x", [Point("a", lambda: {"v": 1})])
    assert carry_out(begun(some, tmp_path))
    file = tmp_path / "points" / "x" / "a.json"
    whole = file.read_text()
    file.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    again = begun(some, tmp_path)
    assert len(again.left) == 1
    assert carry_out(again)
    assert file.read_text() == whole


def test_points_of_other_recordings_run_again(tmp_path):
    some = EXPERIMENTS["deft-figure-15-bytes"]
    setting = replace(TINY, tiny=False, recordings=tmp_path)
    stands_in = [replace(point, run=dict) for point in some.points(setting)]
    some = replace(some, points=lambda setting: iter(stands_in))

    def another(setting: Setting) -> reproduce.Progress:
        reproduce.digest.cache_clear()  # as in another run
        return begun(some, tmp_path / "out", setting)

    for size in (63, 62):
        paths = [[i] for i in range(size)]
        (tmp_path / "tree_size64.json").write_text(json.dumps({"Tree_Structure": paths}))
        assert len(another(setting).left) == len(stands_in)
        assert carry_out(another(setting), setting=setting)
        assert not another(setting).left
    assert len(another(replace(setting, recordings=None)).left) == len(stands_in)
    other = reproduce.described(setting, EXPERIMENTS["deft-table-6"])
    assert "recordings" not in other, "its points do not depend on them"


def test_checkouts_reach_the_peers_and_the_command_without_their_paths(tmp_path):
    args = reproduce.parse(
        ["deft-stars", "--tiny", "--peers", "deft", "--deft", str(tmp_path), "--fasttree", "x"]
    )
    setting = reproduce.setting_of(args)
    assert setting.checkouts == (("fasttree", Path("x")), ("deft", tmp_path))
    assert setting.command.endswith(" --tiny --peers deft --fasttree FASTTREE --deft DEFT")
    assert str(tmp_path) not in setting.command
    (point,) = deft.time_stars(setting)
    found = point.run()["peers"]["deft"]
    assert found == {"status": "unavailable", "reason": "needs a GPU"}


def test_experiments_take_turns_and_nothing_begins_after_the_deadline(tmp_path):
    order: list[str] = []

    def note(name: str) -> dict:
        order.append(name)
        return {}

    points = {n: [Point(f"{n}{i}", lambda n=n, i=i: note(f"{n}{i}")) for i in (1, 2)] for n in "xy"}
    runs = [begun(silent(n, points[n]), tmp_path) for n in "xy"]
    assert carry_out(*runs, left=-math.inf)
    assert not order
    runs[1].seconds = -1e9  # has had the least time
    runs[0].seconds = 0.0
    assert carry_out(*runs)
    assert order == ["y1", "y2", "x1", "x2"]


def test_a_point_that_another_program_measures_begins_only_if_its_seconds_are_left(tmp_path):
    began = []
    point = Point("a", lambda: began.append(1) or {})
    slow = silent("x", [point], seconds=60.0)
    for left, ran in ((30, 0), (90, 1)):
        assert carry_out(begun(slow, tmp_path), left=left)
        assert len(began) == ran


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["figure-99", "--tiny"], "no experiment is called 'figure-99'"),
        (["figure-99", "--list"], "no experiment is called 'figure-99'"),
        (["--tiny", "--peers", "nobody"], "peer 'nobody' is unknown"),
        (["--tiny", "--out", f"{__file__}/results"], "results: Not a directory."),
        (["--tiny", "--deft-recordings", "nowhere"], "nowhere has no JSON files"),
    ],
)
def test_bad_input_gets_one_sentence(arguments, sentence, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_the_list_names_every_experiment_and_the_page_has_them(capsys):
    assert run("--list") == 0
    said = capsys.readouterr().out
    page = (ROOT / "benchmarks" / "published" / "papers.md").read_text()
    for name, e in EXPERIMENTS.items():
        assert (
            f"  {name} (needs {e.needs}): {e.item}, section {e.section}\n    {e.status}\n" in said
        )
        assert e.changed in said
        assert f"\n### {name}\n" in page
    assert run("--list", "fasttree") == 0
    said = capsys.readouterr().out
    assert "  fasttree-figure-9 " in said
    assert "flashforge" not in said
    assert list(PAPERS) == list(dict.fromkeys(e.paper for e in EXPERIMENTS.values()))
    described = {name for of in TEXTS.values() for name in of["experiments"]}
    assert described == EXPERIMENTS.keys(), "a text without an experiment"
    assert EXPERIMENTS["tree-attention-volume"].status == "exact"
    for left in LEFT_OUT:
        assert f"({left.status})" in page and left.status in ("missing", "impossible")
    for name in EXPERIMENTS:
        published = papers_tables.ran(name)
        assert published is None or not published.get("tiny"), name


def test_bytes_are_those_of_the_runs_and_the_partial_results():
    w = tree("1,40_160,32", 16)
    found = accounting.count(methods.DEFT_NODE, w, (32, 8))
    per_token = 2 * 8 * 128 * 2
    # 40 requests of 4 rows are three tiles of 16 requests in the portable kernel
    assert found["kv"] == (3 * 160 + 40 * 32) * per_token
    assert found["tiles"] == 3 + 40
    assert found["partials"] == 2 * 40
    assert found["partial"] == 2 * 80 * 32 * (128 + 1) * 4
    assert found["outputs"] == 40 * 32 * 128 * 2
    assert found["queries"] == 2 * found["outputs"]
    assert accounting.unshared_bytes(w, (32, 8)) == 40 * 192 * per_token
    assert accounting.distinct_bytes(w, (32, 8)) == (160 + 40 * 32) * per_token
    alone = accounting.count(methods.NEITHER, w, (32, 8))
    assert (alone["kv"], alone["partials"]) == (accounting.unshared_bytes(w, (32, 8)), 0)


@pytest.mark.parametrize("way", [methods.OURS, methods.FLASHFORGE, methods.DEFT_NODE_CHUNK])
def test_no_plan_reads_less_than_the_distinct_tokens(way):
    for spec in ("1,2,4_64,32,16", "1,8_4096,100", "3,9_48,64"):
        w = tree(spec, 16)
        found = accounting.count(way, w, (8, 2))
        least = accounting.distinct_bytes(w, (8, 2))
        assert least <= found["kv"] <= accounting.unshared_bytes(w, (8, 2))


def test_large_token_trees_are_walked_by_several_tiles():
    attention = AttentionConfig(32, 8, 128, 16)
    for tokens, hopper, portable in ((1, 1, 1), (16, 1, 1), (32, 1, 2), (64, 2, 4), (256, 8, 16)):
        assert HopperKernel(attention, tokens, H200).row_tiles == hopper
        assert PortableKernel(attention, tokens, H200).row_tiles == portable


@pytest.mark.parametrize(
    ("heads", "way", "most"),
    [
        ((32, 8), methods.OURS, 16),
        ((32, 8), methods.PORTABLE, 32),
        ((16, 1), methods.OURS, 66),
        ((16, 1), methods.PORTABLE, 132),
    ],
)
def test_a_long_request_has_the_partial_results_that_the_page_names(heads, way, most):
    w = tree("1_65536")
    planner, _ = methods.planner_of(way, w, heads)
    plan = planner.update(w.block_table, w.seq_lens, 1).plan
    assert np.diff(plan.merge_indptr).tolist() == [most]


def test_merging_in_two_levels_is_merging():
    torch.manual_seed(0)
    indptr = torch.tensor([0, 3, 3, 20, 28], dtype=torch.int32)
    outs, lses = torch.randn(28, 2, 8), 3 * torch.randn(28, 2)
    found, expected = torch.full((2, 4, 2, 8), 7.0)
    requests = [0, 2, 3]  # the second has no partial results
    some = torch.tensor([0, 3, 20, 28], dtype=torch.int32)
    levels = reduction.TwoLevels(some, outs)
    assert np.diff(levels.second).tolist() == [1, 3, 1]
    merged = torch.empty(3, 2, 8)
    levels.merge(reduction.merge_on_cpu, outs, lses, merged)
    found[requests] = merged
    for r in requests:
        part = slice(int(indptr[r]), int(indptr[r + 1]))
        weights = lses[part].double().softmax(0)[..., None]
        expected[r] = (weights * outs[part]).sum(0).float()
    torch.testing.assert_close(found, expected)


#: two requests below one node, and one by itself, which has a single tile: no partial results
THREE = forest("two and one", [-1, 0, 0, -1], [128, 48, 20, 16])


def in_float16(heads: tuple[int, int]):
    options = timing.layer_options("cpu", 1)
    options.dtype = "float16"
    return make_case(THREE, heads, options)


def tensors_of(case) -> tuple:
    return case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
def test_merged_serially_a_layer_has_the_bits_of_one_launch():
    """The portable kernel under Triton's interpreter."""
    attention = AttentionConfig(4, 2, 128, 16, "float16")
    executor = paths.executor("portable", attention, 1, 16, 3)
    config = executor.planner_config("flashforge", "always")
    planner = DecodePlanner(config, analytic_cost(attention, "torch"), 16, 2)
    plan = planner.update(THREE.block_table, THREE.seq_lens).plan
    executor.prepare(plan)
    case = in_float16((4, 2))
    with paths.as_on_a_gpu(3):
        together = executor.run(*tensors_of(case), torch.empty_like(case.q), case.sm_scale)
    for left in (executor.workspace.partials.out, executor.workspace.partials.lse):
        left.fill_(torch.nan)
    kernel = PortableKernel(attention, 1, Gpu((9, 0), 3, 227 << 10))
    serially = merging.Serially(kernel, merging.merge_on_gpu, executor.workspace, plan)
    assert serially.requests == [0, 1] and np.diff(plan.merge_indptr)[:2].min() > 1
    found = torch.full_like(case.q, torch.nan)
    assert serially.run(*tensors_of(case), found, case.sm_scale) is found
    assert torch.equal(found, together)
    assert relative_error(found, reference(case)) < 2e-3


def test_only_the_first_of_serial_merges_may_begin_before_the_attention_has_ended():
    attention = AttentionConfig(4, 2, 128, 16, "float16")
    config = paths.executor("hopper", attention, 1, 16).planner_config("deft_node", "always")
    planner = DecodePlanner(config, analytic_cost(attention, "torch"), 16, 2)
    plan = planner.update(THREE.block_table, THREE.seq_lens).plan
    serially = merging.Serially.on_cpu(plan, attention)
    serially.kernel.starts_merging = True
    noted: list[tuple[list[int], bool]] = []

    def merge(indptr, *tensors, dependent) -> None:
        noted.append((indptr.tolist(), dependent))
        merging.merge_on_cpu(indptr, *tensors)

    serially.merge = merge
    case = in_float16((4, 2))
    found = torch.full_like(case.q, torch.nan)
    serially.run(*tensors_of(case), found, case.sm_scale)
    assert noted == [([0, 2], True), ([2, 4], False)]
    assert relative_error(found, reference(case)) < 2e-3


@pytest.mark.parametrize("kernel", [pytest.param(k, marks=ON_GPU) for k in KERNELS])
def test_the_steps_of_figure_8_on_a_gpu(kernel):
    setting = replace(TINY, device="cuda")
    points = [p for p in flashforge.time_steps(setting) if p.name.endswith(kernel)]
    assert len(points) == 2
    for point in points:
        peers = point.run()["peers"]
        assert list(peers) == list(flashforge.STEPS)
        for way, found in peers.items():
            assert found["status"] == "ok" and found["graph"], (way, found)
        assert " launches, " in peers[flashforge.SERIAL]["note"]


@pytest.mark.parametrize("name", [n for n, e in EXPERIMENTS.items() if e.needs == CPU])
def test_published_bytes_are_those_that_this_version_counts(name):
    """Else: ``python -m benchmarks.reproduce NAME --out benchmarks/published/papers --fresh``."""
    published = papers_tables.ran(name)["points"]
    counted = {p.name: p.run() for p in EXPERIMENTS[name].points(replace(TINY, tiny=False))}
    # recordings are not part of the repository
    recorded = set(deft.TASKS.values()) | {n for n in published if n.startswith(("star", "token"))}
    recorded &= {n for n in published if name == "deft-table-17"}
    assert counted.keys() == published.keys() - recorded
    assert [n for n in counted if counted[n] != published[n]] == []


def test_few_shot_bytes_are_the_published_ones():
    found = deft.few_shot(20, deft.PROMPT, deft.DECODED)
    medusa = found["medusa partial"] + found["medusa mask"]
    counted = found["unshared"] * deft.GROUP, found["distinct"] * deft.GROUP, medusa
    assert [round(n / 1e12, 2) for n in counted] == list(deft.PUBLISHED["few-shot 20"])
    assert found["ours"]["kv"] == found["distinct"]


def test_table_17_is_published_to_the_last_digit_that_the_paper_has():
    """The recordings are not part of the repository; their counts are."""
    points = papers_tables.ran("deft-table-17")["points"]
    assert {n for n in deft.PUBLISHED if n not in points} == set()
    exact = {n for n in deft.PUBLISHED if deft.deviation(n, points[n]) <= deft.EXACT}
    # the paper's runs of token trees are not published, those of the stars are
    assert exact == {n for n in deft.PUBLISHED if not n.startswith("token tree")}
    for task in (*deft.TASKS.values(), "few-shot 20", "few-shot 50"):
        medusa = (points[task]["medusa partial"] + points[task]["medusa mask"]) / 1e12
        assert round(medusa, 2) == deft.PUBLISHED[task][2]
    for name in deft.TASKS.values():
        assert points[name]["runs"] == recordings.AVERAGED_RUNS
    for size in deft.TOKEN_TREES:
        stars = points[f"star of {size}"]
        counted = (stars[kind] * deft.GROUP for kind in ("unshared", "distinct"))
        assert [*counted] == [round(t * 1e12) for t in deft.PUBLISHED[f"star of {size}"]]


def test_a_token_tree_is_walked_by_each_tile_of_its_rows():
    context = [1016, 1020, 1021]
    found = deft.verified([-1, *((i - 1) // 4 for i in range(1, 64))], context)
    assert found["ours"]["row_tiles"] == 2
    assert found["ours"]["walked"] == 2 * found["ours"]["kv"] == 2 * found["distinct"]
    # one root, 4, 16 and 43 tokens of depth 1 to 4
    token = 2 * 8 * 128 * 2 * 32
    assert found["unshared"] == token * (64 * sum(context) + 3 * (1 + 4 * 2 + 16 * 3 + 43 * 4))
    assert found["distinct"] == token * (sum(context) + 3 * 64)


def test_a_star_is_planned_at_every_step():
    context = [1023, 1040]
    found = deft.star(4, context)
    token = 2 * 8 * 128 * 2 * 32
    assert found["unshared"] == token * 4 * (1024 + 1041)
    assert found["distinct"] == token * (1023 + 1040 + 2 * 4)
    # requests share whole blocks: of 1023 tokens all but 15, and 1040 are 65 blocks
    assert found["DeFT-Flatten"]["kv"] == token * (1008 + 4 * 16 + 1040 + 4)


def test_contexts_are_those_of_the_published_token_trees():
    """Of 401 recorded lengths and those that DeFT's program draws; as ``ref_data`` has 1507 steps
    and the bytes of each size, which the published counts are compared with.
    """
    recorded = [1, 4, 5, 3, 5, 4]
    found = recordings.contexts(recorded)
    assert found[:6] == [1016, 1020, 1025, 1028, 1033, 1037]
    # prompt and answer have 6000 tokens, of which the first comes with the prefill
    assert found[-1] == 5999
    grown = np.diff(found)
    assert grown.min() >= 1 and grown.max() <= 5
    drawn = Random(0)
    assert grown[5:10].tolist() == [drawn.randint(1, 5) for _ in range(5)]
    with_room = recordings.contexts([1, 5000, 2])
    assert with_room[1] != 6016, "a recorded length that has no room ends the recording"


def test_a_run_is_cut_where_its_branches_change():
    assert list(recordings.step_ranges(deft.TWO_THOUGHTS)) == [(1, 24), (25, 40)]
    late = [*deft.TWO_THOUGHTS, {"id": 3, "start": 43, "end": 44, "children": []}]
    assert list(recordings.step_ranges(late)) == [(1, 24), (25, 40), (43, 44)]


def test_recorded_trees_are_counted_at_every_step(tmp_path):
    nodes = {str(n["id"]): n for n in deft.TWO_THOUGHTS}
    unfinished = {"incompleted": True, "data": {"0": deft.TWO_THOUGHTS[0]}}
    shorter = {**nodes, "1": {**nodes["1"], "end": 30}}
    runs = [unfinished, {"data": {}}, *[{"incompleted": False, "data": nodes}] * 9]
    runs += [{"data": shorter}, {"data": shorter}]
    file = tmp_path / "keywordToT.json"
    file.write_text(json.dumps(runs))
    setting = replace(TINY, tiny=False, recordings=tmp_path)
    (point,) = (p for p in deft.count_tasks(setting) if p.name == "keyword")
    found = point.run()
    # 9 runs of 40 steps and one of 30; one thought of each ends after 24
    last = [40] * 9 + [30]
    token = 2 * 8 * 128 * 2 * 32
    both = sum(range(1, 25))
    alone = sum(sum(range(1, end + 1)) for end in last) / 10
    steps = sum(last) / 10
    assert (found["runs"], found["steps"]) == (10, steps)
    assert found["unshared"] == token * (100 * (steps + 24) + alone + both)
    assert found["distinct"] == token * (100 * steps + alone + both)
    assert found["distinct"] <= found["ours"]["kv"] <= found["unshared"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("mineToT.json", "[{", "JSONDecodeError"),
        ("mineToT.json", '[{"data": {"0": {"id": 0, "end": 1}}}]', "KeyError: 'children'"),
        ("tree_size32.json", "{}", "KeyError: 'Tree_Structure'"),
        ("APPS_tree_size2.json", '{"Tree_Structure": [[0]]}', "KeyError: 'Records'"),
    ],
)
def test_recordings_of_another_format_are_refused(name, content, reason, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert run("--tiny", "--deft-recordings", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert f"{name} does not have the format of DeFT's recordings ({reason}" in error
    assert error.count("\n") == 1


def test_a_recording_without_a_complete_run_is_said(tmp_path):
    file = tmp_path / "mineToT.json"
    nodes = {"0": {**deft.TWO_THOUGHTS[0], "children": []}}
    file.write_text(json.dumps([{"incompleted": True, "data": nodes}]))
    reproduce.check_recordings(tmp_path)
    with pytest.raises(PrefixShareError, match=r"mineToT\.json has no complete run"):
        deft.recorded(file)


def test_counters_are_summed_over_the_kernels_of_a_layer(monkeypatch):
    lines = [
        "==PROF== Connected to process 7",
        HEAD,
        '"0","partial_attention","dram__bytes_read.sum","byte","1,024"',
        '"0","partial_attention","dram__bytes_write.sum","byte","96"',
        '"1","_merge_states","dram__bytes_read.sum","byte","64"',
        '"1","_merge_states","dram__bytes_write.sum","byte","32.0"',
        '"2","partial_attention","dram__bytes_read.sum","byte","7"',
        '"2","partial_attention","dram__bytes_write.sum","byte","5"',
    ]
    layers = [
        [{"read": 1024, "written": 96}, {"read": 64, "written": 32}],
        [{"read": 7, "written": 5}],
    ]
    assert counters.parse("\n".join(lines), counters.BYTES) == layers
    monkeypatch.setattr(counters, "count", lambda asked, metrics: layers)
    asked = (("ours", "1,4_64,16", 4, 2), ("portable", "1,4_64,16", 4, 2))
    found = counters.dram_bytes.__wrapped__(asked)
    assert found == [{"read": 1088, "written": 128}, {"read": 7, "written": 5}]
    assert counters.parse("==ERROR== no permission", counters.BYTES) == []


def test_the_use_of_a_layer_is_the_mean_over_its_kernels_times(monkeypatch):
    layers = [
        [
            {"time": 30.0, "compute": 20.0, "memory": 50.0},
            {"time": 10.0, "compute": 4.0, "memory": 10.0},
        ],
        {"failed": "no"},
    ]
    monkeypatch.setattr(counters, "count", lambda asked, metrics: layers)
    found = counters.use.__wrapped__((("ours", "1,4_64,16", 4, 2), ("ours", "1,4_64,16", 8, 2)))
    assert found == [{"compute": 16.0, "memory": 40.0}, {"failed": "no"}]


#: one layer, as the counters are asked for it
LAYERS = (("ours", "1,4_64,16", 4, 2),)


def let_ncu(monkeypatch, folder: Path, script: str) -> None:
    """Put a shell script in the place of Nsight Compute."""
    ncu = folder / "ncu"
    ncu.write_text(f"#!/bin/sh\n{script}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("lines", "status", "layers", "expected"),
    [
        ([HEAD, LAYER], 0, 1, {"read": 7, "written": 0}),
        (
            [HEAD, READ.format("partial_attention")],
            0,
            1,
            {"failed": "ncu has no dram__bytes_write.sum of partial_attention"},
        ),
        (
            [HEAD, LAYER, "==ERROR== the program ended with 1."],
            9,
            1,
            {"failed": "ncu ended with status 9: ==ERROR== the program ended with 1."},
        ),
        (["==ERROR== no permission"], 1, 1, {"failed": "ncu ended with status 1: ==ERROR== no p"}),
        ([], 0, 1, {"failed": "ncu counted 0 of 1 layers: it said nothing"}),
        ([HEAD, LAYER], 0, 2, {"failed": "ncu counted 1 of 2 layers"}),
        (
            [HEAD, READ.format("_merge_states")],
            0,
            1,
            {"failed": "ncu lists _merge_states before any partial_attention"},
        ),
    ],
)
def test_counters_that_are_not_whole_are_a_sentence(
    lines, status, layers, expected, tmp_path, monkeypatch
):
    printed = "\n".join(lines)
    let_ncu(monkeypatch, tmp_path, f"cat << 'EOF'\n{printed}\nEOF\nexit {status}")
    found = counters.dram_bytes.__wrapped__(LAYERS * layers)
    assert len(found) == layers
    for figures in found:
        assert figures.keys() == expected.keys()
        for name, value in expected.items():
            assert str(figures[name]).startswith(str(value))


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    """The shell waits for its child, which holds the output open."""
    child = tmp_path / "child"
    with pytest.raises(TimeoutError, match=r"sh took more than 0\.05 minutes and was ended"):
        program.run(["sh", "-c", f"sleep 600 & echo $! > {child}; wait"], 0.05)
    pid = int(child.read_text())
    deadline = time.monotonic() + 60
    while processes.tree(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.tree(pid)
    done = program.run(["sh", "-c", "echo $WORD; echo bad >&2; exit 3"], 1, {"WORD": "good"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "good\n", "bad\n")


@pytest.mark.parametrize(
    ("module", "name", "begin"),
    [
        (tree_attention, "benchmarks.kernel.scale", lambda: tree_attention.run_ranks(TINY, 256)),
        (engine, "benchmarks.engine", lambda: engine.run_engines.__wrapped__(1)[-1]),
        (counters, "ncu", lambda: counters.dram_bytes.__wrapped__(LAYERS)[0]),
    ],
    ids=["ranks", "engines", "ncu"],
)
def test_a_measuring_program_that_hangs_is_a_failed_point(
    module, name, begin, tmp_path, monkeypatch
):
    let_ncu(monkeypatch, tmp_path, "sleep 600")
    monkeypatch.setattr(module, "MINUTES", 0)
    figures = begin()
    assert figures == {"failed": f"{name} took more than 0 minutes and was ended"}
    run = begun(silent("x", [Point("a", lambda: figures)]), tmp_path)
    assert not carry_out(run), "which ends in status 1"


@pytest.fixture
def asked(monkeypatch) -> list:
    """The layers of each run of stand-ins for the GPU's counters."""
    runs = []

    def count(layers) -> list[dict]:
        runs.append(layers)
        return [{"read": i, "written": 0} for i in range(1, len(layers) + 1)]

    monkeypatch.setattr(counters, "available", lambda: True)
    monkeypatch.setattr(counters, "dram_bytes", count)
    return runs


def test_figure_6_is_counted_in_a_run_for_every_five_workloads(asked):
    points = list(flashforge.count_dram(replace(TINY, device="cuda", tiny=False)))
    assert len(points) == 50
    published = papers_tables.ran("flashforge-figure-6-dram")
    assert published["of_points"] == 50
    every = {p.name for p in points}
    assert set(published["points"]) <= every
    assert published["complete"] == (set(published["points"]) == every)
    found = [point.run() for point in points[:12]]
    assert len(set(asked)) == 2, "one run for five workloads, which is kept"
    assert len(asked[0]) == 10 * len(methods.COUNTED)
    read = [f[m.title]["read"] for f in found for m in methods.COUNTED]
    of_run = range(1, 10 * len(methods.COUNTED) + 1)
    assert read == [*of_run, *of_run[: 2 * len(methods.COUNTED)]]
    asked_names = {layer[1] for layers in asked for layer in layers}
    assert asked_names <= {w.name for w in sets.flashforge(16)}


def test_figure_13_follows_the_largest_sorting_run(tmp_path):
    setting = replace(TINY, tiny=False, recordings=tmp_path)
    assert not list(deft.time_iterations(setting)), "there is no recording"
    nodes = {str(n["id"]): n for n in deft.TWO_THOUGHTS}
    runs = [{"data": {"0": {**deft.TWO_THOUGHTS[0], "children": []}}}, {"data": nodes}]
    (tmp_path / "sorting128ToT.json").write_text(json.dumps(runs))
    points = list(deft.time_iterations(setting))
    assert len(points) == deft.ITERATIONS
    assert points[-1].name == f"step {40 * deft.ITERATIONS // (deft.ITERATIONS + 1)}"
    _, tokens = sets.recorded_tree(deft.TWO_THOUGHTS, 24)
    assert tokens == [100, 24, 24]


def test_few_shot_is_added_up_over_all_steps():
    def at(ours: float, other: float, status: str = "ok") -> dict:
        peers = {"ours": {"status": "ok", "ms": ours}, "other": {"status": status, "ms": other}}
        return {"peers": peers}

    found = {
        "few-shot 1,20_4000,400, 32:8": at(3.0, 30.0),
        "few-shot 1,20_4000,16, 32:8": at(1.0, 10.0),
        "few-shot 1,20_4000,16, 64:8": at(1.0, 2.0),
        "few-shot 1,30_4000,16, 32:8": at(1.0, 2.0),
        "few-shot 1,30_4000,400, 32:8": at(1.0, 2.0, "wrong"),
    }
    lines = deft.time_over_steps(found)
    assert lines[: len(flashforge.time_table(found))] == flashforge.time_table(found)
    # 1 up to step 16, then a line to 3 at step 400
    ours = 16 + sum(1 + 2 * (step - 16) / 384 for step in range(17, 401))
    (line,) = (line for line in lines if line.startswith("| 20 samples"))
    assert line == f"| 20 samples, 32:8 | {ours:.1f} (1.00) | {10 * ours:.1f} (10.00) |"
    assert not any("30 samples" in line or "64:8 |" in line.split("(")[0] for line in lines[-2:])
    single = {name: f for name, f in found.items() if "64:8" in name}
    assert deft.time_over_steps(single) == flashforge.time_table(single)


def test_figure_15_compares_both_strategies_at_each_size():
    figures = deft.chunk_bytes(tree("1,50_4000,200"))
    for tokens in deft.CHUNKS:
        node, flat = (figures[title(tokens)] for title in (deft.node_chunk, deft.flatten))
        assert flat["kv"] == node["kv"]
        assert node["partial"] / flat["partial"] == pytest.approx(1, abs=0.06)


def test_every_loss_of_more_than_two_percent_is_counted():
    some = {
        "ahead": {"peers": {t: {"status": "ok", "ms": ms} for t, ms in (("ours", 1), ("b", 2))}},
        "level": {"peers": {t: {"status": "ok", "ms": ms} for t, ms in (("ours", 1.01), ("b", 1))}},
        "lost": {"peers": {t: {"status": "ok", "ms": ms} for t, ms in (("ours", 3), ("b", 2))}},
        "wrong": {"peers": {"ours": {"status": "ok", "ms": 2}, "b": {"status": "wrong", "ms": 1}}},
        "none": {"bytes": 1},
    }
    found = papers_tables.losses(some)
    assert found == {"ahead": [], "level": [], "lost": [(1.5, "b")], "wrong": []}


def test_what_a_program_measures_ends_within_the_seconds_that_minutes_checks():
    limits = {
        "flashforge-figure-6-dram": counters,
        "flashforge-figure-7": engine,
        "flashforge-figure-7-sweeps": engine,
        "deft-table-17-dram": counters,
        "deft-table-14": counters,
        "tree-attention-figure-3": tree_attention,
        "tree-attention-figure-4-measured": tree_attention,
    }
    assert {n for n, e in EXPERIMENTS.items() if e.seconds} == set(limits)
    for name, module in limits.items():
        assert EXPERIMENTS[name].seconds == 60 * module.MINUTES


def test_points_that_one_run_measures_need_no_more_of_the_minutes(tmp_path):
    for at_once, ran in ((True, 3), (False, 1)):
        points = [Point(n, dict) for n in "abc"]
        run = begun(silent(f"{at_once}", points, seconds=60.0, at_once=at_once), tmp_path)
        run.left = points[:1]
        assert carry_out(run)
        run.left = points[1:]
        assert carry_out(run, left=30)
        assert run.done == ran


def test_engines_are_started_by_the_published_command(tmp_path, monkeypatch):
    asked = []

    def refuse(command, minutes):
        asked.append(command)
        raise TimeoutError("x")

    monkeypatch.setattr(program, "run", refuse)
    engine.run_engines.__wrapped__(10)
    command = published.load("engine_sweep")["command"].split()
    assert asked[0][1:-1] == command[1:-1]
    args = bench_engine.parse(asked[0][3:])
    assert args.breakdown and args.repeats == 2
    assert args.workloads == list(engine_workloads.SWEEP)


def test_engines_that_end_early_have_measured_rows(monkeypatch):
    def rows(*gaps: float) -> list[dict]:
        return [{"name": f"w{i}", "agreement": {"largest_gap": x}} for i, x in enumerate(gaps)]

    def ends(status: int | None, result: dict):
        def run(command, minutes):
            Path(command[-1]).write_text(json.dumps({"max_gap": 0.3, "left_out": {}, **result}))
            if status is None:
                raise TimeoutError("time is up")
            return subprocess.CompletedProcess(command, status, "", "Traceback\nCUDA error\n")

        monkeypatch.setattr(program, "run", run)
        return engine.run_engines.__wrapped__(1, ("w0", "w1", "w2"))

    assert [f.get("right") for f in ends(0, {"rows": rows(0.0, 0.1, 0.2)})] == [True] * 3
    assert [f.get("right") for f in ends(1, {"rows": rows(0.0, 0.5, 0.2)})] == [True, False, True]
    cut = ends(None, {"rows": rows(0.0)})
    assert [f.get("failed") for f in cut] == [None, "time is up", "time is up"]
    found = ends(1, {"rows": rows(0.0), "left_out": {"w2": "too long"}})
    assert [f.get("failed") for f in found] == [None, "CUDA error", "too long"]


def test_each_of_flashforges_sweeps_is_one_start_of_the_engines(monkeypatch):
    asked = []
    monkeypatch.setattr(
        engine, "run_engines", lambda repeats, of: asked.append(of) or [{"n": n} for n in of]
    )
    points = list(engine.time_sweeps(Setting("cuda")))
    assert [p.run() for p in points] == [{"n": p.name} for p in points]
    assert len(points) == 20 and [len(of) for of in dict.fromkeys(asked)] == [5] * 4
    assert not list(engine.time_sweeps(TINY))
    for names in dict.fromkeys(asked):
        args = ["--workloads", ",".join(names), "--max-model-len", str(engine.MAX_MODEL_LEN)]
        bench_engine.parse([*args, "--breakdown"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_findings_need_no_more_than_one_point(name):
    """A run may stop after any of them."""
    e = EXPERIMENTS[name]
    published = papers_tables.ran(name)
    if published is None:
        pytest.skip("no run of it is published")
    for point, figures in published["points"].items():
        some = {point: figures}
        assert e.ours(some)
        assert e.table is None or any("|" in line for line in e.table(some))
        assert e.series is None or e.series(some).unit


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_grouping_changes_no_plan_of_figures_8_and_9(kernel):
    """Their published runs are from before "FlashForge's divider" had a group for each node."""
    specs = ("1,8_30720,256", "1,8_61440,256", "1,8_122880,256")
    layers = [(w, heads) for _, w, heads in flashforge.ablation_trees(Setting("cuda"))]
    for w, heads in [*layers, *((tree(spec), (32, 8)) for spec in specs)]:
        plans = []
        for options in ({}, flashforge.NO_GROUPING):
            way = methods.Method("both", kernel, "flashforge", options=options)
            planner, _ = methods.planner_of(way, w, heads)
            plans.append(planner.update(w.block_table, w.seq_lens, 1).plan)
        for name in ("tile_req_indices", "run_kv_start", "run_kv_end", "work_indptr"):
            assert np.array_equal(*(getattr(plan, name) for plan in plans)), name
