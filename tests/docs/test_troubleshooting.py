"""docs/troubleshooting.md explains every sentence of the source that does not name its remedy."""

import re

from tests.support.documentation import ROOT
from tests.support.package_messages import messages, names_remedy

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("|---")]


def test_every_message_names_its_remedy_or_is_explained():
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
    assert sorted(quoted) == sorted(set(quoted)), "quoted twice"
    unexplained = {text for text in messages() if not names_remedy(text)} - set(quoted)
    assert sorted(unexplained) == [], "name the remedy, or give cause and remedy on the page"
    assert sorted(set(quoted) - set(messages())) == [], "quoted, but not in the source"


def test_each_row_has_a_cause_and_a_remedy():
    for line in ROWS:
        symptom, cause, remedy = re.split(r" \| ", line.strip("| "))
        assert symptom and cause and remedy, line


def test_a_remedy_is_recognised():
    assert names_remedy("... is not valid: set it to ...")
    assert names_remedy("kernel must be one of ..., got ...")
    assert not names_remedy("... cannot be read (...).")
    assert not names_remedy("tokenizer ... cannot be loaded (...).")
