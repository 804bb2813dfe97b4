"""Released versions of a package, unpacked next to the installed one."""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest


def unpacked(
    found: Path,
    requirement: str,
    hashes: Iterable[str],
    options: Iterable[str] = (),
    wanted: Callable[[str], bool] = lambda name: True,
) -> Path:
    """The folder ``found`` with the files of a wheel, downloaded once. First on PYTHONPATH, it is
    imported instead of the installed release. Without a network the test is skipped, except under
    CI.

    Args:
        requirement: ``package==version``. hashes: SHA-256 of the wheels that may be taken.
        options: of ``pip download``. wanted: whether a file of the wheel is unpacked.
    """
    if found.is_dir():
        return found
    with tempfile.TemporaryDirectory() as scratch:
        list_of_one = Path(scratch, "wanted.txt")
        list_of_one.write_text(" ".join([requirement, *(f"--hash=sha256:{h}" for h in hashes)]))
        download = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
            "--only-binary=:all:", f"--dest={scratch}", f"--requirement={list_of_one}", *options,
        ]  # fmt: skip
        done = subprocess.run(download, capture_output=True, text=True)
        if done.returncode and not os.environ.get("CI"):
            pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip()[-200:]}")
        assert done.returncode == 0, done.stderr
        found.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=found.parent))
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(folder, filter(wanted, wheel.namelist()))
        folder.rename(found)
    return found
