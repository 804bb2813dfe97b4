"""CITATION.cff has what version 1.2.0 of the Citation File Format asks for."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_prefixshare

ROOT = Path(__file__).parents[2]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PAPERS = CITATION["references"]


def check_authors(record: dict[str, Any]) -> None:
    assert record["authors"]
    for author in record["authors"]:
        is_person = author.keys() == {"family-names", "given-names"}
        assert is_person or author.keys() == {"name"}
        assert all(isinstance(value, str) and value for value in author.values())


def test_it_describes_this_release():
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["type"] == "software"
    assert CITATION["title"] == "vllm_prefixshare"
    assert CITATION["message"]
    assert CITATION["license"] == "Apache-2.0"
    assert CITATION["version"] == vllm_prefixshare.__version__
    assert isinstance(CITATION["date-released"], datetime.date)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{CITATION['version']}] - {CITATION['date-released']}" in changelog
    check_authors(CITATION)
    assert CITATION.keys() <= {
        "cff-version", "message", "type", "title", "abstract", "version", "date-released",
        "license", "keywords", "authors", "references",
    }  # fmt: skip


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p["title"].split(":")[0])
def test_a_paper_is_complete(paper):
    assert paper["type"] in ("article", "conference-paper")
    assert isinstance(paper["year"], int)
    check_authors(paper)
    if paper["type"] == "conference-paper":
        assert paper["conference"]["name"]
    else:
        assert re.fullmatch(r"10\.\d{4,9}/\S+", paper["doi"])
    assert paper.keys() <= {"type", "title", "authors", "year", "conference", "doi", "notes"}


def test_it_names_the_five_papers():
    titles = [paper["title"].split(":")[0] for paper in PAPERS]
    assert titles == ["FlashForge", "FastTree", "DeFT", "DeFT", "Tree Attention"]
