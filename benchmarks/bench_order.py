"""The time of ``LLM.generate`` on questions about more documents than the KV cache holds: grouped
by document, shuffled, and shuffled with ``VLLM_PREFIXSHARE_ORDER=prefix``.

On a GPU the engine has Llama-3.1-8B's shape and random weights. On a CPU a smaller run uses the
embedded model. The exit status is 1 if answers differ where the engine's token had a clear lead.

    python benchmarks/bench_order.py --out order.json
"""

import argparse
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
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
            "worker_extension_cls": "bench_worker.BenchWorker"}  # fmt: skip


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
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    counts = (args.documents, args.questions, args.document_tokens, args.tokens, args.repeats)
    if min(counts) < 1 or min(args.cache) <= 0:
        parser.error("all counts must be 1 or more, and --cache above 0")

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
    rows, wrong = [], 0
    print(f"{work.num_reqs} questions about {work.documents} documents of {work.document_tokens}")
    print("cache  run                 seconds  tokens/s  prefilled  cached  wrong")
    try:
        with tempfile.TemporaryDirectory() if gpu else nullcontext() as folder:
            model = write_llama_8b(Path(folder)) if folder else embedded_model_path()
            for cache in args.cache:
                best: dict[str, Batch] = {}
                settings = settings_for(work, args.tokens, cache, gpu)
                for order in ("off", "prefix"):
                    environment = {"VLLM_PREFIXSHARE_ORDER": order}
                    with EngineProcess(PREFIX_SHARE, model, environment, **settings) as engine:
                        if gpu:
                            engine.collective_rpc("randomize_weights")
                        engine.generate(prompts[:2], args.tokens, ignore_eos=True)  # compiles
                        for name, (wanted, places) in runs.items():
                            if wanted == order:
                                batches = [
                                    answered(engine, prompts, places, args.tokens)
                                    for _ in range(args.repeats)
                                ]
                                best[name] = min(batches, key=lambda b: b.seconds)
                for name, batch in best.items():
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
        "rows": rows,
    }
    write(args.out, report)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
