"""The published results, and Markdown made of them."""

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.support.program import ROOT

FOLDER = ROOT / "benchmarks" / "published"

Result = dict[str, Any]


def load(name: str) -> Result:
    """Results by the name of their file, such as ``papers/deft-table-6``."""
    result: Result = json.loads((FOLDER / f"{name}.json").read_text())
    return result


def exists(name: str) -> bool:
    """Whether these results are published."""
    return (FOLDER / f"{name}.json").exists()


def versions(result: Result) -> str:
    return ", ".join(f"{name} {v}" for name, v in result["versions"].items())


def table(header: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table. header: cells separated by `` | ``."""
    columns = header.split(" | ")
    return [_line(columns), "|" + "---|" * len(columns), *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)
