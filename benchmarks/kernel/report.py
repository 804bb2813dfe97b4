"""The text that ``benchmarks.kernel`` makes of its results."""

from collections import Counter
from statistics import geometric_mean

NAME, COLUMN = 42, 15
#: names of this project's own kernels among the peers; users get the first by default
OURS = ("ours", "tokens", "portable")
#: (shortest roof in milliseconds, fraction of the roof to reach, text)
ROOF_GOALS = ((0.1, 0.80, "of 0.1 ms or more"), (0.04, 0.65, "of 0.04 to 0.1 ms"))

Result = dict[str, object]
Cell = dict[str, object]


def header(result: Result) -> str:
    titles = "".join(f"{title:>{COLUMN}}" for title in result["titles"].values())
    return f"{'workload':{NAME}} {'heads':>6} {'batch':>5} {'share':>6} {'roof':>7}{titles}"


def row(result: Result, cell: Cell) -> str:
    marks = {"unavailable": "-"}
    entries = []
    for name in result["titles"]:
        found = cell["peers"][name]
        if found["status"] == "ok":
            star = "" if found["graph"] else "*"
            text = f"{found['ms']:.4g}{star} ({found['roofline']:.0%})"
        else:
            text = marks.get(found["status"], found["status"])
        entries.append(f"{text:>{COLUMN}}")
    return (
        f"{cell['workload'][:NAME]:{NAME}} {cell['heads']:>6} {cell['batch']:>5} "
        f"{cell['share_factor']:>6} {cell['roof_ms']:>7.4f}{''.join(entries)}"
    )


def best_peer(cell: Cell) -> tuple[str, float] | None:
    """Name and milliseconds of the fastest peer with a correct output."""
    right = [
        (found["ms"], name)
        for name, found in cell["peers"].items()
        if name not in OURS and found["status"] == "ok"
    ]
    return min(right)[::-1] if right else None


def bad_results(result: Result) -> list[str]:
    """The results that make the exit status 1: a wrong output of any kernel, or a failure of our
    own.
    """
    return [
        f"{cell['workload']} {cell['heads']}: {result['titles'][name]} is {found['status']}"
        + (f" (relative error {found['error']})" if found["status"] == "wrong" else "")
        + (f" ({found['reason']})" if "reason" in found else "")
        for cell in result["cells"]
        for name, found in cell["peers"].items()
        if found["status"] == "wrong" or (found["status"] == "failed" and name in OURS)
    ]


def summary(result: Result) -> str:
    cells, titles = result["cells"], result["titles"]
    lines = [""]
    for us in OURS:
        if us in titles and any(c["peers"][us]["status"] == "ok" for c in cells):
            lines += _standing(cells, titles, us)
    for name, title in titles.items():
        reasons = Counter(c["peers"][name]["reason"] for c in cells if "reason" in c["peers"][name])
        lines += [f"{title}: {reason} ({n} of {len(cells)})" for reason, n in reasons.items()]
    bad = bad_results(result)
    return "\n".join(lines + [f"BAD: {line}" for line in bad])


def _standing(cells: list[Cell], titles: dict[str, str], us: str) -> list[str]:
    """One of our kernels compared with the peers, the roofline and FA3's error."""
    right = [c for c in cells if c["peers"][us]["status"] == "ok"]
    lines = [*_speedups(right, titles, us), *_roofline(right, us), *_errors(right, us)]
    return [line if line.startswith(" ") else f"{titles[us]}: {line}" for line in lines] + [""]


def where(cell: Cell) -> str:
    return f"{cell['workload']} {cell['heads']}"


def _speedups(cells: list[Cell], titles: dict[str, str], us: str) -> list[str]:
    lines, lost = [], []
    over_best: dict[str, list[float]] = {}
    over_each: dict[str, list[float]] = {}
    for cell in cells:
        ours = cell["peers"][us]["ms"]
        for name, found in cell["peers"].items():
            if name != us and found["status"] == "ok":
                over_each.setdefault(name, []).append(found["ms"] / ours)
        best = best_peer(cell)
        if best:
            over_best.setdefault(cell["heads"], []).append(best[1] / ours)
            if best[1] < ours:
                lost.append(f"  {where(cell)}: {ours:.4g}, {titles[best[0]]} {best[1]:.4g}")
    if over_best:
        every = [x for ratios in over_best.values() for x in ratios]
        by_heads = [f"{heads} {geometric_mean(x):.3f}x" for heads, x in over_best.items()]
        lines.append(
            f"{geometric_mean(every):.3f}x the best peer in the geometric mean of "
            f"{len(every)} cells ({', '.join(by_heads)}), {len(lost)} lost"
        )
    each = [
        f"{geometric_mean(ratios):.3f}x {titles[name]} over {len(ratios)} cells"
        for name, ratios in over_each.items()
    ]
    return [*lines, *lost, *each]


def _roofline(cells: list[Cell], us: str) -> list[str]:
    lines, longest = [], float("inf")
    for shortest, fraction, within in ROOF_GOALS:
        group = [c for c in cells if shortest <= c["roof_ms"] < longest]
        below = [c for c in group if c["peers"][us]["roofline"] < fraction]
        if group:
            reached = len(group) - len(below)
            lines.append(
                f"{reached} of {len(group)} cells with a roof {within} reach {fraction:.0%}"
            )
        lines += [
            f"  {where(c)}: {c['peers'][us]['roofline']:.0%} of {c['roof_ms']:.4f} ms"
            for c in below
        ]
        longest = shortest
    return lines


def _errors(cells: list[Cell], us: str) -> list[str]:
    ours = max(c["peers"][us]["error"] for c in cells)
    both = [c for c in cells if c["peers"].get("fa3", {}).get("status") == "ok"]
    if not both:
        return [f"largest relative error {ours:.4f}"]
    fa3 = max(c["peers"]["fa3"]["error"] for c in both)
    worse = [
        f"  {where(c)}: {c['peers'][us]['error']:.4f}, FA3 {c['peers']['fa3']['error']:.4f}"
        for c in both
        if c["peers"][us]["error"] > c["peers"]["fa3"]["error"]
    ]
    return [
        f"largest relative error {ours:.4f}, FA3's {fa3:.4f}; "
        f"larger than FA3's in {len(worse)} of {len(both)} cells",
        *worse,
    ]
