"""A trace holds the plans of an engine in a bounded file that ``inspect`` reads."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.embedded_model import embedded_model_path
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, EngineProcess
from tests.support.traced_plans import LENS, TABLE, Group, record_in
from vllm_prefixshare.cli.batches import read_batch
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin.observability import tracing


def planner(monkeypatch: pytest.MonkeyPatch, path: Path | None) -> Group:
    """A group whose plans are recorded in ``path``."""
    record_in(path, monkeypatch)
    return Group()


def test_without_the_variable_nothing_is_recorded(monkeypatch):
    made = planner(monkeypatch, None)
    made.update(TABLE, LENS)
    assert made.planner._trace is None


def test_each_new_plan_is_recorded_once(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    made = planner(monkeypatch, path)
    for lens in (LENS, LENS + 1, LENS + 2):  # the plan holds
        plan = made.update(TABLE, lens)
    made.update(TABLE[:2], LENS[:2])
    slots = {"req_idx": np.array([2, 0]), "req_serials": np.array([7, 8])}
    made.update(TABLE, LENS[[2, 0]], **slots)
    made.update(np.zeros((0, 0), np.int32), np.zeros(0, np.int32))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kv_lens"] for line in lines] == [[60, 52, 40], [60, 52], [40, 60]]
    assert lines[0]["block_tables"] == [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]
    assert lines[2]["block_tables"] == [[1, 2, 6], [1, 2, 3, 4]]
    named = {"kv_tokens", "kv_tokens_read", "divider", "default_divider", "unshared"}
    times = {"merge_us", "unshared_us", "plan_ms", "tile_us"}
    assert lines[0]["plan"].keys() == {*tracing.PLAN_ARRAYS, *named, *times}
    assert lines[0]["plan"]["kv_tokens_read"] == plan.kv_tokens_read(LENS)
    batch = read_batch(path, 0)
    np.testing.assert_array_equal(batch.block_table, TABLE)
    np.testing.assert_array_equal(batch.seq_lens, LENS)
    assert len(read_batch(path).seq_lens) == 3, "the largest of them"


def test_a_trace_ends_at_its_limit_with_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_BYTES", 4000)
    path = tmp_path / "t.jsonl"
    made = planner(monkeypatch, path)
    for n in range(20):
        made.update(TABLE + n, LENS)
    text = path.read_text()
    assert 2000 < len(text) <= 4000
    assert text.endswith("}\n")
    for line in text.splitlines():
        json.loads(line)


def test_a_trace_that_has_ended_costs_no_step_anything(tmp_path, monkeypatch):
    made = planner(monkeypatch, tmp_path / "t.jsonl")
    trace, _ = made.planner._trace
    monkeypatch.setattr(tracing, "MAX_BYTES", 100)
    made.update(TABLE, LENS)
    assert not trace.is_open

    def is_priced(*_):
        raise AssertionError("priced for a trace that has ended")

    monkeypatch.setattr(made.planner.decode_planner, "unshared_us", is_priced)
    monkeypatch.setattr(trace, "record", is_priced)
    assert made.update(TABLE + 1, LENS).num_reqs == 3


def test_a_disk_that_is_full_ends_the_trace_and_no_step(tmp_path, monkeypatch):
    made = planner(monkeypatch, tmp_path / "t.jsonl")
    written = tracing.os.pwrite
    monkeypatch.setattr(tracing.os, "pwrite", lambda f, data, at: written(f, data[:10], at))
    assert made.update(TABLE, LENS).num_reqs == 3
    assert (tmp_path / "t.jsonl").read_bytes() == b""


def test_a_disk_that_fails_altogether_ends_no_step(tmp_path, monkeypatch):
    made = planner(monkeypatch, tmp_path / "t.jsonl")

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tracing.os, "pwrite", fails)
    monkeypatch.setattr(tracing.os, "ftruncate", fails)
    assert made.update(TABLE, LENS).num_reqs == 3


def test_a_file_system_without_locks_records(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tracing.fcntl, "flock", no_locks)
    path = tmp_path / "t.jsonl"
    planner(monkeypatch, path).update(TABLE, LENS)
    assert len(path.read_text().splitlines()) == 1


def test_a_file_that_can_no_longer_be_written_ends_no_engine(tmp_path, monkeypatch, caplog):
    (tmp_path / "t.jsonl").mkdir()
    made = planner(monkeypatch, tmp_path / "t.jsonl")
    assert made.update(TABLE, LENS).num_reqs == 3
    assert caplog.text.count("Nothing is recorded: VLLM_PREFIXSHARE_TRACE=") == 1


def test_a_file_that_cannot_be_emptied_is_refused(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tracing.os, "ftruncate", fails)
    with pytest.raises(PrefixShareError, match=r"cannot be written \(Read-only file system\)"):
        tracing.Trace(tmp_path / "t.jsonl")


def test_of_two_processes_the_first_records(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    made = planner(monkeypatch, path)
    code = (
        "from pathlib import Path; "
        "from vllm_prefixshare.vllm_plugin.observability.tracing import Trace; "
        f"Trace(Path({str(path)!r})).write({{'other': 1}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    made.update(TABLE, LENS)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["kv_lens"] == LENS.tolist()


def test_what_is_no_plain_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none" / "t.jsonl", tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(PrefixShareError, match=f"TRACE={path} cannot be written "):
            tracing.open_file(path)


@pytest.mark.engine
def test_an_engine_is_recorded_and_drawn(tmp_path, capsys):
    path, picture = tmp_path / "t.jsonl", tmp_path / "plan.svg"
    environment = {
        **ONE_PROCESS,
        "VLLM_PREFIXSHARE_TRACE": str(path),
        "VLLM_PREFIXSHARE_SHARE": "always",
    }
    document = "The lighthouse was built in 1874. It is 38 metres high. " * 40
    questions = [f"{document} {i}: when was it built?" for i in range(6)]
    settings = {"enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 512}
    with EngineProcess(PREFIX_SHARE, embedded_model_path(), environment, **settings) as engine:
        engine.generate(questions[:1], 1)  # puts the document into the prefix cache
        stats = engine.generate(questions, 8, ignore_eos=True).stats
    assert stats["shared_steps"]
    recorded = [read_batch(path, step) for step in range(path.read_text().count("\n"))]
    assert max(len(batch.seq_lens) for batch in recorded) == 6
    most = max(recorded, key=lambda batch: len(batch.seq_lens))
    assert len(np.unique(most.block_table[:, 0])) == 1, "all requests begin with the same block"
    capsys.readouterr()
    assert main(["inspect", str(path), "--svg", str(picture)]) == 0
    assert "node 0" in picture.read_text()
    lines = capsys.readouterr().out.splitlines()
    (kernel,) = stats["kernels"]
    assert f", as the engine ran it: {kernel} kernel on " in lines[0]
    assert lines[1].startswith("9 query and 3 KV heads, head_dim 64,")
    assert lines[2].startswith("6 requests, ")
    # the steps under this plan dominate; the others have fewer requests
    factor = float(re.match(r"reads ([\d.]+) times fewer KV tokens, ", lines[-2])[1])
    assert stats["share_factor"] * 0.9 < factor < stats["share_factor"] * 1.5
