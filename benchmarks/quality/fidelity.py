"""Compare tokens and log-probabilities of PREFIX_SHARE with those of stock vLLM.

Kernels round differently, so two correct kernels differ a little. The reference is therefore the
difference between vLLM's own TRITON_ATTN and FLASH_ATTN on the same prompts, which share a
document:

- greedy: each engine decodes freely; texts are compared up to their first difference,
- forced: each engine decodes the continuation of a fixed text, so all its tokens can be compared;
  perplexity;
- ``accuracy.py``: questions, copies of prompts, sampled tokens.

The fixed text is the pages of docs/. The exit status is 1 if PREFIX_SHARE differs from the first
backend by more than the others do, plus the tolerances below.

    python -m benchmarks.quality.fidelity --model FOLDER --out fidelity_gpu.json
    python -m benchmarks.quality.fidelity --cpu --out fidelity_cpu.json
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality import accuracy
from benchmarks.support.option_types import count
from benchmarks.support.program import ROOT, add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from examples.embedded_model import embedded_model_path
from tests.support.engine import PREFIX_SHARE, RUNNERS, STOCK, EngineProcess
from tests.support.engine_steps import (
    FORCED_TOKENS,
    Run,
    drive,
    start_engines,
)
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import processor

PROGRAM = "benchmarks.quality.fidelity"

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", PREFIX_SHARE)
#: ``--cpu``: a quarter of an hour on two cores, with the embedded model.
CPU = {
    "backends": (STOCK, PREFIX_SHARE),
    "document": 512,
    "own": 32,
    "forced": 48,
    "tokens": 48,
    "most": 16,
}
#: By how much PREFIX_SHARE's difference may exceed the largest of the others. One step of bfloat16
#: logits between 16 and 32, in nats: for the gap at a first difference and for single tokens.
STEP = 0.125
#: For means over all tokens: a share of the others' own difference, and nats.
MEAN_SHARE, MEAN_NATS = 0.1, 0.001
#: A share of stock's perplexity on the fixed text.
PERPLEXITY = 0.001


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, and the text that each must decode."""

    prompts: list[list[int]]
    forced: list[list[int]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of one backend from the first. Differences of log-probabilities are in nats.

    equal: tokens before the first difference of each answer, of ``tokens``.
    parted: answers that differ. gap: the largest lead that the first backend's token had over its
        second best at a first difference.
    mean, largest: |difference of the chosen token's log-probability|, of tokens before the first
        difference; ``forced_``: of all tokens of the forced text.
    perplexity, perplexity_stock: perplexity of the forced text.
    """

    backend: str
    tokens: int
    equal: int
    parted: int
    gap: float
    mean: float
    largest: float
    forced_tokens: int
    forced_mean: float
    forced_largest: float
    perplexity: float
    perplexity_stock: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.perplexity_stock - 1


def text_batch(model: Path, text: str, args: argparse.Namespace) -> Batch:
    """Prompts that share the start of a text and continue at different places in the rest."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model).encode(text)
    document, rest = ids[: args.document], ids[args.document :]
    length = args.own + args.forced
    count = min(args.most, len(rest) // length)
    if count < 2:
        raise PrefixShareError(
            f"docs/ has {len(ids)} tokens: {args.document + 2 * length} are needed, or "
            "smaller --document, --own and --forced."
        )
    parts = [rest[i * length : (i + 1) * length] for i in range(count)]
    return Batch([document + p[: args.own] for p in parts], [p[args.own :] for p in parts])


def greedy(engine: EngineProcess, prompts: list[list[int]], tokens: int) -> Run:
    engine.call(drive, prompts[:1], {"max_tokens": 1})  # puts the document into the prefix cache
    run: Run = engine.call(drive, prompts, {"max_tokens": tokens, "ignore_eos": True})
    return run


def forced(engine: EngineProcess, prompts: list[list[int]], texts: Sequence[Sequence[int]]) -> Run:
    sampling = [
        {
            "max_tokens": len(text),
            "ignore_eos": True,
            "extra_args": {"forced_tokens": list(text)},
        }
        for text in texts
    ]
    run: Run = engine.call(drive, prompts, sampling)
    for completion, text in zip(run.completions, texts, strict=True):
        if list(completion.token_ids) != list(text):
            raise RuntimeError("an engine did not decode the text that it was forced along")
    return run


def compare_greedy(other: Run, stock: Run) -> dict[str, Any]:
    """The fields of ``Difference`` for the free answers."""
    equal, parted, gap = 0, 0, 0.0
    differences = []
    for a, b in zip(other.completions, stock.completions, strict=True):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
        where = next((i for i, (x, y) in pairs if x != y), None)
        if where is not None:
            parted += 1
            gap = max(gap, b.top2_gaps[where])
        same = len(b.token_ids) if where is None else where
        equal += same
        differences.append(np.subtract(a.logprobs[:same], b.logprobs[:same]))
    size = np.abs(np.concatenate(differences))
    tokens = sum(len(c.token_ids) for c in stock.completions)
    mean, largest = (float(size.mean()), float(size.max())) if len(size) else (0.0, 0.0)
    return {
        "tokens": tokens,
        "equal": equal,
        "parted": parted,
        "gap": gap,
        "mean": mean,
        "largest": largest,
    }


def compare_forced(other: Run, stock: Run) -> dict[str, Any]:
    """The fields of ``Difference`` for the forced text."""
    theirs, ours = (np.concatenate([c.logprobs for c in r.completions]) for r in (stock, other))
    size = np.abs(ours - theirs)
    return {
        "forced_tokens": len(size),
        "forced_mean": float(size.mean()),
        "forced_largest": float(size.max()),
        "perplexity": float(np.exp(-ours.mean())),
        "perplexity_stock": float(np.exp(-theirs.mean())),
    }


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    longest = args.document + args.own + max(args.tokens, args.forced)
    settings: dict[str, Any] = {
        "max_model_len": max(1024, 16 * (longest // 16 + 1)),
        "max_num_seqs": 32 if torch.cuda.is_available() else 16,
        "logits_processors": [FORCED_TOKENS],
        "environment": {"VLLM_PREFIXSHARE_SHARE": "always", "VLLM_PREFIXSHARE_STRICT": "1"},
    }
    if args.dtype:
        settings["dtype"] = args.dtype
    if torch.cuda.is_available():
        settings["environment"] |= RUNNERS["V1"]
        settings |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30}
    else:
        settings["enforce_eager"] = True
    return settings


def measure(
    model: Path, batch: Batch, args: argparse.Namespace
) -> tuple[list[Difference], dict[str, float], list[dict[str, Any]]]:
    """All backends: the differences, PREFIX_SHARE's counters of both runs, and the results of
    ``accuracy`` for each backend.
    """
    settings = engine_settings(args)
    specs = [{"backend": backend, "model": model, **settings} for backend in args.backends]
    with start_engines(*specs) as engines:
        free = [greedy(engine, batch.prompts, args.tokens) for engine in engines]
        last = [forced(engine, batch.prompts, batch.forced) for engine in engines]
        rows = [
            Difference(backend, **compare_greedy(a, free[0]), **compare_forced(b, last[0]))
            for backend, a, b in zip(args.backends[1:], free[1:], last[1:], strict=True)
        ]
        found = []
        asked = accuracy.ask(engines, model, batch.prompts, args.tokens)
        for backend, run, text, answers in zip(args.backends, free, last, asked, strict=True):
            runs = (run, free[0], text, last[0])
            compared = accuracy.compare(*(r.completions for r in runs))
            found.append({"backend": backend, **compared, **answers})
    counters = {"greedy": free[-1].stats, "forced": last[-1].stats}
    for kind, stats in counters.items():
        if not stats.get("shared_steps"):
            raise RuntimeError(f"{kind}: {args.backends[-1]} shared nothing: {stats}")
    keys = ("decode_steps", "shared_steps", "plans", "kv_tokens_read", "kv_tokens_stock")
    return rows, {f"{kind}_{key}": s[key] for kind, s in counters.items() for key in keys}, found


def complaints(rows: Sequence[Difference]) -> list[str]:
    """Where PREFIX_SHARE, the last row, differs by more than the others do."""
    *others, ours = rows
    found = []

    def within(what: str, slack: float, share: float = 0.0) -> None:
        allowed = (1 + share) * max((getattr(o, what) for o in others), default=0.0) + slack
        if not getattr(ours, what) <= allowed:
            found.append(f"{what} {getattr(ours, what):.4f}, allowed {allowed:.4f}")

    if not others:  # on a CPU there is no other backend to compare with
        within("gap", 2 * STEP)
        return found
    within("gap", STEP)
    within("largest", STEP)
    within("mean", MEAN_NATS, MEAN_SHARE)
    within("forced_largest", STEP)
    within("forced_mean", MEAN_NATS, MEAN_SHARE)
    if not abs(ours.perplexity_change) <= PERPLEXITY:
        found.append(f"perplexity differs by {ours.perplexity_change:+.3%}")
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder of a real model")
    add("--cpu", action="store_true", help=f"on a CPU, the embedded model: {CPU}")
    add("--document", type=count, default=2048, help="tokens that all prompts share")
    add("--own", type=count, default=64, help="private tokens of each prompt")
    add("--forced", type=count, default=448, help="tokens of fixed text for each request to decode")
    add("--tokens", type=count, default=160, help="greedy tokens of each request")
    add("--most", type=count, default=32, help="requests; fewer if the text ends")
    add("--dtype", help="default: the model's own")
    add_out(parser)
    parser.set_defaults(backends=BACKENDS)
    args, _ = parser.parse_known_args(argv)
    if args.cpu:
        parser.set_defaults(**CPU)
    args = parser.parse_args(argv)
    if args.cpu and args.model is None:
        args.model = embedded_model_path()
    if args.model is None:
        parser.error("give --model, or --cpu for the embedded model")
    return args


@one_sentence(PROGRAM)
def main() -> int:
    args = parse()
    text = "\n\n".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md")))
    batch = text_batch(args.model, text, args)
    rows, counters, asked = measure(args.model, batch, args)
    wrong = complaints(rows)
    result = {
        "command": recorded_command(PROGRAM),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "dtype": args.dtype or "bfloat16",
        "versions": versions(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "reference": args.backends[0],
        "tolerances": {
            "step": STEP,
            "mean_share": MEAN_SHARE,
            "mean_nats": MEAN_NATS,
            "perplexity": PERPLEXITY,
        },
        "rows": [asdict(row) for row in rows],
        "accuracy": asked,
        "counters": {args.model.name: counters},
        "too_large": wrong,
    }
    write(args.out, result)
    print(*asked, sep="\n")
    for complaint in wrong:
        print(f"too large: {complaint}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
