"""The tables of docs/api.md match the code; links lead to files."""

import re
from pathlib import Path

import pytest

import vllm_prefixshare
from tests.docs.pages import PAGES
from vllm_prefixshare.integration.stats import BackendStats
from vllm_prefixshare.settings import VARIABLES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_every_public_name_has_its_place():
    for name in vllm_prefixshare.__all__:
        assert f"[`{name}`]" in PAGE, name


def test_the_operator_has_the_members_named():
    wrapper = vllm_prefixshare.PrefixShareDecodeWrapper
    members = {name for name in vars(wrapper) if not name.startswith("_")}
    assert members == set(re.findall(r"^### `(\w+)", PAGE, re.MULTILINE))


def test_settings_are_those_of_the_code():
    table = re.findall(r"^\| `(VLLM_PREFIXSHARE_\w+)` \| (?:`(.*?)`)? *\|", PAGE, re.MULTILINE)
    assert dict(table) == {name: default for name, (_, default, _) in VARIABLES.items()}


def test_every_counter_is_explained():
    section = PAGE[PAGE.index("| counter |") : PAGE.index("## Settings")]
    rows = [row.split("|")[1] for row in section.splitlines()[2:] if row.startswith("|")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == BackendStats().as_dict().keys()


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"#:]+)[)#\"]", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readme_fits_on_a_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 600
