"""The time of ``LLM.generate`` on questions about more documents than the KV cache holds: grouped
by document, shuffled, and shuffled with ``VLLM_PREFIXSHARE_ORDER=prefix``.

On a GPU the engine has Llama-3.1-8B's shape and random weights, and compiles nothing, so that it
starts sooner. The engines with and without order are on one device, where both must fit, and take
turns; several GPUs serve several cache sizes at the same time. The fastest of the repeats counts,
and the slowest over the fastest of any run is the noise of a cache size. On a CPU a smaller run
uses the embedded model. The exit status is 1 if answers differ where the engine's token had a clear
lead.

    python -m benchmarks.engine.order --out order.json
    python -m benchmarks.engine.order --layers 8 --cache 1.5 0.25 0.75 --repeats 3 --limit 240
"""

import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from benchmarks.engine.launch import llama_8b_or_embedded, sized_cache, started
from benchmarks.engine.tables import order_table
from benchmarks.support.option_types import count, positive
from benchmarks.support.program import (
    add_out,
    make_parser,
    one_sentence,
    recorded_command,
    visible_gpus,
)
from benchmarks.support.prompt_trees import shared_documents
from benchmarks.support.results import versions, write
from tests.support.engine import PREFIX_SHARE, Batch, EngineProcess, divergences
from vllm_prefixshare.planning.costs.lookup import processor

PROGRAM = "benchmarks.engine.order"

#: nats; batches differ with the order, so bfloat16 logits may differ by one or two roundings
MAX_GAP = 0.26

#: name of a run -> order of the engine, and whether the questions are shuffled
RUNS = {
    "grouped": ("off", False),
    "shuffled": ("off", True),
    "shuffled, ordered": ("prefix", True),
    "grouped, ordered": ("prefix", False),
}
#: batches of each run, by its name
Repeats = dict[str, list[Batch]]


def answered(
    engine: EngineProcess, prompts: list[list[int]], places: Sequence[int], tokens: int
) -> Batch:
    """Ask ``prompts`` in the order of ``places``; the answers in the order of ``prompts``."""
    engine.reset_prefix_cache()
    asked = [prompts[i] for i in places]
    batch = engine.generate(asked, tokens, gaps=True, ignore_eos=True)
    answers = dict(zip(places, batch.answers, strict=True))
    return Batch(
        tuple(answers[i] for i in range(len(prompts))), batch.seconds, batch.seconds_per_token
    )


def row(repeats: list[Batch]) -> dict[str, Any]:
    """The figures of the fastest repeat, and the seconds of all."""
    batch = fastest(repeats)
    prompt = sum(a.num_prompt_tokens for a in batch.answers)
    cached = sum(a.num_cached_tokens for a in batch.answers)
    return {
        "seconds": round(batch.seconds, 3),
        "seconds_of_repeats": [round(b.seconds, 3) for b in repeats],
        "tokens_per_second": round(batch.num_tokens / batch.seconds, 1),
        "prefilled_tokens": prompt - cached,
        "cached_share": round(cached / prompt, 4),
    }


def fastest(repeats: list[Batch]) -> Batch:
    return min(repeats, key=lambda batch: batch.seconds)


def measure(
    settings: dict[str, Any],
    model: Path,
    prompts: list[list[int]],
    tokens: int,
    repeats: int,
    gpu: str | None,
    deadline: float,
) -> Repeats:
    """Every run, in turns, with an engine for each order on one device. No repeat but the first
    begins after ``deadline``.
    """
    grouped: Sequence[int] = range(len(prompts))
    places = {False: grouped, True: random.Random(0).sample(grouped, len(prompts))}
    device = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}

    def start(order: str) -> EngineProcess:
        environment = {"VLLM_PREFIXSHARE_ORDER": order, **device}
        engine = EngineProcess(PREFIX_SHARE, model, environment, pause=True, **settings)
        try:
            if gpu is not None:
                engine.collective_rpc("randomize_weights")
            engine.generate(prompts[:2], tokens, ignore_eos=True)  # compiles
        except BaseException:
            engine.close()
            raise
        return engine

    orders = sorted({order for order, _ in RUNS.values()})
    found: Repeats = {name: [] for name in RUNS}
    with started({o: partial(start, o) for o in orders}, at_once=gpu is not None) as engines:
        for repeat in range(repeats):
            if repeat and time.monotonic() > deadline:
                break
            for name in RUNS if repeat % 2 == 0 else reversed(RUNS):
                order, shuffled = RUNS[name]
                batch = answered(engines[order], prompts, places[shuffled], tokens)
                found[name].append(batch)
    return found


def compared(found: Repeats) -> dict[str, float]:
    """Seconds with order over seconds in vLLM's order, and over those of grouped questions; and the
    noise: 1 for a single repeat.
    """
    seconds = {name: fastest(repeats).seconds for name, repeats in found.items()}
    all_seconds = [[batch.seconds for batch in repeats] for repeats in found.values()]
    ratios = {
        "shuffled: ordered over off": seconds["shuffled, ordered"] / seconds["shuffled"],
        "grouped: ordered over off": seconds["grouped, ordered"] / seconds["grouped"],
        "shuffled, ordered over grouped": seconds["shuffled, ordered"] / seconds["grouped"],
        "noise": max(max(of) / min(of) for of in all_seconds),
    }
    return {name: round(value, 4) for name, value in ratios.items()}


@one_sentence(PROGRAM)
def main() -> int:
    gpu = torch.cuda.is_available()
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--documents", type=count, default=24 if gpu else 4)
    parser.add_argument("--questions", type=count, default=8 if gpu else 4, help="per document")
    parser.add_argument("--document-tokens", type=count, default=16384 if gpu else 512)
    parser.add_argument("--tokens", type=count, default=64 if gpu else 8, help="per answer")
    parser.add_argument("--cache", type=positive, nargs="+", default=[0.5],
                        help="KV-cache sizes, as fractions of the documents' KV")  # fmt: skip
    parser.add_argument("--repeats", type=count, default=1, help="runs of each; the fastest counts")
    parser.add_argument("--layers", type=count, default=32, help="on a GPU; Llama-3.1-8B has 32")
    parser.add_argument("--limit", type=positive, default=3600.0,
                        help="seconds after which no cache size or repeat begins")  # fmt: skip
    add_out(parser)
    args = parser.parse_args()

    work = shared_documents(
        "order", args.documents, args.questions, args.document_tokens, 64 if gpu else 32
    )
    prompts = work.prompts(32000, seed=0)
    report: dict[str, Any] = {
        "command": recorded_command(PROGRAM),
        "device": torch.cuda.get_device_name() if gpu else processor(),
        "model": None if gpu else "the embedded model",
        "versions": versions(),
        "documents": args.documents,
        "questions": work.num_reqs,
        "document_tokens": work.document_tokens,
        "answer_tokens": args.tokens,
        "layers": args.layers if gpu else None,
        "rows": [],
        "ratios": [],
    }
    deadline = time.monotonic() + args.limit
    devices: Queue[str | None] = Queue()
    for name in visible_gpus() if gpu else [None]:
        devices.put(name)

    def run_size(cache: float, model: Path) -> Repeats | None:
        """None if the time limit has passed."""
        device = devices.get()
        try:
            if time.monotonic() > deadline:
                return None
            longest = work.document_tokens + work.own_tokens + args.tokens
            room = cache * args.documents * work.document_tokens
            settings = sized_cache(model, gpu, longest, room)
            return measure(settings, model, prompts, args.tokens, args.repeats, device, deadline)
        finally:
            devices.put(device)

    print(f"{work.num_reqs} questions about {args.documents} documents of {work.document_tokens}")
    with (
        llama_8b_or_embedded(gpu, args.layers) as model,
        ThreadPoolExecutor(devices.qsize()) as pool,
    ):
        sizes = {pool.submit(run_size, cache, model): cache for cache in args.cache}
        for future in as_completed(sizes):
            cache, found = sizes[future], future.result()
            if found is None:
                print(f"{cache:5}  left out, the time limit has passed")
                continue
            report_size(report, cache, found)
            write(args.out, report)  # a later size may be cut short
    print(f"\n{order_table(report)}")
    return 1 if any(row["wrong"] for row in report["rows"]) else 0


def report_size(report: dict[str, Any], cache: float, found: Repeats) -> None:
    """Add the rows and ratios of a cache size to the report, and print them."""
    for name, repeats in found.items():
        grouped = found["grouped"][0]
        differ = [d for b in repeats for d in divergences(b, grouped) if d.gap > MAX_GAP]
        of_run = {"cache": cache, "run": name, **row(repeats), "wrong": len(differ)}
        report["rows"].append(of_run)
        print(f"{cache}, {name}: {of_run['seconds']} s, {len(differ)} wrong", flush=True)
    ratios = compared(found)
    report["ratios"].append({"cache": cache, "repeats": len(found["grouped"]), **ratios})


if __name__ == "__main__":
    sys.exit(main())
