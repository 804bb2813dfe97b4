"""What ``benchmarks.quality.soak`` makes of its runs, with runs that need no engine."""

import json
from datetime import date
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.quality import soak
from benchmarks.support import results
from tests.support import chaos
from tests.support.processes import Held
from vllm_prefixshare.cli.planned import Layer
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.planning.planner import DecodePlanner

MIB = 1 << 20
PUBLISHED = sorted(Path(soak.__file__).parents[1].glob("published/soak*.json"))


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def record(minutes: float, rss: float = 3000, device: float = 400, files: int = 90):
    return 60 * minutes, Held(3, int(rss * MIB), files, int(device * MIB))


# -- growth


@pytest.mark.parametrize("what", ["memory", "GPU memory"])
@pytest.mark.parametrize("minutes", [2, 30])
def test_a_slow_leak_shows_whatever_the_duration(what, minutes):
    def run(a_minute: float, at_once: float) -> list[str]:
        """A step in the later part of the run, and a leak."""
        held = []
        for i in range(100):
            at = minutes * i / 99
            size = a_minute * at + at_once * (i > 70)
            held.append(record(at, **{"memory": {"rss": 3000 + size}}.get(what, {"device": size})))
        return soak.leaks(chaos.grown(held), 0)

    assert run(a_minute=0, at_once=20) == []
    assert run(a_minute=2.5, at_once=0) == []
    (fault,) = run(a_minute=110 / minutes, at_once=0)  # 33 MiB between the means of the halves
    assert fault.startswith(f"{what} grew by ") and fault.endswith("MiB a minute")


def test_the_rate_is_that_of_the_later_part():
    """Caches and pools fill at first; garbage is collected now and then."""
    held = [record(i / 10, rss=3000 + min(500, 20 * i) + 40 * (i % 4 == 0)) for i in range(100)]
    growth = chaos.grown(held)
    assert growth.seconds == pytest.approx(180, abs=6)
    assert growth.more == Held(0, 0, 0, 0) and soak.leaks(growth, 0) == []
    grows = chaos.grown([record(i / 10, rss=3000 + i) for i in range(100)])
    assert grows.per_minute("rss") == pytest.approx(10 * MIB)
    assert len(soak.leaks(grows, 0)) == 1


def test_open_files_count_at_once():
    growth = chaos.grown([record(i, files=90 + (i > 7)) for i in range(10)])
    assert soak.leaks(growth, 0) == []  # the least of each half: some are closed late
    growth = chaos.grown([record(i, files=90 + (i > 6)) for i in range(10)])
    assert soak.leaks(growth, 0) == ["1 more files are open"]
    assert soak.leaks(growth, 8) == []


@pytest.mark.parametrize("records", [0, 1, 2, 3])
def test_a_run_with_too_few_records_says_so(records):
    held = [record(i, rss=3000 + 500 * i) for i in range(records)]
    growth = chaos.grown(held)
    assert growth is None and soak.leaks(growth, 0) == []
    row = soak.row_of_growth(held, growth)
    assert row["grown_bytes"] is None and len(row["held"]) == records


def test_the_row_of_a_run_says_in_how_long():
    held = [record(i / 10, rss=3000 + i / 10) for i in range(100)]
    row = soak.row_of_growth(held, chaos.grown(held))
    assert row["grown_bytes"] == 3 * MIB and row["grown_seconds"] == pytest.approx(180)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_runs_are_within_the_bounds(path):
    for row in rows_of(path):
        held = [(at, Held(**h)) for at, h in row["held"]]
        growth = chaos.grown(held)
        assert growth is not None
        assert soak.leaks(growth, 0 if "asked" not in row else 32) == row["wrong"] == []


# -- sharing


def test_a_run_that_shares_nothing_is_wrong():
    assert soak.without_sharing(0) == ["no step shared KV"]
    assert soak.without_sharing(1) == []


@pytest.mark.parametrize("gpu", ["H100", "H200", "A100", "L4"])
@pytest.mark.parametrize("variant", ["plain", "drafts"])
def test_what_chaos_runs_at_once_is_shared_by_default_on_a_gpu(gpu, variant):
    """The engine decodes 10 requests at once in the median."""
    prompts = chaos.prompts(range(20_000), 24, Random(0))
    size, query_len = chaos.BLOCK_SIZE, 4 if variant == "drafts" else 1
    attention = AttentionConfig(8, 2, 64, size)
    planning, shared, random = Layer.on(gpu, attention), 0, Random(1)
    for _ in range(40):
        running = [p for p in random.choices(prompts, k=10) if len(p) + 8 <= chaos.MAX_LEN]
        lens = np.array([len(p) + random.randint(4, 8) for p in running], np.int32)
        table = np.zeros((len(running), chaos.MAX_LEN // size), np.int32)
        ids: dict[tuple[int, ...], int] = {}
        for i, prompt in enumerate(running):
            for block in range(-(-int(lens[i]) // size)):
                whole = prompt[: (block + 1) * size] if (block + 1) * size <= len(prompt) else (i,)
                table[i, block] = ids.setdefault((block, *whole), 1 + len(ids))
        planner = DecodePlanner(planning.config, planning.cost, size, attention.gqa_group_size)
        plan = planner.update(table, lens, query_len).plan
        shared += plan.kv_tokens_read(lens) < lens.sum()
    assert shared > 20
    assert chaos.GPU_SETTINGS["max_num_seqs"] > 10


# -- seeds, rows and dates


def test_runs_of_which_none_is_left_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(soak, "has_gpu", lambda: True)
    asked = ["engine", "--variants", "drafts", "--runners"]
    with pytest.raises(SystemExit) as ended:
        soak.parse([*asked, "V2"])
    assert ended.value.code == 2
    assert "nothing would run: drafts need the runner V1" in capsys.readouterr().err
    assert len(soak.runs(soak.parse([*asked, "V2", "V1"]))) == 1


def test_a_server_runs_once_for_each_seed():
    args = soak.parse(["server", "--seeds", "3", "4", "5"])
    assert [run.keywords for run in soak.runs(args)] == [{"seed": s} for s in (3, 4, 5)]
    assert soak.parse(["server"]).seeds == [0]
    assert soak.parse(["server", "--seed", "7"]).seeds == [7]


@pytest.mark.parametrize(
    "path", [p for p in PUBLISHED if "server" in p.stem], ids=lambda path: path.stem
)
def test_the_command_of_a_published_server_run_yields_its_rows(path):
    command = json.loads(path.read_text())["command"].split()
    args = soak.parse(command[3:])
    several = len(args.seeds) > 1
    expected = [soak.label("server", args.divider, s if several else None) for s in args.seeds]
    assert [row["variant"] for row in rows_of(path)] == expected


def test_every_file_of_results_has_its_date(tmp_path):
    path = tmp_path / "below" / "r.json"
    results.write(path, {"rows": []})
    assert json.loads(path.read_text()) == {"date": date.today().isoformat(), "rows": []}
    results.write(path, {"date": "2026-01-02"})
    assert json.loads(path.read_text()) == {"date": "2026-01-02"}
    results.write(None, {})
