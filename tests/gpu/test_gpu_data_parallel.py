"""Data-parallel ranks of a mixture of experts on GPUs, which run in lockstep: an idle rank runs
batches without requests, which are not decode steps.

    python -m pytest -m gpu tests/gpu/test_gpu_data_parallel.py
"""

import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_mixtral
from tests.support.engine import DEFAULT_ENVIRONMENT, RUNNERS, EngineProcess
from tests.support.engine_steps import Completion
from tests.support.gpu_engines import DOCUMENT, PRIVATE, Text
from tests.support.gpu_layer import GPUS, TWO_GPUS, missing, on_gpu_with

PACKAGES = ("vllm", "openai")
pytestmark = [*on_gpu_with(*PACKAGES), TWO_GPUS]
if not missing(*PACKAGES):
    from tests.support.serving import NAME, client_of, metrics, serving
    from vllm_prefixshare.vllm_plugin.observability.metrics import PREFIX

#: vLLM's message when a rank begins to run batches without requests, at level DEBUG
IDLE = "EngineCore starting idle loop"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'


@dataclass(frozen=True)
class Case:
    """A server. graphs: with FULL graphs, else without graphs. options: further arguments."""

    runner: str
    ranks: int = 2
    graphs: bool = True
    options: tuple[str, ...] = ()


CASES = {
    "V1, FULL graphs": Case("V1"),
    "V2, FULL graphs": Case("V2"),
    "V1, eager, drafts": Case("V1", graphs=False, options=("--speculative-config", NGRAM)),
    "V2, eager, two API servers": Case("V2", graphs=False, options=("--api-server-count", "2")),
    "V2, four ranks": Case("V2", ranks=4),
}


@dataclass(frozen=True)
class Server:
    """A running server. log: its output."""

    case: Case
    url: str
    log: Path

    def ask(self, rank: int, prompts: Sequence[list[int]], tokens: int) -> list[Completion]:
        """Greedy answers of one rank to requests that are sent at once."""
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            answers = [pool.submit(self._one, rank, prompt, tokens) for prompt in prompts]
            return [answer.result() for answer in answers]

    def _one(self, rank: int, prompt: list[int], tokens: int) -> Completion:
        answer = client_of(self.url).completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            logprobs=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"X-data-parallel-rank": str(rank)},
        )
        (choice,) = answer.choices
        logprobs = tuple(choice.logprobs.token_logprobs)
        return Completion(tuple(prompt), tuple(choice.token_ids), logprobs, (), True, 0)

    def post(self, path: str) -> None:
        request = urllib.request.Request(f"{self.url}{path}", b"", method="POST")
        urllib.request.urlopen(request, timeout=60).close()

    def counts(self) -> list[dict[str, float]]:
        """The backend's metrics of each rank, once they no longer change: workers write them once a
        second.
        """
        before: list[dict[str, float]] = []
        for _ in range(30):
            now = self._counts()
            if now == before:
                return now
            before = now
            time.sleep(2.5)
        pytest.fail(f"the counts of an idle server change: {before}")

    def _counts(self) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in range(self.case.ranks)]
        for sample in metrics(self.url):
            name = sample.name.removeprefix(PREFIX)
            if name in ("decode_steps_total", "kv_tokens_read_total", "kv_tokens_saved_total"):
                assert sample.labels["model_name"] == NAME
                rank = found[int(sample.labels["engine"])]
                assert name not in rank, "each count once"
                rank[name] = sample.value
        assert all(len(rank) == 3 for rank in found), f"a rank has no counts: {found}"
        return found

    def since(self, before: list[dict[str, float]], name: str) -> list[float]:
        """Increase of a count on each rank."""
        pairs = zip(self.counts(), before, strict=True)
        return [now[name] - then[name] for now, then in pairs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_mixtral(tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module", params=list(CASES))
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    case = CASES[request.param]
    if case.ranks > GPUS:
        pytest.skip(f"needs {case.ranks} GPUs")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in cases.SETTINGS.items()]
    options += ["--data-parallel-size", str(case.ranks), "--enable-expert-parallel"]
    options += ["--attention-backend", "PREFIX_SHARE"]
    graphs = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
    options += ["--compilation-config", graphs] if case.graphs else ["--enforce-eager"]
    environment = {
        **os.environ,
        **DEFAULT_ENVIRONMENT,
        **cases.ENVIRONMENT,
        **RUNNERS[case.runner],
        "VLLM_SERVER_DEV_MODE": "1",  # enables /pause
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(model, log, environment, *options, *case.options) as url:
        yield Server(case, url, log)


def assert_as_stock(answers: Sequence[Completion], stock: EngineProcess) -> None:
    for error in cases.errors(answers, stock):
        assert error.mean() < cases.MEAN_ERROR and error.max() < cases.MAX_ERROR


def questions(model: Path, count: int) -> list[list[int]]:
    return Text(model).asking(DOCUMENT, PRIVATE[:count])


def test_the_start_counts_no_step(server, note):
    """Must be the first test of each server. The V2 runner warms up with made-up requests."""
    counted = server.counts()
    note(f"{server.case}: {counted}")
    assert all(value == 0 for rank in counted for value in rank.values())


@pytest.mark.parametrize("busy", [0, 1])
def test_an_idle_rank_counts_no_step(server, model, stock, note, busy):
    prompts = questions(model, 12)
    server.ask(busy, prompts[:1], 1)
    before, started = server.counts(), server.log.read_text().count(IDLE)
    answers = server.ask(busy, prompts, 64)
    steps = server.since(before, "decode_steps_total")
    saved = server.since(before, "kv_tokens_saved_total")
    note(f"{server.case}: {steps} steps")
    assert server.log.read_text().count(IDLE) > started, "the others must have run in lockstep"
    others = [rank for rank in range(server.case.ranks) if rank != busy]
    assert [steps[rank] for rank in others] == [0] * len(others)
    assert 0 < steps[busy] <= 12 * 64
    assert saved[busy] > 0
    assert_as_stock(answers, stock)


def test_unequal_loads(server, model, stock, note):
    """Rank 1 has few short answers and is idle while rank 0 continues."""
    prompts = questions(model, 14)
    for rank in range(server.case.ranks):
        server.ask(rank, prompts[:1], 1)
    before = server.counts()
    with ThreadPoolExecutor(2) as pool:
        many = pool.submit(server.ask, 0, prompts[:11], 120)
        few = pool.submit(server.ask, 1, prompts[11:], 20)
        answers = [*many.result(), *few.result()]
    steps = server.since(before, "decode_steps_total")
    note(f"{server.case}: {steps} steps")
    assert_as_stock(answers, stock)
    assert 0 < steps[1] <= 3 * 20 < steps[0]
    assert steps[2:] == [0] * (server.case.ranks - 2)


def test_after_a_pause(server, model, stock, note):
    """A pause makes every rank run one batch in lockstep, and steps continue as before."""
    prompts = questions(model, 8)
    server.ask(1, prompts[:1], 1)
    before = server.counts()
    server.post("/pause?mode=wait")
    server.post("/resume")
    assert server.since(before, "decode_steps_total") == [0] * server.case.ranks
    answers = server.ask(1, prompts, 48)
    steps = server.since(before, "decode_steps_total")
    note(f"{server.case}: {steps} steps")
    assert_as_stock(answers, stock)
    assert steps[1] > 0
    assert [n for rank, n in enumerate(steps) if rank != 1] == [0] * (server.case.ranks - 1)
