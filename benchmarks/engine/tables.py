"""Tables of the engine's published results."""

from statistics import median

from benchmarks.engine.breakdown import ATTENTION, OTHER, PRODUCTS, WRITTEN
from benchmarks.engine.report import in_common, steady_us
from benchmarks.support import published
from benchmarks.support.published import Result, table, versions
from tests.support.engine import PREFIX_SHARE, STOCK

ENGINES = (STOCK, PREFIX_SHARE)
#: behind a workload's name: what its time is of
MARKS = {"decode": "", "whole call": "*", "first step": "†"}
#: rows of the short engine table: what differs from the first run, and its results
RUNS = (
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


#: baselines of vLLM, and their runs on the same workloads
OPPONENTS = {
    "FLASH_ATTN": "engine",
    "FLASHINFER": "engine_flashinfer",
    "TRITON_ATTN": "engine_triton_attn",
    "cascade attention": "engine_cascade",
}


def opponents_table(_: Result) -> str:
    """One line per workload: every baseline next to PREFIX_SHARE in the same run."""
    runs = {title: published.load(n) for title, n in OPPONENTS.items() if published.exists(n)}
    rows_of = {
        title: {row["workload"]: row for row in result["rows"] if row["kind"] == "decode"}
        for title, result in runs.items()
    }
    lines = []
    for workload in dict.fromkeys(name for rows in rows_of.values() for name in rows):
        found = {title: rows[workload] for title, rows in rows_of.items() if workload in rows}
        best = min(found, key=lambda title: found[title]["ratio"])
        entries = (
            f"{found[t][STOCK]['ms']:.2f} ({found[t]['ratio']:.2f})" if t in found else "-"
            for t in runs
        )
        lines.append((workload, *entries, f"{best}, {found[best]['ratio']:.2f}"))
    missing = [f"{title} (`{name}`)" for title, name in OPPONENTS.items() if title not in runs]
    how = "Milliseconds per output token, in brackets over PREFIX_SHARE in the same run."
    if missing:
        how += (
            f" Not published yet: {', '.join(missing)}, which "
            "`python -m benchmarks.on_gpu figures NAME` runs."
        )
    header = " | ".join(["workload", *runs, "best baseline over PREFIX_SHARE"])
    return "\n".join([how, "", *table(header, lines)])


def cpu_table(result: Result) -> str:

    def ms(row: Result, mean: str, engine: str) -> str:
        low, high = row["spread"][engine]
        return f"{row[mean]:.1f} ({low:.1f}-{high:.1f})"

    lines = table(
        "shared document | private prompt | batch | baseline, ms a token | PREFIX_SHARE "
        "| speed-up | KV read, share factor | plans / steps",
        (
            (
                *(row[key] for key in ("document", "private", "batch")),
                ms(row, "stock_ms", STOCK),
                ms(row, "prefix_share_ms", PREFIX_SHARE),
                f"{row['speedup']:.2f}",
                f"{row['share_factor']:.1f}",
                f"{row['plans']} / {row['decode_steps']}",
            )
            for row in result["rows"]
        ),
    )
    how = (
        f"{result['model']}; {result['processor']} cores; {versions(result)}. "
        f"`{result['command']}`: median and range of {result['pairs']} short runs of each engine "
        "in turns; speed-up: median of pairs."
    )
    return "\n".join([how, "", *lines])


def engine_how(result: Result) -> str:
    """How the times of ``engine_table`` were measured."""
    memory = result["memory"]
    tokens, used = memory["kv_cache_tokens"], memory["used_gib"]
    text = (
        f"{result['gpu']}; {result['model']}; {versions(result)}. `{result['command']}`: "
        "milliseconds per output token, for shared documents while all requests decode (median "
        f"and range of {result['repeats']} runs), for the others (*) the mean over the whole call, "
        "prefill included"
    )
    if any(row["kind"] == "first step" for row in result["rows"]):
        text += ", or (†) that of the first step"
    text += (
        ". Floor: as many requests with 16-token contexts, plus reading every KV token once at "
        f"{result['bandwidth_tbs']} TB/s"
    )
    if not memory["started_together"]:
        text += (
            f". KV-cache capacity: baseline {tokens[STOCK]} tokens, PREFIX_SHARE "
            f"{tokens[PREFIX_SHARE]} ({memory['kv_cache_ratio']:.4f})"
        )
    if used:
        text += f"; {used[STOCK]:.1f} and {used[PREFIX_SHARE]:.1f} GiB in use"
    if result.get("apart"):
        text += ". Each engine on a separate GPU, both at once"
    if result.get("scale", 1) < 1:
        text += f". TRIAL: batches and texts are {result['scale']} of what the titles say"
    return (
        f"{text}. Host time: mean of building attention metadata in decode-only steps that made no "
        "plan."
    )


def engine_table(result: Result) -> str:
    """One line per workload: both engines, the floor, the cost of planning, the same tokens."""
    lines = table(
        "workload | baseline, ms a token | PREFIX_SHARE | speed-up | floor | baseline, tokens/s "
        "| PREFIX_SHARE | share factor | plans / steps | ms a plan "
        "| host us per steady step, baseline / ours | requests with the same tokens "
        "| largest gap where they diverge, nats",
        (
            (
                row["workload"] + MARKS[row["kind"]],
                *(engine_time(row[engine]) for engine in ENGINES),
                f"{row['ratio']:.2f}",
                "-" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
                *(f"{row[engine]['tokens_per_second']:.0f}" for engine in ENGINES),
                f"{row['host'].get('share_factor', 1.0):.1f}",
                f"{row['host']['plans']} / {row['host']['decode_steps']}",
                f"{row['host']['plan_ms']:.2f}",
                steady_us(row, " / "),
                *same_tokens(row["agreement"]),
            )
            for row in result["rows"]
        ),
    )
    return "\n".join([engine_how(result), "", *lines])


def same_tokens(agreement: Result | None) -> tuple[str, str]:
    """Share of requests with the same tokens, and the largest gap of the others."""
    if not agreement:
        return "-", "-"
    gap = f"{agreement['largest_gap']:.3f}"
    if "tokens_in_common" in agreement:
        gap += f" ({in_common(agreement)})"
    return f"{agreement['same']:.0%} of {agreement['requests']}", gap


def engine_time(side: Result) -> str:
    spread = side["range_ms"]
    return f"{side['ms']:.2f}" + (f" ({spread[0]:.2f}-{spread[1]:.2f})" if spread else "")


def breakdown_table(result: Result) -> str:
    """Times of workloads, and a step's GPU time by kind of kernel."""
    kinds = {"attention": (ATTENTION,), "matrix products": (PRODUCTS,), "others": (WRITTEN, OTHER)}
    steps = result["rows"][0]["breakdown"][STOCK]["steps"]

    def gpu_ms(row: Result, of: tuple[str, ...]) -> str:
        spent = (row["breakdown"][engine]["ms"] for engine in ENGINES)
        return " / ".join(f"{sum(ms[kind] for kind in of):.2f}" for ms in spent)

    lines = table(
        "workload | baseline, ms a token | PREFIX_SHARE | speed-up | floor "
        f"| {' | '.join(f'GPU, {kind}' for kind in kinds)} | tokens/s, baseline / ours",
        (
            (
                row["workload"],
                *(engine_time(row[engine]) for engine in ENGINES),
                f"{row['ratio']:.2f}",
                f"{row['floor_ms']:.2f}",
                *(gpu_ms(row, of) for of in kinds.values()),
                " / ".join(f"{row[engine]['tokens_per_second']:.0f}" for engine in ENGINES),
            )
            for row in result["rows"]
        ),
    )
    how = (
        f"{result['gpu']}; {result['model']}; {versions(result)}. `{result['command']}`: "
        "milliseconds per output token while all requests decode (median and range of "
        f"{result['repeats']} runs), and tokens per second of the whole call, prefill included. "
        "Floor: as above. GPU: milliseconds of a decode step by kind of kernel, baseline / ours, "
        f"by torch's profiler in {steps} steps of a run that is not timed, without the GPU's idle "
        "time; others include writing the KV."
    )
    return "\n".join([how, "", *lines])


def headline(result: Result) -> str:
    """One sentence with the figures of the engine's first row."""
    row = result["rows"][0]
    return (
        f"On one {result['gpu']}, {row['workload']} take {row['PREFIX_SHARE']['ms']:.1f} ms per "
        f"output token instead of {row['stock']['ms']:.1f} ({result['model']}, vLLM "
        f"{result['versions']['vllm']})."
    )


def engine_short_table(_: Result) -> str:
    """Milliseconds per output token of every engine run, one line per workload."""
    rows = []
    for title, name in RUNS:
        for i, row in enumerate(published.load(name)["rows"]):
            times = (row[engine]["ms"] for engine in ENGINES)
            rows.append(
                (
                    "" if i else title,
                    row["workload"] + MARKS[row["kind"]],
                    *(f"{x:.2f}" for x in (*times, row["ratio"])),
                )
            )
    return "\n".join(table("model | workload | baseline | PREFIX_SHARE | speed-up", rows))


def startup_table(found: Result) -> str:
    """Seconds to start, baseline and ours in turns: medians, and each pair."""
    used = found["versions"]
    rows = []
    for kind, of in found["seconds"].items():
        stock, ours = (median(of[backend]) for backend in ("stock", "ours"))
        pairs = ", ".join(f"{b - a:+.1f}" for a, b in zip(of["stock"], of["ours"], strict=True))
        rows.append((kind, f"{stock:.1f} s", f"{ours:.1f} s", f"{ours - stock:+.1f} s", pairs))
    how = (
        f"One NVIDIA H200, vLLM {used['vllm']}, torch {used['torch']}, Triton {used['triton']}, "
        "Llama-3.1-8B's shape; `python -m benchmarks.engine.startup`. " + found.get("note", "")
    )
    return "\n".join(
        [how, "", *table("caches | baseline | PREFIX_SHARE | difference | each pair", rows)]
    )


def order_table(result: Result) -> str:
    """The time of shuffled questions with and without order."""
    layers = result.get("layers", 32)
    shape = "shape" if layers == 32 else f"shape with {layers} layers"
    model = result.get("model") or f"Llama-3.1-8B's {shape}, random weights"
    lines = [
        f"{result['device']}, {model}; {versions(result)}. "
        f"`{result['command']}`: {result['questions']} questions about {result['documents']} "
        f"documents of {result['document_tokens']} tokens, {result['answer_tokens']} tokens each.",
        "",
        *table(
            "KV cache, part of the documents | questions | seconds | tokens/s "
            "| prompt tokens from the cache",
            (
                (
                    row["cache"],
                    row["run"],
                    f"{row['seconds']:.1f}",
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['cached_share']:.0%}",
                )
                for row in sorted(result["rows"], key=lambda row: row["cache"])
            ),
        ),
    ]
    if ratios := result.get("ratios"):
        names = [key for key in ratios[0] if key not in ("cache", "repeats")]
        lines += [
            "",
            "Seconds over seconds, the fastest of the repeats; noise: the slowest repeat of any "
            "run over its fastest.",
            "",
            *table(
                f"KV cache | repeats | {' | '.join(names)}",
                (
                    (of["cache"], of["repeats"], *(f"{of[key]:.3f}" for key in names))
                    for of in sorted(ratios, key=lambda of: of["cache"])
                ),
            ),
        ]
    return "\n".join(lines)


def arrivals_table(result: Result) -> str:
    """Time to first token and throughput under Poisson arrivals, with and without order."""
    used = result["settings"]
    shape = f"Llama-3.1-8B's shape with {used['layers']} layers, random weights"
    model = result.get("model") or shape

    def pair(row: Result, figure: str, form: str) -> str:
        return " / ".join(format(row[order][figure], form) for order in ("off", "prefix"))

    lines = table(
        "workload | load | requests, turns | median | 99th percentile | ratio (noise) "
        "| tokens/s | ratio (noise) | prompt tokens from the cache | ",
        (
            (
                row["workload"],
                "all at once" if row["rate"] is None else f"{row['load']} ({row['rate']:.1f}/s)",
                f"{row['requests']}, {len(row['off']['first_token_p99_of_turns'])}",
                pair(row, "first_token_p50", ".2f"),
                pair(row, "first_token_p99", ".2f"),
                f"{row['p99_ratio']:.2f} ({row['p99_noise']:.2f})",
                pair(row, "tokens_per_second", ".0f"),
                f"{row['throughput_ratio']:.3f} ({row['throughput_noise']:.3f})",
                pair(row, "cached_share", ".0%"),
                row["verdict"],
            )
            for row in result["rows"]
        ),
    )
    how = (
        f"{result['device']}, {model}; {versions(result)}. `{result['command']}`: a KV cache for "
        f"{used['cache']} of the smaller "
        "workload's distinct tokens. Seconds to the first token in vLLM's order / with "
        "`VLLM_PREFIXSHARE_ORDER=prefix`, of the requests of all turns; noise: the largest figure "
        "of a turn over the smallest of the same order."
    )
    return "\n".join([how, "", *lines])


def context_parallel_table(result: Result) -> str:
    """Decode context parallelism in an engine, compared with one GPU."""
    used = result["settings"]
    lines = table(
        "GPUs |  | ms | floor | attention | of half of one GPU's | share factor",
        (
            (
                row["gpus"],
                row["engine"],
                *(f"{row[key]:.2f}" for key in ("ms", "floor_ms", "attention_ms")),
                f"{result['of_half'][row['engine']]:.3f}" if row["gpus"] > 1 else "-",
                f"{row['share_factor']:.1f}" if row["share_factor"] else "-",
            )
            for row in sorted(result["rows"], key=lambda row: row["gpus"])
        ),
    )
    how = (
        f"{result['gpu']}, {result['model']}; {versions(result)}. `{result['command']}`: "
        f"{used['requests']} requests on one document of {used['document']} tokens, runs of "
        f"{used['interleave']}. Milliseconds per output token while all requests decode; the "
        "floor has hardly any context, attention is the difference."
    )
    return "\n".join([how, "", *lines])
