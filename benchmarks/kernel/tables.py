"""Tables of the published results of one layer."""

from statistics import geometric_mean

from benchmarks.kernel.report import OURS, best_peer
from benchmarks.support import published
from benchmarks.support.published import Result, table, versions


def kernel_table(result: Result) -> str:
    """Every cell of a run."""
    titles = {n: t for n, t in result["titles"].items() if any_ran(result, n)}
    lines = table(
        f"workload | heads | batch | roof | {' | '.join(titles.values())} | gain",
        (
            (
                *(cell[key] for key in ("workload", "heads", "batch")),
                f"{cell['roof_ms']:.4f}",
                *(entry(cell["peers"][name]) for name in titles),
                gain(cell),
            )
            for cell in result["cells"]
        ),
    )
    return "\n".join([measured_how(result), "", *lines])


def invariant_table(result: Result) -> str:
    """What batch invariance costs one layer, in our kernel and in FlashAttention 3."""
    names, ratios, rows = ("ours", "invariant", "fa3", "fa3_invariant"), [], []
    for cell in result["cells"]:
        ours, invariant, _, fa3 = (cell["peers"][n]["ms"] for n in names)
        ratios.append((invariant / ours, fa3 / invariant))
        rows.append(
            (
                cell["workload"],
                cell["batch"],
                f"{cell['roof_ms']:.4f}",
                *(entry(cell["peers"][n]) for n in names),
                *(f"{ratio:.2f}" for ratio in ratios[-1]),
            )
        )
    means = (f"{geometric_mean(column):.2f}" for column in zip(*ratios, strict=True))
    header = (
        f"workload | batch | roof | {' | '.join(result['titles'][n] for n in names)} "
        "| invariant over default, ours | FA3 over ours, both invariant"
    )
    rows.append(("geometric mean", *[""] * 6, *means))
    return "\n".join([measured_how(result), "", *table(header, rows)])


def measured_how(result: Result) -> str:
    return (
        f"{result['gpu']}; {versions(result)}. "
        f"`{result['command']}`: milliseconds of one layer, median of "
        f"{result['repeats']} CUDA-graph replays with the L2 cache flushed (* without a graph), "
        f"{result['dtype']}{layer_extras(result)}, head_dim {result['head_dim']}, "
        f"blocks of {result['block_size']} "
        "tokens; in brackets the fraction of the roofline "
        f"({result['roofline']['TB/s']:.2f} TB/s, {result['roofline']['TFLOP/s']:.0f} TFLOP/s)."
    )


def layer_extras(result: Result) -> str:
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


def any_ran(result: Result, peer: str) -> bool:
    return any(cell["peers"][peer]["status"] != "unavailable" for cell in result["cells"])


def gain(cell: Result) -> str:
    best, ours = best_peer(cell), cell["peers"][OURS[0]]
    return f"{best[1] / ours['ms']:.2f}" if best and ours["status"] == "ok" else "-"


def entry(found: Result) -> str:
    """Milliseconds of a peer and its fraction of the roofline, or why there are none."""
    if found["status"] != "ok":
        return "-" if found["status"] == "unavailable" else str(found["status"])
    return f"{found['ms']:.4f}{'' if found['graph'] else '*'} ({found['roofline']:.0%})"


def kernel_short_table(result: Result) -> str:
    """Microseconds of one layer with 32:8 heads: ours, FlashAttention-3 and the fastest peer."""
    rows = []
    for cell in result["cells"]:
        found = best_peer(cell)
        if cell["heads"] != "32:8" or found is None:
            continue
        ms = (cell["roof_ms"], *(cell["peers"][name]["ms"] for name in (OURS[0], "fa3")))
        peer = f"{result['titles'][found[0]]}, {1e3 * found[1]:.1f}"
        rows.append((cell["workload"], *(f"{1e3 * x:.1f}" for x in ms), peer, gain(cell)))
    header = "workload | roofline | ours | FlashAttention-3 | fastest peer | gain over it"
    return "\n".join(table(header, rows))


def ablation_table(result: Result) -> str:
    how = (
        f"{result['device']}; {versions(result)}; {result['kernel']} kernel. "
        f"`{result['command']}`: time over that of the default plan, geometric mean over the "
        "workloads."
    )
    rows = ((name, f"{ratio:.2f}") for name, ratio in result["slowdown"].items())
    cells = (
        "Microseconds of each workload by the measured cost table and by the estimate (over the "
        "first), and the fastest other divider with its time over the default's:"
    )
    return "\n".join([how, "", *table("plan | time", rows), "", cells, "", *ablation_cells(result)])


def ablation_cells(result: Result) -> list[str]:
    """One line per workload: measured against estimated costs, and who is faster."""
    lines = []
    for spec, found in result["trees"].items():
        ms = {name: cell["ms"] for name, cell in found.items() if "ms" in cell}
        entries = []
        for plan in ("default", "flashforge"):
            measured = ms["default" if plan == "default" else "divider flashforge"]
            estimated = ms[f"{plan}, analytic cost"]
            entries += [
                f"{measured * 1e3:.1f}",
                f"{estimated * 1e3:.1f} ({estimated / measured:.2f})",
            ]
        of_default = ("default", "divider depth_first", "default, analytic cost")
        others = {name: t for name, t in ms.items() if name not in of_default}
        best = min(others, key=lambda name: others[name])
        lines.append((spec, *entries, f"{best}, {others[best] / ms['default']:.2f}"))
    return table(
        "workload | default, measured | default, estimated | flashforge, measured "
        "| flashforge, estimated | fastest other divider",
        lines,
    )


def resources_table(binaries: list[Result]) -> str:
    """One line per kernel, GPU, head_dim and kind of queries: the most that the binaries of all
    heads and dtypes use, under each Triton.
    """
    tritons = sorted({row["triton"] for row in binaries})
    found: dict[tuple, dict[str, list[Result]]] = {}
    for row in binaries:
        queries = "token tree" if row["tree"] else str(row["queries"])
        key = row["kernel"], float(row["capability"]), row["head_dim"], queries
        if row["kernel"] == "merge_states":  # its binaries use nearly the same
            key = *key[:2], 0, ""
        found.setdefault(key, {}).setdefault(row["triton"], []).append(row)

    def most(of: list[Result]) -> str:
        registers, spilled, shared = (
            max(row[what] for row in of) for what in ("registers", "spilled", "shared")
        )
        return f"{registers} / {spilled} / {shared / 1024:.0f} ({len(of)})"

    return "\n".join(
        table(
            f"kernel | GPU | head_dim | queries | {' | '.join(tritons)}",
            (
                (
                    *(kernel, gpu, dim or "all", queries or "all"),
                    *(most(of[t]) if t in of else "-" for t in tritons),
                )
                for (kernel, gpu, dim, queries), of in sorted(found.items())
            ),
        )
    )


def triton_table(second: Result) -> str:
    """The Hopper kernel under two Tritons, one after the other on one machine."""
    first = published.load("kernel_triton/3.6.0")
    rows = []
    for cell, other in zip(first["cells"], second["cells"], strict=True):
        old, new = (c["peers"]["ours"]["ms"] * 1e3 for c in (cell, other))
        times = (f"{us:.1f}" for us in (cell["roof_ms"] * 1e3, old, new))
        rows.append((cell["workload"], cell["heads"], *times, f"{new / old:.3f}"))
    how = (
        f"{first['gpu']}, torch {first['versions']['torch']}; `{first['command']}` under one "
        f"Triton after the other, and `{first['further']['command']}` on "
        f"{first['further']['date']}: microseconds."
    )
    header = "workload | heads | roof | 3.6.0 | 3.8.0 | 3.8.0 / 3.6.0"
    return "\n".join([how, "", *table(header, rows)])


def first_step_table(result: Result) -> str:
    """Short questions on a cached document: our two ways, FlashAttention-3, and host times."""
    rows = []
    for cell in result["cells"]:
        tokens, fa3 = cell["peers"]["tokens"], cell["peers"]["fa3"]
        rows.append(
            (
                cell["workload"],
                f"{cell['roof_ms']:.4f}",
                *(entry(cell["peers"][name]) for name in ("tokens", "ours", "fa3")),
                f"{fa3['ms'] / tokens['ms']:.2f}",
                f"{tokens['plan_ms']:.2f}",
                f"{tokens['host_ms']:.3f} / {fa3['host_ms']:.3f}",
            )
        )
    how = (
        f"{measured_how(result)} Plan: host time of a step's plan, in ms. Launch: host time of a "
        "layer outside of a CUDA graph, ours / FA3, in ms. Gain: FA3 over ours, each token a "
        "request."
    )
    header = "questions | roof | ours, each token | ours, each request | FA3 | gain | plan | launch"
    return "\n".join([how, "", *table(header, rows)])


def windows_table(_: Result) -> str:
    """Layers with sliding windows: a line for each layer, a column for each tree."""
    names = sorted(path.stem for path in published.FOLDER.glob("kernel_windows_*.json"))
    results = [published.load(name) for name in names]
    results.sort(key=lambda result: (-result["sliding_window"], -result["head_dim"]))
    trees = list(dict.fromkeys(cell["workload"] for r in results for cell in r["cells"]))
    window = "--sliding-window"
    options = (r["command"].split(f" {window} ")[1].split(" --out")[0] for r in results[1:])

    def times(result: Result, tree: str) -> str:
        found = (cell["peers"] for cell in result["cells"] if cell["workload"] == tree)
        if (peers := next(found, None)) is None:
            return ""
        ours, fa3 = (1e3 * peers[peer]["ms"] for peer in (OURS[0], "fa3"))
        return f"{ours:.1f} / {fa3:.1f} ({fa3 / ours:.2f})"

    lines = table(
        f"window, head_dim, heads | torch | Triton | {' | '.join(trees)}",
        (
            (
                f"{r['sliding_window']}, {r['head_dim']}, {r['cells'][0]['heads']}"
                f"{', sinks' if r['sinks'] else ''}{', fp8' if r['kv_dtype'] else ''}",
                *(r["versions"][name] for name in ("torch", "triton")),
                *(times(r, tree) for tree in trees),
            )
            for r in results
        ),
    )
    how = (
        f"{results[0]['gpu']}; {versions(results[0])} where no other is named. "
        + ", ".join([f"`{results[0]['command']}`", *(f"`{window} {of}`" for of in options)])
        + f": microseconds of one layer, ours / FA3 (ratio), medians of {results[0]['repeats']} "
        "CUDA-graph replays with the L2 cache flushed."
    )
    return "\n".join([how, "", *lines])


#: Rows of the table of peers: name, what it shares, its key in the kernel benchmark.
PEERS = (
    ("prefix caching, FlashAttention 3", "memory and prefill; decode reads per request", "fa3"),
    ("cascade attention, vLLM up to 0.31", "one prefix of all requests", "fa3_cascade"),
    ("FlashInfer multi-level", "levels of prefixes, which the caller plans", "flashinfer_cascade"),
    ("SGLang's RadixAttention", "memory and prefill; decode reads per request", None),
    ("PAT", "a prefix tree, without CUDA graphs, for an older vLLM", "pat"),
)


def peers_table(result: Result) -> str:
    """Other ways to share a prefix, compared with PREFIX_SHARE."""
    rows = ((name, shares, over_ours(result, peer)) for name, shares, peer in PEERS)
    how = (
        f"Geometric mean and range over {len(result['cells'])} cells, prefix trees by numbers of "
        f"heads, on one {result['gpu']}; above 1 PREFIX_SHARE is faster. A peer is left out where "
        "it cannot run a cell; SGLang's kernels could not be installed there. "
        "[Every cell and the command](benchmarks/published/kernel.md)."
    )
    lines = table(" | shares | time of one attention layer over ours", rows)
    return "\n".join([*lines, "", how])


def over_ours(result: Result, peer: str | None) -> str:
    """Geometric mean and range of a peer's time over ours, in the cells that the peer ran."""
    if peer is None:
        return "not measured"
    cells = [cell["peers"] for cell in result["cells"] if cell["peers"][peer]["status"] == "ok"]
    ratios = [peers[peer]["ms"] / peers[OURS[0]]["ms"] for peers in cells]
    mean, extremes = geometric_mean(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{mean:.2f} ({extremes}) in {len(ratios)} cells"
