"""Test whether PREFIX_SHARE keeps running, and gives the right tokens, under constant load.

    python -m benchmarks.quality.soak engine --minutes 30 --out engine.json
    python -m benchmarks.quality.soak server --minutes 30 --out server.json

``engine``: more requests than the engine has room for, with random aborts, pre-emption and cache
resets; every greedy answer is compared with stock's answer to the same request alone. ``server``:
``vllm serve`` under a closed loop of clients, of which some disconnect, some send invalid requests
and some send prompts that are too long; then stock gets the same invalid requests. The exit status
is 1 if anything was wrong. On a GPU the default model is a small one with random weights, and all
variants run at once, each under both of vLLM's model runners. A run in which no step shared KV has
tested little, so it counts as wrong, too.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.support.option_types import count, positive
from benchmarks.support.program import ROOT, add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from examples.embedded_model import embedded_model_path
from tests.support import chaos
from tests.support.dummy_model import SMALL_VOCAB, write_eagle, write_lora, write_small_llama
from tests.support.engine import (
    DEFAULT_ENVIRONMENT,
    PREFIX_SHARE,
    RUNNERS,
    STOCK,
    STOCK_GPU,
    EngineProcess,
)
from tests.support.load import Load, all_gone, ends_cleanly, server_faults
from tests.support.processes import Held, tree
from tests.support.serving import NAME, server_process
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import gpu, has_gpu, processor
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.vllm_plugin.observability.metrics import PREFIX

PROGRAM = "benchmarks.quality.soak"

SERVER_LEN = 1024
#: Bytes a minute by which a run may grow in its last three fifths, and bytes that need no
#: explanation, in a short run: a process frees memory late. Open files by which it may grow: a
#: server has as many connections as clients.
MAX_PER_MINUTE, MAX_AT_ONCE, MAX_FILES = 3 << 20, 24 << 20, 0


@dataclass(frozen=True)
class Model:
    """A checkpoint, token ids to make prompts from, and the end-of-sequence token."""

    folder: Path
    text: list[int]
    eos: int


def model_of(args: argparse.Namespace, folder: Path) -> Model:
    """The model to ask: the one that was named, else the embedded one, or on a GPU a small one with
    random weights in ``folder``. Prompts are from the docs, or of random tokens.
    """
    if args.model is None and has_gpu():
        path = write_small_llama(folder / "small")
        return Model(path, Random(0).choices(range(3, SMALL_VOCAB), k=20_000), 1)
    from transformers import AutoTokenizer

    path = args.model or embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    return Model(path, tokenizer.encode(text), tokenizer.eos_token_id)


def leaks(growth: chaos.Growth | None, max_files: int) -> list[str]:
    """The resources that grew by more than allowed, in words."""
    if growth is None:
        return []
    found = []
    most = max(MAX_AT_ONCE, MAX_PER_MINUTE * growth.seconds / 60)
    for what, name in (("memory", "rss"), ("GPU memory", "device")):
        if (grew := getattr(growth.more, name)) > most:
            found.append(
                f"{what} grew by {grew / 2**20:.0f} MiB in {growth.seconds:.0f} s, "
                f"{growth.per_minute(name) / 2**20:.1f} MiB a minute"
            )
    files = growth.more.open_files
    return found + ([f"{files} more files are open"] if files > max_files else [])


def without_sharing(shared_steps: int) -> list[str]:
    """The fault of a run that shared nothing, in words."""
    return [] if shared_steps else ["no step shared KV"]


def row_of_growth(held: list[tuple[float, Held]], growth: chaos.Growth | None) -> dict[str, Any]:
    """What was held, at some fifty moments, and how much more after ``grown_seconds``; None where
    the run was too short to tell.
    """
    some = held[:: 1 + len(held) // 50]
    more = growth.more if growth else None
    return {
        "grown_seconds": growth.seconds if growth else None,
        "grown_bytes": more.rss if more else None,
        "grown_files": more.open_files if more else None,
        "grown_device_bytes": more.device if more else None,
        "held": [[round(t, 1), asdict(h)] for t, h in some],
    }


def label(variant: str, divider: str, seed: int | None = None) -> str:
    """The name of a row of the report. seed: of one of several rows."""
    named = variant if divider == "auto" else f"{variant}, {divider}"
    return named if seed is None else f"{named}, seed {seed}"


def engine(
    args: argparse.Namespace, model: Model, folder: Path, variant: str, runner: str | None
) -> dict[str, Any]:
    """Run chaos on one variant of the engine. runner: vLLM's model runner; None on a CPU."""
    name = label(f"{variant}, {runner}" if runner else variant, args.divider)
    path, settings, stock_backend = model.folder, {}, STOCK
    environment: dict[str, str] = {}
    if runner:
        settings = dict(chaos.GPU_SETTINGS)
        stock_backend, environment = STOCK_GPU, dict(RUNNERS[runner])
    environment["VLLM_PREFIXSHARE_DIVIDER"] = args.divider
    adapters: list[str | None] = [None]
    if variant == "lora":
        # every request has an adapter: beside other requests, vLLM 0.32 on a CPU gives one without
        # an adapter other tokens
        adapters = [str(write_lora(folder / name / str(i), path, seed=i)) for i in range(2)]
    cases = [
        chaos.Case(prompt, adapters[i % len(adapters)])
        for i, prompt in enumerate(chaos.prompts(model.text, args.cases, Random(args.seed)))
    ]
    alone = chaos.spec(stock_backend, path, variant, alone=True, **settings)
    max_gap = chaos.GPU_MAX_GAP if has_gpu() else chaos.MAX_GAP
    options: dict[str, Any] = {"batch": args.batch, "max_gap": max_gap}
    if variant == "drafts" and runner is None:
        # beside sampled requests vLLM 0.32 on a CPU, stock as well, gives greedy ones other tokens,
        # and with a top_k ends in its rejection sampler
        options["sampled"] = ()
    if variant == "eagle" and runner == "V1":
        # beside sampled requests vLLM 0.33, stock as well, ends where an answer reaches the model's
        # greatest length
        options["sampled"] = ()
    if variant == "eagle":
        settings["num_gpu_blocks_override"] *= 2  # the drafter's layer has blocks of its own
        drafter = str(write_eagle(folder / name, path))
        speculation = {"method": "eagle", "model": drafter, "num_speculative_tokens": 3}
        settings["speculative_config"] = speculation
        environment["VLLM_PREFIXSHARE_STRICT"] = "0"  # the drafter's layer falls back
    spec = chaos.spec(PREFIX_SHARE, path, variant, environment=environment, **settings)
    report, seconds, ended = chaos.Report(max_gap), 0.0, []
    try:
        with EngineProcess(**alone) as stock:
            cases = chaos.answered_alone(stock, cases, args.longest)
        with EngineProcess(**spec) as ours:
            began = noted = time.monotonic()
            for report in chaos.endure(ours, cases, model.eos, args.seed, **options):
                seconds = time.monotonic() - began
                if time.monotonic() - noted > 30:
                    noted = time.monotonic()
                    print(f"{name}: {seconds:.0f} s, {summary(asdict(report))}", flush=True)
                    print(*report.wrong[-3:], sep="\n", flush=True)
                if report.requests >= args.requests or seconds >= 60 * args.minutes:
                    break
    except (RuntimeError, PrefixShareError) as e:  # the other variants go on
        ended = [f"the engine ended: {str(e)[-3000:]}"]
    growth = chaos.grown(report.held)
    wrong = [*report.wrong, *leaks(growth, MAX_FILES), *ended]
    wrong += without_sharing(report.shared_steps)
    result = {**asdict(report), "variant": name, "seconds": seconds, "cases": len(cases)}
    return {**result, **row_of_growth(report.held, growth), "wrong": wrong}


def server(args: argparse.Namespace, model: Model, folder: Path, seed: int) -> dict[str, Any]:
    """Run ``vllm serve`` under load, end it, and send stock the same invalid requests. On a GPU all
    servers start at once.
    """
    # on a GPU more at once, for the reason that chaos.GPU_SETTINGS has
    most, blocks = (24, 160) if has_gpu() else (8, 80)
    options = [f"--max-model-len={SERVER_LEN}", f"--max-num-seqs={most}", "--enforce-eager"]
    # by default vLLM ends the engine at once, and then waits for streams that get no more tokens
    options += ["--shutdown-timeout=120"]
    options += ["--block-size=32", f"--num-gpu-blocks-override={blocks}"]
    if has_gpu():
        template = folder / "chat.jinja"
        template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
        options += ["--gpu-memory-utilization=0.1", f"--kv-cache-memory-bytes={1 << 28}"]
        options += [f"--chat-template={template}"]
    stock: dict[str, Any] = {}
    ours: dict[str, Any] = {}

    def endure(backend: str, found: dict[str, Any], last: str) -> None:
        environment = {**os.environ, **DEFAULT_ENVIRONMENT, "VLLM_PREFIXSHARE_SHARE": "always"}
        if backend:
            environment |= {"VLLM_ATTENTION_BACKEND": backend, "VLLM_PREFIXSHARE_STRICT": "1"}
            environment["VLLM_PREFIXSHARE_DIVIDER"] = args.divider
        log = folder / f"{backend}-{last}-{seed}.log"
        with server_process(model.folder, log, environment, *options) as (url, process):
            load = Load(url, NAME, SERVER_LEN, model.text, SERVER_LEN // 2, seed)
            if last == "killed":
                started = tree(process.pid)
                process.kill()
                found["left_by_kill"] = len(asyncio.run(all_gone(started)))
                return
            began = time.monotonic()
            if backend:
                run = load.run(args.clients, process.pid, seconds=60 * args.minutes)
            else:
                run = load.talk_nonsense()
            found["report"] = asyncio.run(run)
            found["seconds"] = time.monotonic() - began
            found["exit_status"], found["wrong"] = asyncio.run(ends_cleanly(load, process))

    backends = [(PREFIX_SHARE, ours)] if args.no_stock else [("", stock), (PREFIX_SHARE, ours)]
    with ThreadPoolExecutor(4 if has_gpu() else 1) as pool:
        runs = [
            pool.submit(endure, *of, last) for of in backends for last in ("terminated", "killed")
        ]
        for run in runs:
            run.result()
    report = ours["report"]
    growth = chaos.grown(report.held)
    wrong = [*report.wrong, *ours["wrong"], *server_faults(report, stock.get("report"))]
    wrong += leaks(growth, args.clients)
    wrong += without_sharing(report.counters[f"{PREFIX}shared_steps_total"])
    if failures := report.counters[f"{PREFIX}fallbacks_total"]:
        wrong.append(f"{failures} fallbacks")
    for name in ("exit_status", "left_by_kill"):
        if stock and ours[name] != stock[name]:
            wrong.append(f"{name}: {ours[name]}, stock {stock[name]}")
    return {
        "variant": label("server", args.divider, seed if len(args.seeds) > 1 else None),
        "seconds": ours["seconds"],
        "asked": report.asked,
        "requests": sum(report.asked.values()),
        "tokens": report.tokens,
        "steps": report.counters[f"{PREFIX}decode_steps_total"],
        "shared_steps": report.counters[f"{PREFIX}shared_steps_total"],
        "statuses": report.statuses,
        "stock_statuses": stock["report"].statuses if stock else None,
        "exit_status": ours["exit_status"],
        "left_by_kill": ours["left_by_kill"],
        "stock_left_by_kill": stock.get("left_by_kill"),
        **row_of_growth(report.held, growth),
        "wrong": wrong,
    }


def growth_in_words(row: dict[str, Any]) -> str:
    if row.get("grown_bytes") is None:
        return "too short to say what grows"
    return f"{row['grown_bytes'] / 2**20:+.1f} MiB in {row['grown_seconds']:.0f} s"


def summary(row: dict[str, Any]) -> str:
    """One line for people."""
    if "asked" in row:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row["asked"].items()))
        return (
            f"{row['requests']} requests ({kinds}), {row['shared_steps']} of {row['steps']} decode "
            f"steps shared KV, {len(row['wrong'])} faults"
        )
    return (
        f"{row['requests']} requests, {row['shared_steps']} of {row['steps']} steps shared KV, "
        f"{row['aborted']} answers aborted, {row['preemptions']} "
        f"pre-emptions, {row['greedy']} greedy answers: {row['equal']} equal, {row['ties']} part "
        f"at a tie (at most {row['widest_tie']:.3f} nats), {row['compared']} tokens: at most "
        f"{row['largest_error']:.2g} nats from stock's, {len(row['wrong'])} faults"
    )


def save(args: argparse.Namespace, model: Model, rows: list[dict[str, Any]]) -> None:
    """Write the report."""
    result = {
        "command": recorded_command(PROGRAM),
        "device": gpu() if has_gpu() else processor(),
        "versions": versions(),
        "model": model.folder.name,
        "rows": rows,
    }
    write(args.out, result)


def runs(args: argparse.Namespace) -> list[Callable[..., dict[str, Any]]]:
    """What is to run: the server once for each seed, or each variant of the engine."""
    if args.kind == "server":
        return [partial(server, seed=seed) for seed in args.seeds]
    runners = args.runners if has_gpu() else [None]
    pairs = [(v, r) for v in args.variants for r in runners]
    # vLLM's second runner has no n-gram drafts
    return [partial(engine, variant=v, runner=r) for v, r in pairs if (v, r) != ("drafts", "V2")]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("engine", "server"):
        sub = kinds.add_parser(kind)
        add = sub.add_argument
        add("--minutes", type=positive, default=5, help="of load, per variant of the engine")
        add("--model", type=Path, help="checkpoint folder (default: the embedded model)")
        add_out(sub)
        add(
            "--divider", default="auto", choices=("auto", *DIVIDERS),
            help="on a GPU the default shares nothing of fewer than eight requests, deft_flatten "
            "does",
        )  # fmt: skip
        if kind == "engine":
            add("--seed", type=int, default=0)
            add("--requests", type=count, default=10_000, help="most of each variant")
            variants = list(chaos.VARIANTS) if has_gpu() else ["plain", "drafts", "lora"]
            add("--variants", nargs="+", choices=chaos.VARIANTS, default=variants)
            add("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS), help="on a GPU")
            add("--cases", type=int, default=24, help="different prompts")
            add("--longest", type=count, default=chaos.MAX_LEN, help="most tokens of an answer")
            batch = 48 if has_gpu() else 32
            add("--batch", type=count, default=batch, help="requests between two checks")
        else:
            add(
                "--seeds", "--seed", type=int, nargs="+", default=[0],
                help="of the requests: a run, and a row of the report, for each, one after the "
                "other",
            )  # fmt: skip
            clients = 32 if has_gpu() else 8
            add("--clients", type=count, default=clients, help="most requests in flight")
            add("--no-stock", action="store_true", help="send stock no invalid requests")
    args = parser.parse_args(argv)
    if args.kind == "engine":
        if args.cases < 5:
            parser.error("--cases must be 5 or more")
        if "eagle" in args.variants and not (has_gpu() and args.model is None):
            parser.error("--variants eagle has a drafter for the GPU's default model only")
    if not runs(args):
        parser.error("nothing would run: drafts need the runner V1, or name another of --variants")
    return args


@one_sentence(PROGRAM)
def main() -> int:
    args = parse()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(args, Path(folder))
        at_once = 16 if has_gpu() and args.kind == "engine" else 1
        with ThreadPoolExecutor(at_once) as pool:
            started = [pool.submit(run, args, model, Path(folder)) for run in runs(args)]
            for run in started:
                rows.append(row := run.result())
                print(f"{row['variant']}: {row['seconds']:.0f} s, {summary(row)}, "
                      f"{growth_in_words(row)}", flush=True)  # fmt: skip
                save(args, model, rows)  # saved now, because the next one may fail to start
    for row in rows:
        for fault in row["wrong"]:
            print(f"wrong, {row['variant']}: {fault}")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
