"""Write the tables and charts of the docs from the benchmarks' JSON; ``--check`` only compares.

python -m benchmarks.tables
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.engine.breakdown import ATTENTION, OTHER, PRODUCTS, WRITTEN
from benchmarks.engine.report import in_common, steady_us
from benchmarks.kernel.report import OURS, best_peer
from benchmarks.papers import EXPERIMENTS, LEFT_OUT, PAPERS
from benchmarks.papers.engine import ENGINES, from_engine
from benchmarks.papers.experiment import Experiment, Setting, good_points, span
from benchmarks.papers.fasttree import trees
from benchmarks.papers.picture import draw
from benchmarks.papers.tree_attention import from_scale
from benchmarks.quality.accuracy import share_interval
from benchmarks.support.charts import THEMES, engine_chart
from benchmarks.support.program import ROOT, make_parser
from benchmarks.whole_call import report
from vllm_prefixshare.distributed.scaling import (
    Cluster,
    Layer,
    Link,
    attention_us,
    gather_bytes,
    replicas_us,
    ring_bytes,
    ring_us,
    tree_us,
)

PROGRAM = "benchmarks.tables"

PUBLISHED = ROOT / "benchmarks" / "published"


def published(name: str) -> dict:
    result: dict = json.loads((PUBLISHED / f"{name}.json").read_text())
    return result


def exists(name: str) -> bool:
    """Whether these results are published."""
    return (PUBLISHED / f"{name}.json").exists()


def versions(result: dict) -> str:
    return ", ".join(f"{name} {v}" for name, v in result["versions"].items())


def cpu_table() -> str:
    result = published("cpu")
    runs = f"{result['pairs']} short runs of each engine in turns; speed-up: median of pairs"
    lines = [
        f"{result['model']}; {result['processor']} cores; {versions(result)}. "
        f"`{result['command']}`: median and range of {runs}.",
        "",
        "| shared document | private prompt | batch | baseline, ms a token | PREFIX_SHARE "
        "| speed-up | KV read, share factor | plans / steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ours, stock = row["spread"]["PREFIX_SHARE"], row["spread"]["stock"]
        lines.append(
            f"| {row['document']} | {row['private']} | {row['batch']} "
            f"| {row['stock_ms']:.1f} ({stock[0]:.1f}-{stock[1]:.1f}) "
            f"| {row['prefix_share_ms']:.1f} ({ours[0]:.1f}-{ours[1]:.1f}) "
            f"| {row['speedup']:.2f} | {row['share_factor']:.1f} "
            f"| {row['plans']} / {row['decode_steps']} |"
        )
    return "\n".join(lines)


def kernel_table(name: str) -> str:
    """Every cell of a run."""
    result = published(name)
    titles = {n: t for n, t in result["titles"].items() if any_ran(result, n)}
    lines = [
        measured_how(result),
        "",
        f"| workload | heads | batch | roof | {' | '.join(titles.values())} | gain |",
        "|" + "---|" * (len(titles) + 5),
    ]
    for cell in result["cells"]:
        entries = [kernel_entry(cell["peers"][name]) for name in titles]
        lines.append(
            f"| {cell['workload']} | {cell['heads']} | {cell['batch']} | {cell['roof_ms']:.4f} "
            f"| {' | '.join(entries)} | {gain(cell)} |"
        )
    return "\n".join(lines)


def invariant_table() -> str:
    """What batch invariance costs one layer, in our kernel and in FlashAttention 3."""
    result = published("kernel_invariant")
    names, ratios = ("ours", "invariant", "fa3", "fa3_invariant"), []
    lines = [
        measured_how(result),
        "",
        f"| workload | batch | roof | {' | '.join(result['titles'][n] for n in names)} "
        "| invariant over default, ours | FA3 over ours, both invariant |",
        "|" + "---|" * 9,
    ]
    for cell in result["cells"]:
        ours, invariant, _, fa3 = (cell["peers"][n]["ms"] for n in names)
        ratios.append((invariant / ours, fa3 / invariant))
        lines.append(
            f"| {cell['workload']} | {cell['batch']} | {cell['roof_ms']:.4f} "
            f"| {' | '.join(kernel_entry(cell['peers'][n]) for n in names)} "
            f"| {ratios[-1][0]:.2f} | {ratios[-1][1]:.2f} |"
        )
    means = (math.prod(column) ** (1 / len(column)) for column in zip(*ratios, strict=True))
    lines.append(f"| geometric mean | | | | | | | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(lines)


def measured_how(result: dict) -> str:
    return (
        f"{result['gpu']}; {versions(result)}. "
        f"`{result['command']}`: milliseconds of one layer, median of "
        f"{result['repeats']} CUDA-graph replays with the L2 cache flushed (* without a graph), "
        f"{result['dtype']}{layer_extras(result)}, head_dim {result['head_dim']}, "
        f"blocks of {result['block_size']} "
        "tokens; in brackets the fraction of the roofline "
        f"({result['roofline']['TB/s']:.2f} TB/s, {result['roofline']['TFLOP/s']:.0f} TFLOP/s)."
    )


def layer_extras(result: dict) -> str:
    """What the layer has in addition to plain attention."""
    kv = result.get("kv_dtype")
    if result.get("mla"):
        queries = {cell["query_len"] for cell in result["cells"]} - {1}
        return (
            f", latent {kv} KV cache and {kv} queries" if kv else ", latent KV cache"
        ) + "".join(f", {n} query tokens of each request" for n in queries)
    return (
        (f", {kv} KV cache and queries" if kv else "")
        + (", attention sinks" if result.get("sinks") else "")
        + (f", a window of {window} tokens" if (window := result.get("sliding_window")) else "")
    )


def any_ran(result: dict, peer: str) -> bool:
    return any(cell["peers"][peer]["status"] != "unavailable" for cell in result["cells"])


def gain(cell: dict) -> str:
    best, ours = best_peer(cell), cell["peers"][OURS[0]]
    return f"{best[1] / ours['ms']:.2f}" if best and ours["status"] == "ok" else "-"


#: behind a workload's name: what its time is of
MARKS = {"decode": "", "whole call": "*", "first step": "†"}


def engine_table(name: str) -> str:
    """One line per workload: both engines, the floor, the cost of planning, the same tokens."""
    result = published(name)
    memory = result["memory"]
    tokens, used = memory["kv_cache_tokens"], memory["used_gib"]
    first_steps = any(row["kind"] == "first step" for row in result["rows"])
    lines = [
        f"{result['gpu']}; {result['model']}; {versions(result)}. "
        f"`{result['command']}`: milliseconds per "
        f"output token, for shared documents while all requests decode (median and range of "
        f"{result['repeats']} runs), for the others (*) the mean over the whole call, prefill "
        "included"
        + (", or (†) that of the first step" if first_steps else "")
        + ". Floor: as many requests with 16-token contexts, plus reading every KV token "
        f"once at {result['bandwidth_tbs']} TB/s"
        + (
            ""
            if memory["started_together"]
            else f". KV-cache capacity: baseline {tokens['stock']} tokens, PREFIX_SHARE "
            f"{tokens['PREFIX_SHARE']} ({memory['kv_cache_ratio']:.4f})"
        )
        + (f"; {used['stock']:.1f} and {used['PREFIX_SHARE']:.1f} GiB in use" if used else "")
        + (". Each engine on a separate GPU, both at once" if result.get("apart") else "")
        + ". Host time: mean of building attention metadata in decode-only steps that made no "
        "plan.",
        "",
        "| workload | baseline, ms a token | PREFIX_SHARE | speed-up | floor | baseline, tokens/s "
        "| PREFIX_SHARE | share factor | plans / steps | ms a plan "
        "| host us per steady step, baseline / ours | requests with the same tokens "
        "| largest gap where they diverge, nats |",
        "|" + "---|" * 13,
    ]
    for row in result["rows"]:
        host, agreement, floor = row["host"], row["agreement"], row["floor_ms"]
        same = (
            f"{agreement['same']:.0%} of {agreement['requests']} | {agreement['largest_gap']:.3f}"
            if agreement
            else "- | -"
        )
        if agreement and "tokens_in_common" in agreement:
            same += f" ({in_common(agreement)})"
        lines.append(
            f"| {row['workload']}{MARKS[row['kind']]} "
            f"| {engine_time(row['stock'])} | {engine_time(row['PREFIX_SHARE'])} "
            f"| {row['ratio']:.2f} | {'-' if floor is None else f'{floor:.2f}'} "
            f"| {row['stock']['tokens_per_second']:.0f} "
            f"| {row['PREFIX_SHARE']['tokens_per_second']:.0f} "
            f"| {host.get('share_factor', 1.0):.1f} "
            f"| {host['plans']} / {host['decode_steps']} | {host['plan_ms']:.2f} "
            f"| {steady_us(row, ' / ')} | {same} |"
        )
    return "\n".join(lines)


def sweep_table() -> str:
    """Times by the length of the document, and a step's GPU time by kind of kernel."""
    result = published("engine_sweep")
    kinds = {"attention": (ATTENTION,), "matrix products": (PRODUCTS,), "others": (WRITTEN, OTHER)}
    steps = result["rows"][0]["breakdown"][ENGINES[0]]["steps"]
    lines = [
        f"{result['gpu']}; {result['model']}; {versions(result)}. `{result['command']}`: "
        "milliseconds per output token while all requests decode (median and range of "
        f"{result['repeats']} runs), and tokens per second of the whole call, prefill included. "
        "Floor: as above. GPU: milliseconds of a decode step by kind of kernel, baseline / ours, "
        f"by torch's profiler in {steps} steps of a run that is not timed, without the GPU's idle "
        "time; others include writing the KV.",
        "",
        "| workload | baseline, ms a token | PREFIX_SHARE | speed-up | floor "
        f"| {' | '.join(f'GPU, {kind}' for kind in kinds)} | tokens/s, baseline / ours |",
        "|" + "---|" * (6 + len(kinds)),
    ]
    for row in result["rows"]:
        both = [row[engine] for engine in ENGINES]
        spent = [row["breakdown"][engine]["ms"] for engine in ENGINES]
        parts = (
            " / ".join(f"{sum(ms[k] for k in of):.2f}" for ms in spent) for of in kinds.values()
        )
        rates = " / ".join(f"{side['tokens_per_second']:.0f}" for side in both)
        lines.append(
            f"| {row['workload']} | {' | '.join(engine_time(side) for side in both)} "
            f"| {row['ratio']:.2f} | {row['floor_ms']:.2f} | {' | '.join(parts)} | {rates} |"
        )
    return "\n".join(lines)


def headline() -> str:
    """One sentence with the figures of the engine's first row."""
    result = published("engine")
    row = result["rows"][0]
    return (
        f"On one {result['gpu']}, {row['workload']} take {row['PREFIX_SHARE']['ms']:.1f} ms per "
        f"output token instead of {row['stock']['ms']:.1f} ({result['model']}, vLLM "
        f"{result['versions']['vllm']})."
    )


def chart_configuration() -> str:
    """The configuration under the engine's chart."""
    result = published("engine")
    found = result["versions"]
    how = "run on one GPU each" if result.get("apart") else "take turns on one GPU"
    return (
        f"{result['gpu']}; {result['model']}; vLLM {found['vllm']}, torch {found['torch']}, Triton "
        f"{found['triton']}. Both engines {how} with the same settings; median of "
        f"{result['repeats']} runs while all requests decode (* mean over one call, prefill "
        f"included). [Command and all figures](benchmarks/published/engine.md)."
    )


#: rows of the short engine table: what differs from the first run, and its results
ENGINE_RUNS = (
    ("Llama-3.1-8B", "engine"),
    ("Llama-3.1-8B, fp8 KV cache", "engine_fp8"),
    ("Llama-3.1-8B, two GPUs (tensor parallel)", "engine_tp2"),
    ("Llama-3.1-70B, 16 layers, two GPUs", "engine_tp2_70b"),
    ("DeepSeek-V2-Lite (MLA)", "engine_mla"),
    ("gpt-oss-20b", "engine_gpt_oss"),
    ("Qwen3-Next, 64 of 512 experts", "engine_qwen3_next"),
    ("Gemma-3-12B", "engine_gemma3"),
    ("Llama-3.1-8B on an H100", "engine_h100"),
)


def engine_short_table() -> str:
    """Milliseconds per output token of every engine run, one line per workload."""
    lines = ["| model | workload | baseline | PREFIX_SHARE | speed-up |", "|---|---|---|---|---|"]
    for title, name in ENGINE_RUNS:
        for row in published(name)["rows"]:
            lines.append(
                f"| {title} | {row['workload']}{MARKS[row['kind']]} | {row['stock']['ms']:.2f} "
                f"| {row['PREFIX_SHARE']['ms']:.2f} | {row['ratio']:.2f} |"
            )
            title = ""
    return "\n".join(lines)


def kernel_short_table() -> str:
    """Microseconds of one layer with 32:8 heads: ours, FlashAttention-3 and the fastest peer."""
    result = published("kernel")
    lines = [
        "| workload | roofline | ours | FlashAttention-3 | fastest peer | gain over it |",
        "|---|---|---|---|---|---|",
    ]
    for cell in result["cells"]:
        found = best_peer(cell)
        if cell["heads"] != "32:8" or found is None:
            continue
        ours, fa3 = (1e3 * cell["peers"][name]["ms"] for name in (OURS[0], "fa3"))
        lines.append(
            f"| {cell['workload']} | {1e3 * cell['roof_ms']:.1f} | {ours:.1f} | {fa3:.1f} "
            f"| {result['titles'][found[0]]}, {1e3 * found[1]:.1f} | {gain(cell)} |"
        )
    return "\n".join(lines)


def whole_call_table() -> str:
    """Seconds of a user's call, a line for each workload and a column for each configuration."""
    if not exists("whole_call"):
        return "No run of the whole-call benchmark is published."
    result = published("whole_call")
    return (
        f"{result['device']}; {result['model']}; {versions(result)}. In brackets: times as fast as "
        f"`{result['baseline']}`. [Command, and equal answers]"
        "(../benchmarks/published/whole_call.md).\n\n"
        f"{report.table(result)}"
    )


#: Workloads of the short table, in its order.
SHORT_CALLS = ("cached", "cached256", "documents4x32", "cold", "token_ids", "agents", "unshared")
SHORT_CALL_ROWS = {
    "flash_attn": "FLASH_ATTN",
    "flash_attn_prompts": "FLASH_ATTN, host work shared",
    "prefix_share": "PREFIX_SHARE",
}


def whole_call_short_table() -> str:
    """Seconds of some calls with text in and out, for three configurations."""
    result = published("whole_call")
    rows = {name: title for name, title in SHORT_CALL_ROWS.items() if name in result["rows"]}
    short = {
        **result,
        "rows": {rows[name]: result["rows"][name] for name in rows},
        "baseline": rows[result["baseline"]],
        "workloads": [w for n in SHORT_CALLS for w in result["workloads"] if w["name"] == n],
    }
    tokens = [d["tokens"] / 1e3 for d in result["documents"]]
    return (
        f"Seconds from prompt texts to answer texts of {result['tokens']} tokens, one "
        f"{result['device'].split(' x')[0]}; {result['model']}; documents of {min(tokens):.0f}k to "
        f"{max(tokens):.0f}k tokens (the single one has {tokens[0]:.0f}k). In brackets: times as "
        "fast as vLLM's default backend. "
        "[All calls and the command](benchmarks/published/whole_call.md).\n\n"
        f"{report.table(short)}"
    )


def whole_call_how(result: dict) -> str:
    """Machine, model and command of a whole-call run, and the rows that it leaves out."""
    left_out = "".join(f" `{row}` left out: {why}." for row, why in result["left_out"].items())
    repeats = result["repeats"]
    runs = f"median of {repeats} runs" if repeats > 1 else "one run after a first one"
    return (
        f"{result['device']}; {result['model']}; {versions(result)}. `{result['command']}`: "
        f"{runs}.{left_out}"
    )


def equal_answers(result: dict) -> str:
    """The table of equal answers, and what to expect of it."""
    return (
        "Of random weights the first two tokens are often less apart than rounding, after which "
        "answers differ; requests that run in other batches are rounded otherwise, with any "
        "backend. `tests/gpu` compares log-probabilities.\n\n"
        f"{report.comparison_table(result)}"
    )


def whole_call_section(write: Callable[[dict], str]) -> str:
    """A table of the whole-call run, or that it measured nothing for it."""
    return write(published("whole_call")) or "Not measured in this run."


def engine_time(side: dict) -> str:
    spread = side["range_ms"]
    return f"{side['ms']:.2f}" + (f" ({spread[0]:.2f}-{spread[1]:.2f})" if spread else "")


def fidelity_table() -> str:
    """One line per backend: its difference from FLASH_ATTN."""
    result = published("fidelity")
    lines = [
        f"{result['device']}; {versions(result)}; runner {result['runner'].upper()}. "
        f"`{result['command']}`: differences from {result['reference']} on the same prompts, which "
        "share a document; of log-probabilities, in nats.",
        "",
        "| model | backend | greedy tokens before texts diverge | baseline's largest lead there "
        "| tokens decoded along a given text | mean difference | largest | perplexity |",
        "|" + "---|" * 8,
    ]
    for row in result["rows"]:
        perplexity = "-"
        if row["perplexity"] is not None:
            change = row["perplexity"] / row["perplexity_stock"] - 1
            perplexity = f"{row['perplexity']:.3f} ({change:+.3%})"
        lines.append(
            f"| {row['model']} | {row['backend']} | {row['equal']} of {row['tokens']} "
            f"| {row['gap']:.3f} | {row['forced_tokens']} | {row['forced_mean']:.4f} "
            f"| {row['forced_largest']:.4f} | {perplexity} |"
        )
    return "\n".join(lines)


#: title of a column of the accuracy table -> file and backend of its results
ACCURACY = (
    ("CPU, CPU_ATTN", "fidelity_cpu", "stock"),
    ("CPU, PREFIX_SHARE", "fidelity_cpu", "PREFIX_SHARE"),
    ("CPU, float32, CPU_ATTN", "fidelity_cpu_float32", "stock"),
    ("CPU, float32, PREFIX_SHARE", "fidelity_cpu_float32", "PREFIX_SHARE"),
    ("GPU, FLASH_ATTN", "fidelity_gpu", "FLASH_ATTN"),
    ("GPU, TRITON_ATTN", "fidelity_gpu", "TRITON_ATTN"),
    ("GPU, PREFIX_SHARE", "fidelity_gpu", "PREFIX_SHARE"),
)


def interval(of: list[float], form: str) -> str:
    """A value and its interval."""
    value, low, high = (format(x, form) for x in of)
    return f"{value} ({low} to {high})"


def share(count: int, of: int) -> str:
    """A part of a number, and its interval."""
    return interval(share_interval(count, of), ".0%")


def accuracy_table() -> str:
    """One column per backend: the results of ``benchmarks.quality.fidelity`` with a real model."""
    found = []
    for _, name, backend in ACCURACY:
        rows = published(name).get("accuracy", ()) if exists(name) else ()
        found.append(next((row for row in rows if row["backend"] == backend), None))
    lines = {
        "greedy tokens before the text diverges from the baseline's": lambda r: (
            f"{interval(r['agreement'], '.1%')} of {r['greedy_tokens']}"
        ),
        "mean difference of log-probabilities from the baseline's, nats": lambda r: interval(
            r["difference"], ".2g"
        ),
        "largest": lambda r: f"{r['largest_difference']:.2g} of {r['forced_tokens']} tokens",
        "perplexity of the given text": lambda r: interval(r["perplexity"], ".3f"),
        "questions answered right": lambda r: f"{interval(r['right'], '.0%')} of {r['questions']}",
        "copies of a prompt answered right (#22103)": lambda r: (
            f"{share(r['copies_right'], r['copies'])} of {r['copies']}"
        ),
        "copies answered as the baseline answers a single one": lambda r: (
            f"{share(r['copies_same'], r['copies'])} of {r['copies']}"
        ),
        "sampled tokens: mean ratio": lambda r: interval(r["sampled"]["ratio"], ".7g"),
        "smallest and largest ratio": lambda r: (
            f"{r['sampled']['smallest_ratio']:.5g}, {r['sampled']['largest_ratio']:.5g} of "
            f"{r['sampled']['tokens']} tokens"
        ),
        "k1": lambda r: interval(r["sampled"]["k1"], ".2g"),
        "k3": lambda r: interval(r["sampled"]["k3"], ".2g"),
    }
    names = dict.fromkeys(name for _, name, _ in ACCURACY)
    runs = [published(name) for name in names if exists(name)]
    return "\n".join(
        [
            *(
                f"{run['device']}, {run['dtype']}; {versions(run)}; "
                f"{next(iter(run['counters']))}. `{run['command']}`\n"
                for run in runs
            ),
            f"| | {' | '.join(title for title, *_ in ACCURACY)} |",
            "|" + "---|" * (1 + len(ACCURACY)),
            *(
                f"| {what} | {' | '.join(say(row) if row else 'not run' for row in found)} |"
                for what, say in lines.items()
            ),
        ]
    )


SOAKS = (
    "soak_engine", "soak_lora", "soak_server",
    "soak_engine_gpu", "soak_engine_gpu_shared", "soak_server_gpu", "soak_server_gpu_long",
    "soak_server_gpu_shared", "soak_server_gpu_default",
)  # fmt: skip


def grown(row: dict, gpu: bool) -> str:
    """By how much memory, open files and a GPU's memory grew in the later part of a run."""
    if row["grown_bytes"] is None:
        return "too short to say"
    said = f"{row['grown_bytes'] / 2**20:+.1f} MiB, {row['grown_files']:+d}"
    if gpu:
        said += f", {row['grown_device_bytes'] / 2**20:+.1f} MiB"
    return said + (f" in {row['grown_seconds']:.0f} s" if "grown_seconds" in row else "")


def soak_table() -> str:
    """One line per variant of the engine, and the server: what was tried, and what failed."""
    lines = [
        "| what | tried | compared with single requests of the baseline | failed "
        "| grown: memory, files, GPU memory | minutes |",
        "|---|---|---|---|---|---|",
    ]
    commands = []
    for name in filter(exists, SOAKS):
        result = published(name)
        where = " on a GPU" if result["device"].startswith("NVIDIA") else ""
        note = f", {result['note']}" if "note" in result else ""
        commands.append(f"`{result['command']}`: {result['device']}{note}.\n")
        for row in result["rows"]:
            if "asked" in row:
                tried = f"{row['requests']} requests: " + ", ".join(
                    f"{count} {kind}" for kind, count in sorted(row["asked"].items())
                )
                if "steps" in row:
                    tried += (
                        f"; {row['steps']} decode steps, of which {row['shared_steps']} shared KV"
                    )
                compared = f"statuses of {len(row['statuses'])} kinds of invalid requests"
                if row["stock_statuses"] is None:
                    compared = f"{compared}: none of 500 or more, baseline not queried"
            else:
                tried = (
                    f"{row['requests']} requests, {row['steps']} steps, of which "
                    f"{row['shared_steps']} shared KV, {row['preemptions']} pre-emptions, "
                    f"{row['aborted']} answers aborted"
                )
                compared = (
                    f"{row['equal']} of {row['greedy']} greedy answers equal, "
                    f"{row['ties']} diverge at a tie"
                )
                if row.get("compared"):
                    mean = row["total_error"] / row["compared"]
                    compared += (
                        f"; log-probabilities of {row['compared']} tokens: {mean:.2g} nats apart "
                        f"in the mean, {row['largest_error']:.2g} at most"
                    )
            lines.append(
                f"| {row['variant']}{where} | {tried} | {compared} | {len(row['wrong'])} "
                f"| {grown(row, bool(where))} "
                f"| {row['seconds'] / 60:.1f} |"
            )
    return "\n".join([*commands, *lines])


def ablation_table() -> str:
    result = published("ablation")
    lines = [
        f"{result['device']}; {versions(result)}; {result['kernel']} kernel. "
        f"`{result['command']}`: time "
        "over that of the default plan, geometric mean over the workloads.",
        "",
        "| plan | time |",
        "|---|---|",
    ]
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in result["slowdown"].items()]
    return "\n".join(lines)


def resources_table() -> str:
    """One line per kernel, GPU, head_dim and kind of queries: the most that the binaries of all
    heads and dtypes use, under each Triton.
    """
    rows = json.loads((PUBLISHED / "kernel_resources.json").read_text())
    tritons = sorted({row["triton"] for row in rows})
    found: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        queries = "token tree" if row["tree"] else str(row["queries"])
        key = row["kernel"], float(row["capability"]), row["head_dim"], queries
        if row["kernel"] == "merge_states":  # its binaries use nearly the same
            key = *key[:2], 0, ""
        found.setdefault(key, {}).setdefault(row["triton"], []).append(row)

    def entry(of: list[dict]) -> str:
        most = [max(row[what] for row in of) for what in ("registers", "spilled", "shared")]
        return f"{most[0]} / {most[1]} / {most[2] / 1024:.0f} ({len(of)})"

    return "\n".join(
        [
            f"| kernel | GPU | head_dim | queries | {' | '.join(tritons)} |",
            "|" + "---|" * (4 + len(tritons)),
            *(
                f"| {kernel} | {gpu} | {dim or 'all'} | {queries or 'all'} | "
                f"{' | '.join(entry(of[t]) if t in of else '-' for t in tritons)} |"
                for (kernel, gpu, dim, queries), of in sorted(found.items())
            ),
        ]
    )


def triton_table() -> str:
    """The Hopper kernel under two Tritons, one after the other on one machine."""
    first, second = (published(f"kernel_triton/{triton}") for triton in ("3.6.0", "3.8.0"))
    lines = [
        f"{first['gpu']}, torch {first['versions']['torch']}; `{first['command']}` under one "
        f"Triton after the other, and `{first['further']['command']}` on "
        f"{first['further']['date']}: microseconds.",
        "",
        "| workload | heads | roof | 3.6.0 | 3.8.0 | 3.8.0 / 3.6.0 |",
        "|---|---|---|---|---|---|",
    ]
    for cell, other in zip(first["cells"], second["cells"], strict=True):
        old, new = (c["peers"]["ours"]["ms"] * 1e3 for c in (cell, other))
        lines.append(
            f"| {cell['workload']} | {cell['heads']} | {cell['roof_ms'] * 1e3:.1f} | {old:.1f} "
            f"| {new:.1f} | {new / old:.3f} |"
        )
    return "\n".join(lines)


def portable_table() -> str:
    """The portable kernel now and before its present form, and its peers."""
    now, before = published("kernel_portable"), published("kernel_portable_before")
    others = ("fa3", "fa3_cascade")
    lines = [
        f"{now['gpu']}, 32:8 heads; `{now['command']}`: microseconds. Before: two sizes of tile "
        "fed by `flashforge`, in an earlier run.",
        "",
        "| workload | roof | now | before | before / now | FA3 | FA3 cascade |",
        "|---|---|---|---|---|---|---|",
    ]
    gains = []
    for cell, earlier in zip(now["cells"], before["cells"], strict=True):
        peers = cell["peers"]
        new, old = (p["portable"]["ms"] * 1e3 for p in (peers, earlier["peers"]))
        gains.append(old / new)
        entries = (
            f"{peers[n]['ms'] * 1e3:.1f}" if peers[n]["status"] == "ok" else "-" for n in others
        )
        lines.append(
            f"| {cell['workload']} | {cell['roof_ms'] * 1e3:.1f} | {new:.1f} | {old:.1f} "
            f"| {old / new:.2f} | {' | '.join(entries)} |"
        )
    lines.append(f"| geometric mean | | | | {math.prod(gains) ** (1 / len(gains)):.2f} | | |")
    return "\n".join(lines)


def first_step_table() -> str:
    """Short questions on a cached document: our two ways, FlashAttention-3, and host times."""
    result = published("kernel_first_step")
    lines = [
        measured_how(result)
        + " Plan: host time of a step's plan, in ms. Launch: host time of a layer outside of a "
        "CUDA graph, ours / FA3, in ms. Gain: FA3 over ours, each token a request.",
        "",
        "| questions | roof | ours, each token | ours, each request | FA3 | gain | plan | launch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in result["cells"]:
        tokens, fa3 = cell["peers"]["tokens"], cell["peers"]["fa3"]
        entries = (kernel_entry(cell["peers"][name]) for name in ("tokens", "ours", "fa3"))
        lines.append(
            f"| {cell['workload']} | {cell['roof_ms']:.4f} | {' | '.join(entries)} "
            f"| {fa3['ms'] / tokens['ms']:.2f} | {tokens['plan_ms']:.2f} "
            f"| {tokens['host_ms']:.3f} / {fa3['host_ms']:.3f} |"
        )
    return "\n".join(lines)


def kernel_entry(found: dict[str, object]) -> str:
    if found["status"] != "ok":
        return "-" if found["status"] == "unavailable" else str(found["status"])
    return f"{found['ms']:.4f}{'' if found['graph'] else '*'} ({found['roofline']:.0%})"


def startup_table() -> str:
    """Seconds to start, baseline and ours in turns: medians, and each pair."""
    found = published("startup")
    versions = found["versions"]
    lines = [
        "| caches | baseline | PREFIX_SHARE | difference | each pair |",
        "|---|---|---|---|---|",
    ]
    for kind, of in found["seconds"].items():
        stock, ours = (median(of[backend]) for backend in ("stock", "ours"))
        pairs = ", ".join(f"{b - a:+.1f}" for a, b in zip(of["stock"], of["ours"], strict=True))
        lines.append(f"| {kind} | {stock:.1f} s | {ours:.1f} s | {ours - stock:+.1f} s | {pairs} |")
    return "\n".join(
        [
            f"One NVIDIA H200, vLLM {versions['vllm']}, torch {versions['torch']}, Triton "
            f"{versions['triton']}, Llama-3.1-8B's shape; `python -m benchmarks.engine.startup`. "
            + found.get("note", ""),
            "",
            *lines,
        ]
    )


def h200s() -> Cluster:
    """A cluster of H200s, 8 to a node. Reading, and the fixed time: from kernel.json, what its
    `256_1024` takes in addition to its roof. Multiplying, and NVLink between two GPUs: from
    scale.json of 22 November 2026, in which 64 requests reach 550 TFLOP/s, a small
    all-reduce takes 14 us, and the ring sends 350 GB/s. InfiniBand: the data sheet of NDR with one
    port per GPU; its latency is assumed.
    """
    cell = anchor("256_1024")
    fixed = 1e3 * (cell["peers"]["ours"]["ms"] - cell["roof_ms"])
    return Cluster(4.35e6, 5.5e8, fixed, 8, Link(14.0, 3.5e5), Link(20.0, 5e4))


def anchor(workload: str) -> dict:
    """The cell of kernel.json with 32:8 heads."""
    cells = published("kernel")["cells"]
    return next(c for c in cells if c["workload"] == workload and c["heads"] == "32:8")


def model_checked() -> str:
    """Measured times compared with the model, where both exist."""
    cluster, result = h200s(), published("scale")
    alone = [("1,64_32768,64", Layer(64, 1 << 15, 64)), ("1,32_122880,256", Layer(32, 122880, 256))]
    times = (
        f"{layer.num_reqs} requests on {layer.shared >> 10}k tokens take "
        f"{1e3 * anchor(workload)['peers']['ours']['ms']:.0f} us, the model predicts "
        f"{attention_us(layer, cluster):.0f}"
        for workload, layer in alone
    )

    def spread(way: str, model: Callable[..., float], least: int = 0) -> str:
        found = sorted(
            row["us"][way] / model(Layer(row["requests"], row["tokens"]), cluster, result["ranks"])
            for row in result["rows"]
            if row["tokens"] >= least
        )
        return f"{found[0]:.2f} to {found[-1]:.2f}"

    return (
        f"Measured on one GPU: {'; '.join(times)}. On two, [in CUDA graphs](#two-gpus), "
        f"gather takes {spread('gather', tree_us)} times what the model predicts, from "
        f"{LONG >> 10}k tokens on {spread('gather', tree_us, LONG)}; ring attention "
        f"{spread('ring', ring_us)}, and {spread('ring', ring_us, LONG)}."
    )


def scale_table() -> str:
    """One layer's attention by the model: replicas against tree reduction on 1 to 64 GPUs, and tree
    reduction against ring attention on 2 to 128.
    """
    gpus, cluster = (1, 2, 4, 8, 16, 64), h200s()
    lines = [
        model_checked(),
        "",
        "One layer, 64 requests with 128 tokens of their own behind the shared prefix, 32:8 heads, "
        "head_dim 128, bfloat16; a token of an 8B model takes 32 such layers. Microseconds: "
        "replicas / tree reduction.",
        "",
        "| shared prefix | KV | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in gpus) + " |",
        "|" + "---|" * (2 + len(gpus)),
    ]
    layers = [(tokens, Layer(64, tokens, 128)) for tokens in (1 << 10, 1 << 14, 1 << 17, 1 << 20)]
    for tokens, layer in layers:
        times = (
            f"{replicas_us(layer, cluster, n):.0f} / {tree_us(layer, cluster, n):.0f}" for n in gpus
        )
        lines.append(
            f"| {tokens >> 10}k | {layer.kv_bytes / 2**20:.0f} MiB | {' | '.join(times)} |"
        )
    lines += [
        "",
        "Bytes that one GPU sends for it, tree reduction (one collective) / ring attention:",
        "",
        "| shared prefix | " + " | ".join(f"{n} GPUs" for n in gpus[1:]) + " |",
        "|" + "---|" * len(gpus),
    ]
    for tokens, layer in layers:
        sent = (
            f"{gather_bytes(layer, n) / 2**20:.1f} / {ring_bytes(layer, n) / 2**20:.0f} MiB"
            for n in gpus[1:]
        )
        lines.append(f"| {tokens >> 10}k | {' | '.join(sent)} |")
    many = (2, 8, 16, 64, 128)
    longest = Layer(1, 5_120_000, 0, 16, 16, 128)
    trees, rings = ([way(longest, cluster, n) for n in many] for way in (tree_us, ring_us))
    ratios = (f"{ring / tree:.0f}" for tree, ring in zip(trees, rings, strict=True))
    lines += [
        "",
        "One request on 5.12M tokens, one layer of 16:16 heads, as in figure 3 of the paper. "
        "Microseconds:",
        "",
        "| | " + " | ".join(f"{n} GPUs" for n in many) + " |",
        "|" + "---|" * (1 + len(many)),
        "| tree reduction | " + " | ".join(f"{t:.0f}" for t in trees) + " |",
        "| ring attention | " + " | ".join(f"{t:.0f}" for t in rings) + " |",
        "| ring / tree | " + " | ".join(ratios) + " |",
        "| ring / tree in the paper, H100s |" + " |" * (len(many) - 1) + " close to 8 |",
    ]
    return "\n".join(lines)


def papers_table(paper: str) -> str:
    """A paper's claims and the results here, then each experiment with its results."""
    of_paper = [e for e in EXPERIMENTS.values() if e.paper == paper]
    results = {e.name: ran(e.name) for e in of_paper}
    lines = [
        "| | the paper | here | why they differ |",
        "|---|---|---|---|",
        *(
            f"| [{e.item}](#{e.name}), section {e.section} | {e.claim} "
            f"| {e.ours(results[e.name]['points']) if results[e.name] else not_run(e)} "
            f"| {e.reason if results[e.name] else '-'} |"
            for e in of_paper
        ),
    ]
    for e in of_paper:
        lines += ["", f"### {e.name}", "", f"{e.item[0].upper()}{e.item[1:]}. {e.changed}", ""]
        result = results[e.name]
        if not result:
            lines.append(f"N{not_run(e)[1:]}.")
            continue
        points = f"{len(result['points'])} of {result['of_points']} points"
        lines.append(
            f"`{result['command']}`, {result['date']}, {result['device']}; {versions(result)}; "
            f"{recordings_of(e, result)}{points}."
        )
        if e.bars and draw(e.item, e.bars(result["points"])):
            lines += ["", f"![{e.item}](images/papers-{e.name}.svg)"]
        if e.table:
            lines += ["", *e.table(result["points"])]
    left = [f"- {x.item}: {x.why}." for x in LEFT_OUT if x.paper == paper]
    return "\n".join([*lines, "", "Not reproduced:", "", *left])


def recordings_of(experiment: Experiment, result: dict) -> str:
    """Which recordings the points were measured on, where they depend on them."""
    if not experiment.reads_recordings:
        return ""
    if "recordings" not in result:  # a run from before it was noted
        return "recordings of an unknown digest; "
    digest = result["recordings"]
    return f"recordings {digest}; " if digest else "no recordings; "


#: peers of FastTree's figure 9: its name for each, and how many times as long as FastTree it takes
FIGURE_9 = {
    "fa3": ("FlashAttention", 5.1),
    "flashinfer": ("FlashInfer", 4.2),
    "deft": ("DeFT", 10.6),
    "flashinfer_cascade": ("CascadeAttn", 2.1),
}


def fasttree_kernels_table() -> str:
    """The kernels of FastTree's figure 9 on its trees, of those that all peers are timed on."""
    result = published("kernel")
    cells = [
        cell["peers"]
        for cell in result["cells"]
        if cell["workload"] in trees(Setting("cpu")) and cell["heads"] in ("32:32", "32:8", "16:1")
    ]

    def over(slow: str, fast: str) -> str:
        both = [c for c in cells if c[slow]["status"] == c[fast]["status"] == "ok"]
        return span([c[slow]["ms"] / c[fast]["ms"] for c in both]) if both else "no cell of both"

    lines = [
        f"`{result['command']}`, {result['date']}, {result['gpu']}; {versions(result)}; "
        f"{len(cells)} cells: {len(cells) // 3} of these trees with 1, 4 and 16 query heads for a "
        "KV head. Each kernel is its project's own, FlashAttention's the third; the paper had "
        "FlashAttention 2.6.3 and FlashInfer 0.1.6 on an H100.",
        "",
        "| time of | over FastTree's, the paper | over FastTree's, here | over ours |",
        "|---|---|---|---|",
        *(
            f"| {name} | {claim} | {over(peer, 'fasttree')} | {over(peer, 'ours')} |"
            for peer, (name, claim) in FIGURE_9.items()
        ),
        f"| FastTree | 1 | - | {over('fasttree', 'ours')} |",
    ]
    return "\n".join(lines)


#: experiments that another benchmark measures: its published results, and how to read them
OTHER_RUNS = {
    "flashforge-figure-7": ("engine_sweep", from_engine),
    "tree-attention-figure-3": ("scale", from_scale),
}


def ran(experiment: str) -> dict | None:
    """An experiment's published results without the points that failed or were wrong."""
    other, convert = OTHER_RUNS.get(experiment, ("", dict))
    if exists(f"papers/{experiment}"):
        result = published(f"papers/{experiment}")
    elif other and exists(other):
        result = convert(published(other))
    else:
        return None
    good = good_points(result["points"])
    return {**result, "points": good} if good else None


def not_run(experiment: Experiment) -> str:
    return f"not run yet: needs {experiment.needs}"


def scale_measured_table() -> str:
    """Tree reduction and ring attention on real ranks: times, the bound, memory."""
    result, cluster = published("scale"), h200s()
    trees = [way for way in result["rows"][0]["errors"] if way != "ring"]
    small = min(row["us"]["small all-reduce"] for row in result["rows"])
    others = [way for way in FA3S if way in result["rows"][0]["us"]]
    rates = {}
    for name, digits in (("copy", 2), ("matrix product", 0), ("dense attention", 0)):
        found = [f"{row['rates'][name] / 1e6:.{digits}f}" for row in result["rows"]]
        rates[name] = " to ".join(dict.fromkeys((min(found, key=float), max(found, key=float))))
    about_fa3 = f"{others[0]}: one sequence with all queries on the own shard. " if others else ""
    if len(others) > 1:
        about_fa3 += f"Paged: by the blocks of {result['block_size']} tokens that ours reads. "
    lines = [
        f"{result['ranks']} x {result['device']}; {versions(result)}. `{result['command']}`: one "
        f"layer, {result['heads']} heads of 128, bfloat16; microseconds, median of "
        f"{result['repeats']} replays of a CUDA graph of eight calls, in turns, the slowest "
        "rank's. Bound: the time to read a rank's shard or to multiply with it, at the rates of a "
        f"large copy ({rates['copy']} TB/s) and a large matrix product "
        f"({rates['matrix product']} TFLOP/s) in the same row, and of one small all-reduce, the "
        "fastest of all rows "
        f"({small:.0f}). cuDNN's attention of 16384 queries takes turns with them, too: "
        f"{rates['dense attention']} TFLOP/s. Own shard / its bound: the kernel without any "
        f"reduction, over the bound without the all-reduce. {about_fa3}Launched: the best tree "
        "and the ring called from Python, to the end of their work. Model: what "
        "[the model](#model) predicts for gather. Memory: peak of a launched call in "
        "addition to shard and queries, MiB, gather / ring, and by the paper's equations 9 and 8.",
        "",
        f"| tokens | requests | {' | '.join([*trees, 'ring', 'own shard', *others])} | bound "
        "| ring / best tree | best tree / bound | own shard / its bound | best tree / own shard "
        "| launched: tree / ring | model | memory | equations |",
        "|" + "---|" * (13 + len(trees) + len(others)),
    ]
    for row in result["rows"]:
        us = row["us"]
        best, launched = (min(x[way] for way in trees) for x in (us, row["launched_us"]))
        bound = row["roof_us"] + small
        peaks = [
            " / ".join(f"{row[key][way] / 2**20:.1f}" for way in ("gather", "ring"))
            for key in ("peak_bytes", "peak_model")
        ]
        layer = Layer(row["requests"], row["tokens"])
        times = (
            *(us[way] for way in trees),
            us["ring"],
            us["own shard"],
            *(us[way] for way in others),
            bound,
        )
        lines.append(
            f"| {row['tokens'] >> 10}k | {row['requests']} "
            f"| {' | '.join(f'{t:.0f}' for t in times)} "
            f"| {us['ring'] / best:.1f} | {best / bound:.2f} "
            f"| {us['own shard'] / row['roof_us']:.2f} | {best / us['own shard']:.2f} "
            f"| {launched:.0f} / {row['launched_us']['ring']:.0f} "
            f"| {tree_us(layer, cluster, result['ranks']):.0f} | {' | '.join(peaks)} |"
        )
    if long := [row for row in result["rows"] if row["tokens"] >= LONG]:
        lines += ["", long_contexts(long, trees, others, small)]
    return "\n".join(lines)


#: tokens from which on the goals hold
LONG = 512 << 10
#: vLLM's FlashAttention-3 on a rank's own shard, in runs of benchmarks.kernel.scale
FA3S = ("FlashAttention-3", "paged FlashAttention-3")


def long_contexts(rows: list[dict], trees: list[str], others: list[str], small: float) -> str:
    """The spread of what the rows of long contexts reach, by the number of requests."""

    def spread(ratios: Iterable[float]) -> str:
        found = sorted(ratios)
        return f"{found[0]:.2f} to {found[-1]:.2f}"

    def best(row: dict) -> float:
        return min(row["us"][way] for way in trees)

    by_requests = [
        (f"{n} request{'s' * (n > 1)}", [row for row in rows if row["requests"] == n])
        for n in sorted({row["requests"] for row in rows})
    ]
    over_bound = (
        f"{title} {spread(best(row) / (row['roof_us'] + small) for row in of)}"
        for title, of in by_requests
    )
    title, most = by_requests[-1]
    alone = (
        f"{way} {spread(row['us'][way] / row['roof_us'] for row in most)}"
        for way in ("own shard", *others)
    )
    return (
        f"From {LONG >> 10}k tokens on: ring / best tree "
        f"{spread(row['us']['ring'] / best(row) for row in rows)}; best tree / bound: "
        f"{', '.join(over_bound)}; without any reduction, {title}: {', '.join(alone)} times the "
        "bound without the all-reduce."
    )


def scale_blocks_table() -> str:
    """Long contexts on two ranks by KV block size, with FlashAttention-3 on the same blocks."""
    results = [published("scale_blocks_16"), published("scale_blocks_64")]
    rows = [(of["block_size"], row) for of in results for row in of["rows"]]
    small = min(row["us"]["small all-reduce"] for _, row in rows)
    ways = ("gather", "one_shot", "own shard", *reversed(FA3S))
    commands = " and ".join(f"`{of['command']}`" for of in results)
    lines = [
        f"{results[0]['ranks']} x {results[0]['device']}; {versions(results[0])}. "
        f"{commands}: as above, the fastest small all-reduce of both runs {small:.0f} us.",
        "",
        f"| blocks | tokens | requests | {' | '.join(ways)} | bound | best tree / bound "
        "| own shard / its bound | paged FlashAttention-3 / that | FlashAttention-3 / that |",
        "|" + "---|" * (8 + len(ways)),
    ]
    for size, row in rows:
        us, roof = row["us"], row["roof_us"]
        best = min(us["gather"], us["one_shot"])
        ratios = best / (roof + small), *(us[way] / roof for way in ways[2:])
        lines.append(
            f"| {size} | {row['tokens'] >> 10}k | {row['requests']} "
            f"| {' | '.join(f'{us[way]:.0f}' for way in ways)} | {roof + small:.0f} "
            f"| {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        )
    return "\n".join(lines)


def order_table(name: str) -> str:
    """The time of shuffled questions with and without order."""
    result = published(name)
    layers = result.get("layers", 32)
    shape = "shape" if layers == 32 else f"shape with {layers} layers"
    lines = [
        f"{result['device']}, Llama-3.1-8B's {shape}, random weights; {versions(result)}. "
        f"`{result['command']}`: {result['questions']} questions about {result['documents']} "
        f"documents of {result['document_tokens']} tokens, {result['answer_tokens']} tokens each.",
        "",
        "| KV cache, part of the documents | questions | seconds | tokens/s "
        "| prompt tokens from the cache |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['cache']} | {row['run']} | {row['seconds']:.1f} | {row['tokens_per_second']:.0f} "
        f"| {row['cached_share']:.0%} |"
        for row in sorted(result["rows"], key=lambda row: row["cache"])
    ]
    if ratios := result.get("ratios"):
        names = [key for key in ratios[0] if key not in ("cache", "repeats")]
        lines += [
            "",
            "Seconds over seconds, the fastest of the repeats; noise: the slowest repeat of any "
            "run over its fastest.",
            "",
            f"| KV cache | repeats | {' | '.join(names)} |",
            "|" + "---|" * (2 + len(names)),
            *(
                f"| {of['cache']} | {of['repeats']} "
                f"| {' | '.join(f'{of[key]:.3f}' for key in names)} |"
                for of in sorted(ratios, key=lambda of: of["cache"])
            ),
        ]
    return "\n".join(lines)


def arrivals_table(name: str) -> str:
    """Time to first token and throughput under Poisson arrivals, with and without order."""
    result = published(name)
    used = result["settings"]
    lines = [
        f"{result['device']}, Llama-3.1-8B's shape with {used['layers']} layers, random weights; "
        f"{versions(result)}. `{result['command']}`: a KV cache for {used['cache']} of the smaller "
        "workload's distinct tokens. Seconds to the first token in vLLM's order / with "
        "`VLLM_PREFIXSHARE_ORDER=prefix`, of the requests of all turns; noise: the largest figure "
        "of a turn over the smallest of the same order.",
        "",
        "| workload | load | requests, turns | median | 99th percentile | ratio (noise) "
        "| tokens/s | ratio (noise) | prompt tokens from the cache | |",
        "|" + "---|" * 10,
    ]
    for row in result["rows"]:
        both = [row[order] for order in ("off", "prefix")]

        def pair(figure: str, form: str, both: list = both) -> str:
            return " / ".join(format(of[figure], form) for of in both)

        load = "all at once" if row["rate"] is None else f"{row['load']} ({row['rate']:.1f}/s)"
        lines.append(
            f"| {row['workload']} | {load} "
            f"| {row['requests']}, {len(both[0]['first_token_p99_of_turns'])} "
            f"| {pair('first_token_p50', '.2f')} | {pair('first_token_p99', '.2f')} "
            f"| {row['p99_ratio']:.2f} ({row['p99_noise']:.2f}) "
            f"| {pair('tokens_per_second', '.0f')} "
            f"| {row['throughput_ratio']:.3f} ({row['throughput_noise']:.3f}) "
            f"| {pair('cached_share', '.0%')} | {row['verdict']} |"
        )
    return "\n".join(lines)


def windows_table() -> str:
    """Layers with sliding windows: a line for each layer, a column for each tree."""
    results = [published(path.stem) for path in sorted(PUBLISHED.glob("kernel_windows_*.json"))]
    results.sort(key=lambda result: (-result["sliding_window"], -result["head_dim"]))
    trees = list(dict.fromkeys(cell["workload"] for r in results for cell in r["cells"]))
    window = "--sliding-window"
    options = (r["command"].split(f" {window} ")[1].split(" --out")[0] for r in results[1:])
    lines = [
        f"{results[0]['gpu']}; {versions(results[0])}. "
        + ", ".join([f"`{results[0]['command']}`", *(f"`{window} {of}`" for of in options)])
        + f": microseconds of one layer, ours / FA3 (ratio), medians of {results[0]['repeats']} "
        "CUDA-graph replays with the L2 cache flushed.",
        "",
        f"| window, head_dim, heads | {' | '.join(trees)} |",
        "|" + "---|" * (1 + len(trees)),
    ]
    for result in results:
        cells = {cell["workload"]: cell["peers"] for cell in result["cells"]}
        times = [[1e3 * cells[tree][peer]["ms"] for peer in (OURS[0], "fa3")] for tree in trees]
        entries = [f"{ours:.1f} / {fa3:.1f} ({fa3 / ours:.2f})" for ours, fa3 in times]
        lines.append(
            f"| {result['sliding_window']}, {result['head_dim']}, {result['cells'][0]['heads']}"
            f"{', sinks' if result['sinks'] else ''} | {' | '.join(entries)} |"
        )
    return "\n".join(lines)


def context_parallel_table() -> str:
    """Decode context parallelism in an engine, compared with one GPU."""
    result = published("context_parallel")
    used = result["settings"]
    lines = [
        f"{result['gpu']}, {result['model']}; {versions(result)}. `{result['command']}`: "
        f"{used['requests']} requests on one document of {used['document']} tokens, runs of "
        f"{used['interleave']}. Milliseconds per output token while all requests decode; the "
        "floor has hardly any context, attention is the difference.",
        "",
        "| GPUs | | ms | floor | attention | of half of one GPU's | share factor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(result["rows"], key=lambda row: row["gpus"]):
        of_half = f"{result['of_half'][row['engine']]:.3f}" if row["gpus"] > 1 else "-"
        factor = f"{row['share_factor']:.1f}" if row["share_factor"] else "-"
        lines.append(
            f"| {row['gpus']} | {row['engine']} | {row['ms']:.2f} | {row['floor_ms']:.2f} "
            f"| {row['attention_ms']:.2f} | {of_half} | {factor} |"
        )
    return "\n".join(lines)


class Section(NamedTuple):
    """A part of a generated page: heading, required results, function that writes it."""

    title: str
    results: str
    write: Callable[[], str]


class GeneratedPage(NamedTuple):
    """A Markdown file of ``benchmarks/published/`` that consists of tables alone."""

    title: str
    intro: str
    sections: tuple[Section, ...]


def engine_section(title: str, name: str) -> Section:
    return Section(title, name, partial(engine_table, name))


def kernel_section(title: str, name: str) -> Section:
    return Section(title, name, partial(kernel_table, name))


TREES = (
    "A workload `1,4,16_1024,256,64` is a tree with 1, 4 and 16 nodes on its levels, of 1024, 256 "
    "and 64 tokens each; the nodes of the last level are the requests. The roofline is the larger "
    "of two times: reading every KV token and query once and writing the output, and the "
    "multiplications. The gain is the fastest peer's time over ours."
)
#: file in benchmarks/published -> what it holds
PAGES = {
    "engine.md": GeneratedPage(
        "Engine",
        "Baseline: the backend that vLLM chooses by default, in the same engine with the same "
        "settings. [Performance](../../docs/performance.md) summarises these tables.",
        (
            engine_section("Llama-3.1-8B", "engine"),
            engine_section("GRPO with long samples", "engine_grpo"),
            Section("Documents of 8k to 120k tokens", "engine_sweep", sweep_table),
            engine_section("Tensor parallelism, 8B", "engine_tp2"),
            engine_section("Tensor parallelism, 70B", "engine_tp2_70b"),
            engine_section("An fp8 KV cache", "engine_fp8"),
            engine_section("DeepSeek-V2-Lite", "engine_mla"),
            engine_section("gpt-oss", "engine_gpt_oss"),
            engine_section("gpt-oss with 4 of 32 experts", "engine_gpt_oss_4_experts"),
            engine_section("Qwen3-Next", "engine_qwen3_next"),
            engine_section("Gemma-3-12B", "engine_gemma3"),
            engine_section("Batch invariance", "engine_invariant"),
            engine_section("H100", "engine_h100"),
            Section("CPU", "cpu", cpu_table),
            Section("Start-up", "startup", startup_table),
        ),
    ),
    "kernel.md": GeneratedPage(
        "Attention of one layer",
        f"{TREES} [Performance](../../docs/performance.md) summarises these tables.",
        (
            kernel_section("Every cell", "kernel"),
            kernel_section("Other workloads", "kernel_workloads"),
            kernel_section("Batches of any size", "kernel_batches"),
            kernel_section("H100", "kernel_h100"),
            Section("The Hopper kernel under two Tritons", "kernel_triton/3.8.0", triton_table),
            Section("The portable kernel", "kernel_portable", portable_table),
            Section("Batch invariance", "kernel_invariant", invariant_table),
            Section("The first step after a prefix hit", "kernel_first_step", first_step_table),
            Section("Sliding windows", "kernel_windows_1024_256", windows_table),
            kernel_section("An fp8 KV cache", "kernel_fp8"),
            kernel_section("Attention sinks", "kernel_sinks"),
            kernel_section("Soft cap", "kernel_soft_cap"),
            kernel_section("ALiBi", "kernel_alibi"),
            kernel_section("head_dim 512", "kernel_head_dim_512"),
            kernel_section("Hybrid models", "kernel_hybrid"),
            kernel_section("MLA", "kernel_mla"),
            kernel_section("MLA with more heads", "kernel_mla_heads"),
            kernel_section("MLA with an fp8 KV cache", "kernel_mla_fp8"),
            kernel_section("MLA with drafts", "kernel_mla_drafts"),
            kernel_section("MLA with drafts and an fp8 KV cache", "kernel_mla_drafts_fp8"),
            Section("What each part of planning is worth", "ablation", ablation_table),
        ),
    ),
    "kernel_resources.md": GeneratedPage(
        "Registers, spills and shared memory",
        "Variants of plain attention that the backend can choose, compiled for each GPU by each "
        "Triton, without a GPU (`make kernels`). An entry has the maximum registers per thread / "
        "bytes spilled per thread / KiB of shared memory per CTA over all heads and dtypes, and in "
        "brackets the number of binaries.",
        (Section("Binaries", "kernel_resources", resources_table),),
    ),
    "fidelity.md": GeneratedPage(
        "Fidelity and soak tests",
        "[Fidelity](../../docs/fidelity.md) explains these tables.",
        (
            Section("Differences from FLASH_ATTN", "fidelity", fidelity_table),
            Section("Accuracy with a real model", "fidelity_cpu", accuracy_table),
            Section("Soak tests", "soak_server", soak_table),
        ),
    ),
    "whole_call.md": GeneratedPage(
        "Whole calls",
        "[Whole-call performance](../../docs/whole-call.md) explains these tables.",
        tuple(
            Section(title, "whole_call", partial(whole_call_section, write))
            for title, write in (
                ("How it was measured", whole_call_how),
                ("Calls", report.table),
                ("Server", report.server_table),
                ("Host time per request by part", report.parts_table),
                ("Answers with equal tokens", equal_answers),
            )
        ),
    ),
    "order.md": GeneratedPage(
        "Order of waiting requests",
        "[Ordering](../../docs/ordering.md) explains these tables.",
        (
            Section("A KV cache for half of the documents", "order", partial(order_table, "order")),
            Section("Other cache sizes", "order_sizes", partial(order_table, "order_sizes")),
            Section("Poisson arrivals", "arrivals", partial(arrivals_table, "arrivals")),
            Section("At 0.95 load", "arrivals_95", partial(arrivals_table, "arrivals_95")),
        ),
    ),
    "scale.md": GeneratedPage(
        "KV in shards",
        "[The deep dive on sharded KV](../../docs/notes/sharded-kv.md) explains these tables.",
        (
            Section("Two GPUs", "scale", scale_measured_table),
            Section("By block size", "scale_blocks_16", scale_blocks_table),
            Section("Decode context parallelism", "context_parallel", context_parallel_table),
            Section("Model", "kernel", scale_table),
        ),
    ),
    "papers.md": GeneratedPage(
        "The papers' figures",
        "[The deep dive on the papers](../../docs/notes/papers.md) explains how to read and "
        "reproduce these tables.",
        (
            *(
                Section(paper, "papers/flashforge-figure-6", partial(papers_table, paper))
                for paper in PAPERS
            ),
            Section("Kernels of FastTree's figure 9", "kernel", fasttree_kernels_table),
        ),
    ),
}
#: short tables inside hand-written pages: place -> (file, results, the function that writes it)
EMBEDDED = {
    "headline": ("README.md", "engine", headline),
    "chart": ("README.md", "engine", chart_configuration),
    "engine": ("docs/performance.md", "engine", engine_short_table),
    "kernel": ("docs/performance.md", "kernel", kernel_short_table),
    "whole call": ("docs/whole-call.md", "engine", whole_call_table),
    "calls": ("README.md", "whole_call", whole_call_short_table),
}


def page_text(page: GeneratedPage) -> str:
    """A generated page, with a section for each published result."""
    parts = [
        f"# {page.title}",
        "Written by `python -m benchmarks.tables` from the JSON next to it.",
    ]
    parts.append(page.intro)
    for section in page.sections:
        if exists(section.results):
            parts += [f"## {section.title}", section.write()]
    return "\n\n".join(parts) + "\n"


def fresh_files() -> dict[Path, str]:
    """Every generated file as it should be.

    Raises:
        ValueError: a document has no place for its table.
    """
    files = {
        PUBLISHED / name: page_text(page)
        for name, page in PAGES.items()
        if any(exists(section.results) for section in page.sections)
    }
    for name, (file, results, write) in EMBEDDED.items():
        if not exists(results):
            continue
        path = ROOT / file
        block = f"<!-- table {name} -->\n{write()}\n<!-- end -->"
        files[path], found = re.subn(
            rf"<!-- table {name} -->.*?<!-- end -->",
            lambda _, b=block: b,
            files.get(path) or path.read_text(),
            flags=re.DOTALL,
        )
        if not found:
            raise ValueError(f"{file} has no place for the table {name}: add <!-- table {name} -->")
    for e in EXPERIMENTS.values():
        result = ran(e.name)
        if result and e.bars and (picture := draw(e.item, e.bars(result["points"]))):
            files[PUBLISHED / "images" / f"papers-{e.name}.svg"] = picture
    rows = [row for row in published("engine")["rows"] if row["kind"] != "first step"]
    for theme in THEMES:
        files[ROOT / "docs" / "images" / f"engine-{theme}.svg"] = engine_chart(rows, theme)
    return files


def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is not up to date")
    args = parser.parse_args()
    try:
        files = fresh_files()
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    stale = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if args.check:
            print(f"{path} is not up to date: run python -m {PROGRAM}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
