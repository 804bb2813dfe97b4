"""Bars of an experiment's results as SVG text, without a plotting library, so that ``make lint``
can compare a picture byte for byte. Its colours follow the reader's theme.
"""

import math
from html import escape

from benchmarks.papers.experiment import Bars

#: pixels: a letter of a name; length of the longest bar, room for its number; height of a bar, and
#: the space between two groups
LETTER, WIDTH, RIGHT, BAR, GAP = 6.6, 430, 70, 12, 9
#: more points than these are left to the table
MAX_POINTS = 36
#: colours of the series, on light ground and on dark
COLOURS = (
    ("#0969da", "#58a6ff"),
    ("#9aa4af", "#6e7781"),
    ("#bf8700", "#d29922"),
    ("#1a7f37", "#3fb950"),
    ("#8250df", "#a371f7"),
    ("#cf222e", "#ff7b72"),
    ("#1b7c83", "#39c5cf"),
    ("#7d4e24", "#b08968"),
    ("#d6409f", "#f778ba"),
)
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


def draw(title: str, bars: Bars) -> str:
    """A group of horizontal bars for each point, on a logarithmic axis.

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

    def length(value: float) -> float:
        return max(1.0, math.log10(value / low) * scale)

    top = 44
    drawn: list[str] = []
    for point, group in groups.items():
        middle = top + BAR * len(group) / 2 + 4
        drawn.append(
            f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(point)}</text>'
        )
        for name, value in group.items():
            if value > 0:
                wide = length(value)
                drawn.append(
                    f'<rect class="s{names.index(name) % len(COLOURS)}" x="{left}" y="{top}" '
                    f'width="{wide:.1f}" height="{BAR - 1}"/><text x="{left + wide + 5:.1f}" '
                    f'y="{top + BAR - 2}" font-size="10">{number(value)}</text>'
                )
            top += BAR
        top += GAP
    grid = []
    mark = low
    while mark <= high * 1.01:
        x = left + math.log10(mark / low) * scale
        grid.append(
            f'<path d="M{x:.1f} 38V{top}"/><text x="{x:.1f}" y="{top + 15}" '
            f'text-anchor="middle">{number(mark)}</text>'
        )
        mark *= 10
    legend, x = [], 8
    for i, name in enumerate(names):
        legend.append(
            f'<rect class="s{i % len(COLOURS)}" x="{x}" y="12" width="11" height="11"/>'
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
