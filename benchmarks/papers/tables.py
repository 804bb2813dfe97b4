"""Tables of the papers' experiments."""

from statistics import fmean

from benchmarks.papers import EXPERIMENTS, LEFT_OUT
from benchmarks.papers.engine import from_engine
from benchmarks.papers.experiment import Experiment, Results, good_points, span
from benchmarks.papers.fasttree import TREES
from benchmarks.support import published
from benchmarks.support.charts import Chart, adaptive
from benchmarks.support.published import Result, table, versions

#: More points than these are left to the table.
MAX_POINTS = 36
#: what a time may be above another's before it counts as a loss
LOSS = 0.02
#: peers of FastTree's figure 9: its name for each, and how many times as long as FastTree it takes
FIGURE_9 = {
    "fa2": ("FlashAttention 2", 5.1),
    "fa3": ("FlashAttention 3", 5.1),
    "flashinfer": ("FlashInfer", 4.2),
    "deft": ("DeFT", 10.6),
    "flashinfer_cascade": ("CascadeAttn", 2.1),
}
#: experiments that another benchmark measures: its published results, and how to read them
OTHER_RUNS = {
    "flashforge-figure-7": ("engine_sweep", from_engine),
    "flashforge-figure-7-sweeps": ("engine_flashforge", from_engine),
}


def papers_table(paper: str, _: Result) -> str:
    """A paper's claims and the results here, then each experiment with its results."""
    of_paper = [e for e in EXPERIMENTS.values() if e.paper == paper]
    results = {e.name: ran(e.name) for e in of_paper}
    rows = []
    for e in of_paper:
        result = results[e.name]
        ours, reason = (e.ours(result["points"]), e.reason) if result else (not_run(e), "-")
        rows.append((f"[{e.item}](#{e.name}), section {e.section}", e.claim, ours, reason))
    lines = table(" | the paper | here | why they differ", rows)
    for e in of_paper:
        status = f"*{e.status[0].upper()}{e.status[1:]}.*"
        title = f"{e.item[0].upper()}{e.item[1:]}"
        lines += ["", f"### {e.name}", "", f"{title}. {status} {e.changed}", ""]
        result = results[e.name]
        if not result:
            lines.append(f"N{not_run(e)[1:]}.")
            continue
        points = f"{len(result['points'])} of {result['of_points']} points"
        lines.append(
            f"`{result['command']}`, {result['date']}, {result['device']}; {versions(result)}; "
            f"{recordings_of(e, result)}{points}."
        )
        if chart(e, result["points"]):
            lines += ["", f"![{e.item}](images/papers-{e.name}.svg)"]
        if e.table:
            lines += ["", *e.table(result["points"])]
    left = [f"- {x.item} ({x.status}): {x.why}." for x in LEFT_OUT if x.paper == paper]
    return "\n".join([*lines, "", "Not reproduced:", "", *left])


def recordings_of(experiment: Experiment, result: Result) -> str:
    """Which recordings the points were measured on, where they depend on them."""
    if not experiment.reads_recordings:
        return ""
    if "recordings" not in result:  # a run from before it was noted
        return "recordings of an unknown digest; "
    digest = result["recordings"]
    return f"recordings {digest}; " if digest else "no recordings; "


def losses_table(_: Result) -> str:
    """The experiments in which another way is ahead of the default by more than ``LOSS``."""
    rows = []
    for e in EXPERIMENTS.values():
        result = ran(e.name)
        over = losses(result["points"]) if result else {}
        if any(over.values()):
            lost = {name: of for name, of in over.items() if of}
            ratio, way, point = max((*max(of), name) for name, of in lost.items())
            rows.append((e.name, str(len(over)), str(len(lost)), f"{ratio:.2f}", way, point))
    header = "experiment | points | lost | at most | to | at"
    return "\n".join(table(header, rows))


def losses(points: Results) -> dict[str, list[tuple[float, str]]]:
    """For each point at which the default is timed: its time over each way that is ahead."""
    found = {}
    for name, f in points.items():
        right = {t: p["ms"] for t, p in f.get("peers", {}).items() if p["status"] == "ok"}
        if (ours := right.pop("ours", None)) is not None:
            found[name] = [(ours / ms, way) for way, ms in right.items() if ours > (1 + LOSS) * ms]
    return found


def fasttree_kernels_table(result: Result) -> str:
    """The kernels of FastTree's figure 9 on its trees, of those that all peers are timed on."""
    cells = [
        cell["peers"]
        for cell in result["cells"]
        if cell["workload"] in TREES and cell["heads"] in ("32:32", "32:8", "16:1")
    ]

    def over(slow: str, fast: str) -> str:
        both = [c for c in cells if c[slow]["status"] == c[fast]["status"] == "ok"]
        ratios = [c[slow]["ms"] / c[fast]["ms"] for c in both]
        return (
            f"{span(ratios)}, {fmean(ratios):.1f} in the arithmetic mean"
            if ratios
            else "no cell of both"
        )

    how = (
        f"`{result['command']}`, {result['date']}, {result['gpu']}; {versions(result)}; "
        f"{len(cells)} cells: {len(cells) // 3} of the artifact's {len(TREES)} trees with 32:32, "
        "32:8 and 16:1 heads. Each kernel is its project's own; the paper "
        "had FlashAttention 2.6.3 and FlashInfer 0.1.6 on an H100. Averages are geometric means; "
        "the paper does not name its own."
    )
    rows: list[tuple] = [
        (name, claim, over(peer, "fasttree"), over(peer, "ours"))
        for peer, (name, claim) in FIGURE_9.items()
        if peer in result["titles"]
    ]
    rows.append(("FastTree", 1, "-", over("fasttree", "ours")))
    header = "time of | over FastTree's, the paper | over FastTree's, here | over ours"
    return "\n".join([how, "", *table(header, rows)])


def ran(experiment: str) -> Result | None:
    """An experiment's published results without the points that failed or were wrong."""
    other, convert = OTHER_RUNS.get(experiment, ("", dict))
    if published.exists(f"papers/{experiment}"):
        result = published.load(f"papers/{experiment}")
    elif other and published.exists(other):
        result = convert(published.load(other))
    else:
        return None
    good = good_points(result["points"])
    return {**result, "points": good} if good else None


def not_run(experiment: Experiment) -> str:
    return f"not run yet: needs {experiment.needs}"


def chart(experiment: Experiment, results: Results) -> Chart | None:
    """Dots for the points of an experiment; None if there is nothing to draw."""
    if experiment.series is None:
        return None
    series = experiment.series(results)
    shown = {
        point: positive
        for point, group in list(series.values.items())[:MAX_POINTS]
        if (positive := {name: value for name, value in group.items() if value > 0})
    }
    more = len(series.values) - MAX_POINTS
    note = f"; {more} more points in the table" if more > 0 else ""
    unit = f"{series.unit}, logarithmic{note}"
    return Chart(experiment.item, unit, shown, logarithmic=True) if shown else None


def pictures() -> dict[str, str]:
    """File name and SVG text of each published experiment that has a chart."""
    results = {e: result for e in EXPERIMENTS.values() if (result := ran(e.name))}
    return {
        f"papers-{e.name}.svg": adaptive(drawn)
        for e, result in results.items()
        if (drawn := chart(e, result["points"]))
    }
