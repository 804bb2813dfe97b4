"""The picture of ``inspect``: a forest above the schedule of a plan."""

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.cli.canvas import (
    GRID,
    MUTED,
    Canvas,
    Line,
    Rect,
    Text,
    longest_that_fits,
)
from vllm_prefixshare.core import Forest, IntArray
from vllm_prefixshare.planning.plan import DecodePlan

#: Fills of nodes, in turn: light enough for dark text.
NODE_FILLS = (
    "#9ec5fe", "#ffd08a", "#a3dfb5", "#f5b0c5", "#c9b6f2",
    "#8fdede", "#f2e08a", "#e8b89a", "#b8d47a", "#d9aee0",
)  # fmt: skip
PRIVATE_FILL, EDGE = "#e3e7eb", "#57606a"
PRIVATE = -1

WIDTH, MARGIN = 1040, 24
#: Heights in pixels: least of a row drawn by itself, most of a request, most of the forest.
MIN_ROW, MAX_ROW, MAX_FOREST = 0.5, 30.0, 360.0
#: Pixels left and right of the schedule's bars, height of a bar, from one worker to the next.
LEFT, RIGHT, BAR, STEP = 84, 178, 15, 20
#: Most workers drawn; if there are more, a sample from the busiest to the least busy.
MAX_WORKERS = 32


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
    title: str, says: str, made_by: str, forest: Forest, plan: DecodePlan, seq_lens: IntArray
) -> Canvas:
    """The forest, widths by requests and lengths by tokens, above the plan's schedule.

    Args:
        title: names the batch. says: its figures. made_by: how the plan was made.
        seq_lens: ``[num_reqs]`` by batch row.
    """
    canvas, room = Canvas(WIDTH, title), WIDTH - 2 * MARGIN
    canvas.add(
        Text(MARGIN, 34, longest_that_fits((title, f"{title[:90]} ..."), room, 17), 17),
        Text(MARGIN, 56, f"{says}; height by requests, length by KV tokens", 13, fill=MUTED),
    )
    bottom = _draw_forest(canvas, forest, seq_lens[forest.request_rows], 70)
    workers = schedule(forest, plan)
    shown, others = _shown(workers)
    subtitle = f"{made_by}; {len(workers)} workers{others}"
    canvas.add(
        Text(MARGIN, bottom + 36, "Schedule: a row for each worker, a bar for each work tile", 17),
        Text(MARGIN, bottom + 58, subtitle, 13, fill=MUTED),
    )
    canvas.height = _draw_schedule(canvas, workers, shown, bottom + 72) + MARGIN
    return canvas


def _fill(node: int) -> str:
    return PRIVATE_FILL if node == PRIVATE else NODE_FILLS[node % len(NODE_FILLS)]


def _rim(width: float, height: float) -> str:
    """The stroke of a rectangle: white if it is large enough for a rim, else none."""
    return "#ffffff" if width >= 6 and height >= 3 else "none"


def _draw_forest(canvas: Canvas, forest: Forest, lens: IntArray, top: float) -> float:
    """Draw below ``top``. lens: ``[num_reqs]`` by depth-first position. Returns the bottom."""
    n = forest.num_reqs
    row = min(MAX_ROW, MAX_FOREST / n)
    height, scale = n * row, (WIDTH - 2 * MARGIN) / int(lens.max())
    _draw_axis(canvas, MARGIN, scale, int(lens.max()), top, top + height, "KV tokens")
    # requests thinner than half a pixel are drawn together
    for first in range(0, n, step := max(1, math.ceil(MIN_ROW / row))):
        last = min(n, first + step)
        start, end = int(forest.private_start[first:last].min()), int(lens[first:last].max())
        x, y = MARGIN + start * scale, top + first * row
        width, thick = max(2.0, (end - start) * scale), (last - first) * row
        names = ", ".join(str(r) for r in forest.request_rows[first:last])
        hint = f"request {names}: {end - start:,} private tokens"
        canvas.add(Rect(x, y, width, thick, PRIVATE_FILL, _rim(width, row), hint))
        brief = f"request {names}: {end - start:,}"
        _label(canvas, (hint, brief, f"request {names}", names), x, y, width, thick)
    for node in range(forest.num_nodes):
        first, last = int(forest.node_reader_start[node]), int(forest.node_reader_end[node])
        tokens = int(forest.node_end[node] - forest.node_start[node])
        x, y = MARGIN + int(forest.node_start[node]) * scale, top + first * row
        width, thick = tokens * scale, (last - first) * row
        hint = f"node {node}: {tokens:,} tokens x {last - first} requests"
        canvas.add(Rect(x, y, width, thick, _fill(node), _rim(width, thick), hint))
        brief = f"node {node}: {tokens:,} x {last - first}"
        _label(canvas, (hint, brief, f"node {node}", str(node)), x, y, width, thick)
    return top + height + 36


def _label(
    canvas: Canvas, texts: tuple[str, ...], x: float, y: float, width: float, height: float
) -> None:
    """The longest of ``texts`` that has room, in the middle of a rectangle."""
    size = 12 if height >= 16 else 10
    if height >= 11 and (text := longest_that_fits(texts, width - 6, size)):
        canvas.add(Text(x + width / 2, y + height / 2 + size * 0.36, text, size, "middle"))


def _draw_axis(
    canvas: Canvas, left: float, scale: float, most: float, top: float, bottom: float, unit: str
) -> None:
    """Grid lines with round numbers, from 0 to ``most``."""
    step = _round_step(most / 8)
    for i in range(int(most / step) + 1):
        x = left + i * step * scale
        canvas.add(
            Line(x, top, x, bottom + 4),
            Text(x, bottom + 18, f"{i * step:,.10g}", 11, "middle" if i else "start", MUTED),
        )
    end = left + most * scale
    canvas.add(Text(end, bottom + 32, unit, 11, "end", MUTED))


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not less than ``least``."""
    power = 10.0 ** np.floor(np.log10(max(least, 1e-3)))
    return float(next(power * n for n in (1, 2, 5, 10) if power * n >= least * 0.999))


def _draw_schedule(
    canvas: Canvas, workers: list[list[Tile]], shown: list[int], top: float
) -> float:
    """Draw below ``top``; returns the bottom."""
    most = max(sum(tile.us for tile in workers[w]) for w in shown)
    scale = (WIDTH - 2 * MARGIN - LEFT - RIGHT) / most
    bottom = top + STEP * len(shown)
    _draw_axis(canvas, MARGIN + LEFT, scale, most, top, bottom, "microseconds, estimated")
    for i, worker in enumerate(shown):
        _draw_worker(canvas, worker, workers[worker], scale, top + STEP * i)
    return bottom + 36


def _shown(workers: list[list[Tile]]) -> tuple[list[int], str]:
    """Workers to draw, and a note on the others."""
    busy = [w for w, tiles in enumerate(workers) if tiles]
    idle = len(workers) - len(busy)
    says = f", {idle} of them idle" if idle else ""
    if len(busy) <= MAX_WORKERS:
        return busy, says
    busy.sort(key=lambda w: -sum(tile.us for tile in workers[w]))
    places = np.linspace(0, len(busy) - 1, MAX_WORKERS).astype(int)
    return [busy[i] for i in places], f"{says}, {MAX_WORKERS} shown from the busiest on"


def _draw_worker(canvas: Canvas, worker: int, tiles: list[Tile], scale: float, y: float) -> None:
    load, tokens = sum(tile.us for tile in tiles), sum(tile.tokens for tile in tiles)
    canvas.add(Text(MARGIN + LEFT - 8, y + BAR - 3, f"worker {worker}", 12, "end"))
    starts = accumulate((tile.us for tile in tiles), initial=0.0)
    for tile, start in zip(tiles, starts, strict=False):
        x, width = MARGIN + LEFT + start * scale, tile.us * scale
        hint = f"{tile.requests} requests, {tile.tokens:,} tokens, {tile.us:.1f} us"
        canvas.add(Rect(x, y, width, BAR, PRIVATE_FILL, hint=hint))
        left = x
        for piece in _merged(tile.pieces):
            part = width * piece.tokens / max(1, tile.tokens)
            if piece.node == PRIVATE:
                texts = (f"private, {piece.tokens:,} tokens", "private", "")
            else:
                name = f"node {piece.node}"
                texts = (f"{name}, {piece.tokens:,} tokens", name, str(piece.node))
            reads = f"{texts[0]}, of a tile of {hint}"
            canvas.add(Rect(left, y, part, BAR, _fill(piece.node), hint=reads))
            _label(canvas, texts, left, y, part, BAR)
            left += part
        canvas.add(Line(x, y, x, y + BAR, EDGE))
    end = MARGIN + LEFT + load * scale
    canvas.add(
        Line(end, y, end, y + BAR, EDGE),
        Line(MARGIN + LEFT, y + BAR, end, y + BAR, GRID),
        Text(WIDTH - MARGIN, y + BAR - 3, f"{load:,.1f} us, {tokens:,} tokens", 12, "end"),
    )


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Pieces merged by node, in order of first appearance."""
    tokens: dict[int, int] = {}
    for piece in pieces:
        tokens[piece.node] = tokens.get(piece.node, 0) + piece.tokens
    return [Piece(node, n) for node, n in tokens.items()]
