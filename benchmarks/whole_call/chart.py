"""The chart of README.md as SVG text, drawn from the published whole calls.

``tables.py`` writes the chart next to the tables and checks it with them. The chart is plain text
without a plotting library, so that ``make lint`` can compare it byte for byte.
"""

from html import escape

#: theme -> colours; the background is transparent, so that the page's background shows. Bars have
#: a contrast of at least 3:1 with GitHub's and the site's background in that theme.
THEMES = {
    "light": {
        "text": "#1f2328",
        "grid": "#d1d9e0",
        "flash_attn": "#7d868f",
        "flash_attn_prompts": "#b35900",
        "prefix_share": "#0969da",
    },
    "dark": {
        "text": "#e6edf3",
        "grid": "#3d444d",
        "flash_attn": "#8b949e",
        "flash_attn_prompts": "#f0883e",
        "prefix_share": "#58a6ff",
    },
}
#: Name of each method in the legend, in the order of the bars.
METHODS = {
    "flash_attn": "vLLM, FLASH_ATTN",
    "flash_attn_prompts": "FLASH_ATTN + shared host work",
    "prefix_share": "PREFIX_SHARE",
}
#: Calls of the chart. Two larger ones, which gain more, would need another scale.
CALLS = ("cached", "cold", "token_ids", "chat", "multi_turn", "agents", "beams4", "unshared")
#: Pixels: left end of the bars, length of the longest bar, room for the text to their right.
LEFT, WIDTH, RIGHT = 320, 480, 100
#: Pixels: height of a bar, distance from one call to the next, top of the first.
BAR, STEP, TOP = 13, 52, 40
#: Milliseconds between two lines of the grid.
GRID = 2000


def call_chart(result: dict, theme: str) -> str:
    """Milliseconds of complete calls, one bar for each method.

    Args:
        result: content of ``benchmarks/published/whole_call.json``.
        theme: a name in ``THEMES``.

    Returns:
        an SVG document.
    """
    colours = THEMES[theme]
    titles = {w["name"]: w["title"].replace("`", "") for w in result["workloads"]}
    times = {
        call: [result["rows"][method]["workloads"][call]["seconds"] * 1e3 for method in METHODS]
        for call in CALLS
    }
    slowest = max(map(max, times.values()))
    scale = WIDTH / slowest  # pixels per millisecond
    bottom = TOP + STEP * len(CALLS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} '
        f'{bottom + 44}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{colours["text"]}">',
        "<title>Milliseconds of complete calls, vLLM's default backend and PREFIX_SHARE</title>",
    ]
    for ms in range(0, int(slowest) + 1, GRID):
        x = LEFT + ms * scale
        parts.append(
            f'<path d="M{x:.1f} {TOP - 8}V{bottom}" stroke="{colours["grid"]}"/>'
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{ms:,}</text>'
        )
    parts.append(
        f'<text x="{LEFT + WIDTH / 2:.0f}" y="{bottom + 38}" text-anchor="middle">'
        "milliseconds of the whole call (shorter is faster)</text>"
    )
    for x, (method, name) in zip((LEFT, LEFT + 150, LEFT + 405), METHODS.items(), strict=True):
        parts.append(
            f'<rect x="{x}" y="9" width="{BAR}" height="{BAR}" fill="{colours[method]}"/>'
            f'<text x="{x + 20}" y="20">{name}</text>'
        )
    for i, call in enumerate(CALLS):
        top = TOP + STEP * i
        middle = top + (3 * BAR) / 2 + 4
        parts.append(
            f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(titles[call])}</text>'
        )
        for j, (method, ms) in enumerate(zip(METHODS, times[call], strict=True)):
            y, weight = top + j * BAR, ' font-weight="bold"' if method == "prefix_share" else ""
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{ms * scale:.1f}" height="{BAR - 1}" '
                f'fill="{colours[method]}"/>'
                f'<text x="{LEFT + ms * scale + 6:.1f}" y="{y + 11}" font-size="12"{weight}>'
                f"{ms:,.0f}</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
