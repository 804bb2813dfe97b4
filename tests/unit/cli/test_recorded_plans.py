"""``inspect`` of a trace shows the plan that the engine ran, and counts as the engine counted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support import decode_paths
from tests.support.traced_plans import CONFIG, LENS, SHAPE, TABLE, Group, record_in
from vllm_prefixshare.cli.batches import read_batch
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.planning.costs import lookup
from vllm_prefixshare.planning.costs.table import CostTable, Grid
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.vllm_plugin.observability import stats

LLAMA = AttentionConfig(32, 8, 128, 16)
#: 24 requests on a document of 64 blocks, with 4 blocks of their own.
DOCUMENT = np.array([[*range(1, 65), *range(65 + 4 * i, 69 + 4 * i)] for i in range(24)], np.int32)
LONG = np.full(24, 64 * 16 + 50, np.int32)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that groups of this test record in."""
    record_in(tmp_path / "t.jsonl", monkeypatch)
    return tmp_path / "t.jsonl"


def group_on_h200(
    monkeypatch: pytest.MonkeyPatch, attention: AttentionConfig, kernel: str, query_len: int = 1
) -> Group:
    monkeypatch.setattr(lookup, "gpu", lambda: decode_paths.H200)
    executor = decode_paths.executor(kernel, attention, query_len, 64)
    return Group(attention, executor, query_len=query_len)


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert main(["inspect", "--json", *map(str, arguments)]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


GPU_LAYERS = [
    (LLAMA, "hopper", 1),
    (LLAMA, "portable", 1),
    (LLAMA, "hopper", 4),
    (replace(LLAMA, kv_dtype=FP8, query_dtype=FP8, features=("sinks",)), "hopper", 1),
    (replace(LLAMA, sliding_window=512), "hopper", 1),
    (AttentionConfig(16, 1, 576, 64, kv_lora_rank=512), "auto", 1),
]


@pytest.mark.parametrize(("attention", "kernel", "query_len"), GPU_LAYERS)
def test_a_gpus_plan_is_shown_as_it_ran(trace, monkeypatch, capsys, attention, kernel, query_len):
    kernel = "mla_hopper" if attention.kv_lora_rank else kernel
    group = group_on_h200(monkeypatch, attention, kernel, query_len)
    lens = LONG * attention.block_size // 16
    ran = group.step(DOCUMENT, lens, None)
    recorded = read_batch(trace).recorded
    for name in ("work_indptr", "tile_req_indices", "run_kv_end", "partial_indices"):
        np.testing.assert_array_equal(
            getattr(recorded.made.plan, name), getattr(ran.plan, name), err_msg=name
        )
    assert (recorded.engine.attention, recorded.engine.kernel) == (attention, kernel)
    found = report(capsys, trace)
    (row,) = found["dividers"]
    assert (row["as_run"], row["default"], row["divider"]) == (True, True, "depth_first")
    assert found["made_by"] == f"as the engine ran it: {kernel} kernel on {decode_paths.H200}"
    assert found["kv_tokens"] == ran.kv_tokens
    assert row["kv_tokens_read"] == ran.kv_tokens - ran.kv_tokens_saved
    assert row["share_factor"] > 3
    assert len(found["workers"]) == ran.plan.num_workers
    drawn = [piece["tokens"] for tiles in found["workers"] for t in tiles for piece in t["reads"]]
    assert sum(drawn) == ran.plan.kv_tokens_read(lens)
    busiest = max(sum(tile["us"] for tile in tiles) for tiles in found["workers"])
    assert row["busiest_worker_us"] == pytest.approx(busiest, abs=0.2)


def test_a_plan_made_again_for_the_engine_is_the_engines(trace, monkeypatch, capsys):
    group_on_h200(monkeypatch, LLAMA, "hopper").step(DOCUMENT, LONG)
    found = report(capsys, trace, "--divider", "depth_first")
    here, ran = found["dividers"]
    assert [row["as_run"] for row in (here, ran)] == [False, True]
    assert "planned here for the same engine, priced by the cost table" in found["made_by"]
    for row in (here, ran):
        del row["as_run"], row["plan_ms"]
    assert here == pytest.approx(ran, abs=0.02)
    tree = report(capsys, "--gpu", "H200", "--tree", "1,24_1024,50", "--divider", "depth_first")
    assert tree["dividers"][0]["attention_us"] == pytest.approx(ran["attention_us"], abs=0.02)
    assert tree["attention_us_unshared"] == pytest.approx(found["attention_us_unshared"], abs=0.02)


def test_the_share_factor_is_the_engines(trace, monkeypatch, capsys):
    """Compare with the counters of ``/metrics``, for decodes and for query tokens as rows."""
    counted = stats.BackendStats()
    monkeypatch.setattr("vllm_prefixshare.vllm_plugin.step.planner.STATS", counted)
    group = group_on_h200(monkeypatch, LLAMA, "hopper")
    for tokens in (None, np.full(24, 3, np.int32)):
        counted.reset()
        group.step(DOCUMENT, LONG, tokens).record()
        found = report(capsys, trace, "--step", -1)
        assert found["kv_tokens"] == counted.kv_tokens_stock
        assert found["dividers"][0]["kv_tokens_read"] == counted.kv_tokens_read
        factor = counted.as_dict()["share_factor"]
        assert found["dividers"][0]["share_factor"] == pytest.approx(factor, abs=1e-3)
        assert factor > 5


def test_times_are_by_the_engines_prices(trace, monkeypatch, capsys):
    """A tile takes a microsecond for each token, and a request without sharing two."""
    grid = Grid(np.array([1.0, 4096]), np.array([1.0, 4096]), np.array([[1.0, 4096]] * 2))
    double = replace(grid, microseconds=2 * grid.microseconds)
    table = CostTable(lookup.fingerprint(SHAPE, "torch"), grid, 0.5, double)
    table.save(trace.with_name("prices.json"))
    monkeypatch.setenv("VLLM_PREFIXSHARE_COST_TABLE", str(trace.with_name("prices.json")))
    record_in(trace, monkeypatch)
    Group().step(TABLE, LENS)
    monkeypatch.delenv("VLLM_PREFIXSHARE_COST_TABLE")
    record_in(None, monkeypatch)
    found = report(capsys, trace)
    (row,) = found["dividers"]
    assert row["busiest_worker_us"] == row["kv_tokens_read"] == 72
    assert row["attention_us"] == 72 + row["partials"] * 2 * 0.5  # two rows for each KV head
    assert found["attention_us_unshared"] == 2 * LENS.sum()


def test_a_named_divider_is_not_marked_as_default(trace, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PREFIXSHARE_DIVIDER", "deft_node")
    record_in(trace, monkeypatch)
    Group(LLAMA).step(DOCUMENT, LONG)
    assert main(["inspect", str(trace)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; planned by deft_node")
    assert main(["inspect", str(trace), "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines[lines.index("") + 2 : -2]]
    assert rows[:2] == ["deft_node, as run", "unshared"]
    assert {row.partition(" (default)")[0] for row in rows[2:]} == DIVIDERS.keys() - {"deft_node"}
    assert [row for row in rows if "(default)" in row] == ["flashforge (default)"]
    assert lines[-2].startswith("other dividers are planned here for the same engine, priced by")


def test_why_nothing_is_shared_is_the_engines_reason(trace, monkeypatch, capsys):
    monkeypatch.setattr(CONFIG.cache_config, "enable_prefix_caching", False)
    Group().step(np.arange(1, 9, dtype=np.int32).reshape(2, 4), LENS[:2])
    assert main(["inspect", str(trace)]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict == ("nothing is shared (prefix caching is off); planned by flashforge (default)")
    assert report(capsys, trace)["attention_gain"] == 1, "vLLM's own kernel ran the batch"


def test_a_time_of_nothing_is_no_division_by_zero(trace, capsys):
    Group(LLAMA).step(DOCUMENT, LONG)
    line = json.loads(trace.read_text())
    line["plan"]["unshared_us"] = 0.0
    trace.write_text(json.dumps(line))
    assert main(["inspect", str(trace)]) == 0
    assert " times the attention time; " in capsys.readouterr().out.splitlines()[-1]


def test_a_text_of_a_trace_is_no_code_for_the_terminal(trace, capsys):
    Group(LLAMA).step(DOCUMENT, LONG)
    line = json.loads(trace.read_text())
    line["engine"] |= {"device": "\x1b[2Ja", "kernel": "\x1b[2Jb"}
    line["plan"] |= dict.fromkeys(("divider", "default_divider", "unshared"), "\x1b[2Jc")
    trace.write_text(json.dumps(line))
    assert main(["inspect", str(trace)]) == 0
    assert main(["inspect", str(trace), "--compare"]) == 2
    printed = "".join(capsys.readouterr())
    assert "\x1b" not in printed and printed.isascii()
    assert all(text in printed for text in ("\\x1b[2Ja", "\\x1b[2Jb", "\\x1b[2Jc"))


def test_a_trace_without_engines_is_planned_here(trace, capsys):
    """As traces of earlier versions are."""
    Group(LLAMA).step(DOCUMENT, LONG)
    line = json.loads(trace.read_text())
    del line["engine"]
    line["plan"] = {"divider": "flashforge", "workers": 1, "kv_tokens_read": 5, "tiles": 2}
    trace.write_text(json.dumps(line))
    found = report(capsys, trace, "--num-kv-heads", 4, "--workers", 1)
    assert found["engine"] is None
    assert found["made_by"].startswith("priced by the cost table measured on NVIDIA H200")
    assert found["dividers"][0]["share_factor"] > 5


@pytest.mark.parametrize(
    "options",
    [
        ["--num-qo-heads", "32"],
        ["--num-kv-heads", "2"],
        ["--head-dim", "128"],
        ["--dtype", "float16"],
        ["--model", "/nowhere"],
        ["--kv-cache-dtype", "fp8"],
        ["--gpu", "H200"],
        ["--workers", "132"],
    ],
)
def test_options_that_a_trace_answers_are_refused(trace, capsys, options):
    Group().step(TABLE, LENS)
    assert main(["inspect", str(trace), *options]) == 2
    assert capsys.readouterr().err == (
        f"vllm-prefixshare: error: {trace} has the shape and the device of its engine: leave out "
        f"{options[0]}.\n"
    )


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("engine", {"query_len": 1}, "it has no 'attention'"),
        ("engine", {"attention": {"heads": 3}}, "unexpected keyword argument 'heads'"),
        ("plan", {}, "it has no 'work_indptr'"),
        ("plan", None, "'NoneType'"),
    ],
)
def test_a_line_of_another_version_gets_one_sentence(trace, capsys, field, value, sentence):
    Group().step(TABLE, LENS)
    trace.write_text(json.dumps(json.loads(trace.read_text()) | {field: value}))
    assert main(["inspect", str(trace)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_an_unknown_gpu_is_shown_but_not_planned_for(trace, capsys, monkeypatch):
    group_on_h200(monkeypatch, LLAMA, "hopper").step(DOCUMENT, LONG)
    trace.write_text(trace.read_text().replace(decode_paths.H200, "NVIDIA H900 MIG 1g x16"))
    assert report(capsys, trace)["dividers"][0]["as_run"]
    assert main(["inspect", str(trace), "--compare"]) == 2
    assert capsys.readouterr().err == (
        "vllm-prefixshare: error: the hopper kernel on NVIDIA H900 MIG 1g x16 is not known here, "
        "so nothing can be planned for it: leave out --compare and --divider.\n"
    )


def test_the_picture_has_the_engines_schedule(trace, tmp_path):
    Group(LLAMA).step(DOCUMENT, LONG)
    assert main(["inspect", str(trace), "--svg", str(tmp_path / "p.svg")]) == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert "divider flashforge (default); as the engine ran it: torch kernel on" in drawn
    assert "Prefix forest of t.jsonl" in drawn
