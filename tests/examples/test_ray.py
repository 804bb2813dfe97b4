"""The Ray examples. Those that need Ray, and several engines at once, run with ``make ray``; one of
them, with a small model and a fifth of the work, runs alone with ``make ray-small``.
"""

import importlib.util
import random
import re
import runpy
import sys

import pytest

from tests.examples.test_examples import EXAMPLES, run
from tests.support.dummy_model import SMALL_VOCAB, write_small_llama

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: make ray"
)
SCRIPTS = ("batch_qa", "serve_qa", "tensor_parallel")


def printed_table(name: str, *arguments: object) -> dict[str, list[tuple[int, int, float]]]:
    """Run an example that must succeed. For each run in its table: what each replica read and
    saved, its share factor, and then the same of all replicas.
    """
    done = run(f"ray_cluster/{name}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    row = r"^(.{22})(\S+) +([\d,]+) +([\d,]+) +([\d.]+)$"
    runs: dict[str, list[tuple[int, int, float]]] = {}
    for run_name, _, read, saved, factor in re.findall(row, done.stdout, re.M):
        if run_name.strip():
            rows = runs[run_name.strip()] = []
        rows.append((int(read.replace(",", "")), int(saved.replace(",", "")), float(factor)))
    return runs


def check_counts(runs: dict[str, list[tuple[int, int, float]]]) -> None:
    """Both replicas worked, and the last row of a run is their sum."""
    for *replicas, total in runs.values():
        assert len(replicas) == 2
        assert total[:2] == tuple(map(sum, zip(*replicas, strict=True)))[:2]
        for read, saved, factor in (*replicas, total):
            assert read > 0
            assert factor == pytest.approx((read + saved) / read, abs=0.006)


def check_met(run: list[tuple[int, int, float]]) -> None:
    """A document's four questions met on one replica: two and two would share at most twice."""
    assert min(replica[2] for replica in run) > 2, "questions met on both replicas"


def compared(name: str, first: str, second: str) -> None:
    """Run an example with and without affinity, and check what it counted."""
    runs = printed_table(name)
    assert list(runs) == [first, second]
    check_counts(runs)
    check_met(runs[first])
    assert 1.2 * runs[first][-1][0] < runs[second][-1][0]


@needs_ray
@pytest.mark.engine
def test_a_documents_questions_meet_in_a_batch():
    compared("batch_qa", "by document", "shuffled")


@needs_ray
@pytest.mark.engine
def test_a_documents_questions_meet_on_a_server():
    compared("serve_qa", "by prefix", "Ray's router")


@needs_ray
@pytest.mark.engine
def test_small_documents_meet_in_a_batch(tmp_path):
    chosen = random.Random(0)
    for i in range(4):
        words = (f"t{chosen.randrange(3, SMALL_VOCAB)}" for _ in range(400))
        (tmp_path / f"{i}.txt").write_text(" ".join(words))
    options = {
        "--model": write_small_llama(tmp_path / "model"),
        "--dtype": "float32",
        "--max-model-len": 1024,
        "--documents": tmp_path,
    }
    arguments = [word for option in options.items() for word in option]
    runs = printed_table("batch_qa", *arguments, "--no-compare")
    assert list(runs) == ["by document"]
    check_counts(runs)
    check_met(runs["by document"])


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "ray_cluster" / "shared.py"))


def test_prompts_about_a_document_differ_at_their_ends_only(shared):
    documents = shared["read_documents"](None)
    questions = shared["read_questions"](None)
    assert len(documents) == len(questions) == 4
    text, *others = documents.values()
    prompts = [shared["prompt"](text, question) for question in questions]
    assert all(p.startswith(f"Document:\n\n{text}\n\nQuestion: ") for p in prompts)
    assert all(text[:100] not in other for other in others)


def test_affinity_that_saves_nothing_is_exit_status_1(shared, capsys):
    reads = shared["Reads"]
    alike = {"1": reads(1000.0, 500.0), "2": reads(600.0, 0.0)}
    few = {"1": reads(200.0, 1900.0)}
    assert shared["show_table"]({"affine": few, "other": alike}) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^other +1 +1,000 +500 +1.50$", printed, re.M)
    assert re.search(r"^ +all +1,600 +500 +1.31$", printed, re.M)
    assert "affine: 8.00 times fewer KV tokens read" in printed
    assert shared["show_table"]({"affine": alike, "other": alike}) == 1


def mistake(name: str, arguments: str, monkeypatch, capsys) -> str:
    script = EXAMPLES / "ray_cluster" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments.split()])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("batch_qa", "--replicas 0", "--replicas must be at least 1, got 0"),
        ("batch_qa", "--at-once 0", "--at-once must be at least 1, got 0"),
        ("batch_qa", "--documents {empty}", "holds no .txt and no .md file"),
        ("batch_qa", "--counters /nowhere", "--counters /nowhere is not a folder"),
        ("serve_qa", "--questions /nowhere", "question file /nowhere cannot be read (No such"),
        ("serve_qa", "--max-tokens 0", "--max-tokens must be at least 1, got 0"),
        ("serve_qa", "--model /nowhere", "model /nowhere is not a checkpoint folder"),
        ("tensor_parallel", "", "vLLM's Ray executor needs GPUs, and this vLLM is for CPUs"),
    ],
)
def test_a_mistake_is_one_sentence(name, arguments, sentence, tmp_path, monkeypatch, capsys):
    printed = mistake(name, arguments.format(empty=tmp_path), monkeypatch, capsys)
    assert sentence in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize(("name", "module"), [("batch_qa", "data"), ("serve_qa", "serve")])
def test_without_ray_an_example_says_what_to_install(name, module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, f"ray.{module}.llm", raising=False)
    printed = mistake(name, "", monkeypatch, capsys)
    assert f"ray.{module}.llm cannot be imported" in printed
    assert "pip install '.[ray]'" in printed


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_how_to_run_it(name, monkeypatch, capsys):
    script = EXAMPLES / "ray_cluster" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert f"python examples/ray_cluster/{name}.py" in capsys.readouterr().out
