"""docs/cli.md describes every command correctly; tests/docs runs the commands on the page."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.test_snippets import RUN
from tests.support.documentation import files_of
from vllm_prefixshare.cli.main import COMMANDS, main
from vllm_prefixshare.cli.picture import MAX_ROWS
from vllm_prefixshare.planning.costs.gpus import GPUS
from vllm_prefixshare.vllm_plugin.observability.tracing import MAX_BYTES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
FILES = files_of("docs/cli.md")
LINES = [line for page, line in RUN if page == "docs/cli.md"]


@pytest.mark.parametrize("line", [x for x in LINES if "profile" not in x])
def test_json_is_one_object(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    _, command, *arguments = shlex.split(line)
    assert main([command, "--json", *arguments]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_every_command_has_its_section():
    assert re.findall(r"^## `(\w+)`", PAGE, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"^\| \[`(\w+)`\]\(#\1\) \|", PAGE, re.MULTILINE) == list(COMMANDS)


def test_limits_are_those_of_the_code():
    assert f"ends at {MAX_BYTES >> 20} MiB" in PAGE
    assert f"At most {MAX_ROWS} workers are shown" in PAGE
    *most, last = GPUS
    assert f"{', '.join(most)} and {last}" in PAGE
