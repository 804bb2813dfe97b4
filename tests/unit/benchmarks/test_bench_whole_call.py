"""``benchmarks.whole_call``: its workloads, what it compares, its client."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.whole_call import bench as bench_whole_call
from benchmarks.whole_call import serving
from benchmarks.whole_call.client import Load, parsed, send
from benchmarks.whole_call.comparison import compare, compare_served
from benchmarks.whole_call.measuring import Outcome, digest
from benchmarks.whole_call.rows import ALL_ROWS, PROMPTS
from benchmarks.whole_call.texts import Document, shuffled
from benchmarks.whole_call.workloads import NUM_STEPS, NUM_TURNS, WORKLOADS, Workloads
from tests.support.engine import ONE_PROCESS
from vllm_prefixshare.settings import VARIABLES

ROOT = Path(__file__).parents[3]
TEXT = " ".join(f"word{i}" for i in range(3000))


@pytest.fixture
def workloads() -> Workloads:
    document = Document("words", TEXT, len(TEXT.split()))
    return Workloads([document], lambda text: [len(w) for w in text.split()], 64, scale=0.125)


def outcome(**changed) -> Outcome:
    usual = Outcome(
        seconds=2.0,
        prompt_digests=(digest([1, 2]), digest([1, 3])),
        token_ids=((5, 6), (7, 8)),
        texts=("five six", "seven eight"),
        num_prompt_tokens=(2, 2),
        num_cached_tokens=(1, 1),
        first_token_seconds=(0.5, 1.0),
    )
    return replace(usual, **changed)


# -- workloads


def prompts_of(run) -> list[str]:
    return [json.dumps(prompt) for call in run.timed for prompt in call.prompts]


@pytest.mark.parametrize("name", WORKLOADS)
def test_runs_repeat_exactly_and_share_no_prompt(workloads, name):
    first, second = (workloads.run(name, repeat) for repeat in (0, 1))
    again = WORKLOADS[name].make(workloads, 0)
    assert prompts_of(again) == prompts_of(first)
    prompts = prompts_of(first) + prompts_of(second)
    if name == "token_ids":
        assert [len(call.prompts) for call in first.timed] == [8]
    else:
        assert len(set(prompts)) == len(prompts)


def test_cached_documents_are_warmed_up_with_another_question(workloads):
    run = workloads.run("documents4x32", 1)
    (timed,), (warm_up,) = run.timed, run.warm_up
    assert len(timed.prompts) == 4 * 4 and len(warm_up.prompts) == 4
    assert not set(warm_up.prompts) & set(timed.prompts)
    documents = {prompt[: len(TEXT)] for prompt in timed.prompts}
    assert documents == {prompt[: len(TEXT)] for prompt in warm_up.prompts}
    assert len(documents) == 4


def test_a_cold_document_was_in_no_earlier_run(workloads):
    documents = {workloads.run("cold", repeat).timed[0].prompts[0][:200] for repeat in range(3)}
    assert len(documents) == 3 and TEXT[:200] not in documents
    assert all(workloads.run("cold", repeat).reset for repeat in range(3))


@pytest.mark.parametrize(("name", "calls"), [("multi_turn", NUM_TURNS), ("agents", NUM_STEPS)])
def test_each_turn_repeats_the_last_ones_messages(workloads, name, calls):
    run = workloads.run(name, 0)
    assert len(run.timed) == calls
    for before, after in zip(run.timed, run.timed[1:], strict=False):
        for earlier, later in zip(before.prompts, after.prompts, strict=True):
            assert later[: len(earlier)] == earlier
            assert [m["role"] for m in later[len(earlier) :]] == ["assistant", "user"]


def test_prompts_that_share_nothing_differ_from_the_first_character_on(workloads):
    prompts = workloads.run("unshared", 0).timed[0].prompts
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts)


def test_shuffling_keeps_words_and_spaces():
    text = "one  two\n\nthree four"
    other = shuffled(text, 1)
    assert sorted(other.split()) == sorted(text.split()) and len(other) == len(text)
    assert other == shuffled(text, 1)


# -- rows and arguments


def test_rows_set_what_this_version_knows():
    for row in ALL_ROWS.values():
        own = {name for name in row.environment() if name.startswith("VLLM_PREFIXSHARE")}
        assert own <= set(VARIABLES)
        assert row.prompts == "off" or PROMPTS in VARIABLES or row.unavailable()
    baseline = ALL_ROWS["flash_attn"]
    assert (baseline.backend_on(gpu=True), baseline.backend_on(gpu=False)) == (
        "FLASH_ATTN", "CPU_ATTN",
    )  # fmt: skip
    assert baseline.unavailable() is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rows", "fastest"], "argument --rows: 'fastest' is unknown"),
        (["--workloads", "cold,warm"], "argument --workloads: 'warm' is unknown"),
        (["--clients", "many"], "argument --clients: invalid"),
        (["--repeats", "0"], "argument --repeats: must be 1 or more"),
        (["--model", "m", "--shape", "8b"], "go without --model"),
        (["--model", "m", "--documents", "/no/file"], "there is no file /no/file"),
    ],
)
def test_wrong_arguments_are_named(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        bench_whole_call.parse(arguments)
    assert error.value.code == 2
    assert sentence in capsys.readouterr().err


# -- comparison


def test_equal_outcomes_have_no_faults():
    found = compare([outcome()], [outcome(seconds=1.0)], same_tokens=True, same_cached=True)
    assert (found.requests, found.same_answers, found.faults) == (2, 1.0, ())


def test_another_text_for_the_same_tokens_is_a_fault():
    (fault,) = compare([outcome(texts=("five six", "seven"))], [outcome()]).faults
    assert fault.startswith("run 0, answer 1: text 'seven' instead of 'seven eight'")


def test_other_tokens_are_counted_or_a_fault():
    ours = outcome(token_ids=((5, 6), (7, 9)), texts=("five six", "seven nine"))
    found = compare([ours], [outcome()])
    assert (found.same_answers, found.faults) == (0.5, ())
    assert compare([ours], [outcome()], same_tokens=True).faults == (
        "run 0: 1 of 2 answers differ",
    )


def test_other_prompts_and_cached_tokens_are_faults():
    other = outcome(prompt_digests=(digest([1, 2]), digest([1, 4])))
    assert compare([other], [outcome()]).faults == ("run 0: token ids of prompts differ",)
    cached = outcome(num_cached_tokens=(0, 1))
    assert compare([cached], [outcome()]).faults == ()
    assert compare([cached], [outcome()], same_cached=True).faults == (
        "run 0: 1 cached tokens instead of 2",
    )


# -- the client


def event(text: str = "", usage: dict | None = None) -> bytes:
    choices = [] if usage else [{"text": text}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}


def test_a_stream_cut_anywhere_is_parsed():
    stream = event("a") + event("") + event("bc") + event(usage=USAGE) + b"data: [DONE]\n\n"
    pieces = [(1.0 + at, stream[at : at + 1]) for at in range(len(stream))]
    served = parsed(0.5, pieces)
    assert served.text == "abc" and served.num_tokens == 3
    assert served.first == 0.5 + len(event("a")) - 1
    assert served.between == [len(event("")), len(event("bc"))]
    with pytest.raises(ValueError, match="incomplete"):
        parsed(0.5, pieces[:10])


def test_a_closed_loop_keeps_its_clients_busy():
    running, most = 0, 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        body = await request.json()
        running += 1
        most = max(most, running)
        response = web.StreamResponse()
        await response.prepare(request)
        for word in ("x", body["prompt"], "y"):
            await response.write(event(word))
            await asyncio.sleep(0.02)
        running -= 1
        await response.write(event(usage=USAGE))
        return response

    async def load() -> list:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server:
            bodies = [{"prompt": str(i)} for i in range(10)]
            return await send(Load(str(server.make_url("/v1/completions")), 4, bodies))

    answers = asyncio.run(load())
    assert [a.text for a in answers] == [f"x{i}y" for i in range(10)]
    assert most == 4
    figures = serving.figures(answers)
    assert figures["seconds"] >= 0.18  # three rounds of three tokens
    assert figures["requests_per_second"] == pytest.approx(10 / figures["seconds"])
    assert figures["between_tokens_p50"] >= 0.019
    assert figures["output_tokens"] == 30

    assert compare_served(answers, answers).same_answers == 1.0
    changed = [replace(answers[0], text="?"), *answers[1:]]
    found = compare_served(changed, answers)
    assert (found.same_answers, found.faults) == (0.9, ())
    (fault,) = compare_served([replace(a, num_prompt_tokens=8) for a in answers], answers).faults
    assert fault == "10 answers with another num_prompt_tokens"


# -- the whole


@pytest.mark.engine
def test_two_rows_on_the_embedded_model(tmp_path, capsys, monkeypatch):
    for name, value in ONE_PROCESS.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "whole_call.json"
    options = [
        "--rows", "flash_attn,prefix_share_kernel_only", "--workloads", "cached,host",
        "--document-tokens", "300", "--scale", "0.03", "--tokens", "4", "--repeats", "1",
        "--max-num-seqs", "16", "--dtype", "float32", "--enforce-eager", "--out", str(out),
    ]  # fmt: skip
    assert bench_whole_call.main(options) == 0
    result = json.loads(out.read_text())
    ours = result["rows"]["prefix_share_kernel_only"]["workloads"]
    assert set(ours) == {"together", "cached", "host"}
    for name, entry in ours.items():
        assert entry["baseline"]["same_answers"] == 1.0, name
        assert entry["baseline"]["faults"] == []
        theirs = result["rows"]["flash_attn"]["workloads"][name]
        assert entry["prompts_sha256"] == theirs["prompts_sha256"]
    assert ours["cached"]["cached_tokens"] >= ours["cached"]["answers"] * 256
    assert 0 < ours["host"]["seconds"] < 0.1
    assert "| host time per request, 2 questions, document cached |" in capsys.readouterr().out
