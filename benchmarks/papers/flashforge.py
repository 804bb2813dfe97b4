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
    Experiment,
    Figures,
    Lazily,
    LeftOut,
    Point,
    Results,
    Series,
    Setting,
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

PAPER = "FlashForge"
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
            counted = dict(zip(layers, counters.dram_bytes(layers), strict=True))
            found = {t: counted[(t, w.name, *heads)] for t in titles}
            if failed := [f for f in found.values() if "failed" in f]:
                return failed[0]
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
    Experiment(
        "flashforge-figure-5",
        PAPER,
        "another GPU; sizes that the paper leaves open are chosen here",
        "6.1",
        "figure 5: attention time over FlashDecoding's",
        "up to 3.6 times as fast, 1.9 on average",
        "25 workloads with 32:32 heads, as in the paper, and with 32:8. Sizes that the paper "
        "leaves open: two requests for sequence lengths, eight for the shared ratio, 256 private "
        "tokens for batches. FlashDecoding is our kernel under a plan that shares nothing and "
        "splits requests, so that nothing but the plan differs; the summary takes the faster of "
        "both kernels. FlashForge's divider, with a group for each node, runs in the portable "
        "kernel; where no table was measured for it, as in the published run, it plans by an "
        "estimate of the costs.",
        GPU,
        time_sweep,
        time_sentence,
        "another GPU; flash-decoding's requests read what they share at about the same time, and "
        "in part from the L2 cache: of the 120 GiB that they load of 1,64_122880,256 with 32:32 "
        "heads the memory delivers 53",
        time_sweep_table,
        time_sweep_series,
    ),
    Experiment(
        "flashforge-figure-6",
        PAPER,
        "counted from plans, where the paper has a GPU's counter; open sizes are chosen here",
        "6.1",
        "figure 6: global memory access",
        "14.66 to 409.80 times lower than FlashDecoding's, 120.85 on average",
        "Counted from plans as an H200 would have them: the KV bytes that thread blocks load, and "
        "partial results. No counter of a GPU.",
        CPU,
        count_sweep,
        count_sentence,
        "reading each shared token once saves at most as many times as there are requests, 2 to 64 "
        "in these workloads; the paper's counter must have seen more than the KV of its baseline, "
        "or other batch sizes, which it does not name",
        count_table,
        count_series,
    ),
    Experiment(
        "flashforge-figure-6-dram",
        PAPER,
        "another GPU; open sizes are chosen here",
        "6.1",
        "figure 6, by the GPU's counters",
        "14.66 to 409.80 times lower than FlashDecoding's, 120.85 on average",
        "The workloads of figure 5; a run that was stopped has some of them. Nsight Compute's DRAM "
        "bytes of the launches of a layer, caches empty before each; needs `ncu` on the path. "
        "FlashDecoding is our kernel under a plan that shares nothing, the dividers plan for the "
        "portable kernel.",
        GPU,
        count_dram,
        dram_sentence,
        "as above; the L2 cache serves some of the baseline's repeated reads",
        dram_table,
        dram_series,
        seconds=60 * counters.MINUTES,
    ),
    Experiment(
        "flashforge-figure-7",
        PAPER,
        "one of five sweeps; another model, GPU and vLLM",
        "6.1",
        "figures 7 and 1b: time per output token, and attention's part",
        "3.75 times as fast as vLLM 0.6.6 on average; attention takes 90% of the time with prompts "
        "of 100k tokens",
        "By `benchmarks.engine`: vLLM's own attention and this project's in the same engine, "
        "Llama-3.1-8B's shape, 32 requests on one document of 8k, 32k, 64k and 120k tokens; the "
        "paper gives no sizes. Attention's part is measured by a profiler. The published run is "
        "that of the command which the experiment starts; the times of all other kernels are in "
        "[the engine tables](engine.md#documents-of-8k-to-120k-tokens).",
        GPU,
        time_engines,
        engines_sentence,
        "another model, GPU and vLLM; all but attention is the same in both engines, so that the "
        "gain grows with the document",
        engines_table,
        engines_series,
        seconds=60 * engine.MINUTES,
        at_once=True,
    ),
    Experiment(
        "flashforge-figure-7-sweeps",
        PAPER,
        "has not run on a GPU yet",
        "6.1",
        "figure 7: batch, depth, shared ratio and shape",
        "3.75 times as fast as vLLM 0.6.6 on average",
        "As flashforge-figure-7, on the trees of figure 5 with a context of 24k tokens, so that "
        "the largest tree fits into the KV cache. Private parts are cached beforehand, and each "
        "request adds 64 tokens. `python -m benchmarks.on_gpu figures engine_flashforge` runs all "
        "in one pair of engines.",
        GPU,
        time_sweeps,
        engines_sentence,
        "another model, GPU and vLLM",
        engines_table,
        engines_series,
        seconds=60 * engine.MINUTES,
    ),
    Experiment(
        "flashforge-figure-8",
        PAPER,
        "another GPU; the paper's trees are not known",
        "6.2",
        "figure 8: ablation",
        "balanced tree: 578 ms without, 109.2 with the tree, 34.9 with division, 22.2 with all; "
        "unbalanced: 38.0, 16.7, 5.9, 3.5",
        "The context of 200k tokens is that of a request, over four levels; the paper does not "
        "give its trees' nodes. Steps: neither, tree, division, both (FlashForge's divider, with a "
        "group for each node), ours. "
        "Both run twice under the same plan: with partial results merged serially, in a launch for "
        "each request, one after the other; then as in all other steps, in one launch for all "
        "requests, which is the parallel reduction. flashforge-reduction times merging alone. With "
        "32:32 heads the Hopper kernel has four workers on an H200, so that there is little or "
        "nothing to divide.",
        GPU,
        time_steps,
        steps_sentence,
        "another GPU and other trees: the paper gives the context, not the nodes",
        steps_table,
        time_series,
    ),
    Experiment(
        "flashforge-reduction",
        PAPER,
        "the paper has no times of this part",
        "6.2",
        "figure 8: parallel combine kernels",
        "part of the step from the tree and division to all (22.2 ms, 3.5 ms)",
        "Merging alone, on random partial results of 32 heads: one launch for all requests, as "
        "ours is; one after the other for each request; and two levels in two launches, of which "
        "the first merges groups of eight partial results in parallel inside a request. Replays "
        "of a CUDA graph, before each of which the L2 cache is flushed; in a layer the launch "
        "before has just written what is merged.",
        GPU,
        time_reduction,
        reduction_sentence,
        "the paper does not time its combine kernels alone. Two levels are ahead where one request "
        "has 64 partial results; in a layer with eight KV heads it has 16 at most in the Hopper "
        "kernel, 32 in the portable one, and [inside layers](../../docs/notes/small-layers.md) "
        "groups were slower with fewer than 66. With one KV head (16:1) a request of 65536 tokens "
        "has 66 and 132 by an H200's plans; two levels were not timed in such a layer",
        time_table,
        time_series,
    ),
    Experiment(
        "flashforge-figure-9",
        PAPER,
        "another GPU; the paper's lengths are not known",
        "6.3",
        "figure 9: division granularity",
        "1.02 to 1.04 times as fast as the best fixed number of pieces, 3.20 to 4.39 times as fast "
        "as no division",
        "Eight requests on documents of 30k, 60k and 120k tokens; the paper does not give its "
        "sequence lengths. FlashForge's divider has a group for each node.",
        GPU,
        time_granularity,
        granularity_sentence,
        "another GPU; a worker is a thread block for each KV head, so that what is best depends on "
        "the heads",
        time_table,
        time_series,
    ),
    Experiment(
        "flashforge-table-2",
        PAPER,
        "another GPU, all of whose multiprocessors are busy",
        "5.2",
        "table 2: time of a thread block, and the estimator",
        "times of 7 x 6 shapes (1 to 100 queries, 512 to 16384 tokens); they are interpolated, the "
        "error is not given",
        "The cost table has 3 x 8 shapes, up to 128 rows and 8192 tokens. The paper's grid is "
        "measured and compared with what the table interpolates. Rows are multiples of four "
        "heads, and end at the 64 of the portable kernel's tiles. All multiprocessors are busy, as "
        "in a batch. In the published run the Hopper kernel's table is the one shipped then, "
        "which was older than the kernel; the portable kernel's was measured in the run.",
        GPU,
        estimator_points,
        estimator_sentence,
        "the paper's times are those of one thread block alone on the GPU, launch included",
        estimator_table,
        estimator_series,
    ),
)

LEFT_OUT = (
    LeftOut(PAPER, "section 4.3, tree reduction inside a request", "the kernel weights eight "
            "partial results of a request at a time, in their order; groups merged side by side "
            "were [measured](../../docs/notes/small-layers.md), gain inside a layer from 66 "
            "partial results of a request on, and were left out: a layer with eight KV heads has "
            "at most 16 in the Hopper kernel and 32 in the portable one. With one KV head (16:1) a "
            "request of 65536 tokens has 66 and 132. Merging alone, from an empty L2 cache, two "
            "launches gain at 64; they were not timed in a layer: see "
            "[flashforge-reduction](#flashforge-reduction)", True),
    LeftOut(PAPER, "figure 7, four of its five sweeps", "only the length of one document was "
            "swept in engines; [flashforge-figure-7-sweeps](#flashforge-figure-7-sweeps) has the "
            "others and did not run yet", True),
    LeftOut(PAPER, "section 5.2, measured cost tables of an H100", "tables of an H200 are shipped "
            "for both kernels; no H100 was there to measure (`python -m "
            "benchmarks.kernel.cost_tables`). The figures above are from before these tables. MLA "
            "plans were [no faster by measured prices](../../docs/notes/mla.md)", True),
    LeftOut(PAPER, "figure 10 on an H100", "these experiments ran on H200s alone; [the kernel "
            "tables](kernel.md#h100) have an H100", True),
    LeftOut(PAPER, "figure 10 on other GPUs", "only H100s and H200s can be had"),
)  # fmt: skip
