"""DeFT, both versions of the paper: tables 6, 7, 12, 14, 16 and 17, figures 13, 14, 15 and 18."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import StatisticsError, correlation, pstdev

import numpy as np

from benchmarks.papers import counters, recordings
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
from benchmarks.papers.flashforge import against, methods_of, ratios, time_series, time_table
from benchmarks.papers.token_trees import kind_of_tree, token_tree
from benchmarks.support.published import table
from benchmarks.support.trees import Workload, forest, tree
from benchmarks.support.workload_sets import (
    deft,
    recorded_step,
    recorded_tree,
    token_tree_parents,
)

accounting = Lazily("accounting")
methods = Lazily("methods")
timing = Lazily("timing")

#: Llama-3-8B: heads, layers, query heads for a KV head
HEADS, LAYERS, GROUP = (32, 8), 32, 4
WIDTHS = (20, 30, 50)
#: few-shot prompting: prompt, tokens that are decoded
PROMPT, DECODED = 4000, 400
TOKEN_TREES = (32, 64, 128, 256)
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
PROMPTS = (1000, 5000, 10000, 20000)
#: tokens that the prompt of sorting is padded to; the first stands for its own, about as many
PADDED = (1000, 5000, 8000, 10000)
#: steps of sorting that are timed
ITERATIONS = 24
#: accepted lengths of a token-tree run in miniature
ACCEPTED = [1, 4, 2]
#: queries of a speculation on one prompt: a request with a token of its own for each
SPECULATION = f"1,64_{PROMPT},1"
#: counted and published figures that differ by no more are equal; half of the last published digit
EXACT, HALF_DIGIT = 0.001, 0.005
#: a recorded run in miniature: a prompt, and two thoughts that grow from it
TWO_THOUGHTS = [
    {"id": 0, "start": -99, "end": 0, "children": [1, 2]},
    {"id": 1, "start": 1, "end": 40, "children": []},
    {"id": 2, "start": 1, "end": 24, "children": []},
]
#: the paper's terabytes (table 12 of the first version, 17 of the second): flash-decoding, DeFT,
#: and Medusa's partial results. Of stars: ``KV_IO`` of the published runs with 1016 tokens of
#: prompt (``ref_data``), Radix Attention and DeFT-Flatten.
PUBLISHED: dict[str, tuple[float, ...]] = {
    "few-shot 20": (17.62, 1.68, 1.05),
    "few-shot 30": (26.43, 2.10, 1.98),
    "few-shot 50": (44.05, 2.94, 4.61),
    "sorting": (59.96, 12.40, 3.69),
    "document merging": (39.74, 10.57, 3.24),
    "keyword": (4.68, 0.58, 0.18),
    "set intersection": (7.01, 1.04, 0.27),
    "token tree 32": (128.72, 4.10, 4.03),
    "token tree 64": (255.16, 4.11, 8.33),
    "token tree 128": (522.05, 4.16, 16.77),
    "token tree 256": (1044.10, 4.35, 34.70),
    "star of 32": (93.735463419904, 2.953726394368),
    "star of 64": (187.470926839808, 2.97900965888),
    "star of 128": (374.941853679616, 3.029576187904),
    "star of 256": (749.883707359232, 3.130709245952),
}
#: tasks of DeFT's recordings, by the names of their files
TASKS = {
    "sorting128ToT": "sorting",
    "docmergeToT": "document merging",
    "keywordToT": "keyword",
    "set128ToT": "set intersection",
}


def per_kind(counted: dict[str, int], scale: int) -> dict[str, int]:
    """The bytes among the counted, times ``scale``."""
    kinds = ("kv", "walked", "partial", "queries", "outputs", "masks")
    return {kind: counted[kind] * scale for kind in kinds} | {"row_tiles": counted["row_tiles"]}


def by_way(w: Workload, grown: Iterable[int], scale: int) -> dict[str, dict[str, int]]:
    """``per_kind`` of each way to plan, summed over the steps of ``grown``."""
    return {
        m.title: per_kind(accounting.count(m, w, HEADS, grown), scale)
        for m in (methods.OURS, methods.DEFT_NODE_CHUNK, methods.DEFT_FLATTEN)
    }


def medusa_bytes(queries: int, tree_tokens: int) -> dict[str, int]:
    """Partial results and mask of tree attention in Medusa (table 4, or 12): products, scaled,
    masked and their softmax written and read for each head, and a dense mask of two bytes.
    """
    scores = queries * tree_tokens * 2
    return {"medusa partial": 8 * scores * HEADS[0] * LAYERS, "medusa mask": scores * LAYERS}


def few_shot(width: int, prompt: int, decoded: int) -> Figures:
    """Bytes of decoding ``decoded`` tokens of ``width`` samples of one prompt, all layers."""
    start = accounting.with_room(tree(f"1,{width}_{prompt},{decoded + 1}"), decoded)
    token = accounting.kv_token_bytes(HEADS) * LAYERS
    grown = range(decoded)
    own = width * sum(1 + step for step in grown)
    tokens = prompt * decoded + own
    return {
        "unshared": (width * prompt * decoded + own) * token,
        "distinct": tokens * token,
        **medusa_bytes(width, tokens),
        **by_way(start, grown, LAYERS),
    }


def verified(parents: list[int], context: list[int]) -> Figures:
    """Bytes of verifying a token tree in one request at every step, all layers.

    Args:
        parents: of each token of the tree, -1 for the root.
        context: tokens in the cache before the tree, at each step.
    """
    size, depths = len(parents), []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    last = context[-1] + size
    tree_of_tokens = np.array(parents, np.int32)
    end = forest("last", [-1], [last], query_len=size, query_parents=tree_of_tokens)
    grown = [tokens - context[0] for tokens in context]
    ways = by_way(accounting.with_room(end, grown[-1]), grown, LAYERS)
    return {**drafted(size, context, sum(depths)), **ways}


def star(size: int, context: list[int]) -> Figures:
    """As ``verified``; the form that DeFT's own programs give a token tree (``build_tree_SD``):
    as many requests as tokens, each with one token after the context. Accepted tokens become part
    of the context, so every step is planned anew.
    """
    of_way: dict[str, Counter[str]] = defaultdict(Counter)
    for tokens in context:
        for title, counted in by_way(tree(f"1,{size}_{tokens},1"), (0,), LAYERS).items():
            of_way[title].update(counted)
    for counted in of_way.values():
        counted["row_tiles"] = 1
    return {**drafted(size, context, size), **{m: dict(c) for m, c in of_way.items()}}


def drafted(size: int, context: list[int], depths: int) -> Figures:
    """Bytes of all steps of a token tree's run under any plan.

    Args:
        depths: sum over the tree's tokens of their depths, the root's being 1.
    """
    tokens = sum(context) + size * len(context)
    token = accounting.kv_token_bytes(HEADS) * LAYERS
    return {
        "steps": len(context),
        "unshared": (size * sum(context) + depths * len(context)) * token,
        "distinct": tokens * token,
        **medusa_bytes(size, tokens),
    }


def recorded(file: Path) -> Figures:
    """Bytes of decoding a recorded tree of thoughts at every step: the mean of the runs that DeFT
    averages. Tokens are counted one by one, the plans' KV in whole blocks.
    """
    total: Counter[str] = Counter()
    of_way: dict[str, Counter[str]] = defaultdict(Counter)
    runs = recordings.complete_runs(file)
    for nodes in runs:
        for steps in recordings.step_ranges(nodes):
            end = recorded_step("last of equal steps", nodes, steps.last, 16)
            start = accounting.with_room(end, steps.num_steps - 1)
            grown = range(steps.num_steps)
            growth = start.num_reqs * sum(grown)
            tokens = steps.num_steps * sum(recorded_tree(nodes, steps.first)[1]) + growth
            total["steps"] += steps.num_steps
            total["unshared"] += steps.num_steps * int(start.seq_lens.sum()) + growth
            total["distinct"] += tokens
            total.update(medusa_bytes(start.num_reqs, tokens))
            for title, counted in by_way(start, grown, LAYERS).items():
                of_way[title].update(counted)
    for kind in ("unshared", "distinct"):
        total[kind] *= accounting.kv_token_bytes(HEADS) * LAYERS
    means = {kind: n // len(runs) for kind, n in total.items()}
    for counted in of_way.values():
        counted["row_tiles"] = len(runs)  # one query each: one tile of rows
    of_means = {m: {k: n // len(runs) for k, n in c.items()} for m, c in of_way.items()}
    return {"runs": len(runs), **means, **of_means}


def count_tasks(setting: Setting) -> Iterator[Point]:
    shots = ((4, 64, 20),) if setting.tiny else ((w, PROMPT, DECODED) for w in WIDTHS)
    for width, prompt, decoded in shots:
        yield Point(f"few-shot {width}", partial(few_shot, width, prompt, decoded))
    for parents, context in token_tree_runs(setting):
        size = len(parents)
        yield Point(f"token tree {size}", partial(verified, parents, context))
        yield Point(f"star of {size}", partial(star, size, context))
    folder = None if setting.tiny else setting.recordings
    for file in sorted(folder.glob("*ToT.json")) if folder else ():
        yield Point(TASKS.get(file.stem, file.stem), partial(recorded, file))


def token_tree_runs(setting: Setting) -> Iterator[tuple[list[int], list[int]]]:
    """Parents of the tokens and contexts of the steps of each published token-tree run; of a
    miniature's.
    """
    if setting.tiny:
        yield [-1, 0, 0, 1], recordings.contexts(ACCEPTED)[:3]
        return
    for size, file in recordings.token_tree_files(setting.recordings).items():
        run = json.loads(file.read_text())
        parents = token_tree_parents(run["Tree_Structure"])
        if size in TOKEN_TREES:
            yield parents.tolist(), recordings.contexts(run["Records"][0]["Accept_length"])


def tera(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:.2f}" if num_bytes >= 1e10 else f"{num_bytes / 1e12:.4f}"


def tasks_sentence(results: Results) -> str:
    cut = {n: 1 - f["ours"]["kv"] / f["unshared"] for n, f in results.items()}
    partial = max(f["ours"]["partial"] / f["distinct"] for f in results.values())
    walked = max(f["ours"]["row_tiles"] for f in results.values())
    off = {n: deviation(n, f) for n, f in results.items() if n in PUBLISHED}
    exact = [n for n, x in off.items() if x <= EXACT]
    more = [f"{n} by {x:.0%}" for n, x in off.items() if x > EXACT]
    return (
        f"KV of flash-decoding and of DeFT equal to {EXACT:.1%} in {len(exact)} of {len(off)} rows"
        f"{', off in ' if more else ''}{', '.join(more)}; ours reads {min(cut.values()):.1%} to "
        f"{max(cut.values()):.2%} less KV than flash-decoding; "
        f"partial results at most {partial:.1%} of the distinct KV; the largest token tree's KV is "
        f"walked by {walked} thread blocks, from memory once"
    )


def deviation(name: str, figures: Figures) -> float:
    """By how much the counted KV of flash-decoding and of DeFT differs from the published one: the
    larger fraction. Half of the last published digit is no difference.
    """
    counted = (figures[kind] * GROUP / 1e12 for kind in ("unshared", "distinct"))
    pairs = zip(counted, PUBLISHED[name][:2], strict=True)
    return max(max(0.0, abs(ours - theirs) - HALF_DIGIT) / theirs for ours, theirs in pairs)


def tasks_table(results: Results) -> list[str]:
    lines = []
    for name, f in results.items():
        paper = PUBLISHED.get(name)
        entries = [tera(f["unshared"] * GROUP), tera(f["distinct"] * GROUP)]
        if paper:
            entries = [f"{x} ({y:.2f})" for x, y in zip(entries, paper[:2], strict=True)]
        medusa = tera(f["medusa partial"] + f["medusa mask"])
        medusa += f" ({paper[2]:.2f})" if paper and len(paper) > 2 else ""
        ours, chunk, flat = (f[m] for m in ("ours", "DeFT-Node-Chunk", "DeFT-Flatten"))
        lines.append(
            (
                name,
                *entries,
                medusa,
                *(tera(ours[kind]) for kind in ("kv", "walked", "partial", "masks")),
                *(
                    " + ".join(tera(x[kind]) for kind in ("kv", "partial", "masks"))
                    for x in (chunk, flat)
                ),
            )
        )
    return [
        "TB of a whole decoding, 32 layers; in brackets the paper's, and for stars `KV_IO` of "
        "DeFT's published runs. The first columns count the KV once for each query head, as the "
        "paper does, ours and the dividers of DeFT once for each KV head, a fourth. Medusa's "
        'partial results and masks are by the paper\'s formula. "Walked" counts the KV once for '
        "each tile of query rows that loads it.",
        "",
        *table(
            "task | flash-decoding | distinct KV | Medusa, partial and mask | ours, KV | walked | "
            "partial | masks | Node-Chunk of 128, KV + partial + masks | Flatten, the same",
            lines,
        ),
    ]


def tasks_series(results: Results) -> Series:
    values = {}
    for name, f in results.items():
        medusa = f["distinct"] + f["medusa partial"] + f["medusa mask"]
        values[name] = {
            "ours": (f["ours"]["kv"] + f["ours"]["partial"]) / 1e12,
            "flash-decoding": f["unshared"] / 1e12,
            "Medusa": medusa / 1e12,
        }
    return Series("TB of a whole decoding, KV once for each KV head, and partial results", values)


def heads_of(setting: Setting) -> tuple[int, int]:
    return (8, 2) if setting.tiny else HEADS


def strategies() -> list:
    of_deft = (methods.DEFT_NODE, methods.DEFT_NODE_CHUNK, methods.DEFT_FLATTEN)
    return [methods.OURS, *(replace(m, kernel="auto") for m in of_deft)]


def time_strategies(setting: Setting) -> Iterator[Point]:
    """Few-shot prompting at three steps of the 400, with the heads of three models."""
    specs = [f"1,{w}_{PROMPT},{step}" for step in (400, 16, 200) for w in (50, 20, 30)]
    heads: tuple[tuple[int, int], ...] = (HEADS, (32, 32), (64, 8))
    if setting.tiny:
        specs, heads = ["1,4_128,20"], ((8, 2),)
    ways = [*strategies(), methods.FLASH_DECODING]
    for spec, shape in product(specs, heads):
        run = partial(timing.time_methods, setting, tree(spec), shape, ways)
        yield Point(f"few-shot {spec}, {shape[0]}:{shape[1]}", run)


def time_recorded(setting: Setting) -> Iterator[Point]:
    """Steps of recorded trees of thoughts: two large runs of each file at four steps."""
    if setting.tiny:
        steps = [recorded_step("two thoughts", TWO_THOUGHTS, 24, 16)]
    else:
        steps = list(deft(16, setting.recordings)) if setting.recordings else []
    ways = [*strategies(), methods.FLASH_DECODING]
    for w in steps:
        yield Point(w.name, partial(timing.time_methods, setting, w, heads_of(setting), ways))


def sorting_run(setting: Setting) -> list[dict] | None:
    """Nodes of the largest recorded run of sorting; a miniature's; None without the recording."""
    if setting.tiny:
        return TWO_THOUGHTS
    file = setting.recordings / "sorting128ToT.json" if setting.recordings else None
    if not (file and file.exists()):
        return None
    runs = [list(run["data"].values()) for run in json.loads(file.read_text())]
    return max(runs, key=len)


def with_prompt(nodes: list[dict], tokens: int) -> list[dict]:
    """The run with its prompt, which ends at step 0, padded to ``tokens``; unchanged if the prompt
    has as many.
    """
    prompts = [n["id"] for n in nodes if n["end"] == 0]
    start = 1 - tokens
    return [{**n, "start": min(n["start"], start)} if n["id"] in prompts else n for n in nodes]


def busiest_step(nodes: list[dict]) -> int:
    """The first of the steps at which most branches grow."""
    starts = sorted({n["start"] for n in nodes if n["start"] > 0})
    return max(starts, key=lambda step: sum(n["start"] <= step <= n["end"] for n in nodes))


def time_prompts(setting: Setting) -> Iterator[Point]:
    """The largest recorded run of sorting with longer prompts, at the step with most branches."""
    nodes = sorting_run(setting)
    if nodes is None:
        return
    step = busiest_step(nodes)
    flatten = next(m for m in strategies() if m.title == "DeFT-Flatten")
    ways = [methods.OURS, flatten, methods.FLASH_DECODING]
    for tokens in (200,) if setting.tiny else PADDED:
        w = recorded_step(f"prompt of {tokens}", with_prompt(nodes, tokens), step, 16)
        yield Point(w.name, partial(timing.time_methods, setting, w, heads_of(setting), ways))


def prompts_sentence(results: Results) -> str:
    over = {
        m: ", ".join(
            f"{name.removeprefix('prompt of ')} {ratios({name: f}, 'flash-decoding', m)[0]:.2f}"
            for name, f in results.items()
            if ratios({name: f}, "flash-decoding", m)
        )
        for m in ("DeFT-Flatten", "ours")
    }
    found = "; ".join(f"{m}: {x or 'no point ran'}" for m, x in over.items())
    return f"time of flash-decoding over each, by the tokens of the prompt: {found}"


def time_iterations(setting: Setting) -> Iterator[Point]:
    """Evenly spaced steps of the largest recorded run of sorting."""
    nodes, count = sorting_run(setting), 3 if setting.tiny else ITERATIONS
    if nodes is None:
        return
    final = max(node["end"] for node in nodes)
    for step in (final * n // (count + 1) for n in range(1, count + 1)):
        yield Point(f"step {step}", partial(time_iteration, setting, nodes, step))


def time_iteration(setting: Setting, nodes: list[dict], step: int) -> Figures:
    w = recorded_step(f"sorting, step {step}", nodes, step, 16)
    ways = [m for m in strategies() if m.title in ("ours", "DeFT-Node", "DeFT-Flatten")]
    figures = timing.time_methods(setting, w, heads_of(setting), ways)
    _, tokens = recorded_tree(nodes, step)
    return {**figures, "nodes": len(tokens), "spread": pstdev(tokens)}


def iterations_sentence(results: Results) -> str:
    spread, over = [], []
    for f in results.values():
        node, flat = (f["peers"][m] for m in ("DeFT-Node", "DeFT-Flatten"))
        if node["status"] == flat["status"] == "ok":
            spread.append(f["spread"])
            over.append(node["ms"] / flat["ms"])
    said = (
        f"time of DeFT-Node over DeFT-Flatten: {against(results, 'DeFT-Node', 'DeFT-Flatten')}; of "
        f"ours: {against(results, 'ours', 'DeFT-Flatten', '.2f')}"
    )
    try:
        return (
            f"{said}; correlation of the first with the spread of the recorded nodes' lengths "
            f"{correlation(spread, over):.2f}"
        )
    except StatisticsError:  # of one point, or of equal ones
        return said


def iterations_table(results: Results) -> list[str]:
    titles = methods_of(results)
    lines = []
    for name, f in results.items():
        found = (f["peers"][t] for t in titles)
        times = [f"{p['ms']:.4f}" if p["status"] == "ok" else p["status"] for p in found]
        lines.append((name, str(f["nodes"]), f"{f['spread']:.0f}", *times))
    return [
        "Milliseconds of one layer. Nodes and spread (standard deviation of their tokens): as "
        "recorded, of those that a growing branch reads.",
        "",
        *table(" | ".join(["step", "nodes", "spread", *titles]), lines),
    ]


def count_use(setting: Setting) -> Iterator[Point]:
    """How busy 64 queries keep the GPU, with Nsight Compute where it is installed."""
    if setting.tiny:
        yield Point("few-shot 1,4_128,1", lambda: toy_use(setting))
        return
    if setting.device != "cuda" or not counters.available():
        return
    names = (SPECULATION, f"64 tokens x 1, context {PROMPT}")
    for name in names:

        def run(name=name) -> Figures:
            ways = (methods.DEFT_NODE, methods.DEFT_FLATTEN, methods.OURS)
            layers = tuple((m.title, n, *HEADS) for n, m in product(names, ways))
            titles = [m.title for m in ways]
            found = counters.of_methods(counters.use, layers, titles, name, HEADS)
            if "failed" in found:
                return found
            w = tree(name) if name == SPECULATION else token_tree(64, 1, PROMPT, None)
            return {**timing.time_methods(setting, w, HEADS, ways), "use": found}

        yield Point(name, run)


def toy_use(setting: Setting) -> Figures:
    """A point of ``count_use`` without counters: parts of the roofline stand for both."""
    ways = (methods.DEFT_NODE, methods.DEFT_FLATTEN, methods.OURS)
    figures = timing.time_methods(setting, tree("1,4_128,1"), heads_of(setting), ways)
    parts = {t: 100 * p.get("roofline", 0.0) for t, p in figures["peers"].items()}
    return {**figures, "use": {t: {"compute": x, "memory": x} for t, x in parts.items()}}


def use_sentence(results: Results) -> str:
    found = []
    for title in next(iter(results.values()))["use"]:
        spans = []
        for kind in ("compute", "memory"):
            of = [f["use"][title][kind] for f in results.values()]
            spans.append(f"{min(of):.1f}% to {max(of):.1f}%")
        found.append(f"{title} {' and '.join(spans)}")
    over = against(results, "DeFT-Node", "DeFT-Flatten")
    return (
        f"throughput of the multiprocessors and of the memory: {'; '.join(found)}; time of "
        f"DeFT-Node over DeFT-Flatten: {over}"
    )


def use_table(results: Results) -> list[str]:
    lines = []
    for name, f in results.items():
        for title, used in f["use"].items():
            timed = f["peers"][title]
            us = f"{timed['ms'] * 1e3:.1f}" if timed["status"] == "ok" else timed["status"]
            entries = (f"{used[kind]:.1f}%" for kind in ("compute", "memory"))
            lines.append((name, title, us, *entries))
    header = "queries | method | microseconds | of the multiprocessors' peak | of the memory's peak"
    return ["One layer.", "", *table(header, lines)]


def strategies_sentence(results: Results) -> str:
    over = {
        m: against(results, m, "ours")
        for m in ("flash-decoding", "DeFT-Node", "DeFT-Node-Chunk", "DeFT-Flatten")
    }
    return "time over ours: " + "; ".join(f"{m} {x}" for m, x in over.items())


def time_over_steps(results: Results) -> list[str]:
    """``time_table``, and the sum over all steps of a decoding, on straight lines between the steps
    that were timed.
    """
    titles = methods_of(results)
    timed: dict[str, dict[int, list[float]]] = {}
    for name, f in results.items():
        spec, heads = name.removeprefix("few-shot ").rsplit(", ", 1)
        width, step = spec.split("_")[0].split(",")[1], int(spec.rsplit(",", 1)[1])
        found = [f.get("peers", {}).get(title, {}) for title in titles]
        if all(of.get("status") == "ok" for of in found):
            timed.setdefault(f"{width} samples, {heads}", {})[step] = [of["ms"] for of in found]
    lines = []
    for name, of_step in timed.items():
        steps = sorted(of_step)
        if len(steps) < 2:
            continue
        columns = np.array([of_step[step] for step in steps]).T
        every = np.arange(1, DECODED + 1)
        sums = [np.interp(every, steps, column).sum() for column in columns]
        lines.append((name, *(f"{ms:.1f} ({ms / sums[0]:.2f})" for ms in sums)))
    if not lines:
        return time_table(results)
    return [
        *time_table(results),
        "",
        f"Milliseconds of one layer over all {DECODED} steps, on straight lines between those that "
        f"were timed (over {titles[0]}).",
        "",
        *table(" | ".join(["prompt and heads", *titles]), lines),
    ]


def time_token_trees(setting: Setting) -> Iterator[Point]:
    """Token trees over contexts of their own; and the same tokens as requests of one query each
    that share nothing.
    """
    shapes = [(t, b, 2000) for b in (1, 8, 32) for t in TOKEN_TREES]
    shapes += [(t, 1, n) for n in PROMPTS for t in (32, 64)]
    for size, batch, context in [(32, 2, 100)] if setting.tiny else shapes:

        def run(size=size, batch=batch, context=context) -> Figures:
            w = token_tree(size, batch, context, setting.recordings)
            heads = heads_of(setting)
            ways = [methods.OURS, methods.PORTABLE]
            figures = timing.time_methods(setting, w, heads, ways)
            # each token of a tree as a request with the context and its own branch
            parents = [-1] * batch + [r for r in range(batch) for _ in range(size)]
            lengths = [context // 16 * 16] * batch + [16] * (batch * size)
            expanded = forest("expanded branches", parents, lengths)
            peers = figures["peers"]
            no_trees = [n for n in setting.peers if peers[n].get("reason") == "no token trees"]
            on_branches = replace(setting, peers=tuple(no_trees))
            branches = timing.time_methods(on_branches, expanded, heads, [methods.FLASH_DECODING])
            peers["expanded branches"] = branches["peers"].pop("flash-decoding")
            for name in no_trees:
                del peers[name]
                peers[f"{name}, expanded branches"] = branches["peers"][name]
            figures["row_tiles"] = methods.planner_of(methods.OURS, w, heads)[1]
            return {"tree": kind_of_tree(size, setting.recordings), **figures}

        yield Point(f"{size} tokens x {batch}, context {context}", run)


def time_stars(setting: Setting) -> Iterator[Point]:
    """Token trees as DeFT's programs run them, at three steps of its published runs, and few-shot
    prompts of width 10; Medusa's attention as a peer.
    """
    first, last = recordings.PROMPT_TOKENS, recordings.MAX_TOKENS - 1
    specs = {
        f"star of {size}": [f"1,{size}_{n},1" for n in (first, (first + last) // 2, last)]
        for size in TOKEN_TREES
    }
    specs["few-shot 10"] = [f"1,10_{PROMPT},{step}" for step in (16, 200, DECODED)]
    if setting.tiny:
        specs = {"star of 4": ["1,4_100,1"]}
    setting = replace(setting, peers=tuple(dict.fromkeys((*setting.peers, "medusa"))))
    ways = [*strategies(), methods.FLASH_DECODING]
    for name, every in specs.items():
        for spec in every:
            run = partial(timing.time_methods, setting, tree(spec), heads_of(setting), ways)
            yield Point(f"{name}: {spec}", run)


def stars_sentence(results: Results) -> str:
    others = [n for n in methods_of(results) if n != "ours"]
    return "time over ours: " + "; ".join(f"{n} {against(results, n, 'ours')}" for n in others)


def count_walks(setting: Setting) -> Iterator[Point]:
    """Token trees of up to eight tiles of query rows, with Nsight Compute where it is installed."""
    if setting.device != "cuda" or setting.tiny or not counters.available():
        return
    shapes = tuple(product(TOKEN_TREES, (1, 8)))
    for size, batch in shapes:

        def run(size=size, batch=batch) -> Figures:
            ways = (methods.OURS, methods.PORTABLE)
            trees = [token_tree(*shape, PROMPTS[-1], None) for shape in shapes]
            layers = tuple((m.title, w.name, *HEADS) for w in trees for m in ways)
            w = trees[shapes.index((size, batch))]
            titles = [m.title for m in ways]
            found = counters.of_methods(counters.dram_bytes, layers, titles, w.name, HEADS)
            if "failed" in found:
                return found
            figures: Figures = {"distinct": accounting.distinct_bytes(w, HEADS)}
            for m in ways:
                row_tiles = methods.planner_of(m, w, HEADS)[1]
                figures[m.title] = {**found[m.title], "row_tiles": row_tiles}
            return figures

        yield Point(f"{size} tokens x {batch}, context {PROMPTS[-1]}", run)


def walks_sentence(results: Results) -> str:
    found = []
    for title in ("ours", "portable"):
        read = [f[title]["read"] / f["distinct"] for f in results.values()]
        tiles = max(f[title]["row_tiles"] for f in results.values())
        found.append(f"{title}, up to {tiles} tiles of query rows: {span(read, '.2f')}")
    return f"DRAM bytes read over the distinct KV: {'; '.join(found)}"


def walks_table(results: Results) -> list[str]:
    lines = []
    for name, f in results.items():
        entries = []
        for way in (f["ours"], f["portable"]):
            entries += [str(way["row_tiles"]), f"{mega(way['read'])} + {mega(way['written'])}"]
        lines.append((name, mega(f["distinct"]), *entries))
    return [
        "MiB of one layer: read + written.",
        "",
        *table(
            "token trees | distinct KV | tiles of rows, ours | ours | tiles of rows, portable "
            "| portable",
            lines,
        ),
    ]


def walks_series(results: Results) -> Series:
    values = {
        name: {
            "distinct KV": f["distinct"] / 2**20,
            **{t: (f[t]["read"] + f[t]["written"]) / 2**20 for t in ("ours", "portable")},
        }
        for name, f in results.items()
    }
    return Series("MiB of one layer, read and written", values)


def trees_table(results: Results) -> list[str]:
    """As ``time_table``; says whose the token trees are."""
    kinds = {n: f.get("tree") for n, f in results.items() if f["query_len"] > 1}
    quaternary = [name for name, kind in kinds.items() if kind == "quaternary"]
    lines = time_table(results)
    if None in kinds.values():
        lines[0] += " The run did not note whether its token trees are Medusa's."
    elif quaternary:
        lines[0] += f" Quaternary token trees: {'; '.join(quaternary)}."
    elif kinds:
        lines[0] += " The token trees are Medusa's."
    return lines


def verified_table(results: Results) -> list[str]:
    """As ``trees_table``; says what bounds ours where four tiles of rows or more load the KV of
    several token trees: with 512 rows to a token that is arithmetic.
    """
    parts, rates = [], []
    for f in results.values():
        ours = f["peers"]["ours"]
        if ours["status"] == "ok" and f["row_tiles"] >= 4 and f["batch"] >= 8:
            walked = f["row_tiles"] * f["kv_tokens"] * 2 * HEADS[1] * 128 * 2
            parts.append(ours["roofline"])
            rates.append(walked / ours["ms"] / 1e9)
    lines = trees_table(results)
    if parts:
        lines[0] += (
            " With four tiles of rows or more at batches of 8 and 32 ours reaches "
            f"{min(parts):.0%} to {max(parts):.0%} of its roofline, which there is the arithmetic; "
            f"for all tiles to load the KV takes {min(rates):.1f} to {max(rates):.1f} TB/s, mostly "
            "from the L2 cache, where the memory alone delivers 4.35."
        )
    return lines


def token_trees_sentence(results: Results) -> str:
    others = [n for n in methods_of(results) if n not in ("ours", "portable")]
    return "time over ours: " + "; ".join(f"{n} {against(results, n, 'ours')}" for n in others)


def chunk_workloads(setting: Setting) -> dict[str, Workload]:
    if setting.tiny:
        return {"few-shot 4": tree("1,4_128,16")}
    return {
        "few-shot 50": tree(f"1,50_{PROMPT},200"),
        "star of 64": tree(SPECULATION),
        "token tree 64": token_tree(64, 1, PROMPT, setting.recordings),
        "token tree 32 x 8": token_tree(32, 8, PROMPT, setting.recordings),
    }


def chunk_methods() -> list:
    """Both strategies of DeFT at each chunk size."""
    return [
        methods.Method(title(n), "auto", divider, options={"kv_chunk_size": n})
        for divider, title in (("deft_node_chunk", node_chunk), ("deft_flatten_chunk", flatten))
        for n in CHUNKS
    ]


def node_chunk(tokens: int) -> str:
    """Title of DeFT-Node-Chunk with chunks of so many tokens."""
    return f"{tokens} tokens"


def flatten(tokens: int) -> str:
    """Title of DeFT-Flatten with chunks of so many tokens."""
    return f"Flatten, {tokens} tokens"


def count_chunks(setting: Setting) -> Iterator[Point]:
    for name, w in chunk_workloads(setting).items():
        yield Point(name, partial(chunk_bytes, w))


def chunk_bytes(w: Workload) -> Figures:
    ways = [*chunk_methods(), methods.OURS]
    counted = {m.title: accounting.count(m, w, HEADS) for m in ways}
    return {"distinct": accounting.distinct_bytes(w, HEADS), **counted}


def chunks_sentence(results: Results) -> str:
    found, over = [], []
    for name, f in results.items():
        small, ours = (
            (f[m]["partial"] + f[m]["queries"]) / f["distinct"] for m in (node_chunk(128), "ours")
        )
        found.append(f"{name} {small:.0%} and {ours:.0%}")
        over += [moved(f[node_chunk(n)]) / moved(f[flatten(n)]) for n in CHUNKS]
    return (
        "queries and partial results over the distinct KV, Node-Chunk of 128 and ours: "
        f"{'; '.join(found)}; bytes of Node-Chunk over Flatten at equal sizes: {span(over, '.2f')}"
    )


def moved(counted: dict[str, int]) -> int:
    """KV, queries and partial results."""
    return counted["kv"] + counted["queries"] + counted["partial"]


def chunks_table(results: Results) -> list[str]:
    lines = []
    for name, f in results.items():
        for strategy, title in (("Node-Chunk", node_chunk), ("Flatten", flatten)):
            lines.append(
                (name, mega(f["distinct"]), strategy, *(three(f[title(n)]) for n in CHUNKS))
            )
        rest = ["-"] * (len(CHUNKS) - 1)
        lines.append((name, mega(f["distinct"]), "ours", three(f["ours"]), *rest))
    sizes = [f"{n} tokens" for n in CHUNKS]
    return [
        "MiB of one layer in one step: KV + queries + partial results, by the tokens of a chunk. "
        "Ours has no chunk size.",
        "",
        *table(" | ".join(["workload", "distinct KV", "strategy", *sizes]), lines),
    ]


def three(counted: dict[str, int]) -> str:
    return " + ".join(mega(counted[kind]) for kind in ("kv", "queries", "partial"))


def chunks_series(results: Results) -> Series:
    def value(counted: dict[str, int] | None) -> float:
        return (counted["queries"] + counted["partial"]) / 2**20 if counted else 0.0

    unit = "MiB of one layer in one step, queries and partial results"
    return by_chunk_size(unit, results, value)


def chunk_times_series(results: Results) -> Series:
    def value(peer: dict | None) -> float:
        return peer["ms"] if peer and peer["status"] == "ok" else 0.0

    peers = {name: f["peers"] for name, f in results.items()}
    return by_chunk_size("milliseconds of one layer", peers, value)


def by_chunk_size(unit: str, results: Results, value: Callable[[dict | None], float]) -> Series:
    """A group for each workload and strategy, with a value for each chunk size and for ours."""
    values = {}
    for name, f in results.items():
        for strategy, title in (("Node-Chunk", node_chunk), ("Flatten", flatten)):
            if any(title(n) in f for n in CHUNKS):
                of_size = {f"{n} tokens": value(f.get(title(n))) for n in CHUNKS}
                values[f"{name}, {strategy}"] = {**of_size, "ours": value(f.get("ours"))}
    return Series(unit, values)


def time_chunks(setting: Setting) -> Iterator[Point]:
    for name, w in chunk_workloads(setting).items():
        yield Point(name, partial(time_chunk, setting, w))


def time_chunk(setting: Setting, w: Workload) -> Figures:
    ways = [*chunk_methods(), *strategies()[3:], methods.OURS]
    figures = timing.time_methods(setting, w, heads_of(setting), ways)
    if w.query_parents is None:
        return figures
    return {"tree": kind_of_tree(w.query_len, setting.recordings), **figures}


def chunk_times_sentence(results: Results) -> str:
    """The fastest chunk of either strategy, and both at equal sizes where they ran."""
    parts = []
    for strategy, title in (("Node-Chunk", node_chunk), ("Flatten", flatten)):
        best = []
        for name, f in results.items():
            times = {n: f["peers"].get(title(n), {}) for n in CHUNKS}
            right = {n: p["ms"] for n, p in times.items() if p.get("status") == "ok"}
            if right:
                best.append(f"{name} {min(right, key=lambda n: right[n])}")
        if best:
            parts.append(f"fastest chunk of {strategy}, in tokens: {', '.join(best)}")
    over = [x for n in CHUNKS for x in ratios(results, node_chunk(n), flatten(n))]
    if over:
        parts.append(f"time of Node-Chunk over Flatten at equal sizes: {span(over, '.2f')}")
    ours = against(results, node_chunk(128), "ours")
    return "; ".join([*parts, f"time of Node-Chunk of 128 over ours: {ours}"])


EXPERIMENTS = (
    experiment(
        "deft-table-17",
        CPU,
        count_tasks,
        tasks_sentence,
        tasks_table,
        tasks_series,
        reads_recordings=True,
    ),
    experiment(
        "deft-table-17-dram",
        GPU,
        count_walks,
        walks_sentence,
        walks_table,
        walks_series,
        seconds=60 * counters.MINUTES,
        at_once=True,
    ),
    experiment(
        "deft-table-14",
        GPU,
        count_use,
        use_sentence,
        use_table,
        time_series,
        seconds=60 * counters.MINUTES,
        at_once=True,
    ),
    experiment(
        "deft-table-6", GPU, time_strategies, strategies_sentence, time_over_steps, time_series
    ),
    experiment(
        "deft-recorded",
        GPU,
        time_recorded,
        strategies_sentence,
        time_table,
        time_series,
        reads_recordings=True,
    ),
    experiment(
        "deft-table-7",
        GPU,
        time_prompts,
        prompts_sentence,
        time_table,
        time_series,
        reads_recordings=True,
    ),
    experiment(
        "deft-figure-13",
        GPU,
        time_iterations,
        iterations_sentence,
        iterations_table,
        time_series,
        reads_recordings=True,
    ),
    experiment(
        "deft-table-16",
        GPU,
        time_token_trees,
        token_trees_sentence,
        verified_table,
        time_series,
        reads_recordings=True,
    ),
    experiment("deft-stars", GPU, time_stars, stars_sentence, time_table, time_series),
    experiment(
        "deft-figure-15-bytes",
        CPU,
        count_chunks,
        chunks_sentence,
        chunks_table,
        chunks_series,
        reads_recordings=True,
    ),
    experiment(
        "deft-figure-15",
        GPU,
        time_chunks,
        chunk_times_sentence,
        trees_table,
        chunk_times_series,
        reads_recordings=True,
    ),
)
