"""The site builds without a warning, and every link in it has a target."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import vllm_prefixshare
from tests.support.documentation import NOTES
from tests.support.processes import run

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """The links and images of an HTML page, and the anchors that other pages can link to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src", "srcset") and value:
                self.targets.append(value)
            if key == "id" and value:
                self.names.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run(build, cwd=ROOT)
    return folder


def test_every_page_is_in_it(site):
    pages = {p.stem for p in [*ROOT.glob("docs/*.md"), *NOTES]}
    pages |= {"CONTRIBUTING", "CHANGELOG", "SECURITY", "patches", "engine", "kernel"}
    assert pages <= {p.parent.name for p in site.rglob("index.html")}
    assert "is read from memory once per step" in (site / "index.html").read_text()


def test_code_and_tables_are_shown_as_such(site):
    page = (site / "api" / "index.html").read_text()
    shown = len(re.findall(r"<pre[^>]*>(?:<span></span>)?<code", page))
    assert shown >= (ROOT / "docs" / "api.md").read_text().count("```") // 2
    for path in site.rglob("index.html"):
        text = path.read_text()
        assert "```" not in text, path
        assert "|---" not in text, path


def test_the_reference_is_generated_from_docstrings(site):
    names = Links(site / "api" / "index.html").names
    objects = {"LayerExtras", "PrefixShareDecodeWrapper", "merge_states"}
    wrapper = vllm_prefixshare.PrefixShareDecodeWrapper
    objects |= {f"PrefixShareDecodeWrapper.{x}" for x in vars(wrapper) if not x.startswith("_")}
    assert {f"vllm_prefixshare.{name}" for name in objects} <= names


def test_no_link_leads_nowhere(site):
    pages = {path: Links(path) for path in site.rglob("*.html")}
    for path, links in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for target in links.targets:
            place, name = urldefrag(target)
            if "://" in target or target.startswith(("mailto:", "data:")):
                continue
            found = (path.parent / unquote(place)).resolve() if place else path
            found = found / "index.html" if found.is_dir() else found
            assert found.is_file(), f"{path.relative_to(site)}: {target}"
            if name and found in pages:
                assert name in pages[found].names, f"{path.relative_to(site)}: {target}"


def test_the_guide_is_short_and_its_pages_open_with_their_answer(site):
    menus = (site / "index.html").read_text()
    guide, notes = re.findall(r'<li class="md-tabs__item.*?</li>', menus, re.S)
    assert "Guide" in guide and "Lab notes" in notes
    nav = (ROOT / "mkdocs.yml").read_text().partition("  - Guide:\n")[2].partition("  - Lab")[0]
    names = re.findall(r": (\S+\.md)$", nav, re.M)
    assert len(names) <= 8
    for name in names:
        path = ROOT / ("README.md" if name == "index.md" else f"docs/{name}")
        opening = path.read_text().split("\n\n")[1]
        assert not opening.startswith(("#", "|", "```", "<!--")), name
        assert len(opening) <= 600
