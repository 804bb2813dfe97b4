"""``--resume``: interrupted benchmarks keep the rows that they have written."""

import json
import sys

import pytest

from benchmarks.engine import bench as bench_engine
from benchmarks.kernel import bench as bench_kernel
from benchmarks.support.results import resumed, write
from vllm_prefixshare import PrefixShareError

RUN = {"command": "python -m x", "gpu": "H200", "versions": {"torch": "2"}}


def test_the_rows_of_the_same_run_are_kept(tmp_path):
    path = tmp_path / "run.json"
    assert resumed(path, RUN, "rows") == []
    write(path, {**RUN, "rows": [{"ms": 1}]})
    assert resumed(path, RUN, "rows") == [{"ms": 1}]


@pytest.mark.parametrize("key", RUN)
def test_the_rows_of_another_run_are_not(tmp_path, key):
    write(tmp_path / "run.json", {**RUN, "rows": []})
    with pytest.raises(PrefixShareError, match=f"of another {key}.*leave --resume out"):
        resumed(tmp_path / "run.json", {**RUN, key: "another"}, "rows")


def test_it_needs_a_file_with_results(tmp_path):
    with pytest.raises(PrefixShareError, match="--out: name it"):
        resumed(None, RUN, "rows")
    for text in ("{", "[]", "{}"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(PrefixShareError, match="has no results"):
            resumed(tmp_path / "run.json", RUN, "rows")


def test_a_layer_is_not_timed_again(tmp_path, monkeypatch, capsys):
    out = tmp_path / "kernel.json"
    options = "--device cpu --dtype float32 --heads 4:2 --peers medusa --repeats 1"
    trees = ["--tree", "1,2_32,16", "--tree", "1,3_32,16"]
    argv = [*options.split(), *trees, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *argv])
    assert bench_kernel.main(argv) == 0
    first = json.loads(out.read_text())
    first["cells"].pop()
    first["cells"][0]["peers"]["medusa"]["ms"] = 12345.0
    out.write_text(json.dumps(first))
    monkeypatch.setattr(sys, "argv", ["bench", *argv, "--resume"])
    assert bench_kernel.main([*argv, "--resume"]) == 0
    again = json.loads(out.read_text())
    assert again["command"] == first["command"]
    assert [cell["workload"] for cell in again["cells"]] == ["1,2_32,16", "1,3_32,16"]
    assert again["cells"][0]["peers"]["medusa"]["ms"] == 12345.0
    assert again["cells"][1]["peers"]["medusa"]["status"] == "ok"


class Engines:
    """Stands for ``benchmarks.engine.bench.Bench``; no engine starts."""

    measured: list[str]
    ends: str | None = None

    def __init__(self, *args: object) -> None:
        pass

    def measure(self, name: str) -> dict:
        if name == self.ends:
            raise RuntimeError("Traceback\nthe engine process has ended")
        self.measured.append(name)
        return {"workload": name, "agreement": None, "breakdown": None}


def test_an_engine_measures_what_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_engine, "Bench", Engines)
    monkeypatch.setattr(bench_engine, "start", lambda *args: ({}, {}))
    monkeypatch.setattr(bench_engine.report, "line", lambda _: "")
    monkeypatch.setattr(bench_engine, "engine_table", lambda _: "")
    argv = ["--workloads", "doc4k,few,single", "--out", str(tmp_path / "engine.json")]
    monkeypatch.setattr(sys, "argv", ["bench", *argv])
    Engines.measured, Engines.ends = [], "few"
    assert bench_engine.main(argv) == 1
    result = json.loads((tmp_path / "engine.json").read_text())
    assert result["left_out"] == {"few": "the engine process has ended"}
    assert [row["name"] for row in result["rows"]] == ["doc4k", "single"]
    Engines.ends = None
    assert bench_engine.main([*argv, "--resume"]) == 0
    assert Engines.measured == ["doc4k", "single", "few"]
    result = json.loads((tmp_path / "engine.json").read_text())
    assert {row["name"] for row in result["rows"]} == {"doc4k", "few", "single"}
    assert not result["left_out"]
