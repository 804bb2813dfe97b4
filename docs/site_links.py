"""A hook of MkDocs: adds the repository's other pages to the site, and rewrites links.

The pages are written for the repository, where ``docs/`` is one folder among others. In the
site the files of ``docs/`` lie at the root, ``README.md`` is ``index.md``, and everything else
keeps its path. A file that a page links to is copied into the site, so every link has a target.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/README.md",
    "patches/README.md",
    "benchmarks/papers/equations.md",
    *(f"benchmarks/published/{path.name}" for path in ROOT.glob("benchmarks/published/*.md")),
)
#: Markdown's links and images, and the attributes of HTML that hold a path.
LINK = re.compile(r'(\]\(|src="|srcset=")([^)"#:\s]+)(?=[)"#])')
#: A picture for two schemes, as GitHub shows it: the dark file, the text, the light file.
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def in_repository(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    if uri == "index.md":
        return "README.md"
    return uri if uri in PAGES else f"docs/{uri}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs/``, and the files that any page links to."""
    for page in PAGES:
        files.append(File.generated(config, in_site(page), abs_src_path=str(ROOT / page)))
    for page in [in_repository(file.src_uri) for file in files.documentation_pages()]:
        for _, target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            uri = in_site(path)
            if (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Write each link as the site has it. Generated tables stay out of the search."""
    source = in_repository(page.file.src_uri)
    if source.startswith("benchmarks/published/"):
        page.meta["search"] = {"exclude": True}
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        before, target = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return before + posixpath.relpath(in_site(path), folder or ".")

    return LINK.sub(rewrite, PICTURE.sub(_by_scheme, markdown))


def _by_scheme(match: re.Match[str]) -> str:
    """Two images, of which the theme shows the one for the scheme that the reader has chosen;
    ``<picture>`` would follow the operating system.
    """
    dark, text, light = match.groups()
    return f"![{text}]({light}#only-light)\n![{text}]({dark}#only-dark)"
