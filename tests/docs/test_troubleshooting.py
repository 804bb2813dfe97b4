"""docs/troubleshooting.md quotes every sentence of the source, and no other."""

import re

from tests.docs.pages import ROOT
from tests.docs.source import messages

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_message_is_quoted_and_no_other():
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
    said = set(messages())
    assert sorted(quoted) == sorted(set(quoted)), "quoted twice"
    assert sorted(said - set(quoted)) == [], "say the cause and the remedy"
    assert sorted(set(quoted) - said) == [], "quoted, but not in the source"


def test_each_has_a_cause_and_a_remedy():
    for line in re.findall(r"^\| `.+", PAGE, re.M):
        _, cause, remedy = re.split(r" \| ", line.strip("| "))
        assert cause and remedy, line
