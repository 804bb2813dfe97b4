"""Test whether PREFIX_SHARE keeps running, and gives the right tokens, under constant load.

    python benchmarks/soak.py engine --minutes 30 --out engine.json
    python benchmarks/soak.py server --minutes 30 --out server.json

``engine``: more requests than the engine has room for, with random aborts, pre-emption and cache
resets; every greedy answer is compared with stock's answer to the same request alone. ``server``:
``vllm serve`` under a closed loop of clients, of which some disconnect, some send invalid requests
and some send prompts that are too long; then stock gets the same invalid requests. The exit status
is 1 if anything was wrong.
"""

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import repository  # noqa: F401
from results import versions, write

from tests.serving import NAME, server_process
from tests.support import chaos
from tests.support.dummy_model import write_lora
from tests.support.embedded_model import embedded_model_path
from tests.support.engine import DEFAULT_ENVIRONMENT, PREFIX_SHARE, STOCK, EngineProcess
from tests.support.load import Load, all_gone, ends_cleanly, server_faults
from tests.support.processes import tree
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.costs.lookup import gpu, has_gpu, processor

ROOT = Path(__file__).resolve().parent.parent
SERVER_LEN = 1024
#: Bytes and open files by which a run may grow between its second fifth and its end. A server has
#: as many connections as clients.
MOST_GROWTH, MOST_FILES = 64 << 20, 0


def text_ids(model: Path) -> tuple[list[int], int]:
    """Token ids of the docs, and the end-of-sequence token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    return tokenizer.encode(text), tokenizer.eos_token_id


def leaks(growth: tuple[int, int], most_files: int) -> list[str]:
    """The resources that grew by more than allowed, in words."""
    rss, files = growth
    found = [f"memory grew by {rss / 2**20:.0f} MiB"] if rss > MOST_GROWTH else []
    return found + ([f"{files} more files are open"] if files > most_files else [])


def engine(args: argparse.Namespace, variant: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run chaos on one variant of the engine."""
    text, eos = text_ids(model)
    adapters: list[str | None] = [None]
    if variant == "lora":
        # every request has an adapter: beside other requests, vLLM 0.32 on a CPU gives one without
        # an adapter other tokens
        adapters = [str(write_lora(folder / str(i), model, seed=i)) for i in range(2)]
    cases = [
        chaos.Case(prompt, adapters[i % len(adapters)])
        for i, prompt in enumerate(chaos.prompts(text, args.cases, Random(args.seed)))
    ]
    with EngineProcess(**chaos.spec(STOCK, model, variant, alone=True, dtype=args.dtype)) as stock:
        cases = chaos.answered_alone(stock, cases, args.longest)
    options: dict[str, Any] = {"batch": args.batch, "max_gap": args.max_gap}
    if variant == "drafts":
        # greedy only: on a CPU, vLLM 0.32 ends in its rejection sampler beside requests with top_k
        options["sampled"] = ()
    with EngineProcess(**chaos.spec(args.backend, model, variant, dtype=args.dtype)) as ours:
        began = noted = time.monotonic()
        for report in chaos.endure(ours, cases, eos, args.seed, **options):
            seconds = time.monotonic() - began
            if time.monotonic() - noted > 30:
                noted = time.monotonic()
                print(f"{variant}: {seconds:.0f} s, {summary(asdict(report))}", flush=True)
                print(*report.wrong[-3:], sep="\n", flush=True)
            if report.requests >= args.requests or seconds >= 60 * args.minutes:
                break
    growth = chaos.grown(report.held)
    wrong = [*report.wrong, *leaks(growth, MOST_FILES)]
    result = {**asdict(report), "variant": variant, "seconds": seconds, "cases": len(cases)}
    result |= {"grown_bytes": growth[0], "grown_files": growth[1], "wrong": wrong}
    result["held"] = [
        [round(t, 1), asdict(h)] for t, h in report.held[:: 1 + len(report.held) // 50]
    ]
    return result


def server(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Run ``vllm serve`` under load, end it, and send stock the same invalid requests."""
    text, _ = text_ids(model)
    options = [f"--max-model-len={SERVER_LEN}", "--max-num-seqs=8", "--enforce-eager"]
    # by default vLLM ends the engine at once, and then waits for streams that get no more tokens
    options += ["--shutdown-timeout=120"]
    options += ["--block-size=32", "--num-gpu-blocks-override=80", *args.options]
    stock: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for backend, found in (("", stock), (PREFIX_SHARE, ours)):
        if backend == "" and args.no_stock:
            continue
        environment = {**os.environ, **DEFAULT_ENVIRONMENT, "VLLM_PREFIXSHARE_SHARE": "always"}
        if backend:
            environment |= {"VLLM_ATTENTION_BACKEND": backend, "VLLM_PREFIXSHARE_STRICT": "1"}
        for last in ("terminated", "killed"):
            log = folder / f"{backend}-{last}.log"
            with server_process(model, log, environment, *options) as (url, process):
                load = Load(url, NAME, SERVER_LEN, text, SERVER_LEN // 2, args.seed)
                if last == "killed":
                    started = tree(process.pid)
                    process.kill()
                    found["left_by_kill"] = len(asyncio.run(all_gone(started)))
                    continue
                began = time.monotonic()
                if backend:
                    run = load.run(args.clients, process.pid, seconds=60 * args.minutes)
                else:
                    run = load.talk_nonsense()
                found["report"] = asyncio.run(run)
                found["seconds"] = time.monotonic() - began
                found["exit_status"], found["wrong"] = asyncio.run(ends_cleanly(load, process))
    report = ours["report"]
    growth = chaos.grown(report.held)
    wrong = [*report.wrong, *ours["wrong"], *server_faults(report, stock.get("report"))]
    wrong += leaks(growth, args.clients)
    for name in ("exit_status", "left_by_kill"):
        if stock and ours[name] != stock[name]:
            wrong.append(f"{name}: {ours[name]}, stock {stock[name]}")
    some = report.held[:: 1 + len(report.held) // 50]
    return {
        "variant": "server",
        "seconds": ours["seconds"],
        "asked": report.asked,
        "requests": sum(report.asked.values()),
        "tokens": report.tokens,
        "statuses": report.statuses,
        "stock_statuses": stock["report"].statuses if stock else None,
        "exit_status": ours["exit_status"],
        "left_by_kill": ours["left_by_kill"],
        "stock_left_by_kill": stock.get("left_by_kill"),
        "grown_bytes": growth[0],
        "grown_files": growth[1],
        "held": [[round(t, 1), asdict(h)] for t, h in some],
        "wrong": wrong,
    }


def summary(row: dict[str, Any]) -> str:
    """One line for people."""
    if "asked" in row:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row["asked"].items()))
        return f"{row['requests']} requests ({kinds}), {len(row['wrong'])} faults"
    return (
        f"{row['requests']} requests, {row['aborted']} answers aborted, {row['preemptions']} "
        f"pre-emptions, {row['greedy']} greedy answers: {row['equal']} equal, {row['ties']} part "
        f"at a tie (at most {row['widest_tie']:.3f} nats), {len(row['wrong'])} faults"
    )


def save(args: argparse.Namespace, model: Path, rows: list[dict[str, Any]]) -> None:
    """Write the report."""
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "device": gpu() if has_gpu() else processor(),
        "versions": versions(),
        "model": model.name,
        "rows": rows,
    }
    write(args.out, result)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("engine", "server"):
        sub = kinds.add_parser(kind)
        add = sub.add_argument
        add("--minutes", type=float, default=5, help="minutes of load, per variant of the engine")
        add("--seed", type=int, default=0)
        add("--model", type=Path, help="checkpoint folder (default: the embedded model)")
        add("--out", type=Path, help="write the report here as JSON")
        if kind == "engine":
            add("--requests", type=int, default=10_000, help="most requests of each variant")
            add("--variants", nargs="+", choices=chaos.VARIANTS, default=list(chaos.VARIANTS))
            add("--cases", type=int, default=24, help="different prompts")
            add("--longest", type=int, default=chaos.MAX_LEN, help="most tokens of an answer")
            add("--batch", type=int, default=32, help="requests between two checks")
            add("--backend", default=PREFIX_SHARE, help=f"backend to test; {STOCK} for comparison")
            add("--dtype", default=chaos.SETTINGS["dtype"])
            add("--max-gap", type=float, default=chaos.MAX_GAP, help="nats; see docs/fidelity.md")
        else:
            add("--clients", type=int, default=8, help="most requests in flight")
            sub.set_defaults(variants=())
            add("--options", nargs="*", default=[], help="further options of vllm serve")
            add("--no-stock", action="store_true", help="send stock no invalid requests")
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error("--minutes must be more than 0")
    if args.kind == "engine" and (
        min(args.requests, args.longest, args.batch) < 1 or args.cases < 5
    ):
        parser.error("--requests, --longest and --batch must be 1 or more, --cases 5 or more")
    return args


def main() -> int:
    args = parse()
    rows = []
    try:
        model = args.model or embedded_model_path()
        with tempfile.TemporaryDirectory() as folder:
            runs = (
                [partial(engine, variant=v) for v in args.variants] if args.variants else [server]
            )
            for run in runs:
                rows.append(run(args, model=model, folder=Path(folder)))
                row = rows[-1]
                print(f"{row['variant']}: {row['seconds']:.0f} s, {summary(row)}", flush=True)
                save(args, model, rows)  # saved now, because the next variant may fail to start
    except PrefixShareError as e:
        print(f"soak: error: {e}", file=sys.stderr)
        return 2
    for row in rows:
        for fault in row["wrong"]:
            print(f"wrong, {row['variant']}: {fault}")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
