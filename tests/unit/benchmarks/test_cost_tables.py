"""``benchmarks.kernel.cost_tables``: the tables of a GPU by one command."""

import pytest

from benchmarks.kernel import cost_tables
from benchmarks.planner.bench import H200
from tests.support.planning_cases import flashforge_table
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import candidates
from vllm_prefixshare.planning.costs.lookup import SHIPPED, fingerprint
from vllm_prefixshare.profiling.gpu_table import profiled_shape

GPU = "NVIDIA H200 x132"


def test_every_kernel_head_dim_and_cache_has_a_table():
    every = list(cost_tables.profiled())
    kinds = [(of.kernel, of.attention.head_dim, of.attention.kv_dtype) for of in every]
    assert len(kinds) == len(set(kinds)) == 12
    for of in every:
        assert candidates(of.attention, H200, of.kernel)[0] == of.kernel
        assert profiled_shape(of.attention) == of.attention
    files = {fingerprint(of.attention, of.kernel, GPU).file_name() for of in every}
    assert {path.name for path in SHIPPED.glob("*h200*.json")} == files


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(cost_tables, "has_gpu", lambda: True)
    monkeypatch.setattr(
        cost_tables, "fingerprint", lambda attention, kernel: fingerprint(attention, kernel, GPU)
    )


def test_a_cut_run_measures_what_is_left(machine, monkeypatch, tmp_path, capsys):
    measured = []

    def measure(of):
        measured.append(of.kernel)
        if of.attention.head_dim == 256:
            raise PrefixShareError("no such kernel here.")
        return flashforge_table()

    monkeypatch.setattr(cost_tables, "measure", measure)
    first = next(iter(cost_tables.profiled()))
    there = tmp_path / fingerprint(first.attention, first.kernel, GPU).file_name()
    there.write_text("kept")
    assert cost_tables.main(["--out", str(tmp_path)]) == 0
    assert there.read_text() == "kept"
    assert (len(measured), len(list(tmp_path.glob("*.json")))) == (11, 8)
    assert capsys.readouterr().out.count("left out: no such kernel here.") == 4
    assert cost_tables.main(["--out", str(tmp_path), "--fresh"]) == 0
    assert len(measured) == 23 and there.read_text() != "kept"


def test_without_a_gpu_it_is_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cost_tables, "has_gpu", lambda: False)
    assert cost_tables.main(["--out", str(tmp_path)]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
