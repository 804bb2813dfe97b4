"""Dots of an experiment's results as SVG text, without a plotting library, so that ``make lint``
can compare a picture byte for byte. Its colours follow the reader's theme.
"""

import math
from html import escape

from benchmarks.papers.experiment import Bars

#: pixels: a letter of a name; length of the axis, room for the number of its last dot; height of a
#: dot's line, and the space between two groups
LETTER, WIDTH, RIGHT, LINE, GAP = 6.6, 430, 70, 12, 9
#: more points than these are left to the table
MAX_POINTS = 36
#: colours of the series, on light ground and on dark, each with a contrast of at least 3:1
COLOURS = (
    ("#0969da", "#58a6ff"),
    ("#7d868f", "#8b949e"),
    ("#bf8700", "#d29922"),
    ("#1a7f37", "#3fb950"),
    ("#8250df", "#a371f7"),
    ("#cf222e", "#ff7b72"),
    ("#1b7c83", "#39c5cf"),
    ("#7d4e24", "#b08968"),
    ("#d6409f", "#f778ba"),
)
#: methods that have the same colour, by index, in every picture; "stock" is vLLM's default backend
METHODS = {
    "ours": 0,
    "stock": 1,
    "flash-decoding": 1,
    "DeFT-Flatten": 2,
    "FastTree's divider": 3,
    "DeFT-Node": 4,
    "DeFT-Node-Chunk": 5,
    "portable": 6,
    "flashinfer": 7,
    "FlashForge's divider": 8,
}
LIGHT, DARK = (
    "".join(f".s{i}{{fill:{pair[ground]}}}" for i, pair in enumerate(COLOURS)) for ground in (0, 1)
)
STYLE = f"""<style>text{{fill:#1f2328}}path{{stroke:#d1d9e0}}
{LIGHT}
@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}path{{stroke:#3d444d}}
{DARK}}}</style>"""


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def colours_of(names: list[str]) -> dict[str, int]:
    """The index of each series' colour: its method's, or one that no other series has."""
    fixed = {name: METHODS[name] for name in names if name in METHODS}
    free = [i for i in range(len(COLOURS)) if i not in fixed.values()]
    others = [name for name in names if name not in fixed]
    return fixed | dict(zip(others, free, strict=False))


def draw(title: str, bars: Bars) -> str:
    """A group of dots for each point, on a logarithmic axis.

    Returns:
        an SVG document; "" if there is nothing to draw.
    """
    groups = dict(list(bars.values.items())[:MAX_POINTS])
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    numbers = [x for group in groups.values() for x in group.values() if x > 0]
    if not numbers:
        return ""
    low = 10.0 ** math.floor(math.log10(min(numbers)))
    high = max(low * 10, 10.0 ** math.ceil(math.log10(max(numbers))))
    scale = WIDTH / math.log10(high / low)
    left = 24 + round(LETTER * max(map(len, groups)))

    colours = colours_of(names)

    def place(value: float) -> float:
        return left + math.log10(value / low) * scale

    top = 44
    drawn: list[str] = []
    for point, group in groups.items():
        middle = top + LINE * len(group) / 2 + 4
        drawn.append(
            f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(point)}</text>'
        )
        for name, value in group.items():
            if value > 0:
                x = place(value)
                drawn.append(
                    f'<circle class="s{colours[name]}" cx="{x:.1f}" cy="{top + LINE / 2:.0f}" '
                    f'r="4.5"/><text x="{x + 9:.1f}" y="{top + LINE - 2}" font-size="10">'
                    f"{number(value)}</text>"
                )
            top += LINE
        top += GAP
    grid = []
    mark = low
    while mark <= high * 1.01:
        x = place(mark)
        grid.append(
            f'<path d="M{x:.1f} 38V{top}"/><text x="{x:.1f}" y="{top + 15}" '
            f'text-anchor="middle">{number(mark)}</text>'
        )
        mark *= 10
    legend, x = [], 8
    for name in names:
        legend.append(
            f'<circle class="s{colours[name]}" cx="{x + 6}" cy="18" r="4.5"/>'
            f'<text x="{x + 16}" y="22">{escape(name)}</text>'
        )
        x += 34 + 7 * len(name)
    more = len(bars.values) - len(groups)
    below = f"{bars.unit}, logarithmic" + (f"; {more} more points in the table" if more else "")
    unit = f'<text x="{left}" y="{top + 34}">{escape(below)}</text>'
    width = max(left + WIDTH + RIGHT, x)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 46}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    parts = [opening, STYLE, f"<title>{escape(title)}</title>", *legend, *grid, *drawn, unit]
    return "\n".join([*parts, "</svg>"]) + "\n"
