"""FlashForge: experiments of sections 5.2, 6.1, 6.2 and 6.3."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import fmean

from benchmarks.papers import counters, engine
from benchmarks.papers.engine import (
    engines_sentence,
    engines_series,
    engines_table,
    time_engines,
    time_sweeps,
)
from benchmarks.papers.experiment import (
    CPU,
    GPU,
    Figures,
    Lazily,
    Point,
    Results,
    Series,
    Setting,
    experiment,
    mega,
    span,
)
from benchmarks.support.published import table
from benchmarks.support.trees import Workload, forest, tree
from benchmarks.support.workload_sets import flashforge

accounting = Lazily("accounting")
estimator = Lazily("estimator")
methods = Lazily("methods")
reduction = Lazily("reduction")
timing = Lazily("timing")

#: the first is the paper's
HEADS = ((32, 32), (32, 8))
SWEEPS = ("length", "batch", "depth", "ratio", "shape")
#: the shared context of section 6.1, "120k"
LONG = 122_880
#: context of a request in the ablation (section 6.2), the levels it is divided over, and what a
#: level has in a miniature
CONTEXT, LEVELS, TINY = 200_000, 4, 64
SPLITS = (1, 2, 4, 8, 16, 32, 64)
#: points that one run of Nsight Compute counts: five workloads with both head shapes
PER_RUN = 10
#: flash-decoding in the default's kernel and in the portable one; the faster of both
BASELINES, FASTER = ("flash-decoding", "flash-decoding, portable"), "faster flash-decoding"
#: each node is one group, as in the paper; users' ``flashforge`` merges short nodes into
#: their children first (``PlannerConfig.grouping``)
FORGE, NO_GROUPING = "FlashForge's divider", {"grouping": False}
BOTH = "tree and division"
#: both, without the parallel reduction
SERIAL = f"{BOTH}, merged serially"
#: divider and sharing of each step
STEPS = {
    "no tree, undivided": ("deft_node", "never"),
    "tree": ("deft_node", "always"),
    "division": ("per_request", "never"),
    SERIAL: ("flashforge", "always"),
    BOTH: ("flashforge", "always"),
    "ours": (None, "always"),
}
NEITHER, *FURTHER = STEPS


def sweep_points(setting: Setting) -> Iterator[tuple[str, Workload, tuple[int, int]]]:
    """The 25 workloads of figure 5 with both head shapes; the first of each sweep come first."""
    if setting.tiny:
        for spec, heads in product(("1,2_128,32", "1,2,4_64,32,16"), ((4, 4), (8, 2))):
            yield f"depth: {spec}, {heads[0]}:{heads[1]}", tree(spec), heads
        return
    every = list(flashforge(16))
    order = sorted(range(len(every)), key=lambda i: (i % 5, i // 5))
    for i, heads in product(order, HEADS):
        yield f"{SWEEPS[i // 5]}: {every[i].name}, {heads[0]}:{heads[1]}", every[i], heads


def count_sweep(setting: Setting) -> Iterator[Point]:
    for name, w, heads in sweep_points(setting):
        yield Point(name, partial(counted_bytes, w, heads))


def counted_bytes(w: Workload, heads: tuple[int, int]) -> Figures:
    """Bytes of one layer in one step under each method's plan."""
    return {
        "requests": w.num_reqs,
        "distinct": accounting.distinct_bytes(w, heads),
        "unshared": accounting.unshared_bytes(w, heads),
        **{m.title: accounting.count(m, w, heads) for m in methods.COUNTED},
    }


def saved(figures: Figures, method: str = "ours") -> float:
    return figures["unshared"] / figures[method]["kv"]


def in_sweeps(results: Results) -> Results:
    """The points in the order of the sweeps, not in that of the run."""
    names = sorted(results, key=lambda name: SWEEPS.index(name.split(":")[0]))
    return {name: results[name] for name in names}


def count_sentence(results: Results) -> str:
    ratios = [saved(f) for f in results.values()]
    partial = {
        method: max(f[method]["partial"] / f["distinct"] for f in results.values())
        for method in ("ours", "flash-decoding")
    }
    return (
        f"flash-decoding's KV bytes over ours: {span(ratios)}; partial results add at most "
        f"{partial['ours']:.1%} of the distinct KV, flash-decoding's "
        f"{partial['flash-decoding']:.1%}"
    )


def count_table(results: Results) -> list[str]:
    titles = [t for t, f in next(iter(results.values())).items() if isinstance(f, dict)]
    lines = []
    for name, f in in_sweeps(results).items():
        counted = (f"{mega(f[t]['kv'])} + {mega(f[t]['partial'])}" for t in titles)
        lines.append((name, str(f["requests"]), mega(f["distinct"]), *counted, f"{saved(f):.1f}"))
    return [
        "MiB of one layer in one step: KV + partial results, written and read.",
        "",
        *table(
            " | ".join(
                [
                    *("workload and heads", "requests", "distinct KV"),
                    *titles,
                    "flash-decoding's KV / ours",
                ]
            ),
            lines,
        ),
    ]


def count_series(results: Results) -> Series:
    at = {n.rpartition(",")[0]: f for n, f in results.items() if n.endswith("32:8")}
    return Series(
        "MiB of one layer with 32:8 heads, KV and partial results",
        {
            name: {
                "ours": (f["ours"]["kv"] + f["ours"]["partial"]) / 2**20,
                "flash-decoding": (f["unshared"] + f["flash-decoding"]["partial"]) / 2**20,
            }
            for name, f in at.items()
        },
    )


def time_series(results: Results) -> Series:
    """Milliseconds of every method that ran."""
    values = {
        name: {t: p["ms"] for t, p in f.get("peers", {}).items() if p["status"] == "ok"}
        for name, f in results.items()
    }
    return Series("milliseconds of one layer", values)


def count_dram(setting: Setting) -> Iterator[Point]:
    """The workloads with Nsight Compute, where it is installed: a run of it for every five, because
    most of a run is its start.
    """
    if setting.device != "cuda" or setting.tiny or not counters.available():
        return

    titles = [m.title for m in methods.COUNTED]
    points = list(sweep_points(setting))
    for i, (name, w, heads) in enumerate(points):
        begin = i - i % PER_RUN
        layers = tuple(
            (t, of.name, *h) for _, of, h in points[begin : begin + PER_RUN] for t in titles
        )

        def run(w=w, heads=heads, layers=layers) -> Figures:
            found = counters.of_methods(counters.dram_bytes, layers, titles, w.name, heads)
            if "failed" in found:
                return found
            return {"distinct": accounting.distinct_bytes(w, heads), **found}

        yield Point(name, run)


def dram_sentence(results: Results) -> str:
    def total(f: Figures, way: str) -> int:
        return sum(f[way].values())

    ratio = [total(f, "flash-decoding") / total(f, "ours") for f in results.values()]
    over = [f["ours"]["read"] / f["distinct"] for f in results.values()]
    return (
        f"flash-decoding's DRAM bytes over ours: {span(ratio)}; ours reads {span(over, '.3f')} the "
        "distinct KV"
    )


def dram_table(results: Results) -> list[str]:
    titles = [t for t in next(iter(results.values())) if t != "distinct"]
    lines = []
    for name, f in in_sweeps(results).items():
        entries = (f"{mega(f[t]['read'])} + {mega(f[t]['written'])}" for t in titles)
        lines.append((name, mega(f["distinct"]), *entries))
    return [
        "MiB of one layer: read + written.",
        "",
        *table(" | ".join(["workload and heads", "distinct KV", *titles]), lines),
    ]


def dram_series(results: Results) -> Series:
    """Those with the paper's heads, as in figure 5."""
    ordered = in_sweeps(results)
    values = {
        name: {t: sum(found.values()) / 2**20 for t, found in f.items() if t != "distinct"}
        for name, f in ordered.items()
    }
    shown = {name: group for name, group in values.items() if name.endswith("32:32")}
    return Series("MiB of one layer, read and written", shown or values)


def time_sweep(setting: Setting) -> Iterator[Point]:
    flash_decoding = methods.FLASH_DECODING
    ways = (methods.OURS, flash_decoding, methods.FLASHFORGE, flash_decoding.on("portable"))
    for name, w, heads in sweep_points(setting):
        yield Point(name, partial(timing.time_methods, setting, w, heads, ways))


def ratios(results: Results, slow: str, fast: str) -> list[float]:
    """Times of ``slow`` over those of ``fast``, at the points where both ran."""
    found = []
    for f in results.values():
        one, other = (f.get("peers", {}).get(n, {}) for n in (slow, fast))
        if one.get("status") == other.get("status") == "ok":
            found.append(one["ms"] / other["ms"])
    return found


def against(results: Results, slow: str, fast: str, form: str = ".1f") -> str:
    found = ratios(results, slow, fast)
    return f"{span(found, form)}, over {len(found)} points" if found else "no point ran"


def with_faster_baseline(results: Results) -> Results:
    """The points with the faster of the two flash-decodings under ``FASTER``, where one ran."""
    found = {}
    for name, f in results.items():
        peers = f.get("peers", {})
        ran = [peers[t] for t in BASELINES if peers.get(t, {}).get("status") == "ok"]
        faster = {FASTER: min(ran, key=lambda p: p["ms"])} if ran else {}
        found[name] = {**f, "peers": {**peers, **faster}}
    return found


def time_sentence(results: Results) -> str:
    results = with_faster_baseline(results)
    parts = [
        "time of flash-decoding, in the faster of both kernels, over ours: "
        f"{against(results, FASTER, 'ours')}; over FlashForge's divider in the portable kernel: "
        f"{against(results, FASTER, FORGE)}"
    ]
    for shape in dict.fromkeys(name.rpartition(", ")[2] for name in results):
        of_shape = {n: f for n, f in results.items() if n.endswith(f", {shape}")}
        few = {n: f for n, f in of_shape.items() if not n.startswith("batch")}
        said = []
        if gains := ratios(few, FASTER, "ours"):
            said.append(
                f"{fmean(gains):.2f} in the arithmetic mean without the batch sweep and "
                f"{max(gains):.1f} at most"
            )
        if both := ratios(of_shape, "ours", FORGE):
            lost = [ratio for ratio in both if ratio > 1]
            how = f", by up to {max(lost) - 1:.0%}" if lost else ""
            said.append(
                f"slower than FlashForge's divider at {len(lost)} of {len(both)} points{how}"
            )
        if said:
            parts.append(f"ours with {shape} heads: {', '.join(said)}")
    return "; ".join(parts)


def methods_of(results: Results) -> list[str]:
    """Names of the methods under ``peers``, without those that the machine had at no point."""
    found = (peer for f in results.values() for peer in f.get("peers", {}).items())
    return list(dict.fromkeys(name for name, of in found if of["status"] != "unavailable"))


def time_table(results: Results) -> list[str]:
    """Milliseconds of every method."""
    titles = methods_of(results)
    lines = []
    for name, f in results.items():
        entries = []
        for title in titles:
            found = f.get("peers", {}).get(title, {})
            status = found.get("status", "-")
            entries.append(f"{found['ms']:.4f}" if status == "ok" else status)
        lines.append((name, *entries))
    return ["Milliseconds of one layer.", "", *table(" | ".join(["point", *titles]), lines)]


def time_sweep_table(results: Results) -> list[str]:
    return time_table(in_sweeps(results))


def time_sweep_series(results: Results) -> Series:
    """Those with the paper's heads, or a miniature's."""
    ordered = in_sweeps(results)
    return time_series({n: f for n, f in ordered.items() if n.endswith("32:32")} or ordered)


def ablation_trees(setting: Setting) -> Iterator[tuple[str, Workload, tuple[int, int]]]:
    """A full binary tree and a degenerate one, whose longest requests have the full context."""
    level = TINY if setting.tiny else CONTEXT // LEVELS // 16 * 16
    counts = ",".join(str(2**i) for i in range(LEVELS))
    # of two children only the left one has children
    chain = [-1, *(max(0, 2 * (i // 2) - 1) for i in range(2 * LEVELS - 2))]
    for heads in ((4, 4),) if setting.tiny else HEADS:
        shape = f"{heads[0]}:{heads[1]}"
        spec = f"{counts}_{','.join([str(level)] * LEVELS)}"
        yield f"balanced (binary), {shape}", tree(spec), heads
        degenerate = forest("degenerate", chain, [level] * len(chain))
        yield f"unbalanced (degenerate), {shape}", degenerate, heads


def time_steps(setting: Setting) -> Iterator[Point]:
    for name, w, heads in ablation_trees(setting):
        for kernel in ("hopper", "portable") if setting.device == "cuda" else ("torch",):
            ways = [
                methods.Method(
                    title, kernel, divider, share, serial=title == SERIAL, options=NO_GROUPING
                )
                for title, (divider, share) in STEPS.items()
            ]
            run = partial(timing.time_methods, setting, w, heads, ways)
            yield Point(f"{name}, {kernel}", run)


def steps_sentence(results: Results) -> str:
    ran = [step for step in FURTHER if ratios(results, NEITHER, step)]
    said = "time of neither over that of each step: " + (
        "; ".join(f"{step}: {against(results, NEITHER, step)}" for step in ran) or "no point ran"
    )
    if ratios(results, SERIAL, BOTH):
        parallel = against(results, SERIAL, BOTH, ".2f")
        said += f"; with tree and division, of merging serially over in parallel: {parallel}"
    return said


def steps_table(results: Results) -> list[str]:
    """As ``time_table``; says which steps are not in a run from before they were added."""
    there = {t for f in results.values() for t in f.get("peers", ())}
    lines = time_table(results)
    if missing := [step for step in STEPS if step not in there]:
        lines[0] += f" Not in this run: {'; '.join(missing)}."
    return lines


def time_granularity(setting: Setting) -> Iterator[Point]:
    specs = (
        ("1,4_128,32",) if setting.tiny else ("1,8_30720,256", "1,8_61440,256", "1,8_122880,256")
    )
    kernels = ("portable", "hopper") if setting.device == "cuda" else ("torch",)
    for spec, kernel in product(specs, kernels):
        ways = [
            methods.Method("ours", kernel),
            methods.Method(FORGE, kernel, "flashforge", options=NO_GROUPING),
            *(
                methods.Method(f"{n} pieces", kernel, "fixed", options={"num_splits": n})
                for n in (SPLITS[:3] if setting.tiny else SPLITS)
            ),
        ]
        heads = (8, 2) if setting.tiny else (32, 8)
        run = partial(timing.time_methods, setting, tree(spec), heads, ways)
        yield Point(f"{spec}, {kernel}", run)


def granularity_sentence(results: Results) -> str:
    best = []
    for f in results.values():
        fixed = [p["ms"] for t, p in f["peers"].items() if "pieces" in t and p["status"] == "ok"]
        ours = f["peers"][FORGE]
        if fixed and ours["status"] == "ok":
            best.append(min(fixed) / ours["ms"])
    undivided = against(results, "1 pieces", FORGE)
    return (
        "time of the best fixed number of pieces over FlashForge's divider: "
        f"{span(best, '.2f') if best else 'no point ran'}; of no division: {undivided}"
    )


def time_reduction(setting: Setting) -> Iterator[Point]:
    specs = {"1 request, many pieces": (1, 64), "8 requests": (8, 16), "64 requests": (64, 4)}
    for name, (requests, partials) in specs.items():
        yield Point(name, partial(reduction.time_merging, setting, requests, partials))


def reduction_sentence(results: Results) -> str:
    serial, levels = (against(results, way, "ours", ".2f") for way in ("serial", "two levels"))
    return f"time of a launch for each request over ours: {serial}; of two levels: {levels}"


def estimator_points(setting: Setting) -> Iterator[Point]:
    if setting.tiny:
        yield Point("estimate", estimator.toy_errors)
    elif setting.device == "cuda":
        for kernel in ("hopper", "portable"):
            yield Point(kernel, partial(estimator.errors, kernel))


def estimator_sentence(results: Results) -> str:
    return "; ".join(
        f"{kernel}: the interpolated time is off by {f['median']:.0%} in the median, "
        f"{f['largest']:.0%} at most"
        for kernel, f in results.items()
    )


def estimator_table(results: Results) -> list[str]:
    lines = []
    for kernel, f in results.items():
        for row, measured, estimated in zip(
            f["rows"], f["measured_us"], f["estimated_us"], strict=True
        ):
            entries = (f"{m:.1f} ({e:.1f})" for m, e in zip(measured, estimated, strict=True))
            lines.append((kernel, str(row), *entries))
    tokens = [str(n) for n in next(iter(results.values()))["tokens"]]
    return [
        "Microseconds of a tile, measured (interpolated from the cost table).",
        "",
        *table(" | ".join(["kernel", "query rows", *tokens]), lines),
    ]


def estimator_series(results: Results) -> Series:
    """Tiles of the fewest rows and of the most."""
    values = {}
    for kernel, f in results.items():
        for i, tokens in enumerate(f["tokens"]):
            values[f"{kernel}, {tokens} tokens"] = {
                f"{which} rows, {way}": f[f"{way}_us"][row][i]
                for which, row in (("fewest", 0), ("most", -1))
                for way in ("measured", "estimated")
            }
    return Series("microseconds of a tile", values)


EXPERIMENTS = (
    experiment(
        "flashforge-figure-5", GPU, time_sweep, time_sentence, time_sweep_table, time_sweep_series
    ),
    experiment("flashforge-figure-6", CPU, count_sweep, count_sentence, count_table, count_series),
    experiment(
        "flashforge-figure-6-dram",
        GPU,
        count_dram,
        dram_sentence,
        dram_table,
        dram_series,
        seconds=60 * counters.MINUTES,
    ),
    experiment(
        "flashforge-figure-7",
        GPU,
        time_engines,
        engines_sentence,
        engines_table,
        engines_series,
        seconds=60 * engine.MINUTES,
        at_once=True,
    ),
    experiment(
        "flashforge-figure-7-sweeps",
        GPU,
        time_sweeps,
        engines_sentence,
        engines_table,
        engines_series,
        seconds=60 * engine.MINUTES,
    ),
    experiment("flashforge-figure-8", GPU, time_steps, steps_sentence, steps_table, time_series),
    experiment(
        "flashforge-reduction", GPU, time_reduction, reduction_sentence, time_table, time_series
    ),
    experiment(
        "flashforge-figure-9", GPU, time_granularity, granularity_sentence, time_table, time_series
    ),
    experiment(
        "flashforge-table-2",
        GPU,
        estimator_points,
        estimator_sentence,
        estimator_table,
        estimator_series,
    ),
)
