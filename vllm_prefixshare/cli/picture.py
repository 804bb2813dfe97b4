"""The picture of ``inspect``: a forest above the schedule of a plan, drawn by matplotlib."""

import io
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from vllm_prefixshare.core import Forest, IntArray, PrefixShareError
from vllm_prefixshare.planning.plan import DecodePlan

#: matplotlib's, which is imported only for a picture.
Figure = Any
Axes = Any

#: Fills of nodes, in turn: light enough for dark text.
NODE_FILLS = (
    "#9ec5fe", "#ffd08a", "#a3dfb5", "#f5b0c5", "#c9b6f2",
    "#8fdede", "#f2e08a", "#e8b89a", "#b8d47a", "#d9aee0",
)  # fmt: skip
PRIVATE_FILL, LABEL, EDGE = "#e3e7eb", "#1f2328", "#57606a"
PRIVATE = -1


class Theme(NamedTuple):
    """Colours of a page."""

    background: str
    text: str
    muted: str
    grid: str


LIGHT = Theme("#ffffff", "#1f2328", "#59636e", "#d1d9e0")

#: Pixels: width of the page, margin, and what the schedule leaves for text on both sides.
WIDTH, MARGIN, LEFT, RIGHT = 1040, 24, 84, 178
#: Pixels above the forest and the schedule for their titles, and below each for its axis.
TITLE, AXIS = 70, 52
#: Heights in pixels: minimum of a row that is drawn separately, maximum of a request and of the
#: forest; a row of the schedule, and the part of it that the bar fills.
MIN_ROW, MAX_ROW, MAX_FOREST, STEP, BAR = 0.5, 30.0, 360.0, 20, 0.76
#: Pixels of a page per inch; font sizes below are in pixels, too.
DPI = 100
#: Maximum number of workers drawn; if there are more, a sample from the busiest to the least busy.
MAX_ROWS = 32


class Piece(NamedTuple):
    """Tokens of a run that lie in one node; ``PRIVATE`` for those after the last node."""

    node: int
    tokens: int


class Tile(NamedTuple):
    """A work tile as it is drawn."""

    us: float
    requests: int
    pieces: list[Piece]

    @property
    def tokens(self) -> int:
        """KV tokens that the tile reads."""
        return sum(piece.tokens for piece in self.pieces)


def schedule(forest: Forest, plan: DecodePlan) -> list[list[Tile]]:
    """The work tiles of each worker, and which nodes they read."""
    position = np.empty(forest.num_reqs, np.int64)
    position[forest.request_rows] = np.arange(forest.num_reqs)
    ends = plan.run_kv_start + plan.run_lengths(plan.planned_seq_lens)
    workers = []
    for first, last in zip(plan.work_indptr[:-1], plan.work_indptr[1:], strict=True):
        tiles = []
        for t in range(first, last):
            pieces = [
                piece
                for r in range(plan.tile_run_indptr[t], plan.tile_run_indptr[t + 1])
                for piece in _pieces(
                    forest, int(position[plan.run_row[r]]), plan.run_kv_start[r], ends[r]
                )
            ]
            requests = int(plan.tile_req_indptr[t + 1] - plan.tile_req_indptr[t])
            tiles.append(Tile(float(plan.tile_cost[t]), requests, pieces))
        workers.append(tiles)
    return workers


def _pieces(forest: Forest, position: int, start: int, end: int) -> list[Piece]:
    """Tokens ``[start, end)`` of the request at ``position``, cut where its nodes end."""
    above = (forest.node_reader_start <= position) & (position < forest.node_reader_end)
    above &= (forest.node_start < end) & (forest.node_end > start)
    found = []
    for node in np.flatnonzero(above):
        low, high = max(start, forest.node_start[node]), min(end, forest.node_end[node])
        found.append(Piece(int(node), int(high - low)))
    rest = int(end - start) - sum(piece.tokens for piece in found)
    return found + ([Piece(PRIVATE, rest)] if rest else [])


def picture(
    title: str,
    summary: str,
    made_by: str,
    forest: Forest,
    plan: DecodePlan,
    seq_lens: IntArray,
) -> Figure:
    """The forest, widths by requests and lengths by tokens, above the plan's schedule.

    Args:
        title: names the batch. summary: its figures. made_by: how the plan was made.
        seq_lens: ``[num_reqs]`` by batch row.

    Raises:
        PrefixShareError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError:
        raise PrefixShareError(
            "pictures need matplotlib: install it with pip install 'vllm-prefixshare[plots]'."
        ) from None
    workers = schedule(forest, plan)
    shown, others = _shown(workers)
    forest_height = forest.num_reqs * min(MAX_ROW, MAX_FOREST / forest.num_reqs)
    schedule_top = TITLE + forest_height + AXIS + TITLE
    height = schedule_top + STEP * len(shown) + AXIS
    figure = NewFigure((WIDTH / DPI, height / DPI), dpi=DPI, facecolor=LIGHT.background)
    FigureCanvasAgg(figure)  # measures texts
    page = _Page(figure, height)
    # names of files may have characters that are no text, or not allowed in XML
    title = "".join(x if x.isprintable() else "?" for x in title)
    page.heading(0, title, f"{summary}; height by requests, length by KV tokens")
    axes = page.axes(TITLE, forest_height, MARGIN, MARGIN)
    _draw_forest(page, axes, forest, seq_lens[forest.request_rows])
    page.heading(
        schedule_top - TITLE,
        "Schedule: a row for each worker, a bar for each work tile",
        f"{made_by}; {len(workers)} worker{'' if len(workers) == 1 else 's'}{others}",
    )
    axes = page.axes(schedule_top, STEP * len(shown), MARGIN + LEFT, MARGIN + RIGHT)
    _draw_schedule(page, axes, workers, shown)
    return figure


def encoded(figure: Figure, title: str | None = None) -> bytes:
    """The bytes of an SVG file. title: for readers who hear it."""
    from matplotlib import rc_context

    data = io.BytesIO()
    # text stays text, and equal pictures are equal files
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "prefixshare", "font.sans-serif": "DejaVu Sans",
    }  # fmt: skip
    metadata = {"Creator": None, "Date": None} | ({"Title": title} if title else {})
    with rc_context(settings):
        figure.savefig(data, format="svg", metadata=metadata)
    return data.getvalue()


class _Page:
    """A figure that is laid out in pixels from its top left corner."""

    def __init__(self, figure: Figure, height: float) -> None:
        self.figure, self.height = figure, height

    def heading(self, top: float, title: str, subtitle: str) -> None:
        """A title with a line below, at the left margin."""
        room = WIDTH - 2 * MARGIN
        title = self.longest_that_fits((title, f"{title[:90]} ..."), room, 17)
        for text, y, size, color in (
            (title, 34, 17, LIGHT.text),
            (subtitle, 56, 13, LIGHT.muted),
        ):
            self.figure.text(
                MARGIN / WIDTH, 1 - (top + y) / self.height, text, size=points(size), color=color,
                parse_math=False,
            )  # fmt: skip

    def axes(self, top: float, height: float, left: float, right: float) -> Axes:
        """Axes below ``top`` with these margins, without a frame."""
        bottom = 1 - (top + height) / self.height
        width = (WIDTH - left - right) / WIDTH
        axes = self.figure.add_axes((left / WIDTH, bottom, width, height / self.height))
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        return axes

    def scale(self, axes: Axes, limit: float, unit: str, num_rows: int) -> None:
        """Let ``axes`` go from 0 to ``limit``, with grid lines at round numbers, and have rows from
        top to bottom.
        """
        from matplotlib.ticker import MaxNLocator

        axes.set_xlim(0, limit)
        axes.set_ylim(num_rows, 0)
        ticks = [x for x in MaxNLocator(8, steps=(1, 2, 5, 10)).tick_values(0, limit) if x <= limit]
        axes.set_xticks(ticks, [f"{x:,.10g}" for x in ticks])
        axes.set_yticks([])
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=LIGHT.grid, linewidth=0.8)
        axes.tick_params(labelsize=points(11), labelcolor=LIGHT.muted, color=LIGHT.grid)
        axes.set_xlabel(unit, loc="right", size=points(11), color=LIGHT.muted)

    def longest_that_fits(self, texts: Sequence[str], width: float, size: int) -> str:
        """The first of ``texts`` that is not wider than ``width`` pixels; "" if none is."""
        from matplotlib.font_manager import FontProperties

        renderer: Any = self.figure.canvas.get_renderer()
        font = FontProperties(size=points(size))
        return next(
            (
                text
                for text in texts
                if text and renderer.get_text_width_height_descent(text, font, False)[0] <= width
            ),
            "",
        )

    def box(
        self,
        axes: Axes,
        corner: tuple[float, float],
        size: tuple[float, float],
        fill: str,
        texts: Sequence[str],
        rim: bool = True,
    ) -> None:
        """A rectangle, with the longest of ``texts`` that has room in its middle.

        Args:
            corner, size: in the units of ``axes``.
            texts: what it shows, from the longest on.
            rim: whether a rectangle with room for it has a rim.
        """
        from matplotlib.patches import Rectangle

        (x, y), (width, height) = corner, size
        area, (x_low, x_high), (y_low, y_high) = axes.bbox, axes.get_xlim(), axes.get_ylim()
        wide = width * area.width / abs(x_high - x_low)
        high = height * area.height / abs(y_high - y_low)
        rim = rim and wide >= 6 and high >= 3
        edge = LIGHT.background if rim else "none"
        axes.add_patch(
            Rectangle(corner, width, height, facecolor=fill, edgecolor=edge, label=texts[0])
        )
        font = 12 if high >= 16 else 10
        if high >= 11 and (text := self.longest_that_fits(texts, wide - 6, font)):
            axes.text(
                x + width / 2, y + height / 2, text, size=points(font), color=LABEL, ha="center",
                va="center_baseline",
            )  # fmt: skip


def points(pixels: float) -> float:
    """The size of a font in points."""
    return pixels * 72 / DPI


def _fill(node: int) -> str:
    return PRIVATE_FILL if node == PRIVATE else NODE_FILLS[node % len(NODE_FILLS)]


def _draw_forest(page: _Page, axes: Axes, forest: Forest, lens: IntArray) -> None:
    """Draw a row for each request. lens: ``[num_reqs]`` by depth-first position."""
    n = forest.num_reqs
    page.scale(axes, int(lens.max()), "KV tokens", n)
    # requests thinner than half a pixel are drawn together
    step = max(1, math.ceil(MIN_ROW * n / axes.bbox.height))
    for first in range(0, n, step):
        last = min(n, first + step)
        start, end = int(forest.private_start[first:last].min()), int(lens[first:last].max())
        names = ", ".join(str(r) for r in forest.request_rows[first:last])
        texts = (
            f"request {names}: {end - start:,} private tokens",
            f"request {names}: {end - start:,}",
            f"request {names}",
            names,
        )
        page.box(axes, (start, first), (end - start, last - first), PRIVATE_FILL, texts)
    for node in range(forest.num_nodes):
        first, last = int(forest.node_reader_start[node]), int(forest.node_reader_end[node])
        start, end = int(forest.node_start[node]), int(forest.node_end[node])
        texts = (
            f"node {node}: {end - start:,} tokens x {last - first} requests",
            f"node {node}: {end - start:,} x {last - first}",
            f"node {node}",
            str(node),
        )
        page.box(axes, (start, first), (end - start, last - first), _fill(node), texts)


def _shown(workers: list[list[Tile]]) -> tuple[list[int], str]:
    """Workers to draw, and a note on the others."""
    busy = [w for w, tiles in enumerate(workers) if tiles]
    idle = len(workers) - len(busy)
    note = f", {idle} of them idle" if idle else ""
    if len(busy) <= MAX_ROWS:
        return busy, note
    busy.sort(key=lambda w: -sum(tile.us for tile in workers[w]))
    places = np.linspace(0, len(busy) - 1, MAX_ROWS).astype(int)
    return [busy[i] for i in places], f"{note}, {MAX_ROWS} shown from the busiest on"


def _draw_schedule(page: _Page, axes: Axes, workers: list[list[Tile]], shown: list[int]) -> None:
    """Draw a row for each worker in ``shown``."""
    busiest = max(sum(tile.us for tile in workers[w]) for w in shown)
    page.scale(axes, busiest, "microseconds, estimated", len(shown))
    loads = []
    for row, worker in enumerate(shown):
        tiles = workers[worker]
        load, tokens = sum(tile.us for tile in tiles), sum(tile.tokens for tile in tiles)
        loads.append(f"{load:,.1f} us, {tokens:,} tokens")
        starts = list(accumulate((tile.us for tile in tiles), initial=0.0))
        for tile, start in zip(tiles, starts, strict=False):
            _draw_tile(page, axes, tile, start, row)
        axes.vlines(starts, row, row + BAR, color=EDGE, linewidth=1, clip_on=False)
    rows = np.arange(len(shown)) + BAR / 2
    style: dict[str, Any] = {"length": 0, "labelsize": points(12), "labelcolor": LIGHT.text}
    axes.set_yticks(rows, [f"worker {worker}" for worker in shown])
    axes.tick_params(axis="y", pad=6, **style)
    right = axes.secondary_yaxis("right")
    right.spines[:].set_visible(False)
    right.set_yticks(rows, loads, ha="right")
    right.tick_params(axis="y", pad=RIGHT * 72 / DPI, **style)


def _draw_tile(page: _Page, axes: Axes, tile: Tile, start: float, row: int) -> None:
    """The parts of a bar, by the nodes that the tile reads."""
    for piece in _merged(tile.pieces):
        width = tile.us * piece.tokens / max(1, tile.tokens)
        name = "private" if piece.node == PRIVATE else f"node {piece.node}"
        short = "" if piece.node == PRIVATE else str(piece.node)
        texts = f"{name}, {piece.tokens:,} tokens", name, short
        page.box(axes, (start, row), (width, BAR), _fill(piece.node), texts, rim=False)
        start += width


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Pieces merged by node, in order of first appearance."""
    tokens: dict[int, int] = {}
    for piece in pieces:
        tokens[piece.node] = tokens.get(piece.node, 0) + piece.tokens
    return [Piece(node, n) for node, n in tokens.items()]
