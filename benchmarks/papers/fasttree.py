"""FastTree: experiments of sections 4.2, 6.1 and 6.2."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

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
from benchmarks.papers.flashforge import against, time_series, time_table
from benchmarks.support.prompt_trees import ANSWER, FASTTREE
from benchmarks.support.published import table
from benchmarks.support.trees import Workload, forest, tree
from benchmarks.support.workload_sets import FASTTREE as TREES

accounting = Lazily("accounting")
methods = Lazily("methods")
timing = Lazily("timing")

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
    experiment("fasttree-figure-9", GPU, time_trees, times_sentence, time_table, times_series),
    experiment("fasttree-grouping", CPU, count_trees, count_sentence, count_table, count_series),
    experiment(
        "fasttree-figure-10", GPU, time_workloads, workloads_sentence, time_table, time_series
    ),
)
