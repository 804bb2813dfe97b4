"""Time to first token and throughput of an asynchronous engine under Poisson arrivals, first come,
first served and with ``VLLM_PREFIXSHARE_ORDER=prefix``.

Two workloads: questions about documents in random order, and a Mooncake trace, of which prompts,
shared blocks and lengths are kept. Requests arrive at a rate, whether earlier ones have ended or
not; both orders get the same requests at the same times, and a KV cache that holds a part of their
tokens. Rates are parts of the engine's capacity: the rate at which it ends the requests if all of
them wait from the start. Both engines are on one device and take turns, each order first in every
other turn, because the same engine with the same requests differs from turn to turn. The figures
are of the requests of all turns; the noise beside them is the largest figure of a turn over the
smallest of the same order. A row "holds" if its ratios are within what is asked for, is "undecided"
if they would be without the noise, and "fails" otherwise.

On a GPU the engine has Llama-3.1-8B's shape and random weights, on a CPU a smaller run uses the
embedded model.

    python -m benchmarks.engine.arrivals --mooncake TRACE.jsonl --out arrivals.json
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.launch import llama_8b_or_embedded, sized_cache, started
from benchmarks.engine.tables import arrivals_table
from benchmarks.engine.workloads import Requests, mooncake
from benchmarks.support.option_types import count, positive
from benchmarks.support.program import add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.prompt_trees import shared_documents
from benchmarks.support.results import versions, write
from tests.support.engine import DEFAULT_ENVIRONMENT, PREFIX_SHARE
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import processor

PROGRAM = "benchmarks.engine.arrivals"

ORDERS = ("off", "prefix")
VOCAB = 32000
#: What is asked for: p99 of the time to first token over that of first come, first served, and
#: throughput over its throughput. "Never lower" is asked; 1% is what rounding of times hides.
MAX_P99, MIN_THROUGHPUT = 1.1, 0.99
#: seconds within which an engine starts, and a case ends
START, CASE = 300.0, 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, and the seconds at which they arrive; all at 0 to measure the capacity."""

    requests: Requests
    arrivals: list[float]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One run of a case. first: seconds from each request's arrival to its first token. between:
    mean seconds between its tokens. cached: prompt tokens found in the cache.
    """

    seconds: float
    first: list[float]
    between: list[float]
    cached: int


async def replay(engine: Any, case: Case, patience: float) -> Replayed:
    """Send the requests when they arrive.

    Raises:
        PrefixShareError: not all requests ended within ``patience`` seconds.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not await engine.reset_prefix_cache():
        raise PrefixShareError("the prefix cache is in use, so the last case has not ended.")
    began = time.monotonic()
    first, between, cached = [], [], 0

    async def ask(number: int) -> None:
        nonlocal cached
        due = began + case.arrivals[number]
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tokens = case.requests.max_tokens[number]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": case.requests.prompts[number]}
        begun = 0.0
        async for output in engine.generate(prompt, params, f"{began}-{number}"):
            if not begun:
                begun = time.monotonic()
                cached += output.num_cached_tokens or 0
        first.append(begun - due)
        between.append((time.monotonic() - begun) / max(1, tokens - 1))

    every = asyncio.gather(*map(ask, range(len(case.arrivals))))
    try:
        await asyncio.wait_for(every, patience)
    except asyncio.TimeoutError:
        sentence = f"{len(first)} of {len(case.arrivals)} requests ended within {patience:.0f} s."
        raise PrefixShareError(sentence) from None
    return Replayed(time.monotonic() - began, first, between, cached)


def figures(case: Case, runs: list[Replayed]) -> dict[str, Any]:
    """What all runs of a case say together, in seconds and tokens; the last percentile of each."""
    seconds = sum(run.seconds for run in runs)
    first = [value for run in runs for value in run.first]
    p50, p90, p99 = np.percentile(first, [50, 90, 99]).tolist()
    asked_tokens = sum(map(len, case.requests.prompts)) * len(runs)
    answered = sum(case.requests.max_tokens)
    return {
        "seconds": seconds,
        "requests_per_second": len(first) / seconds,
        "tokens_per_second": answered * len(runs) / seconds,
        "first_token_p50": p50,
        "first_token_p90": p90,
        "first_token_p99": p99,
        "first_token_p99_of_turns": [float(np.percentile(run.first, 99)) for run in runs],
        "tokens_per_second_of_turns": [answered / run.seconds for run in runs],
        "first_token_mean": float(np.mean(first)),
        "between_tokens_mean": float(np.mean([v for run in runs for v in run.between])),
        "cached_share": sum(run.cached for run in runs) / asked_tokens,
    }


async def serve(pipe: Connection, options: dict[str, Any], randomize: bool) -> None:
    """An engine that replays each case that comes through the pipe."""
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # as "vllm serve" sets it up, which takes more tokens in a step
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**options), usage_context=UsageContext.OPENAI_API_SERVER
    )
    try:
        if randomize:
            await engine.collective_rpc("randomize_weights")
        pipe.send("ready")
        while (asked := await asyncio.to_thread(pipe.recv)) is not None:
            try:
                pipe.send(await replay(engine, *asked))
            except PrefixShareError as e:
                pipe.send(str(e))
                return
    finally:
        engine.shutdown()


def work_in_child(
    pipe: Connection, environment: dict[str, str], options: dict[str, Any], randomize: bool
) -> None:
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)  # before vLLM is imported
    try:
        asyncio.run(serve(pipe, options, randomize))
    except Exception:  # another process cannot get the exception, only its text
        pipe.send(traceback.format_exc())


class Server:
    """An asynchronous engine in its own process. While it waits it hardly disturbs another."""

    def __init__(self, environment: dict[str, str], options: dict[str, Any], gpu: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        work = (theirs, environment, options, gpu)
        self._process = context.Process(target=work_in_child, args=work)
        self._process.start()
        theirs.close()
        try:
            self._receive(START)
        except BaseException:
            self.close()
            raise

    def _receive(self, patience: float) -> Any:
        try:
            if not self._pipe.poll(patience):
                raise PrefixShareError(f"the engine has not answered within {patience:.0f} s.")
            answer = self._pipe.recv()
        except EOFError:
            raise PrefixShareError("the engine's process has ended without an answer") from None
        if isinstance(answer, str) and answer != "ready":
            raise PrefixShareError(answer)
        return answer

    def replay(self, case: Case, patience: float) -> Replayed:
        self._pipe.send((case, patience))
        replayed: Replayed = self._receive(patience + 30)
        return replayed

    def close(self) -> None:
        if self._process.is_alive():
            with suppress(OSError):
                self._pipe.send(None)
            self._process.join(30)
            self._process.kill()
        self._process.join()


def asked(args: argparse.Namespace) -> dict[str, Requests]:
    """The workloads, in random order of documents."""
    shape = shared_documents(
        "questions", args.documents, args.questions, args.document_tokens, args.own
    )
    prompts = shape.prompts(VOCAB, seed=0)
    random.Random(0).shuffle(prompts)
    found = {"questions about documents": Requests(prompts, [args.tokens] * len(prompts))}
    if args.mooncake:
        found["Mooncake trace"] = mooncake(
            args.mooncake, args.mooncake_requests, args.longest, args.tokens, VOCAB
        )
    return found


def distinct_tokens(requests: Requests, block: int) -> int:
    """Prompt tokens in different blocks: what a cache for everything must hold."""
    seen = set()
    for prompt in requests.prompts:
        prefix = 0  # a hash of all tokens up to here
        for start in range(0, len(prompt) - block + 1, block):
            prefix = hash((prefix, *prompt[start : start + block]))
            seen.add(prefix)
    return len(seen) * block


def engine_options(args: argparse.Namespace, model: Path, works: dict[str, Requests]) -> Any:
    """Arguments of both engines. One KV cache serves all workloads: a part of the smallest one's
    tokens, and room for the longest request.
    """
    longest = max(len(p) for w in works.values() for p in w.prompts) + args.tokens
    smallest = min(distinct_tokens(w, 16 if args.gpu else 128) for w in works.values())
    return {
        "model": str(model),
        "seed": 0,
        "attention_backend": PREFIX_SHARE,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        **sized_cache(model, args.gpu, longest, args.cache * smallest),
    }


def in_turns(
    running: dict[str, Server], case: Case, turns: int, deadline: float = float("inf")
) -> dict[str, Any]:
    """The figures of each order. No turn but the first begins after ``deadline``."""
    runs: dict[str, list[Replayed]] = {order: [] for order in running}
    for turn in range(turns):
        if turn and time.monotonic() > deadline:
            break
        for order in ORDERS if turn % 2 == 0 else reversed(ORDERS):
            runs[order].append(running[order].replay(case, CASE))
    return {order: figures(case, replayed) for order, replayed in runs.items()}


def noise(found: dict[str, Any], figure: str) -> float:
    """The largest figure of a turn over the smallest of the same order; 1 for a single turn."""
    return max(max(of) / min(of) for of in (found[order][f"{figure}_of_turns"] for order in ORDERS))


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of the orders' figures, what the same order differs by, and the verdict."""
    off, ordered = (found[order] for order in ORDERS)
    p99, throughput = "first_token_p99", "tokens_per_second"
    row = {
        "p99_ratio": ordered[p99] / off[p99],
        "p99_noise": noise(found, p99),
        "throughput_ratio": ordered[throughput] / off[throughput],
        "throughput_noise": noise(found, throughput),
    }
    # above 1 where it is worse than asked for
    worse = row["p99_ratio"] / MAX_P99, MIN_THROUGHPUT / row["throughput_ratio"]
    noises = row["p99_noise"], row["throughput_noise"]
    if max(worse) <= 1:
        verdict = "holds"
    elif any(by > margin for by, margin in zip(worse, noises, strict=True)):
        verdict = "fails"
    else:
        verdict = "undecided"
    return {**row, "verdict": verdict}


def poisson(count: int, rate: float) -> list[float]:
    """Seconds at which ``count`` requests arrive at ``rate`` a second."""
    gaps = np.random.default_rng([5, count]).exponential(1.0, count)
    return (np.cumsum(gaps) / rate).tolist()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments; exits with status 2 where they are wrong."""
    gpu = torch.cuda.is_available()
    parser = make_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--mooncake", type=Path, help="Mooncake trace, JSON lines")
    add("--mooncake-requests", type=count, default=160 if gpu else 8, help="of those that fit")
    add("--longest", type=count, default=8192 if gpu else 1536, help="tokens; longer are left out")
    add("--documents", type=count, default=24 if gpu else 4)
    add("--questions", type=count, default=8 if gpu else 3, help="about each document")
    add("--document-tokens", type=count, default=8192 if gpu else 512)
    add("--own", type=count, default=64 if gpu else 32, help="tokens of each question")
    add("--tokens", type=count, default=64 if gpu else 8, help="of an answer, at most")
    add("--cache", type=positive, default=0.5, help="KV cache, as a part of the requests' tokens")
    add("--loads", type=positive, nargs="+", default=[0.7, 0.95], help="rates over the capacity")
    add("--turns", type=count, default=2, help="runs of each order at each rate")
    add("--layers", type=count, default=16, help="on a GPU; Llama-3.1-8B has 32")
    add("--limit", type=positive, default=270.0, help="seconds after which no turn begins")
    add_out(parser)
    args = parser.parse_args(argv)
    args.gpu = gpu
    return args


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 2 with one sentence on standard error if an engine fails."""
    args = parse(argv)
    began = time.monotonic()
    result: dict[str, Any] = {
        "command": recorded_command(PROGRAM),
        "device": torch.cuda.get_device_name() if args.gpu else processor(),
        "model": None if args.gpu else "the embedded model",
        "versions": versions(),
        "settings": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "rows": [],
    }
    try:
        works = asked(args)
        with llama_8b_or_embedded(args.gpu, args.layers) as model:
            options = engine_options(args, model, works)
            starts = {
                order: partial(Server, {"VLLM_PREFIXSHARE_ORDER": order}, options, args.gpu)
                for order in ORDERS
            }
            with started(starts) as running:
                run_all(args, works, running, began, result)
    finally:
        write(args.out, result)
    return 0


def run_all(
    args: argparse.Namespace,
    works: dict[str, Requests],
    running: dict[str, Server],
    began: float,
    result: dict[str, Any],
) -> None:
    """Fill the result's rows, and write them as they come."""
    few = Requests([w.prompts[0] for w in works.values()], [args.tokens] * len(works))
    in_turns(running, Case(few, [0.0] * len(works)), 1)  # compiles
    print(f"{result['device']}; {time.monotonic() - began:.0f} s to start", flush=True)
    deadline = began + args.limit
    capacity: dict[str, float] = {}
    for load in ("all", *args.loads):
        for title, requests in works.items():
            count = len(requests.prompts)
            rate = None if load == "all" else capacity[title] * load
            if rate is None:
                found = in_turns(running, Case(requests, [0.0] * count), 1)
                capacity[title] = found["off"]["requests_per_second"]
            elif time.monotonic() > deadline:
                print(f"{title} at {load}: left out, the time limit has passed")
                continue
            else:
                case = Case(requests, poisson(count, rate))
                found = in_turns(running, case, args.turns, deadline)
            settings = {"workload": title, "requests": count, "load": load, "rate": rate}
            row = {**settings, **found, **judged(found)}
            result["rows"].append(row)
            write(args.out, result)  # a later row may be cut short
            print(f"{title} at {load}: {row['verdict']}", flush=True)
    print(f"\n{arrivals_table(result)}")


if __name__ == "__main__":
    sys.exit(main())
