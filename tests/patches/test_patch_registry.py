"""``patches/README.md`` lists what the patches say, and each patch says all that it must."""

import re

import pytest

from tests.support.patch_series import FOLDER, VERSIONS, Patch, series

PATCHES = [patch for version in VERSIONS for patch in series(version)]
README = (FOLDER / "README.md").read_text()


def rows() -> dict[str, list[str]]:
    """File name of a patch -> the other cells of its row in the registry."""
    cells = re.findall(r"^\| (\[`\d{4}-[^`]+`\].*) \|$", README, re.MULTILINE)
    found = {}
    for line in cells:
        name, *others = (cell.strip() for cell in line.split(" | "))
        found[re.search(r"`(.+)`", name).group(1)] = others
    return found


def test_every_release_is_listed():
    listed = re.findall(r"^\| (0\.\d+\.\d+) \|", README, re.MULTILINE)
    assert sorted(listed) == VERSIONS


def test_the_registry_lists_the_files_that_exist():
    assert {patch.path.name for patch in PATCHES} == {f"{name}.patch" for name in rows()}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_series_has_every_patch(version):
    assert [p.path.stem for p in series(version)] == list(rows())


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: f"{p.path.parent.name}/{p.path.stem}")
def test_a_patch_says_what_the_registry_says(patch: Patch):
    subject, upstream, until = rows()[patch.path.stem]
    assert patch.subject == subject
    assert patch.trailer("Upstream") == upstream
    assert patch.trailer("Until") == until


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: f"{p.path.parent.name}/{p.path.stem}")
def test_a_patch_is_small_and_says_why(patch: Patch):
    assert patch.author == "vllm_prefixshare developers <noreply@example.com>"
    assert re.match(r"\[[A-Z][A-Za-z0-9]+\] [A-Z]", patch.subject)
    assert len(patch.subject) <= 80
    assert "\nWhy: " in patch.message
    assert max(map(len, patch.message.splitlines())) <= 88
    assert patch.changed_lines <= 150, "one idea each"
