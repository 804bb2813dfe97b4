"""The benchmark of planning times runs: every kernel, batch and divider, each plan checked."""

import json

from benchmarks.planner import bench
from vllm_prefixshare.planning.dividers.registry import DIVIDERS


def test_every_case_has_its_times(tmp_path):
    assert bench.main(["--repeats", "1", "--out", str(tmp_path / "times.json")]) == 0
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert {row["kernel"] for row in rows} == set(bench.KERNELS)
    assert {f"divider {name}" for name in DIVIDERS} - {row["case"] for row in rows} == {
        "divider depth_first"
    }
    times = ("scratch_us", "change_us", "steady_us", "layout_us")
    assert all(row[name] > 0 for row in rows for name in times)
