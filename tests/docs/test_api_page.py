"""The tables of docs/api.md match the code; links and file names lead to files."""

import dataclasses
import re
from pathlib import Path

import pytest

import vllm_prefixshare
from tests.support.documentation import PAGES, prose
from vllm_prefixshare.settings import VARIABLES
from vllm_prefixshare.vllm_plugin.observability.stats import BackendStats
from vllm_prefixshare.wrapper import DecodeStats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
#: Folders whose files pages name with their path.
FOLDERS = {"benchmarks", "docs", "examples", "patches", "tests", "vllm_prefixshare"}


def test_every_public_name_has_its_place():
    for name in vllm_prefixshare.__all__:
        assert f"[`{name}`]" in PAGE, name


def test_the_operator_has_the_members_named():
    wrapper = vllm_prefixshare.PrefixShareDecodeWrapper
    members = {name for name in vars(wrapper) if not name.startswith("_")}
    (listed,) = re.findall(r"^      members: \[(.*)\]$", PAGE, re.MULTILINE)
    assert members == set(listed.split(", "))


def test_every_public_object_has_its_reference():
    directives = set(re.findall(r"^::: vllm_prefixshare\.(\w+)$", PAGE, re.MULTILINE))
    assert directives == set(vllm_prefixshare.__all__) - {"PrefixShareError", "__version__"}


def test_figures_of_a_plan_are_those_of_the_code():
    section = PAGE[PAGE.index("returns a `DecodeStats`") : PAGE.index("## Verify drafts")]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    fields = {field.name for field in dataclasses.fields(DecodeStats)} | {"share_factor"}
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == fields


def test_settings_are_those_of_the_code():
    table = re.findall(r"^\| `(VLLM_PREFIXSHARE_\w+)` \| (?:`(.*?)`)? *\|", PAGE, re.MULTILINE)
    assert dict(table) == {name: variable.default for name, variable in VARIABLES.items()}


def test_every_counter_is_explained():
    section = PAGE[PAGE.index("| counter |") : PAGE.index("## Settings")]
    rows = [row.split("|")[1] for row in section.splitlines()[2:] if row.startswith("|")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == BackendStats().as_dict().keys()


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"#:]+)[)#\"]", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_pages_name_exist(path):
    for name in re.findall(r"`((?:\w+/)+[\w.-]*)`", prose(path)):
        is_placeholder = Path(name).stem.isupper()
        if name.partition("/")[0] in FOLDERS and not is_placeholder:
            assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_pages_that_the_source_names_exist():
    for path in [*(ROOT / "vllm_prefixshare").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"


def test_the_readme_fits_on_a_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 600
