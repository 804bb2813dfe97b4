"""The chart of README.md as SVG text, drawn from the engine's published figures.

``tables.py`` writes the chart beside the tables and checks it with them. The chart is plain text
without a plotting library, so that ``make lint`` can compare it byte for byte.
"""

from html import escape

#: theme -> colours; the background is transparent, so that the page's background shows
THEMES = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "stock": "#9aa4af", "ours": "#0969da"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "stock": "#6e7781", "ours": "#58a6ff"},
}
#: Pixels: left end of the bars, length of the longest bar, room for the text to the right of the
#: bars.
LEFT, WIDTH, RIGHT = 320, 520, 60
#: Pixels: the height of a bar, the distance from one workload to the next.
BAR, STEP = 13, 36
#: Milliseconds between two lines of the grid.
GRID = 10


def engine_chart(rows: list[dict], theme: str) -> str:
    """Milliseconds per output token of both engines, a pair of bars for each workload.

    Args:
        rows: those of ``benchmarks/published/engine.json``.
        theme: a name in ``THEMES``.

    Returns:
        an SVG document.
    """
    colours = THEMES[theme]
    slowest = max(row[engine]["ms"] for row in rows for engine in ("stock", "PREFIX_SHARE"))
    scale = WIDTH / slowest  # pixels of a millisecond
    bottom = 40 + STEP * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} '
        f'{bottom + 44}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{colours["text"]}">',
        "<title>Milliseconds per output token, vLLM's default backend and PREFIX_SHARE</title>",
    ]
    for ms in range(0, int(slowest) + 1, GRID):
        x = LEFT + ms * scale
        parts.append(
            f'<path d="M{x:.1f} 32V{bottom}" stroke="{colours["grid"]}"/>'
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{ms}</text>'
        )
    parts.append(
        f'<text x="{LEFT + WIDTH / 2:.0f}" y="{bottom + 38}" text-anchor="middle">'
        "milliseconds per output token (shorter is faster)</text>"
    )
    for x, colour, name in (
        (LEFT, "stock", "default backend"),
        (LEFT + 120, "ours", "PREFIX_SHARE"),
    ):
        parts.append(
            f'<rect x="{x}" y="9" width="{BAR}" height="{BAR}" fill="{colours[colour]}"/>'
            f'<text x="{x + 20}" y="20">{name}</text>'
        )
    for i, row in enumerate(rows):
        top = 40 + STEP * i
        stock, ours = (row[engine]["ms"] * scale for engine in ("stock", "PREFIX_SHARE"))
        weight = ' font-weight="bold"' if row["ratio"] >= 1.1 else ""
        parts += [
            f'<text x="{LEFT - 8}" y="{top + BAR + 5}" text-anchor="end">'
            f"{escape(workload_label(row))}</text>",
            f'<rect x="{LEFT}" y="{top}" width="{stock:.1f}" height="{BAR}" '
            f'fill="{colours["stock"]}"/>',
            f'<rect x="{LEFT}" y="{top + BAR + 1}" width="{ours:.1f}" height="{BAR}" '
            f'fill="{colours["ours"]}"/>',
            f'<text x="{LEFT + max(stock, ours) + 7:.1f}" y="{top + BAR + 5}"{weight}>'
            f"{row['ratio']:.2f}x</text>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def workload_label(row: dict) -> str:
    """The workload; a star marks times that include prefill, as in the table."""
    return row["workload"] + ("" if row["kind"] == "decode" else " *")
