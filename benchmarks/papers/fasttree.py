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
from benchmarks.support.published import table
from benchmarks.support.trees import Workload, tree
from benchmarks.support.workload_sets import ANCHORS

accounting = Lazily("accounting")
methods = Lazily("methods")
timing = Lazily("timing")

PAPER = "FastTree"
#: title of the method that the others are compared with
METHOD = "FastTree's divider"
#: one query head for a KV head, 4 and 16
HEADS = ((32, 8), (32, 32), (32, 2))
#: the tree that the text names, then those of the paper's benchmark script
NAMED = "1,10_4000,400"
#: Llama-2-7B and Mistral-7B
MODELS = {"Llama-2-7B": (32, 32), "Mistral-7B": (32, 8)}
#: 128 requests, half-way through 256 generated tokens. Nodes that the paper does not size: 60
#: tokens a question (GSM8K), 150 a shot with its answer, documents of 2000
WORKLOADS = {
    "A, multi-level system prompt": "1,4,16,32,128_459,38,584,2112,188",
    "B, few-shot": "1,8,128_3193,3000,188",
    "C, multi-chain reasoning": "1,32,128_3193,60,128",
    "D, multi-document QA": "2,8,32,128_2000,2000,2000,188",
}


def trees(setting: Setting) -> list[str]:
    return ["1,4_64,16", "1,2,8_32,16,16"] if setting.tiny else [NAMED, *ANCHORS[:11]]


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


def count_series(results: Results) -> Series:
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
    chosen = {"tiny": "1,2,4_32,16,16"} if setting.tiny else WORKLOADS
    models = {"tiny": (8, 2)} if setting.tiny else MODELS
    for (name, spec), (model, heads) in product(chosen.items(), models.items()):
        yield Point(f"{name}, {model}", partial(time_workload, setting, tree(spec), heads))


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
        "6.1",
        "figure 9: kernels, grouping and splitting",
        "FlashAttention takes 5.1 times as long on average, SGLang's Triton kernels 9.2, "
        "FlashInfer 4.2, DeFT 10.6, cascades 2.1; grouping gains up to 2.2 times, splitting up to "
        "1.9 (N=1,10, C=4000,400)",
        "The tree that the text names and those of the paper's benchmark script, with 1, 4 and 16 "
        "query heads for a KV head. FlashAttention is flash-decoding in our kernel; `--peers` adds "
        "others, and [the kernels of figure 9](#kernels-of-fasttrees-figure-9) are the paper's "
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
        time_series,
    ),
    Experiment(
        "fasttree-grouping",
        PAPER,
        "4.2",
        "algorithm 1 and equations 3 to 11: grouping, in bytes",
        "grouping trades KV that is read again for fewer partial results; no bytes are given",
        "Counted from plans as an H200 would have them, for the trees of figure 9. Edges are "
        "assigned by the paper's equations (`benchmarks/papers/padding.py`), or by our costs, "
        "which are an estimate: no table is shipped for the portable kernel.",
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
        "6.2",
        "figures 10 and 12: four workloads",
        "throughput over FlashInfer's backend 1.6 times (Llama-2-7B) and 1.9 times (Mistral-7B) on "
        "average",
        "One layer half-way through 256 generated tokens of 128 requests, heads of both models. "
        "Node sizes as in the text; where it has none, 60 tokens for a question, 150 for a shot, "
        "2000 for a document. The text does not say how often the trees of A and D branch.",
        GPU,
        time_workloads,
        workloads_sentence,
        "attention of a layer, not a whole engine; another GPU",
        time_table,
        time_series,
    ),
)

LEFT_OUT = (
    LeftOut(PAPER, "figures 2 and 11", "time of a whole engine, and SGLang with it: "
            "[the engine table](engine.md) has vLLM's"),
    LeftOut(PAPER, "SGLang's kernel as a baseline", "not installed on the GPU machine"),
)  # fmt: skip
