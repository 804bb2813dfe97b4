"""FastTree: experiments of sections 4.2, 6.1 and 6.2."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

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
from benchmarks.papers.flashforge import against, time_series, time_table
from benchmarks.support.prompt_trees import ANSWER, FASTTREE
from benchmarks.support.published import table
from benchmarks.support.trees import Workload, forest, tree
from benchmarks.support.workload_sets import FASTTREE as TREES

accounting = Lazily("accounting")
methods = Lazily("methods")
timing = Lazily("timing")

PAPER = "FastTree"
#: title of the method that the others are compared with
METHOD = "FastTree's divider"
#: 1, 4 and 16 query heads for a KV head
HEADS = ((32, 32), (32, 8), (16, 1))
#: Llama-2-7B and Mistral-7B
MODELS = {"Llama-2-7B": (32, 32), "Mistral-7B": (32, 8)}


def trees(setting: Setting) -> list[str]:
    return ["1,4_64,16", "1,2,8_32,16,16"] if setting.tiny else [*TREES]


def ways() -> list:
    fasttree = methods.FASTTREE
    return [
        fasttree,
        replace(fasttree, title="without grouping", options={"grouping": False}),
        replace(fasttree, title="without splitting", divider="fixed", options={"num_splits": 1}),
        replace(fasttree, title="grouping by our costs", cost="table"),
        methods.OURS,
    ]


def count_trees(setting: Setting) -> Iterator[Point]:
    for spec, heads in product(trees(setting), ((8, 2),) if setting.tiny else HEADS):
        run = partial(counted_bytes, tree(spec), heads)
        yield Point(f"{spec}, {heads[0]}:{heads[1]}", run)


def counted_bytes(w: Workload, heads: tuple[int, int]) -> Figures:
    """Bytes of one layer in one step under each way to plan."""
    return {
        "unshared": accounting.unshared_bytes(w, heads),
        "distinct": accounting.distinct_bytes(w, heads),
        **{m.title: accounting.count(m, w, heads) for m in ways()},
    }


def moved(counted: dict[str, int]) -> int:
    """KV and partial results."""
    return counted["kv"] + counted["partial"]


def count_sentence(results: Results) -> str:
    over = {
        title: span([moved(f[title]) / moved(f[METHOD]) for f in results.values()], ".2f")
        for title in ("without grouping", "without splitting", "grouping by our costs", "ours")
    }
    return "KV and partial results over FastTree's divider: " + "; ".join(
        f"{title} {x}" for title, x in over.items()
    )


def count_table(results: Results) -> list[str]:
    titles = [t for t in next(iter(results.values())) if t not in ("unshared", "distinct")]
    lines = [
        (
            name,
            mega(f["distinct"]),
            *(f"{mega(f[t]['kv'])} + {mega(f[t]['partial'])} ({f[t]['tiles']})" for t in titles),
        )
        for name, f in results.items()
    ]
    return [
        "MiB of one layer in one step: KV + partial results (work tiles).",
        "",
        *table(" | ".join(["tree and heads", "distinct KV", *titles]), lines),
    ]


def one_shape(results: Results) -> Results:
    """The points with Mistral-7B's heads, or a miniature's: a chart has no room for all."""
    return {n: f for n, f in results.items() if n.endswith("32:8")} or results


def times_series(results: Results) -> Series:
    return time_series(one_shape(results))


def count_series(results: Results) -> Series:
    results = one_shape(results)
    values = {
        name: {t: moved(counted) / 2**20 for t, counted in f.items() if isinstance(counted, dict)}
        for name, f in results.items()
    }
    return Series("MiB of one layer, KV and partial results", values)


def time_trees(setting: Setting) -> Iterator[Point]:
    for spec, heads in product(trees(setting), ((8, 2),) if setting.tiny else HEADS):
        every = [*ways(), methods.FLASH_DECODING]
        run = partial(timing.time_methods, setting, tree(spec), heads, every)
        yield Point(f"{spec}, {heads[0]}:{heads[1]}", run)


def times_sentence(results: Results) -> str:
    over = "; ".join(
        f"{way} {against(results, way, METHOD, '.2f')}"
        for way in ("without grouping", "without splitting", "grouping by our costs")
    )
    return (
        f"time of flash-decoding over ours: {against(results, 'flash-decoding', 'ours')}; over "
        f"FastTree's divider in the portable kernel: {over}"
    )


def time_workloads(setting: Setting) -> Iterator[Point]:
    """Half-way through the answers of all requests."""
    chosen = {w.title: forest(w.title, *w.with_requests(ANSWER // 2)) for w in FASTTREE.values()}
    models = MODELS
    if setting.tiny:
        chosen, models = {"tiny": tree("1,2,4_32,16,16")}, {"tiny": (8, 2)}
    for (name, w), (model, heads) in product(chosen.items(), models.items()):
        yield Point(f"{name}, {model}", partial(time_workload, setting, w, heads))


def time_workload(setting: Setting, w: Workload, heads: tuple[int, int]) -> Figures:
    every = [methods.OURS, methods.FASTTREE, methods.FLASH_DECODING]
    figures = timing.time_methods(setting, w, heads, every)
    return {**figures, "distinct": accounting.distinct_bytes(w, heads)}


def workloads_sentence(results: Results) -> str:
    return f"time of flash-decoding over ours: {against(results, 'flash-decoding', 'ours')}"


EXPERIMENTS = (
    Experiment(
        "fasttree-figure-9",
        PAPER,
        "8 of 45 points have run, on an H200 instead of an H100; without SGLang's kernels",
        "6.1",
        "figure 9: kernels, grouping and splitting",
        "FlashAttention takes 5.1 times as long on average, SGLang's Triton kernels 9.2, "
        "FlashInfer 4.2, DeFT 10.6, cascades 2.1; grouping gains up to 2.2 times, splitting up to "
        "1.9 (N=1,10, C=4000,400)",
        "The 15 trees of the artifact's `kernel_bench/run_benchmark.sh`, with 32:32, 32:8 and 16:1 "
        "heads. The published run has four of them, with two head shapes. FlashAttention is "
        "flash-decoding in our kernel; `--peers` adds others, and "
        "[the kernels of figure 9](#kernels-of-fasttrees-figure-9) are the paper's "
        "own. Dividers in the portable kernel, edges by the paper's equations with its artifact's "
        "coefficients, or by our costs, which are an estimate where no table was measured for that "
        "kernel, as in the published runs.",
        GPU,
        time_trees,
        times_sentence,
        "another GPU; the baseline has this project's kernel, which uses tensor cores for groups "
        "of heads. The artifact's coefficients belong to its own kernel: with 16 query heads to a "
        "KV head they put short nodes to their children, where ours reads them faster apart",
        time_table,
        times_series,
    ),
    Experiment(
        "fasttree-grouping",
        PAPER,
        "",
        "4.2",
        "algorithm 1 and equations 3 to 11: grouping, in bytes",
        "grouping trades KV that is read again for fewer partial results; no bytes are given",
        "Counted from plans as an H200 would have them, for the 15 trees of figure 9 and its three "
        "head shapes; of blocks of 16 tokens, so that nodes of 8 are copies. Edges are "
        "assigned by the paper's equations (`benchmarks/papers/padding.py`), or by our costs, "
        "which are measured.",
        CPU,
        count_trees,
        count_sentence,
        "the paper counts no bytes",
        count_table,
        count_series,
    ),
    Experiment(
        "fasttree-figure-10",
        PAPER,
        "one layer instead of an engine; workloads A and D have not run",
        "6.2",
        "figures 10 and 12: four workloads",
        "throughput over FlashInfer's backend 1.6 times (Llama-2-7B) and 1.9 times (Mistral-7B) on "
        "average",
        "One layer half-way through 256 generated tokens, heads of both models, all requests at "
        "once: 512 of A, 128 of the others, as the artifact has them. A: four system prompts of "
        "three countries and three languages. D: 16 branches of 4 out of 17 documents, drawn as "
        "the artifact draws them. Node sizes as in the text; where it has none, 60 tokens for a "
        "question, 150 for a shot; the artifact's documents have 1100. The published run has B and "
        "C; engines run all four by `benchmarks.engine --workloads fasttree_a`.",
        GPU,
        time_workloads,
        workloads_sentence,
        "attention of a layer, not a whole engine; another GPU",
        time_table,
        time_series,
    ),
)

LEFT_OUT = (
    LeftOut(PAPER, "figures 2, 10 to 12 in an engine", "tokens per second and time by kernel: "
            "`python -m benchmarks.on_gpu figures engine_fasttree_llama2 engine_fasttree_mistral` "
            "measures them on two GPUs, and did not run yet", True),
    LeftOut(PAPER, "SGLang's kernels and engine as a baseline", "the wheel of its kernels "
            "could not be installed where these figures are measured"),
    LeftOut(PAPER, "multi-phase tiling", "a tile of our kernels has one height, where "
            "FastTree's first phase has 64 query rows and its second 16: the ablation cannot show "
            "what phases gain", True),
)  # fmt: skip
