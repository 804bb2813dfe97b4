"""Workflows call make targets that exist; templates are complete."""

import pytest
import yaml

from tests.support.documentation import ROOT
from tests.support.documented_commands import check

FOLDER = ROOT / ".github"
WORKFLOWS = sorted(FOLDER.glob("workflows/*.yml"))
FORMS = [path for path in sorted(FOLDER.glob("ISSUE_TEMPLATE/*.yml")) if path.stem != "config"]


def commands(path) -> list[str]:
    """The commands that a workflow runs."""
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_calls_make_targets(path, pytestconfig):
    assert commands(path)
    for line in commands(path):
        assert line.startswith("make ")
        check(line, pytestconfig)


def test_every_kind_of_check_has_a_workflow():
    called = " ".join(line for path in WORKFLOWS for line in commands(path))
    for target in ("make check", "make test", "make docs", "make dist"):
        assert target in called


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_a_form_asks_for_what_is_needed(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields and all(field["validations"]["required"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_the_owner_chooses_the_code_owners():
    assert not list(ROOT.glob("**/CODEOWNERS"))
