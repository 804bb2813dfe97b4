"""Rectangles, lines and text on a light page, written as SVG by hand or as PNG by Pillow."""

import io
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.utils.trusted_files import write_whole

#: Average letter width over font size for a usual sans-serif font, estimated on the wide side.
LETTER = 0.58
BACKGROUND, TEXT, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#d1d9e0"
#: PNG pixels per pixel of the page.
SCALE = 2


class Rect(NamedTuple):
    """A rectangle, in pixels. hint: its tooltip in a browser."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = "none"
    hint: str = ""


class Line(NamedTuple):
    """A straight line, in pixels."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str = GRID


class Text(NamedTuple):
    """A line of text. y: its baseline, in pixels."""

    x: float
    y: float
    text: str
    size: int = 13
    anchor: Literal["start", "middle", "end"] = "start"
    fill: str = TEXT


Shape = Rect | Line | Text


def text_width(text: str, size: int) -> float:
    """Approximate upper bound of the width of ``text`` in pixels."""
    return len(text) * size * LETTER


def longest_that_fits(texts: Iterable[str], width: float, size: int) -> str:
    """The first of ``texts`` that is not wider than ``width`` pixels; "" if none is."""
    return next((text for text in texts if text_width(text, size) <= width), "")


class Canvas:
    """A page of ``width`` pixels, as high as what is drawn on it needs."""

    def __init__(self, width: int, title: str) -> None:
        self.width, self.height, self.title = width, 0.0, title
        self.shapes: list[Shape] = []

    def add(self, *shapes: Shape) -> None:
        """Draw shapes above those drawn already."""
        self.shapes += shapes

    def svg(self) -> str:
        """An SVG document."""
        width, height = self.width, round(self.height)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>',
            *map(_svg_of, self.shapes),
        ]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def write_svg(self, path: Path) -> None:
        """Raises:
        PrefixShareError: the file cannot be written.
        """
        _write(path, self.svg().encode(errors="replace"))

    def write_png(self, path: Path) -> None:
        """Raises:
        PrefixShareError: Pillow is missing, or the file cannot be written.
        """
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise PrefixShareError(
                "a PNG needs Pillow: install it with pip install pillow, or use --svg."
            ) from None
        size = (self.width * SCALE, round(self.height) * SCALE)
        image = Image.new("RGB", size, BACKGROUND)
        draw = ImageDraw.Draw(image)
        fonts = {
            n: ImageFont.load_default(n * SCALE)
            for n in {s.size for s in self.shapes if isinstance(s, Text)}
        }
        for shape in self.shapes:
            if isinstance(shape, Rect):
                left, top = round(shape.x * SCALE), round(shape.y * SCALE)
                right = max(left, round((shape.x + shape.width) * SCALE) - 1)
                bottom = max(top, round((shape.y + shape.height) * SCALE) - 1)
                outline = None if shape.stroke == "none" else shape.stroke
                draw.rectangle((left, top, right, bottom), shape.fill, outline)
            elif isinstance(shape, Line):
                draw.line([SCALE * v for v in shape[:4]], shape.stroke, SCALE)
            else:
                place = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                at = (shape.x * SCALE, shape.y * SCALE)
                draw.text(at, shape.text, shape.fill, fonts[shape.size], place)
        data = io.BytesIO()
        image.save(data, "PNG")
        _write(path, data.getvalue())


def _svg_of(shape: Shape) -> str:
    if isinstance(shape, Rect):
        hint = f"<title>{escape(shape.hint)}</title>" if shape.hint else ""
        return (
            f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
            f'height="{shape.height:.1f}" fill="{shape.fill}" stroke="{shape.stroke}"'
            + (f">{hint}</rect>" if hint else "/>")
        )
    if isinstance(shape, Line):
        return (
            f'<path d="M{shape.x1:.1f} {shape.y1:.1f}L{shape.x2:.1f} {shape.y2:.1f}" '
            f'stroke="{shape.stroke}"/>'
        )
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" '
        f'text-anchor="{shape.anchor}" fill="{shape.fill}">{escape(shape.text)}</text>'
    )


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all. What is no plain file, such as /dev/stdout,
    or a link to a file, is written to and not replaced.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            write_whole(path, data)
    except OSError as e:
        raise PrefixShareError(f"{path} cannot be written ({e}): name another file.") from None
