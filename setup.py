"""README with the addresses that a package index needs; the rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def readme() -> str:
    """README, whose links into the repository lead to its address: an index has no such files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    return re.sub(
        r'(\]\(|src="|srcset=")(?![a-z]+:|#)([^)"]+)',
        lambda link: f"{link[1]}{source}/{'raw' if '.svg' in link[2] else 'blob'}/main/{link[2]}",
        text,
    )


setup(long_description=readme(), long_description_content_type="text/markdown")
