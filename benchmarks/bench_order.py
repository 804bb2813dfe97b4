"""The time of ``LLM.generate`` on questions about more documents than the KV cache holds: grouped
by document, shuffled, and shuffled with ``VLLM_PREFIXSHARE_ORDER=prefix``.

On a GPU the engine has Llama-3.1-8B's shape and random weights, and compiles nothing, so that it
starts sooner; on two GPUs the engines with and without order run at the same time. On a CPU a
smaller run uses the embedded model. The exit status is 1 if answers differ where the engine's token
had a clear lead.

    python benchmarks/bench_order.py --out order.json
    python benchmarks/bench_order.py --layers 8 --cache 0.25 0.75 1.5 --limit 240
"""

import argparse
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import repository  # noqa: F401
import torch
from engine_workloads import SharedDocuments
from results import versions, write

from tests.support.dummy_model import write_llama_8b
from tests.support.embedded_model import embedded_model_path
from tests.support.engine import PREFIX_SHARE, Batch, EngineProcess, divergences
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.costs.lookup import processor

#: nats; batches differ with the order, so bfloat16 logits may differ by one or two roundings
MAX_GAP = 0.26

#: batches by the name of the run
Runs = dict[str, Batch]


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


def row(batch: Batch) -> dict[str, float]:
    prompt = sum(a.num_prompt_tokens for a in batch.answers)
    cached = sum(a.num_cached_tokens for a in batch.answers)
    return {
        "seconds": round(batch.seconds, 3),
        "tokens_per_second": round(batch.num_tokens / batch.seconds, 1),
        "prefilled_tokens": prompt - cached,
        "cached_share": round(cached / prompt, 4),
    }


def settings_for(work: SharedDocuments, tokens: int, cache: float, gpu: bool) -> dict[str, Any]:
    """Engine arguments: a KV cache of ``cache`` times the documents."""
    block = 16 if gpu else 128
    longest = work.document_tokens + work.own_tokens + tokens
    room = max(cache * work.documents * work.document_tokens, longest + block)
    common = {
        "max_model_len": -(-longest // block) * block,
        "block_size": block,
        "num_gpu_blocks_override": -(-int(room) // block) + 1,
    }
    if not gpu:
        return {**common, "max_num_seqs": 4, "enforce_eager": True}
    return {**common, "load_format": "dummy", "skip_tokenizer_init": True,
            "worker_extension_cls": "bench_worker.BenchWorker",
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}  # fmt: skip


def main() -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--documents", type=int, default=24 if gpu else 4)
    parser.add_argument("--questions", type=int, default=8 if gpu else 4, help="per document")
    parser.add_argument("--document-tokens", type=int, default=16384 if gpu else 512)
    parser.add_argument("--tokens", type=int, default=64 if gpu else 8, help="per answer")
    parser.add_argument("--cache", type=float, nargs="+", default=[0.5],
                        help="KV-cache sizes, as fractions of the documents' KV")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the fastest counts")
    parser.add_argument("--layers", type=int, default=32, help="on a GPU; Llama-3.1-8B has 32")
    parser.add_argument("--limit", type=float, default=3600.0,
                        help="seconds after which no further cache size begins")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    counts = (args.documents, args.questions, args.document_tokens, args.tokens, args.repeats)
    if min(*counts, args.layers) < 1 or min(*args.cache, args.limit) <= 0:
        parser.error("all counts must be 1 or more, --cache and --limit above 0")

    work = SharedDocuments(
        "order", args.documents, args.questions, args.document_tokens, 64 if gpu else 32
    )
    prompts = work.prompts(32000, seed=0)
    grouped: Sequence[int] = range(len(prompts))
    shuffled = random.Random(0).sample(grouped, len(prompts))
    runs = {
        "grouped": ("off", grouped),
        "shuffled": ("off", shuffled),
        "shuffled, ordered": ("prefix", shuffled),
        "grouped, ordered": ("prefix", grouped),
    }
    rows, wrong, began = [], 0, time.monotonic()
    several = torch.cuda.device_count() > 1

    def run_order(place: int, order: str, model: Path, settings: dict[str, Any]) -> Runs:
        """The fastest of the runs of one order, with an engine of its own."""
        environment = {"VLLM_PREFIXSHARE_ORDER": order}
        if several:
            environment["CUDA_VISIBLE_DEVICES"] = str(place)
        with EngineProcess(PREFIX_SHARE, model, environment, **settings) as engine:
            if gpu:
                engine.collective_rpc("randomize_weights")
            engine.generate(prompts[:2], args.tokens, ignore_eos=True)  # compiles
            return {
                name: min(
                    (answered(engine, prompts, places, args.tokens) for _ in range(args.repeats)),
                    key=lambda batch: batch.seconds,
                )
                for name, (wanted, places) in runs.items()
                if wanted == order
            }

    print(f"{work.num_reqs} questions about {work.documents} documents of {work.document_tokens}")
    print("cache  run                 seconds  tokens/s  prefilled  cached  wrong")
    try:
        with tempfile.TemporaryDirectory() if gpu else nullcontext() as folder:
            model = (
                write_llama_8b(Path(folder), num_hidden_layers=args.layers)
                if folder
                else embedded_model_path()
            )
            for cache in args.cache:
                if time.monotonic() - began > args.limit:
                    print(f"{cache:5}  left out, the time limit has passed")
                    continue
                settings = settings_for(work, args.tokens, cache, gpu)
                with ThreadPoolExecutor(2 if several else 1) as pool:
                    futures = [
                        pool.submit(run_order, i, order, model, settings)
                        for i, order in enumerate(("off", "prefix"))
                    ]
                    best = {name: b for f in futures for name, b in f.result().items()}
                for name in runs:
                    batch = best[name]
                    differ = [d for d in divergences(batch, best["grouped"]) if d.gap > MAX_GAP]
                    wrong += len(differ)
                    found = {"cache": cache, "run": name, **row(batch), "wrong": len(differ)}
                    rows.append(found)
                    print(
                        f"{cache:5}  {name:18} {found['seconds']:8} "
                        f"{found['tokens_per_second']:9} {found['prefilled_tokens']:10} "
                        f"{found['cached_share']:7} {len(differ):6}",
                        flush=True,
                    )
    except PrefixShareError as e:
        print(f"bench_order: error: {e}", file=sys.stderr)
        return 2
    report: dict[str, object] = {
        "command": shlex.join(["python", "benchmarks/bench_order.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if gpu else processor(),
        "versions": versions(),
        "documents": work.documents,
        "questions": work.num_reqs,
        "document_tokens": work.document_tokens,
        "answer_tokens": args.tokens,
        "layers": args.layers if gpu else None,
        "rows": rows,
    }
    write(args.out, report)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
