"""``vllm serve`` with VLLM_ATTENTION_BACKEND=PREFIX_SHARE, driven by HTTP clients and traced."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import DOCUMENT
from tests.support.dummy_model import write_small_mixtral
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.load import Load, ends_cleanly, nonsense, server_faults
from tests.support.processes import run
from tests.support.serving import (
    NAME,
    VLLM,
    client_of,
    free_port,
    metrics,
    metrics_at,
    server_process,
    stats,
    stream,
)
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.vllm_plugin.observability.metrics import PREFIX

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "prefix-share.json"
BLOCK_SIZE = 32
ENVIRONMENT = {
    **os.environ,
    **DEFAULT_ENVIRONMENT,
    "VLLM_ATTENTION_BACKEND": "PREFIX_SHARE",
    "VLLM_PREFIXSHARE_SHARE": "always",
    "VLLM_SERVER_DEV_MODE": "1",  # enables /collective_rpc
}


MAX_LEN = 3072


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's output (log) and its trace (trace.jsonl) lie."""
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def running(model: Path, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    options = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", "8", "--enforce-eager"]
    options += ["--block-size", str(BLOCK_SIZE)]
    # by default vLLM ends the engine at once, and then waits for streams that get no more tokens
    options += ["--shutdown-timeout", "120"]
    environment = {**ENVIRONMENT, "VLLM_PREFIXSHARE_TRACE": str(folder / "trace.jsonl")}
    with server_process(model, folder / "log", environment, *options) as server:
        yield server


@pytest.fixture(scope="module")
def server(running: tuple[str, subprocess.Popen[bytes]]) -> str:
    return running[0]


def test_streams_share_the_document_and_one_can_be_aborted(server):
    client = client_of(server)
    document = f"Document:\n\n{DOCUMENT}\n\nQuestion: "
    client.completions.create(model=NAME, prompt=document, max_tokens=1)
    stats(server, reset=True)
    prompts = [f"{document}{i}. What is a work tile?\nAnswer:" for i in range(5)]
    texts = stream(client, prompts, tokens=24, leave_after=6)
    assert all(len(text) > 20 for text in texts[1:])
    counted = stats(server)
    assert counted["shared_steps"] > 10
    assert counted["kv_tokens_stock"] > 2 * counted["kv_tokens_read"]
    assert counted["plans"] < counted["decode_steps"]

    # the server continues, and gives the same answer as among other requests
    again = client.completions.create(
        model=NAME, prompt=prompts[1], max_tokens=24, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert again.choices[0].text[:10] == texts[1][:10]


def test_metrics_say_what_samples_of_one_prompt_share(server):
    """Check the metrics exactly. The numbers of samples, tokens and steps determine how much is
    shared: in each step the samples that decode read the whole blocks of the prompt once.
    """
    client = client_of(server)
    prompt = f"{DOCUMENT}\n\nQuestion: What is a work tile?\nAnswer:"
    client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
    before = metrics_at(server)
    samples, tokens = 5, 24
    answer = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=tokens, n=samples, temperature=0.8,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    after = metrics_at(server)
    since = {name: after[name] - before.get(name, 0) for name in after}

    length = answer.usage.prompt_tokens
    assert length % BLOCK_SIZE > 1, "a prefill of one token would count as a decode"
    decodes = samples * (tokens - 1)  # the first token of a sample comes from its prefill
    steps = since["decode_steps_total"]
    assert tokens - 1 <= steps < decodes / 2, "the samples decode together"
    held = samples * sum(length + n for n in range(1, tokens))
    saved = (decodes - steps) * (length // BLOCK_SIZE * BLOCK_SIZE)
    assert since["kv_tokens_saved_total"] == saved
    assert since["kv_tokens_read_total"] == held - saved
    assert since["plans_total"] + since["plans_reused_total"] == steps
    assert since["plan_seconds_count"] == since["plans_total"] < steps / 2
    assert 0 < since["plan_seconds_sum"] < 10
    # of the last step, in which a sample that began late may be alone
    assert 1 <= after["share_factor"] <= samples
    assert 1 <= after["imbalance"] < 4
    assert after["fallbacks_total"] == 0

    counted = stats(server)
    for name in ("plans", "plans_reused", "kv_tokens_read", "kv_tokens_saved", "shared_steps"):
        assert after[f"{name}_total"] == counted[name]
    assert counted["share_factor"] == counted["kv_tokens_stock"] / counted["kv_tokens_read"]


def test_every_query_of_the_dashboard_finds_its_metrics_and_labels(server):
    metrics_at(server)
    scraped: dict[str, set[str]] = {}
    for sample in metrics(server):
        scraped.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    assert len(queries) >= 8
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    shown = set()
    for query in queries:
        names = set(re.findall(r"\b(?:vllm_prefixshare_|vllm:)\w+", query))
        assert names, query
        assert names <= scraped.keys(), query
        shown |= names
        lists = re.findall(r"\b(?:by|without) ?\((.*?)\)", query)
        lists += re.findall(r"label_values\([^,]+,(.*?)\)", query)
        labels = {label.strip() for text in lists for label in text.split(",")}
        labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
        for name in names:
            assert labels <= scraped[name], f"{query}: {name} has no label {labels}"
    ours = {name.removesuffix("_count").removesuffix("_sum") for name in scraped}
    ours = {name for name in ours if name.startswith(PREFIX)}
    assert ours - shown <= {f"{PREFIX}plan_seconds"}, "a metric is not on the dashboard"
    documented = set(re.findall(rf"`({PREFIX}\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert documented == {name.removesuffix("_bucket") for name in ours}


def test_a_crowd_of_clients_gets_its_answers_or_a_refusal(running):
    """A run of ``benchmarks.quality.soak server``, which defines the requests and the valid
    answers: of a minute in CI, a short one elsewhere.
    """
    amount = {"seconds": 60.0} if "CI" in os.environ else {"requests": 60}
    report = asyncio.run(load(running).run(6, running[1].pid, **amount))
    assert report.wrong == []
    assert server_faults(report, None) == []
    assert report.statuses.keys() == nonsense(NAME, MAX_LEN).keys()
    assert report.asked["leaves"] > 3 and report.asked["streamed"] > 3 and report.tokens > 100


def test_sigterm_ends_the_server_with_requests_in_flight(running):
    """Must be the last test that needs this server to run."""
    assert asyncio.run(ends_cleanly(load(running), running[1])) == (0, [])


def test_what_the_trace_of_the_server_holds_can_be_inspected(running, folder, capsys):
    """The server has answered all requests above and has ended."""
    trace, picture = folder / "trace.jsonl", folder / "plan.svg"
    assert running[1].poll() == 0
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    shared = [sum(line["kv_lens"]) / line["plan"]["kv_tokens_read"] for line in lines]
    assert min(shared) >= 1 and max(shared) > 2, "five questions about one document"
    best = shared.index(max(shared))
    assert main(["inspect", str(trace), "--step", str(best), "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    ((tokens, readers),) = re.findall(r"^  node 0: (\d+) tokens x (\d+) requests$", printed, re.M)
    assert int(tokens) % BLOCK_SIZE == 0 and 2 < int(readers) <= len(lines[best]["kv_lens"])
    assert re.search(r", as the engine ran it: (native|torch) kernel on ", printed)
    assert f"reads {max(shared):.2f} times fewer KV tokens, estimated " in printed
    assert "node 0" in picture.read_text()


def load(running: tuple[str, subprocess.Popen[bytes]]) -> Load:
    return Load(running[0], NAME, MAX_LEN, list(range(100, 2000)), document=600)


API_SERVERS = pytest.mark.skipif(
    "PREFIXSHARE_API_SERVERS" not in os.environ,
    reason="starts one more server: `make soak`, or PREFIXSHARE_API_SERVERS=1",
)


@API_SERVERS
def test_each_of_several_api_servers_has_every_count_once(model, tmp_path):
    options = ["--api-server-count", "2", "--max-model-len", "1024", "--enforce-eager"]
    options += ["--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    options += ["--block-size", str(BLOCK_SIZE)]
    with server_process(model, tmp_path / "log", ENVIRONMENT, *options, patience=900) as (url, _):
        client_of(url).completions.create(
            model=NAME, prompt="word " * 300, max_tokens=8, n=4, temperature=0.8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        counted = metrics_at(url)
        assert counted["kv_tokens_saved_total"] > counted["kv_tokens_read_total"] > 0
        for _ in range(10):  # each connection reaches either of them
            name = f"{PREFIX}kv_tokens_read_total"
            (sample,) = (s for s in metrics(url) if s.name == name)
            assert sample.value == stats(url)["kv_tokens_read"]


@API_SERVERS
def test_each_of_two_data_parallel_ranks_has_its_own_counts(model, tmp_path):
    options = ["--data-parallel-size", "2", "--api-server-count", "2", "--enforce-eager"]
    options += ["--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)]
    options += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 28)]
    with server_process(model, tmp_path / "log", ENVIRONMENT, *options, patience=900) as (url, _):
        client = client_of(url)

        def ask(number: int) -> str:
            answer = client.completions.create(
                model=NAME, prompt=f"{'word ' * 400}{number}?", max_tokens=8, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return str(answer.choices[0].text)

        first = ask(0)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, [number % 8 for number in range(32)]))
        assert answers[0] == first
        found = [s for s in metrics(url) if s.name == f"{PREFIX}decode_steps_total"]
        assert sorted(s.labels["engine"] for s in found) == ["0", "1"]
        assert all(0 < s.value < 400 for s in found)
        for _ in range(50):  # files are written once in a while
            hashed = sum(
                s.value
                for s in metrics(url)
                if s.name == f"{PREFIX}prompt_requests_total" and s.labels["part"] == "hashes"
            )
            if hashed == 33:
                break
            time.sleep(0.2)
        assert hashed == 33, "requests of both ranks, each once"


@API_SERVERS
def test_an_idle_rank_of_a_mixture_of_experts_counts_no_step(tmp_path):
    """Such ranks run in lockstep: an idle one runs batches without requests."""
    experts = write_small_mixtral(tmp_path / "mixtral")
    options = ["--data-parallel-size", "2", "--enforce-eager", "--dtype", "bfloat16"]
    options += ["--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)]
    options += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 28)]
    options += ["--worker-extension-cls", "tests.support.cpu_experts.ExpertsOnCpu"]
    environment = {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with server_process(experts, log, environment, *options, patience=900) as (url, _):
        client = client_of(url)

        def ask(rank: int, number: int) -> str:
            answer = client.completions.create(
                model=NAME, prompt=[*range(5, 405), number + 3], max_tokens=16, temperature=0,
                extra_body={"ignore_eos": True},
                extra_headers={"X-data-parallel-rank": str(rank)},
            )  # fmt: skip
            return str(answer.choices[0].text)

        def steps() -> list[float]:
            found, before = {}, None
            while found != before:  # files are written once a second
                before = found
                time.sleep(2.5)
                name = f"{PREFIX}decode_steps_total"
                found = {s.labels["engine"]: s.value for s in metrics(url) if s.name == name}
            return [found["0"], found["1"]]

        assert steps() == [0, 0], "the start counts none"
        with ThreadPoolExecutor(6) as pool:
            first = list(pool.map(lambda number: ask(0, number), range(6)))
        busy, idle = steps()
        assert "EngineCore starting idle loop" in log.read_text()
        assert busy >= 15 and idle == 0
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda number: ask(1, number), range(6))) == first
        assert steps()[0] == busy and steps()[1] >= 15


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("VLLM_ATTENTION_BACKEND", "PREFIXSHARE", "'PREFIXSHARE' is not an attention backend"),
        ("VLLM_PREFIXSHARE_DIVIDER", "best", "divider 'best' is unknown: use one of flashforge"),
        ("VLLM_PREFIXSHARE_SPEED", "9", "VLLM_PREFIXSHARE_SPEED is not a known variable"),
        (
            "VLLM_PREFIXSHARE_COST_TABLE",
            "/nowhere.json",
            "/nowhere.json is not a usable cost table",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_status_2(model, variable, value, sentence):
    command = [*VLLM, "serve", model, "--port", free_port(), "--enforce-eager"]
    done = run(command, status=2, env=ENVIRONMENT, timeout=300, **{variable: value})
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_so_it_is_in_the_module_that_starts_a_server(model):
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*server, "--model", model, "--port", free_port()]
    wrong = {"VLLM_PREFIXSHARE_SHARE": "maybe"}
    done = run(command, status=2, env=ENVIRONMENT, timeout=300, **wrong)
    assert done.stderr.splitlines()[-1] == (
        "vllm: error: VLLM_PREFIXSHARE_SHARE='maybe' is not valid: set it to one of auto, always, "
        "never."
    )
    assert "Traceback" not in done.stderr
