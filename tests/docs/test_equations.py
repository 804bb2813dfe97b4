"""The appendix of the papers' equations names functions that exist, and all papers."""

import importlib
import re

from benchmarks.papers import PAPERS
from tests.support.documentation import ROOT

PAGE = ROOT / "benchmarks" / "papers" / "equations.md"


def resolve(name: str) -> object:
    """A module, or what it has under that name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_every_function_of_the_appendix_exists():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", row[2])}
    assert len(named) > 40
    for name in sorted(named):
        resolve(name if name.startswith("benchmarks.") else f"vllm_prefixshare.{name}")


def test_the_appendix_has_every_paper_and_a_deviation_in_each_row():
    text = PAGE.read_text()
    for paper in PAPERS:
        assert f"\n## {paper}" in text
    for line in text.splitlines():
        if line.startswith("| "):
            assert len(line.split("|")) == 5, line
