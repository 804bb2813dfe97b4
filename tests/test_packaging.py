"""What pyproject.toml says of the package is true of its files, and of its wheel."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_prefixshare"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
POINTS = [
    EntryPoint(name, value, group)
    for group, points in (
        *SETTINGS["project"]["entry-points"].items(),
        ("console_scripts", SETTINGS["project"]["scripts"]),
    )
    for name, value in points.items()
]


def test_every_file_beside_python_sources_is_shipped():
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["vllm_prefixshare"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {p for p in PACKAGE.rglob("*") if p.is_file() and p.parent.name != "__pycache__"}
    others = {p for p in files if p.suffix != ".py"}
    assert {p.name for p in others} >= {"py.typed", "native.c"}
    assert shipped == others


def test_every_folder_of_sources_is_a_package():
    for path in PACKAGE.rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), f"the wheel would leave out {path}"


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.group}: {p.value}")
def test_entry_points_lead_to_functions(point):
    assert callable(point.load())


def test_the_wheel_has_the_patches_and_nothing_of_the_tests(tmp_path):
    source = tmp_path / "source"
    for name in ("vllm_prefixshare", "patches", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    patches = {f"vllm_prefixshare/{p.relative_to(ROOT)}" for p in ROOT.glob("patches/*/*.patch")}
    assert patches <= names
    own = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file()}
    own = {name for name in own if "__pycache__" not in name}
    assert names - patches == own | {"vllm_prefixshare/patches/README.md"}
