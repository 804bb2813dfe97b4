"""The charts of published results: what they show, and whether it can be seen."""

import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.support import charts
from benchmarks.support.charts import COLOURS, DARK_OF, Chart, adaptive, draw, light_and_dark
from benchmarks.whole_call.report import call_chart
from vllm_prefixshare.cli.picture import DARK, LIGHT

VALUES = {"a < b": {"ours": 0.5, "other": 50.0}, "c": {"ours": 5.0}}
BARS = Chart("a title", "ms", VALUES)
DOTS = BARS._replace(logarithmic=True)
SVG = "{http://www.w3.org/2000/svg}"
HEX = re.compile(r"#[\da-f]{6}\b")
#: Backgrounds of the site's dark scheme and of dark SVG documents.
DARK_PAGES = ("#1e2129", DARK.background)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def sizes(figure: Figure) -> list[float]:
    return [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]


def test_colours_can_be_seen_on_both_backgrounds():
    for light, dark in COLOURS:
        assert contrast(light, LIGHT.background) >= 3
        for page in DARK_PAGES:
            assert contrast(dark, page) >= 3
    assert contrast(LIGHT.text, LIGHT.background) >= 4.5
    for page in DARK_PAGES:
        assert contrast(DARK.text, page) >= 4.5
    for theme in (0, 1):
        assert len({pair[theme] for pair in COLOURS}) == len(COLOURS)


def test_a_bar_begins_at_zero_on_a_linear_axis():
    axes = draw(BARS).axes[0]
    assert axes.get_xscale() == "linear"
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 0.5), (0, 5), (0, 50)]


def test_a_logarithmic_axis_has_dots_and_no_bars():
    axes = draw(DOTS).axes[0]
    assert axes.get_xscale() == "log"
    assert not axes.patches, "a bar has no beginning on a logarithmic axis"
    assert [list(line.get_xdata()) for line in axes.lines] == [[0.5, 5.0], [50.0]]
    signs = {line.get_label(): line.get_marker() for line in axes.lines}
    assert signs == {"ours": "o", "other": "D"}, "a colour stands for a method, or for a diamond"


@pytest.mark.parametrize("chart", [BARS, DOTS, call_chart()])
def test_texts_can_be_read(chart):
    figure = draw(chart)
    # a README shows charts at 830 to 900 pixels
    assert min(sizes(figure)) * 830 / charts.WIDTH >= 11


def test_a_method_has_its_colour_in_every_chart():
    for chart in (BARS, DOTS, call_chart()):
        axes = draw(chart).axes[0]
        ours = {
            mark.get_color() if chart.logarithmic else mark[0].get_facecolor()
            for mark in [*axes.lines, *axes.containers]
            if mark.get_label() in ("ours", "PREFIX_SHARE")
        }
        assert {to_hex(colour) for colour in ours} == {COLOURS[0][0]}


def test_light_and_dark_are_one_drawing():
    light, dark = light_and_dark(BARS)
    assert light != dark
    assert set(HEX.findall(light)) <= set(DARK_OF)
    assert set(HEX.findall(dark)) <= set(DARK_OF.values())
    assert HEX.sub("", light) == HEX.sub("", dark)
    texts = ["".join(text.itertext()) for text in ET.fromstring(dark).iter(f"{SVG}text")]
    assert {"a < b", "c", "ours", "other", "ms", "0.5", "50"} <= set(texts)


def test_an_adaptive_chart_changes_each_of_its_colours():
    svg = adaptive(DOTS)
    drawing, style = svg.split("<style>@media")
    for colour in set(re.findall(r"(?:fill|stroke): (#\w{6})", drawing)):
        assert f'[style*="fill: {colour}"]{{fill:{DARK_OF[colour]}!important}}' in style
    assert f"fill: {LIGHT.background}" in drawing, "readable on a page of the other scheme"
    title = ET.fromstring(svg).find(f"{SVG}title")
    assert title is not None and title.text == "a title"


def test_equal_charts_are_equal_files():
    assert adaptive(DOTS) == adaptive(DOTS)
    assert light_and_dark(BARS) == light_and_dark(BARS)
