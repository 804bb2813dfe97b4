"""The pages of the documentation, and the blocks of code in them.

A comment on the line before a block says what a test does with the block:

    <!-- file: NAME -->        saved as the file NAME, for the commands of the page
    <!-- run: engine -->       Python that starts an engine, run with the embedded model
    <!-- run: as a file -->    a script, run by tests/examples/test_minimal.py
    <!-- not run: REASON -->   its commands and names are checked, but not run

Without a comment, Python and commands are run.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Dated deep dives.
NOTES = sorted(ROOT.glob("docs/notes/*.md"))
#: The guide: what a reader with a task looks at.
GUIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "patches" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *NOTES,
]
#: Languages of blocks; ``text`` is the output of a program, or a sketch.
LANGUAGES = {"python", "sh", "json", "text", "promql", "yaml"}
#: Why a block is not run.
REASONS = {
    "needs a GPU",
    "needs a network",
    "needs another framework",
    "starts a server",
    "starts an engine for each line",
    "takes minutes",
    "changes what is installed",
}
MARK = re.compile(r"<!-- (run|file|not run): (.+) -->")


class Block(NamedTuple):
    """A block of code.

    page: path of the page from the root. line: line of the page where the code begins.
    mark, value: the two parts of the comment before the block; "" and "" without a comment.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str
    value: str

    @property
    def commands(self) -> list[str]:
        """The block's lines without comments; a trailing backslash joins two lines."""
        lines = self.code.replace("\\\n", "").splitlines()
        return [line for line in lines if line and not line.startswith("#")]


def blocks_of(path: Path) -> list[Block]:
    """Every block of a page, from top to bottom."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        mark = MARK.fullmatch(lines[start - 1])
        found.append(
            Block(
                str(path.relative_to(ROOT)),
                start + 2,
                lines[start][3:],
                "\n".join(lines[start + 1 : number]) + "\n",
                *(mark.groups() if mark else ("", "")),
            )
        )
        start = None
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def files_of(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {b.value: b.code for b in BLOCKS if b.page == page and b.mark == "file"}


def prose(path: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
