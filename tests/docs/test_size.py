"""The documentation stays small enough to read: pages, sizes, paragraphs, table cells."""

import re

import pytest

from tests.support.documentation import GUIDE, NOTES, PAGES, ROOT, prose

KB = 1000
MAX_PARAGRAPH = 600
MAX_CELL = 220


def size(paths) -> int:
    return sum(path.stat().st_size for path in paths)


def test_the_guide_has_a_dozen_pages():
    assert 12 <= len(GUIDE) <= 14
    assert size(GUIDE) <= 200 * KB


def test_notes_are_few_and_short():
    assert len(NOTES) <= 10
    assert size(NOTES) <= 120 * KB
    assert [path.name for path in NOTES if path.stat().st_size > 12 * KB] == []


@pytest.mark.parametrize("path", NOTES, ids=lambda p: p.stem)
def test_a_note_is_dated(path):
    assert re.search(r"^\*[A-Z][a-z]+ 20\d\d\. ", path.read_text(), re.M)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paragraphs_and_cells_are_short(path):
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#] |\d+\. )", prose(path)):
        if paragraph.lstrip().startswith("|"):
            cells = re.split(r"(?<!\\)\|", paragraph)
            assert max(map(len, cells)) <= MAX_CELL, f"{path.name}: {max(cells, key=len)}"
        else:
            assert len(paragraph) <= MAX_PARAGRAPH, f"{path.name}: {paragraph[:80]}"


def test_the_changelog_of_the_first_release_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 15
