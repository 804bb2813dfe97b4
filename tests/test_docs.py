"""The examples of docs/api.md run, and its tables name what the code has."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomllib

import vllm_prefixshare
from tests.support.embedded_model import embedded_model_path
from tests.support.engine import DEFAULT_ENVIRONMENT
from vllm_prefixshare.integration.stats import BackendStats
from vllm_prefixshare.settings import VARIABLES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()


def blocks(kind: str) -> list[str]:
    """The fenced blocks of the page that are marked with ``kind``."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_examples_run_from_top_to_bottom():
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/api.md", "exec"), names)
    assert {"PrefixShareDecodeWrapper", "PrefixShareError", "__version__"} <= names.keys()


@pytest.mark.engine
def test_the_engine_example_runs():
    (block,) = blocks("python engine")
    lines = "\n".join(f"    {line}" for line in block.splitlines())
    program = f"MODEL = {str(embedded_model_path())!r}\nif __name__ == '__main__':\n{lines}\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **DEFAULT_ENVIRONMENT, "VLLM_PREFIXSHARE_SHARE": "always"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 1.2  # one may decode alone at first


@pytest.mark.parametrize("line", [x for b in blocks("sh") for x in b.splitlines()])
def test_commands_succeed(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # for what they write
    program, *arguments = shlex.split(line)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    main = EntryPoint(program, scripts[program], "console_scripts").load()
    assert main(arguments) == 0
    assert capsys.readouterr().out


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


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/*.md"),
        ROOT / "examples" / "README.md",
    ],
)
def test_links_lead_to_files(path):
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"#:]+)[)#\"]", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readme_fits_on_a_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 600
