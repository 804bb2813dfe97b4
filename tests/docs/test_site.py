"""The site builds without a warning, and every link in it has a target."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import vllm_prefixshare
from tests.support.browser import check_site, find_browser
from tests.support.documentation import NOTES

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
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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


needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="needs Chromium or Chrome: apt-get install chromium"
)
WIDTHS = (390, 1366, 1920)


def check(site: Path, pages: list[str], tmp_path: Path) -> dict[str, Any]:
    browser = find_browser()
    assert browser is not None
    return check_site(browser, site, pages, WIDTHS, "share factor", tmp_path / "profile")


@needs_browser
def test_pages_fit_their_window_and_can_be_read(site, tmp_path):
    """At each width, light and dark: nothing leaves the column, text has a contrast of at least
    4.5:1, also in charts, and bars of 3:1. Of the generated tables one page stands for all.
    """
    pages = [p.relative_to(site).as_posix() for p in site.rglob("index.html")]
    published = "benchmarks/published/"
    pages = [p for p in pages if not p.startswith(published) or "kernel/" in p]
    assert len(pages) > 25
    report = check(site, pages, tmp_path)
    assert report["problems"] == []
    # the page that opens with the definition
    assert report["firstHit"].startswith("/metrics/ ")


@needs_browser
def test_a_page_that_does_not_fit_is_found(site, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(site, broken)
    page = broken / "quick-start" / "index.html"
    spoilt = '<div style="width: 3000px">wide</div><p style="color: #888">faint</p></article>'
    page.write_text(page.read_text().replace("</article>", spoilt))
    chart = broken / "images" / "whole-call-light.svg"
    for tag, faint in (("path", "#eeeeee"), ("text", "#808080")):
        fill = rf"(<{tag} [^>]*fill: )#\w+"
        chart.write_text(re.sub(fill, rf"\g<1>{faint}", chart.read_text()))
    problems = check(broken, ["quick-start/index.html", "index.html"], tmp_path)["problems"]
    for width in WIDTHS:
        at = f"/quick-start/index.html at {width} px, default: "
        assert f'{at}div. "wide" leaves the column' in problems
        assert f'{at}p. "faint" has a contrast of 3.54' in problems
    assert any("bars #eeeeee have a contrast of 1.16" in problem for problem in problems)
    assert any("texts #808080 have a contrast of 3.95" in problem for problem in problems)


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
