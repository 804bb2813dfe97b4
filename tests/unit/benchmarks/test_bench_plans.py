"""Plans of another checkout beside today's, on a CPU: a copy that divides in another way."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.planner import plans as bench_plans

ROOT = Path(__file__).parents[3]

LAYER = ["--device", "cpu", "--dtype", "float32", "--heads", "4:2", "--head-dim", "64"]
LAYER += ["--tree", "1,4_256,32", "--tree", "1_64", "--repeats", "1", "--turns", "1"]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Divides as ``fixed`` does where the package divides as ``flashforge``."""
    folder = tmp_path_factory.mktemp("before")
    package = folder / "vllm_prefixshare"
    shutil.copytree(ROOT / package.name, package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "planning" / "dividers" / "registry.py").open("a") as file:
        file.write('DIVIDERS["flashforge"] = DIVIDERS["fixed"]\n')
    return folder


def test_plans_that_differ_are_timed(before, tmp_path, capsys):
    out = tmp_path / "plans.json"
    assert bench_plans.main(["--before", str(before), *LAYER, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["layers"] == 2
    tree, alone = found["changed"]
    assert (tree["workload"], alone["workload"]) == ("1,4_256,32", "1_64")
    assert tree["before"]["tiles"] > tree["now"]["tiles"]
    assert all(cell[which]["us"] > 0 for cell in found["changed"] for which in ("before", "now"))
    printed = capsys.readouterr().out
    assert "2 of 2 plans differ" in printed
    assert "4:2: " in printed


def test_equal_plans_are_only_counted(capsys):
    assert bench_plans.main(["--before", str(ROOT), *LAYER]) == 0
    assert capsys.readouterr().out == "0 of 2 plans differ\n"


def test_a_wrong_output_is_named(before, monkeypatch, capsys):
    wrong = torch.ones(4, 256), torch.ones(1, 256)
    monkeypatch.setattr(
        bench_plans.bench_kernel, "reference", lambda case: wrong[len(case.seq_lens) == 1]
    )
    assert bench_plans.main(["--before", str(before), *LAYER]) == 1
    assert "before is WRONG now is WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("package", [None, 'raise RuntimeError("not today")\n'])
def test_what_is_no_checkout_is_named(package, tmp_path, capsys):
    if package is not None:
        (tmp_path / "vllm_prefixshare" / "planning").mkdir(parents=True)
        (tmp_path / "vllm_prefixshare" / "__init__.py").write_text(package)
    assert bench_plans.main(["--before", str(tmp_path), *LAYER]) == 2
    said = "made no plan" if package else "is no checkout of this project"
    assert said in capsys.readouterr().err
