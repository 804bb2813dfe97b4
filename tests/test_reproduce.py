"""benchmarks/reproduce.py: its registry, its bytes, and that it goes on where it stopped."""

import json
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.contract import Gpu
from vllm_prefixshare.kernels.hopper.launch import HopperKernel
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.records import PrefixShareError
from vllm_prefixshare.workloads.trees import tree

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import reproduce  # noqa: E402
import tables  # noqa: E402
from papers import EXPERIMENTS, PAPERS, accounting, counters, deft, flashforge, methods, reduction  # noqa: E402
from papers.experiment import Bars, Experiment, Point, Setting  # noqa: E402
from papers.picture import draw  # noqa: E402

H200 = Gpu((9, 0), 132, 227 << 10)
TINY = Setting("cpu", tiny=True, repeats=1)


def run(*arguments: str) -> int:
    return reproduce.main(list(map(str, arguments)))


def test_everything_runs_in_miniature(tmp_path, capsys):
    assert run("--tiny", "--out", tmp_path) == 0
    said = capsys.readouterr().out
    for name, experiment in EXPERIMENTS.items():
        expected = [p.name for p in experiment.points(TINY)]
        if not expected:
            assert f"{name}: nothing to run here" in said
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


def stand_in(name: str, points: list[Point]) -> Experiment:
    some = EXPERIMENTS["flashforge-figure-6"]
    return replace(some, name=name, points=lambda setting: iter(points), ours=lambda found: "")


def test_points_that_fail_are_said_and_wrong_outputs_end_in_1(tmp_path):
    def refuse() -> dict:
        raise PrefixShareError("this machine cannot.")

    def wrong() -> dict:
        return {"peers": {"ours": {"status": "wrong"}}}

    points = [Point("a", refuse), Point("b", wrong), Point("c", lambda: {"figure": 1})]
    runs = [reproduce.begin(stand_in("x", points), TINY, tmp_path, fresh=False)]
    assert not reproduce.carry_out(runs, TINY, float("inf"))
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["points"]["a"] == {"failed": "PrefixShareError: this machine cannot."}
    assert result["points"]["c"] == {"figure": 1}
    assert not result["complete"]
    again = reproduce.begin(stand_in("x", points), TINY, tmp_path, fresh=False)
    assert [p.name for p in again.left] == ["a"]


def test_experiments_take_turns_and_nothing_begins_after_the_deadline(tmp_path):
    order: list[str] = []

    def note(name: str) -> dict:
        order.append(name)
        return {}

    points = {n: [Point(f"{n}{i}", lambda n=n, i=i: note(f"{n}{i}")) for i in (1, 2)] for n in "xy"}
    runs = [reproduce.begin(stand_in(n, points[n]), TINY, tmp_path, fresh=False) for n in "xy"]
    assert reproduce.carry_out(runs, TINY, 0.0)
    assert not order
    runs[1].seconds = -1e9  # has had the least time
    runs[0].seconds = 0.0
    assert reproduce.carry_out(runs, TINY, float("inf"))
    assert order == ["y1", "y2", "x1", "x2"]


def test_a_point_that_another_program_measures_begins_only_if_its_seconds_are_left(tmp_path):
    began = []
    point = Point("a", lambda: began.append(1) or {})
    slow = replace(stand_in("x", [point]), seconds=60.0)
    for left, ran in ((30, 0), (90, 1)):
        runs = [reproduce.begin(slow, TINY, tmp_path, fresh=False)]
        assert reproduce.carry_out(runs, TINY, time.monotonic() + left)
        assert len(began) == ran


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["figure-99", "--tiny"], "no experiment is called 'figure-99'"),
        (["--tiny", "--peers", "nobody"], "peer 'nobody' is unknown"),
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
    page = (ROOT / "docs" / "papers.md").read_text()
    for name, e in EXPERIMENTS.items():
        assert f"  {name} (needs {e.needs}): {e.item}, section {e.section}\n" in said
        assert e.changed in said
        assert f"\n### {name}\n" in page
    assert len(PAPERS) == len({e.paper for e in EXPERIMENTS.values()})
    for name in EXPERIMENTS:
        published = tables.ran(name)
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


def test_few_shot_bytes_are_the_published_ones():
    found = deft.few_shot(20, deft.PROMPT, deft.DECODED)
    medusa = found["medusa partial"] + found["medusa mask"]
    counted = found["unshared"] * deft.GROUP, found["distinct"] * deft.GROUP, medusa
    assert [round(n / 1e12, 2) for n in counted] == list(deft.PUBLISHED["few-shot 20"])
    assert found["ours"]["kv"] == found["distinct"]


def test_a_token_tree_is_walked_by_each_tile_of_its_rows():
    setting = replace(TINY, tiny=True)
    found = deft.speculative(64, setting)
    assert found["ours"]["row_tiles"] == 2
    assert found["ours"]["walked"] == 2 * found["ours"]["kv"] == 2 * found["distinct"]
    assert found["unshared"] == 64 * found["distinct"]


def test_recorded_trees_are_counted_over_all_their_steps(tmp_path):
    nodes = [
        {"id": 0, "start": -99, "end": 0, "children": [1, 2]},
        {"id": 1, "start": 1, "end": 40, "children": []},
        {"id": 2, "start": 1, "end": 24, "children": []},
    ]
    file = tmp_path / "keywordToT.json"
    file.write_text(json.dumps([{"data": {}}, {"data": {str(n["id"]): n for n in nodes}}]))
    setting = replace(TINY, tiny=False, recordings=tmp_path)
    (point,) = (p for p in deft.count_tasks(setting) if p.name == "keyword")
    found = point.run()
    # 12 samples that stand for 3 steps each: at 1, 4, 7, 11, ... both grow until step 24
    steps = [1 + 40 * i // 12 for i in range(12)]
    both = [s for s in steps if s <= 24]
    token = 2 * 8 * 128 * 2 * (32 * 40 // 12)
    assert found["runs"] == 1
    assert found["unshared"] == token * (sum(100 + s for s in steps) + sum(100 + s for s in both))
    assert found["distinct"] <= found["ours"]["kv"] <= found["unshared"]


def test_counters_are_summed_over_the_kernels_of_a_layer():
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [
        "==PROF== Connected to process 7",
        head,
        '"0","partial_attention","dram__bytes_read.sum","byte","1,024"',
        '"0","partial_attention","dram__bytes_write.sum","byte","96"',
        '"1","_merge_states","dram__bytes_read.sum","byte","64"',
        '"1","_merge_states","dram__bytes_write.sum","byte","32.0"',
        '"2","partial_attention","dram__bytes_read.sum","byte","7"',
        '"2","partial_attention","dram__bytes_write.sum","byte","5"',
    ]
    layers = [{"read": 1088, "written": 128}, {"read": 7, "written": 5}]
    assert counters.parse("\n".join(lines)) == layers
    assert counters.parse("==ERROR== no permission") == []


def test_the_layers_of_all_points_are_counted_in_one_run(monkeypatch):
    asked = []

    def count(layers) -> list[dict]:
        asked.append(layers)
        return [{"read": i, "written": 0} for i in range(len(layers))]

    monkeypatch.setattr(counters, "available", lambda: True)
    monkeypatch.setattr(counters, "dram_bytes", count)
    points = list(flashforge.count_dram(replace(TINY, device="cuda", tiny=False)))
    found = [point.run() for point in points]
    assert len(points) == 8
    assert len(set(asked)) == 1, "one run for all points, which is kept"
    read = [f[m.title]["read"] for f in found for m in methods.COUNTED]
    assert read == list(range(8 * len(methods.COUNTED)))
    results = {p.name: f for p, f in zip(points, found, strict=True)}
    assert "| flash-decoding |" in flashforge.dram_table(results)[2]
    asked.clear()
    points = list(deft.count_walks(replace(TINY, device="cuda", tiny=False)))
    results = {p.name: p.run() for p in points}
    assert len(set(asked)) == 1
    assert [f["portable"]["read"] for f in results.values()] == list(range(1, 16, 2))
    assert [f["ours"]["row_tiles"] for f in results.values()] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert "up to 16 tiles" in deft.walks_sentence(results)


def test_a_picture_has_a_bar_for_each_value_on_a_logarithmic_axis():
    values = {"a < b": {"ours": 0.5, "other": 50.0}, "c": {"ours": 5.0}}
    picture = ET.fromstring(draw("a title", Bars("ms", values)))
    space = "{http://www.w3.org/2000/svg}"
    bars = [
        r for r in picture.iter(f"{space}rect") if r.get("height") == "11" and r.get("y") != "12"
    ]
    lengths = [float(bar.get("width")) for bar in bars]
    assert len(lengths) == 3
    assert lengths[1] - lengths[2] == pytest.approx(lengths[2] - lengths[0], abs=0.2)
    texts = [t.text for t in picture.iter(f"{space}text")]
    assert {"a < b", "c", "ours", "other", "ms, logarithmic"} <= set(texts)
    assert draw("nothing", Bars("ms", {"a": {}})) == ""
