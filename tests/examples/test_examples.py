"""Every example runs as a user would run it, on the embedded model, at the smallest useful size.

By default an example also runs the baseline. That costs a second engine here, so only some tests do
it; the others compare with the backend's own counters, which include the KV tokens that reading
request by request would have read.
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.engine import DEFAULT_ENVIRONMENT
from vllm_prefixshare.kernels.cpu import native_executor

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = ("--no-compare", "--pairs", "0")
#: Where all tokens must be the same: in bfloat16 rounding may decide a tie.
EXACT = ("--dtype", "float32")


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return processes.run(command, status=None, **DEFAULT_ENVIRONMENT)


def output(name: str, *arguments: object) -> str:
    """Run an example that must succeed; return its output, without warnings of vLLM."""
    done = run(name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert "WARNING" not in done.stdout
    return done.stdout


def kv_tokens(printed: str) -> tuple[int, int]:
    """The printed counts of KV tokens: read with PREFIX_SHARE, and without sharing."""
    (counts,) = re.findall(
        r"^KV tokens that decode read in each layer, by count: (\S+); (\S+) without sharing$",
        printed,
        re.M,
    )
    read, alone = (int(count.replace(",", "")) for count in counts)
    return read, alone


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "document.md"
    path.write_text((EXAMPLES / "document.md").read_text()[:2200])
    return path


@pytest.mark.engine
def test_the_demo_beside_stock(document, tmp_path):
    questions = tmp_path / "questions"
    questions.write_text(
        "When was the museum founded? | 1952\n"
        "Who is the director of the museum? | Peter Lund\n"
        "What does the moon cost? | nine euros\n"
        "Who founded it?\n"
    )
    log = tmp_path / "log"
    printed = output(
        "document_qa", "--document", document, "--questions", questions, "--max-tokens", 16,
        "--block-size", 32, "--pairs", 1, "--max-model-len", 2048, "--log", log, *EXACT,
    )  # fmt: skip
    assert str(log) in printed and log.read_text()
    read, alone = kv_tokens(printed)
    assert alone > 2 * read
    assert re.search(r"^same tokens +yes, all 4 sequences$", printed, re.M)
    assert re.search(r"^  tokenization +[\d.]+ ms +\d+%$", printed, re.M), "host work by part"
    for row in ("pair 1", "median"):
        assert re.search(rf"^{row} +[\d.]+ +[\d.]+ +[\d.]+ times as fast$", printed, re.M), row
    for row in (
        "answers per second", "milliseconds per output token", "host milliseconds per request",
    ):  # fmt: skip
        assert re.search(rf"^{row} +[\d.]+ +[\d.]+$", printed, re.M), row
    parts = ("prefix tree", "KV tokens that", "whole calls", "on an NVIDIA", "answers:")
    places = [printed.index(part) for part in parts]
    assert places == sorted(places)
    assert re.search(r"^  node 0: \d{3} tokens x 4 requests$", printed, re.M)
    assert 'the text: "It was founded in 1952 by the teacher' in " ".join(printed.split())
    assert "NO, the text does not say it" in printed
    assert re.search(r"^[012] of 3 answers stand in the text$", printed, re.M)


@pytest.mark.engine
def test_the_demos_questions_are_answered_by_the_embedded_model():
    printed = output("document_qa", *ALONE)
    ((right, checked),) = re.findall(r"^(\d+) of (\d+) answers stand in the text$", printed, re.M)
    assert (int(right) >= 14) and checked == "16"
    for word in ("baseline", "FLASH_ATTN", "times as fast", "same tokens"):
        assert word not in printed, word


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        (
            "majority_vote",
            ("--samples", 6, "--questions", 2, "--max-tokens", 10),
            r"^right: \d+% of the samples, [012] of 2 majorities$",
        ),
        (
            "tree_of_thoughts",
            ("--branch", 2, "--keep", 3, "--depth", 2, "--max-tokens", 10),
            r"^best chain: .+; .+: (right|wrong)$",
        ),
        ("few_shot", ("--words", 6), r"^\d of 6 labels are right$"),
    ],
)
def test_an_example_reads_less_than_request_by_request(name, arguments, says):
    printed = output(name, *arguments, *ALONE)
    read, alone = kv_tokens(printed)
    assert alone > 1.2 * read
    assert re.search(says, printed, re.M)
    assert "baseline" not in printed


def show(monkeypatch, capsys, seconds: dict[str, list[float]]) -> str:
    """What the demo prints of whole calls with these durations, by engine."""
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = runpy.run_path(str(EXAMPLES / "document_qa.py"))
    common = demo["common"]
    stats = {"kv_tokens_read": 500.0, "kv_tokens_stock": 6000.0}  # a server's counters are floats
    timed = {
        backend: [
            common.Pass([(1, 2)] * 4, [()] * 4, None, x, 10 * x, 0.4 * x, stats) for x in found
        ]
        for backend, found in seconds.items()
    }
    found = common.Comparison({backend: passes[0] for backend, passes in timed.items()}, timed)
    common.show_reads(found.ours.stats)
    assert common.show_calls(found) == 0
    demo["show_published"]("baseline" in seconds)
    return capsys.readouterr().out


def test_whole_calls_are_shown_in_pairs(monkeypatch, capsys):
    printed = show(
        monkeypatch, capsys, {"PREFIX_SHARE": [1.0, 2.0, 4.0], "baseline": [3.0, 10.0, 8.0]}
    )
    rows = re.findall(r"^(pair \d|median) +(\S+) +(\S+) +(\S+) times as fast$", printed, re.M)
    assert rows == [
        ("pair 1", "1.00", "3.00", "3.00"),
        ("pair 2", "2.00", "10.00", "5.00"),
        ("pair 3", "4.00", "8.00", "2.00"),
        ("median", "2.00", "8.00", "3.00"),
    ]
    assert re.search("^answers per second +2.0 +0.5$", printed, re.M)
    assert re.search("^host milliseconds per request +200.00 +800.00$", printed, re.M)
    assert kv_tokens(printed) == (500, 6000), "counts, and no ratio of them"
    published = json.loads((EXAMPLES.parent / "benchmarks/published/whole_call.json").read_text())
    rows = published["rows"]
    ours, other = (
        f"{rows[name]['workloads']['cached']['seconds']:.2f} s"
        for name in ("prefix_share", "flash_attn")
    )
    gpu = published["device"].split(" x")[0]
    assert (
        f"on an {gpu}, 64 questions, document cached: {ours}; {other} with FLASH_ATTN\n" in printed
    )


def test_without_a_comparison_nothing_is_shown_of_the_other_engine(monkeypatch, capsys):
    printed = show(monkeypatch, capsys, {"PREFIX_SHARE": [1.0, 2.0]})
    assert re.search("^call 2 +2.00$", printed, re.M) and "on an NVIDIA" in printed
    for word in ("baseline", "FLASH_ATTN", "times as fast", "same tokens", "pair"):
        assert word not in printed, word


@pytest.mark.engine
def test_rollouts_are_written_for_a_trainer(tmp_path):
    out = tmp_path / "rollouts.jsonl"
    printed = output(
        "grpo_rollouts", "--groups", 2, "--samples", 4, "--max-tokens", 10, "--out", out, *ALONE
    )
    read, alone = kv_tokens(printed)
    assert alone > 1.2 * read
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["group"] for r in records] == [0] * 4 + [1] * 4
    for group in (records[:4], records[4:]):
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-6)
        by_reward = sorted(group, key=lambda r: r["reward"])
        assert [r["advantage"] for r in by_reward] == sorted(r["advantage"] for r in group)
    for record in records:
        assert len(record["logprobs"]) == len(record["token_ids"]) > 0
        assert max(record["logprobs"]) <= 0


@pytest.mark.engine
def test_beams_share_one_step_in_a_block():
    printed = output("beam_search", "--width", 4, "--prompt-tokens", 128, "--max-tokens", 4, *ALONE)
    read, alone = kv_tokens(printed)
    assert alone == 4 * 129  # one step: four blocks of the prompt, and one token
    assert read <= alone  # beams that arrive late decode by themselves


@pytest.mark.engine
def test_agents_over_a_server(tmp_path):
    printed = output("agent_loop", "--agents", 4, "--max-tokens", 12, *ALONE)
    read, alone = kv_tokens(printed)
    assert alone > 1.2 * read
    calls = re.findall(r"^    (\w+)\(\"", printed, re.M)
    assert len(calls) == 4  # the server constrains the output to valid calls
    assert re.search(r"^\d of 4 agents found the answer$", printed, re.M)


@pytest.mark.engine
def test_the_ablation_shares_only_where_it_may():
    printed = output(
        "ablation", "--settings", "never", "always", "--requests", 6, "--groups", 2,
        "--tree-tokens", 256, 64, 16, "--max-tokens", 4, *ALONE, *EXACT,
    )  # fmt: skip
    rows = dict(re.findall(r"^(never|always) +[\d,]+ +([\d.]+) ", printed, re.M))
    assert float(rows["never"]) == 1
    assert float(rows["always"]) > 1.5
    assert len(re.findall(r"yes, all 6 sequences$", printed, re.M)) == 2


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("document_qa", "--document /nowhere.md", "document /nowhere.md cannot be read (No such"),
        ("document_qa", "--document {binary}", "cannot be read (it is not UTF-8 text)"),
        ("document_qa", "--questions {empty}", "is empty"),
        ("document_qa", "--max-tokens 0", "--max-tokens must be at least 1, got 0"),
        ("document_qa", "--model /nowhere", "model /nowhere is not a checkpoint folder, and no"),
        ("document_qa", "--document {long}", "the model reads 8192: shorten the document"),
        ("document_qa", "--log /nowhere/log", "--log /nowhere/log cannot be written (No such"),
        ("majority_vote", "--samples 0", "--samples must be at least 1, got 0"),
        ("grpo_rollouts", "--out /nowhere/x", "--out /nowhere/x cannot be written (No such"),
        ("tree_of_thoughts", "--keep 0", "--keep must be at least 1, got 0"),
        ("few_shot", "--pairs -1", "--pairs must be at least 0, got -1"),
        ("few_shot", "--words 99", "invalid choice: 99"),
        ("beam_search", "--prompt-tokens 8", "--prompt-tokens must be at least 32, got 8"),
        ("ablation", "--settings best", "--settings 'best' is unknown: use never, auto, always"),
        ("ablation", "--tree-tokens 4000 1 1", "--tree-tokens must be 1 or more each and fit"),
        ("agent_loop", "--base-url localhost", "--base-url localhost must begin with http"),
        ("agent_loop", "--base-url http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(
    name, arguments, sentence, tmp_path, monkeypatch, capsys
):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("\n  \n")
    (tmp_path / "long").write_text("prefix " * 9000)
    names = {name: tmp_path / name for name in ("binary", "empty", "long")}
    script = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *(a.format(**names) for a in arguments.split())])
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert sentence in printed.err
    assert "error: " in printed.err
    assert "starting" not in printed.out
    assert {path.name for path in tmp_path.iterdir()} == set(names), "a refused run leaves no file"


@pytest.mark.parametrize(
    ("flags", "named"),
    [({"avx512_bf16", "amx_tile"}, True), ({"avx512_bf16"}, False), ({"amx_tile"}, False)],
)
def test_the_note_on_the_time_names_amx_where_stock_uses_it(flags, named, monkeypatch):
    common = runpy.run_path(str(EXAMPLES / "common.py"))
    monkeypatch.setattr(native_executor, "processor_flags", lambda: frozenset(flags))
    # what is found with these flags is not kept for other tests
    monkeypatch.setattr(native_executor, "_find_library", native_executor._find_library.__wrapped__)
    assert ("AMX" in common["note"]()) == named
