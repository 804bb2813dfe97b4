"""The Ray examples, each with two replicas. They run with a small model, or with ``make ray`` as a
user would run them.
"""

import importlib.util
import io
import os
import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.examples.test_examples import EXAMPLES
from tests.support.dummy_model import SMALL_VOCAB, write_small_llama
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.processes import run
from tests.support.serving import free_port
from vllm_prefixshare import PrefixShareError

SCRIPTS = ("batch_qa", "serve_qa", "tensor_parallel")
RAY_CLUSTER = EXAMPLES / "ray_cluster"
#: The environment that `make test` puts beside the one of the tests.
BESIDE = EXAMPLES.parent / ".venv-ray" / "bin" / "python"
PYTHON = BESIDE if importlib.util.find_spec("ray") is None else Path(sys.executable)
needs_ray = pytest.mark.skipif(
    not PYTHON.exists() and "CI" not in os.environ, reason="needs Ray: make ray"
)
ENVIRONMENT = {
    **DEFAULT_ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join([str(RAY_CLUSTER), str(EXAMPLES.parent)]),
}
#: Rows of the table that an example prints: read, saved and share factor of each replica, and then
#: of both; by run.
Table = dict[str, list[tuple[int, int, float]]]

#: Both examples in one process, which imports vLLM once.
BOTH = """
import runpy, sys
for name in ("batch_qa", "serve_qa"):
    sys.argv = [name, *sys.argv[1:]]
    if name == "serve_qa":
        sys.argv += ["--port", PORT]
    try:
        runpy.run_path(f"{FOLDER}/{name}.py", run_name="__main__")
    except SystemExit as e:
        print(f"{name} ended with {e.code}", flush=True)
"""


def small_options(folder: Path) -> dict[str, object]:
    """A model that starts soon, and documents for it. The answers are so long that the questions
    about a document are decoded together, and that a replica decodes for some seconds: it writes
    its counters once a second.
    """
    chosen = random.Random(0)
    documents = folder / "documents"
    documents.mkdir()
    for i in range(4):
        words = (f"t{chosen.randrange(3, SMALL_VOCAB)}" for _ in range(400))
        (documents / f"{i}.txt").write_text(" ".join(words))
    return {
        "--model": write_small_llama(folder / "model", num_layers=2),
        "--dtype": "float32",
        "--max-model-len": 1024,
        "--max-tokens": 240,
        "--documents": documents,
    }


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example has printed."""
    full = os.environ.get("PREFIXSHARE_RAY") == "full"
    options = {} if full else small_options(tmp_path_factory.mktemp("ray"))
    program = f"FOLDER, PORT = {str(RAY_CLUSTER)!r}, '{free_port()}'\n{BOTH}"
    words = (word for option in options.items() for word in option)
    done = run([PYTHON, "-c", program, *words], status=None, **ENVIRONMENT)
    print(done.stdout)
    batch, _, rest = done.stdout.partition("batch_qa ended with 0\n")
    serve, ended, _ = rest.partition("serve_qa ended with 0\n")
    assert ended, done.stdout + done.stderr
    return {"batch_qa": batch, "serve_qa": serve}


def table(printed: str) -> Table:
    row = r"^(.{22})(\S+) +([\d,]+) +([\d,]+) +([\d.]+)$"
    runs: Table = {}
    for run_name, _, read, saved, factor in re.findall(row, printed, re.M):
        if run_name.strip():
            rows = runs[run_name.strip()] = []
        rows.append((int(read.replace(",", "")), int(saved.replace(",", "")), float(factor)))
    return runs


@needs_ray
@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "affine", "other"),
    [("batch_qa", "by document", "shuffled"), ("serve_qa", "by prefix", "Ray's router")],
)
def test_a_documents_questions_meet_on_one_replica(printed, name, affine, other):
    runs = table(printed[name])
    assert list(runs) == [affine, other]
    for *replicas, total in runs.values():
        assert len(replicas) == 2
        assert total[:2] == tuple(map(sum, zip(*replicas, strict=True)))[:2]
        for read, saved, factor in (*replicas, total):
            assert read > 0
            assert factor == pytest.approx((read + saved) / read, abs=0.006)
    # Counts of Ray Data may lack a replica's last second, here at most the second half of its work.
    # Of a document's four questions, two on each replica would share at most twice
    assert min(replica[2] for replica in runs[affine]) > 2, "questions met on both replicas"
    assert 1.2 * runs[affine][-1][0] < runs[other][-1][0]


#: As the engine core of vLLM does it, in a process that vLLM starts.
OTHER_PROCESS = """
import multiprocessing, os, sys
from tensor_parallel import open_to_processes

def core(answers):
    import ray
    if not ray.is_initialized():
        ray.init(logging_level="ERROR")
    answers.put(ray.cluster_resources()["CPU"])

if __name__ == "__main__":
    import ray
    ray.init(num_cpus=7, include_dashboard=False, logging_level="ERROR")
    open_to_processes()
    context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    answers = context.Queue()
    process = context.Process(target=core, args=(answers,), daemon=True)
    process.start()
    print("CPUs:", answers.get(timeout=60))
    process.join(10)
"""


@needs_ray
def test_a_process_that_vllm_starts_reaches_the_scripts_ray(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OTHER_PROCESS)
    done = run([PYTHON, script], status=None, timeout=120, **ENVIRONMENT)
    assert "CPUs: 7.0" in done.stdout, done.stderr[-4000:]


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


@pytest.mark.parametrize("nothing", [{}, {"1": (0.0, 0.0)}])
def test_a_run_that_counted_nothing_is_no_gain(shared, nothing):
    found = {replica: shared["Reads"](*reads) for replica, reads in nothing.items()}
    some = {"1": shared["Reads"](200.0, 1900.0)}
    for runs in ({"by prefix": found}, {"by prefix": found, "x": some}, {"x": some, "y": found}):
        with pytest.raises(PrefixShareError, match="no replica counted what it read"):
            shared["show_table"](runs)


def test_a_counter_that_has_not_counted_is_zero(monkeypatch):
    """Ray's ``/metrics`` names a counter once it has counted."""
    pytest.importorskip("prometheus_client")
    line = 'ray_vllm_prefixshare_kv_tokens_read_total{{ReplicaId="{}"}} {}'
    text = "\n".join([line.format("a", 7), line.format("", 9), "other 1", ""])
    node = {"NodeManagerAddress": "here", "MetricsExportPort": 1}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: [node]))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(text.encode()))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(RAY_CLUSTER)
    serve_qa = runpy.run_path(str(RAY_CLUSTER / "serve_qa.py"))
    assert serve_qa["counters"]() == {"a": (7.0, 0.0)}


def test_a_cluster_that_does_not_answer_is_one_sentence(shared, monkeypatch):
    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance. Please specify")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=refuse))
    with pytest.raises(PrefixShareError, match="no Ray cluster answers at --address auto: start"):
        shared["start_ray"](SimpleNamespace(address="auto", replicas=2), {})


@pytest.mark.parametrize("option", ["replicas", "tensor_parallel_size"])
def test_ray_is_not_asked_for_gpus_that_it_lacks(shared, monkeypatch, option):
    check, args = shared["check_gpus"], SimpleNamespace(**{option: 2})
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 1.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(shared["common"], "on_cpu", lambda: False)
    with pytest.raises(PrefixShareError, match="2 needs as many GPUs, and Ray has 1"):
        check(args, option)
    ray.cluster_resources = lambda: {"GPU": 2.0}
    check(args, option)


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
