"""The patch series of ``patches/``, and a copy of vLLM with one of them applied."""

import os
import re
from dataclasses import dataclass
from email import message_from_string
from functools import cached_property
from pathlib import Path

from tests.support.processes import run

FOLDER = Path(__file__).parents[2] / "patches"
VERSIONS = sorted(p.name for p in FOLDER.iterdir() if p.is_dir())


@dataclass(frozen=True)
class Patch:
    """One file of a series, as ``git format-patch`` writes them."""

    path: Path

    @cached_property
    def _mail(self):
        return message_from_string(self.path.read_text())

    @property
    def author(self) -> str:
        return self._mail["From"]

    @property
    def subject(self) -> str:
        return re.sub(r"\s+", " ", self._mail["Subject"]).removeprefix("[PATCH] ")

    @property
    def message(self) -> str:
        """The body of the commit message."""
        return self._mail.get_payload().partition("\ndiff --git ")[0]

    def trailer(self, name: str) -> str:
        """The text after ``name:`` in the message."""
        (found,) = re.findall(rf"^{name}: (.+)$", self.message, re.MULTILINE)
        return found

    @property
    def files(self) -> list[str]:
        return re.findall(r"^diff --git a/(\S+) b/\1$", self.path.read_text(), re.MULTILINE)

    @property
    def changed_lines(self) -> int:
        return len(re.findall(r"^[+-](?![+-])", self.path.read_text(), re.MULTILINE))


def series(version: str) -> list[Patch]:
    """The patches for a release, in order."""
    return [Patch(path) for path in sorted((FOLDER / version).glob("*.patch"))]


def patched_copy(version: str, installed: Path, target: Path) -> list[Path]:
    """Make ``target`` a folder for PYTHONPATH with a patched vLLM: files that no patch touches are
    links into ``installed``.

    Args:
        installed: holds the package ``vllm`` and its metadata.

    Returns:
        the files that the series changed.
    """
    files = patched_files(version, installed, target)
    link_rest(installed, target)
    return files


def patched_files(version: str, installed: Path, target: Path) -> list[Path]:
    """Write the files that the series changes, patched, into the empty folder ``target``."""
    touched = sorted({name for patch in series(version) for name in patch.files})
    for name in touched:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((installed / name).read_bytes())
    _git(target, "init", "--quiet")
    _git(target, "add", "--all")
    _git(target, "commit", "--quiet", "--message", f"vLLM {version}")
    _git(target, "am", "--quiet", *(str(patch.path) for patch in series(version)))
    return [target / name for name in touched]


def link_rest(installed: Path, target: Path) -> None:
    """Link the files of the package ``vllm`` and its metadata that ``target`` lacks."""
    _link_missing(installed / "vllm", target / "vllm")
    for metadata in installed.glob("vllm-*.dist-info"):
        (target / metadata.name).symlink_to(metadata)


def _link_missing(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        there = target / entry.name
        if entry.name == "__pycache__":
            continue  # compiled patched files must not land in the installed package
        if not there.exists():
            there.symlink_to(entry)
        elif entry.is_dir():
            _link_missing(entry, there)


def _git(folder: Path, *arguments: str) -> None:
    """Run git as in a checkout of vLLM, without this machine's settings."""
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "test"), ("EMAIL", "test@example.com"))
    }
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    run(["git", *arguments], cwd=folder, env=clean, **identity, **alone)
