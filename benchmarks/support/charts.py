"""Charts of published results, drawn by matplotlib: one style, light and dark from one drawing, and
one colour per method in every chart.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vllm_prefixshare.cli.picture import LIGHT, Theme, encoded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK = Theme("#0d1117", "#f0f6fc", "#9198a1", "#3d444d")
#: Colours of methods, on a light and on a dark background, each with a contrast of at least 3:1.
COLOURS = (
    ("#0969da", "#58a6ff"),
    ("#7d868f", "#8b949e"),
    ("#b35900", "#f0883e"),
    (LIGHT.text, DARK.text),
    ("#1a7f37", "#3fb950"),
    ("#8250df", "#a371f7"),
    ("#cf222e", "#ff7b72"),
    ("#1b7c83", "#39c5cf"),
    ("#7d4e24", "#b08968"),
    ("#d6409f", "#f778ba"),
    ("#4d7c0f", "#a3e635"),
    ("#be5a83", "#e8b4c8"),
)
#: Index of each method's colour. Other series, such as block sizes, are diamonds in the colours
#: that are left.
METHODS = {
    "PREFIX_SHARE": 0,
    "ours": 0,
    "vLLM, FLASH_ATTN": 1,
    "stock": 1,
    "fa3": 1,
    "FLASH_ATTN + shared host work": 2,
    "flash-decoding": 3,
    "FastTree's divider": 4,
    "DeFT-Node": 5,
    "DeFT-Node-Chunk": 6,
    "DeFT-Flatten": 7,
    "FlashForge's divider": 8,
    "flashinfer": 9,
    "portable": 10,
}
#: Light colours, and the dark ones in their place.
DARK_OF = dict([*COLOURS, *zip(LIGHT, DARK, strict=True)])
#: Pixels: width of the page; height of a value's line; a letter; fonts of numbers and of names.
WIDTH, LINE, LETTER, NUMBERS, NAMES = 900, 15, 7.2, 12, 13


class Chart(NamedTuple):
    """Values of some series at some points: as bars on a linear axis or as dots on a logarithmic
    one, where a bar would have no beginning.

    values: point -> name of a series -> value in ``unit``. title: for readers who hear the page.
    """

    title: str
    unit: str
    values: dict[str, dict[str, float]]
    logarithmic: bool = False

    @property
    def names(self) -> list[str]:
        """The series, in the order in which they appear."""
        return list(dict.fromkeys(name for group in self.values.values() for name in group))


def light_and_dark(chart: Chart) -> tuple[str, str]:
    """A chart without a background as two SVG documents, for a page that knows its theme."""
    light = _svg(chart, "none")
    colours = re.compile("|".join(DARK_OF))
    return light, colours.sub(lambda found: DARK_OF[found[0]], light)


def adaptive(chart: Chart) -> str:
    """A chart with a background as an SVG document that follows its reader's theme."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK_OF.items()
        for kind in ("fill", "stroke")
    )
    svg = _svg(chart, LIGHT.background)
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>\n</svg>"
    return svg.replace("</svg>", style)


def colours_of(names: Iterable[str]) -> dict[str, int]:
    """Index of each series' colour: its method's, or one that no method of the chart has, except
    this project's.
    """
    fixed = {name: METHODS[name] for name in names if name in METHODS}
    free = [i for i in range(len(COLOURS) - 1, 0, -1) if i not in fixed.values()]
    others = [name for name in names if name not in fixed]
    return fixed | dict(zip(others, free, strict=False))


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _svg(chart: Chart, background: str) -> str:
    figure = draw(chart)
    figure.set_facecolor(background)
    return encoded(figure, chart.title).decode()


def draw(chart: Chart) -> "Figure":
    """A group for each point, with a bar or dot and its number for each value."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.ticker import LogLocator

    names, groups = chart.names, chart.values.values()
    columns = max(1, int(WIDTH // (60 + LETTER * max(map(len, names)))))
    rows = sum(map(len, groups)) + len(groups) * 0.7
    height = LINE * (rows + 4 + 1.5 * (len(names) // columns))
    figure = Figure((WIDTH / 72, height / 72), dpi=72, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # inches
    axes = figure.add_subplot(facecolor="none")
    axes.set_xscale("log" if chart.logarithmic else "linear")
    middles, row = [], 0.5
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for group in groups:
        middles.append(row + (len(group) - 1) / 2)
        for name, value in group.items():
            found[name].append((value, row))
            row += 1
        row += 0.7
    for name in names:
        index = colours_of(names)[name]
        values, places = zip(*found[name], strict=True)
        style = {"color": COLOURS[index][0], "label": name}
        if chart.logarithmic:
            sign = "o" if name in METHODS else "D"
            axes.plot(values, places, sign, markersize=7, markeredgewidth=0, **style)
        else:
            axes.barh(places, values, 0.92, **style)
        for place in found[name]:
            axes.annotate(
                number(place[0]), place, (7, 0), textcoords="offset points", va="center",
                size=NUMBERS, weight="bold" if index == 0 else "normal",
            )  # fmt: skip
    axes.set_ylim(row - 0.7, 0)
    axes.set_yticks(middles, list(chart.values), size=NAMES)
    if chart.logarithmic:
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_xlabel(chart.unit, size=NAMES)
    axes.tick_params(axis="x", labelsize=NUMBERS)
    axes.tick_params(which="both", length=0, pad=6)
    axes.minorticks_off()
    axes.grid(axis="x", color=LIGHT.grid)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=NAMES)
    for text in figure.findobj(Text):
        text.set_color(LIGHT.text)
    return figure
