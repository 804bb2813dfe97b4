r"""Decode context parallelism on two GPUs: stock FLASH_ATTN against PREFIX_SHARE, and one GPU.

Requests share one long document. The model has Llama-3.1-8B's shape with one KV head, which vLLM
shards over two ranks, and random weights. Four engines live on the two GPUs at once and take turns;
those that wait are stopped. They replay FULL graphs but compile nothing, which halves their start;
after ``--limit`` seconds no further repeat begins.

    python -m benchmarks.engine.context_parallel --out benchmarks/published/context_parallel.json

Milliseconds are those of an output token while all requests decode: with the document, and with
hardly any context. The difference is the attention over the document, since the collectives of
context parallelism are in both. Greedy tokens of both engines are compared in an untimed call; the
exit status is 1 if they differ where stock's token had a clear lead.
"""

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import report
from benchmarks.engine.launch import NOT_COMPILED, RANDOM_WEIGHTS
from benchmarks.engine.report import Row
from benchmarks.engine.tables import context_parallel_table
from benchmarks.support.option_types import count, positive
from benchmarks.support.program import add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.prompt_trees import PromptTree, shared_documents
from benchmarks.support.results import versions, write
from tests.support.dummy_model import write_llama_8b
from tests.support.engine import PREFIX_SHARE, STOCK, EngineProcess
from tests.support.engine_steps import start_engines

PROGRAM = "benchmarks.engine.context_parallel"

GPUS = 2
VOCAB = 128256  # of Llama 3.1
#: tokens of context where attention takes hardly any time, and tokens of each answer compared
FLOOR_CONTEXT, CHECKED_TOKENS = 16, 16
SAMPLING = {"ignore_eos": True, "detokenize": False}
#: what the attention on two GPUs may be of half of that on one
GOAL = 1.15

Pair = dict[str, EngineProcess]


def specs(args: argparse.Namespace, model: Path) -> list[Row]:
    """Arguments of the engines: stock and ours on one GPU each, then both on both."""
    settings: Row = {
        "model": model,
        "pause": True,
        **RANDOM_WEIGHTS,
        **NOT_COMPILED,
        "max_model_len": args.document + args.own + args.tokens + 16,
        "max_num_seqs": args.requests,
        # engines that start at once count each other's memory
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
    }
    sharded = {
        "tensor_parallel_size": GPUS,
        "decode_context_parallel_size": GPUS,
        "cp_kv_cache_interleave_size": args.interleave,
        "dcp_comm_backend": args.comm_backend,
        "distributed_executor_backend": "mp",
    }
    backends: list[Row] = [
        {"backend": STOCK, "attention_backend": "FLASH_ATTN"},
        {"backend": PREFIX_SHARE},
    ]
    alone = [{"environment": {"CUDA_VISIBLE_DEVICES": str(gpu)}} for gpu in range(GPUS)]
    return [
        *({**settings, **b, **own} for b, own in zip(backends, alone, strict=True)),
        *({**settings, **b, **sharded} for b in backends),
    ]


def works(args: argparse.Namespace) -> dict[str, PromptTree]:
    return {
        "document": shared_documents("document", 1, args.requests, args.document, args.own),
        "floor": shared_documents("floor", args.requests, 1, 0, FLOOR_CONTEXT),
    }


def fill(args: argparse.Namespace, engines: list[EngineProcess]) -> None:
    """Weights as large as trained ones, and the document in the prefix cache. Engines on different
    GPUs do so at the same time.
    """
    cached = works(args)["document"].cached_prompts(VOCAB)

    def fill_one(engine: EngineProcess) -> None:
        engine.collective_rpc("randomize_weights")
        engine.generate(cached, 1, **SAMPLING)

    with ThreadPoolExecutor(GPUS) as pool:
        list(pool.map(fill_one, engines))


def measure(args: argparse.Namespace, engines: Pair, gpus: int, end: float) -> list[Row]:
    """A row for each engine of one setting. end: ``time.monotonic`` at which repeats stop."""
    document = works(args)["document"]
    agreement = None
    if gpus == GPUS:
        prompts = document.prompts(VOCAB, seed=0)
        checked = {
            name: engine.generate(prompts, CHECKED_TOKENS, gaps=True, **SAMPLING)
            for name, engine in engines.items()
        }
        agreement = report.agreement(checked[PREFIX_SHARE], checked[STOCK])
    times: dict[str, dict[str, list[float]]] = {n: {"document": [], "floor": []} for n in engines}
    share_factors = {}
    for repeat in range(args.repeats):
        if repeat and time.monotonic() > end:
            break
        for title, work in works(args).items():
            prompts = work.prompts(VOCAB, seed=repeat + 1)
            for name, engine in engines.items():
                batch = engine.generate(prompts, args.tokens, together=True, **SAMPLING)
                times[name][title].append(report.decode_ms(batch))
                if title == "document" and name == PREFIX_SHARE:
                    share_factors[name] = report.host_times([batch])["share_factor"]
    rows = []
    for name, found in times.items():
        ms, least = (statistics.median(found[title]) for title in ("document", "floor"))
        rows.append(
            {
                "gpus": gpus,
                "engine": name,
                "ms": ms,
                "floor_ms": least,
                "attention_ms": ms - least,
                "range_ms": [min(found["document"]), max(found["document"])],
                "repeats": len(found["document"]),
                "share_factor": share_factors.get(name),
                "agreement": agreement,
            }
        )
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments; exits with status 2 where they are wrong."""
    parser = make_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--requests", type=count, default=32, help="requests on the document")
    add("--document", type=count, default=122880, help="tokens of the document")
    add("--own", type=count, default=64, help="tokens of each request behind it")
    add("--tokens", type=count, default=48, help="output tokens")
    add("--layers", type=count, default=16, help="of the model; Llama-3.1-8B has 32")
    add("--interleave", type=count, default=1, help="cp_kv_cache_interleave_size")
    add("--comm-backend", choices=("ag_rs", "a2a"), default="ag_rs", help="vLLM's dcp_comm_backend")
    add("--repeats", type=count, default=3, help="timed runs")
    add("--kv-gib", type=positive, default=6.0, help="GiB of KV cache of each engine and GPU")
    add("--limit", type=positive, default=240.0, help="seconds after which no repeat begins")
    add("--max-gap", type=float, default=0.3, help="nats; tokens may differ at smaller gaps")
    add_out(parser)
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error("--tokens must be 2 or more")
    if torch.cuda.device_count() < GPUS:
        parser.error(f"{GPUS} GPUs are needed, here are {torch.cuda.device_count()}")
    return args


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where tokens differ, 2 with one sentence on standard error."""
    args = parse(argv)
    began = time.monotonic()

    def passed(what: str) -> None:
        result["seconds"][what] = round(time.monotonic() - began, 1)
        print(f"{result['seconds'][what]:.0f} s: {what}", flush=True)

    result: Row = {
        "command": recorded_command(PROGRAM),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "model": f"Llama-3.1-8B's shape with 1 KV head and {args.layers} layers, random weights",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "seconds": {},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        changes = {"num_key_value_heads": 1, "num_hidden_layers": args.layers}
        model = write_llama_8b(Path(folder), **changes)
        with start_engines(*specs(args, model)) as engines:
            passed("started")
            alone, sharded = engines[:2], engines[2:]
            for those in (alone, sharded[:1], sharded[1:]):
                fill(args, those)
            passed("document cached")
            print(f"{result['gpu']}, {result['versions']}\n{result['model']}")
            for gpus, pair in ((GPUS, sharded), (1, alone)):
                named: Pair = dict(zip((STOCK, PREFIX_SHARE), pair, strict=True))
                result["rows"] += measure(args, named, gpus, began + args.limit)
                passed(f"measured on {gpus}")
                write(args.out, result)
    attention: dict[Any, float] = {
        (row["engine"], row["gpus"]): row["attention_ms"] for row in result["rows"]
    }
    for name in (STOCK, PREFIX_SHARE):
        of_half = attention[name, GPUS] / (attention[name, 1] / GPUS)
        result.setdefault("of_half", {})[name] = of_half
    print(f"\n{context_parallel_table(result)}\n\ngoal for {PREFIX_SHARE}: at most {GOAL} of half")
    write(args.out, result)
    agreements = [row["agreement"] for row in result["rows"] if row["agreement"]]
    wrong = any(a["largest_gap"] > args.max_gap for a in agreements)
    if wrong:
        print(f"tokens part where stock's gap is over {args.max_gap} nats", file=sys.stderr)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
