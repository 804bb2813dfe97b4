"""Every command and snippet of the documentation runs, or is marked as not run and is checked."""

import ast
import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.documentation import (
    BLOCKS,
    LANGUAGES,
    PAGES,
    REASONS,
    ROOT,
    Block,
    files_of,
    prose,
)
from tests.support.documented_commands import PROGRAMS, WrongCommandError, check
from tests.support.dummy_model import write_small_llama
from tests.support.engine import DEFAULT_ENVIRONMENT, ONE_PROCESS
from tests.support.processes import run
from vllm_prefixshare.cli.main import main

PYTHON = [b for b in BLOCKS if b.language == "python"]
SHELL = [b for b in BLOCKS if b.language == "sh"]
RUN = [(b.page, line) for b in SHELL if b.mark == "" for line in b.commands]
NOT_RUN = [(b, line) for b in SHELL if b.mark == "not run" for line in b.commands]
CHECKED = [(b.page, line) for b, line in NOT_RUN if b.value != "needs another framework"]
FOREIGN = [line for b, line in NOT_RUN if b.value == "needs another framework"]
#: Pages whose blocks are whole scripts; on the others, blocks continue those above them.
SCRIPTS = {"docs/api.md"}
#: Commands between backticks in the text. Tables written from published figures are left out: they
#: keep the command that was current at the time.
GENERATED = re.compile(r"^<!-- table .*?^<!-- end -->$", re.M | re.S)
INLINE = sorted(
    {
        span
        for page in PAGES
        for span in re.findall(r"`([^`\n]+)`", GENERATED.sub("", prose(page)))
        if len(span.split()) > 1
        and re.sub(r"^([A-Z_]+=\S+ )*", "", span).split(" ")[0] in {*PROGRAMS, "pytest"}
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_says_what_it_is(page):
    for block in (b for b in BLOCKS if b.page == str(page.relative_to(ROOT))):
        assert block.language in LANGUAGES, block
        assert block.mark != "not run" or block.value in REASONS, block
        assert block.mark != "run" or block.language == "python", block
        assert block.mark != "run" or block.value in ("engine", "as a file"), block
    indented = re.findall(r"^\n {4}\S.*", prose(page), re.M)
    assert not [x for x in indented if not x.strip().startswith("-")], "fence it, with its language"


@pytest.mark.parametrize("page", sorted({b.page for b in PYTHON if b.mark == ""}))
def test_snippets_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    for block in PYTHON:
        if block.page == page and block.mark == "":
            if page in SCRIPTS:
                names = {"__name__": page}
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)


@pytest.mark.engine
def test_snippets_for_an_engine_run(tmp_path):
    """Run all of them in one process. Equal arguments get the engine that already runs, which is
    in this process as well and has a small model and short contexts, so that it starts soon. It
    compiles the model, as vLLM does by default.
    """
    short = "dtype='float32', max_model_len=1024, max_num_batched_tokens=512"
    lines = [
        "import functools, vllm",
        f"vllm.LLM = functools.cache(functools.partial(vllm.LLM, {short}))",
        f"MODEL = {str(write_small_llama(tmp_path, num_layers=2))!r}",
    ]
    for block in (b for b in PYTHON if (b.mark, b.value) == ("run", "engine")):
        lines += [f"print('# {block.page}')", *block.code.splitlines()]
    program = "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in lines)
    variables = {**DEFAULT_ENVIRONMENT, **ONE_PROCESS, "VLLM_PREFIXSHARE_SHARE": "always"}
    done = run([sys.executable, "-c", program], timeout=600, **variables)
    printed = done.stdout.partition("# docs/api.md\n")[2].splitlines()[0]
    assert float(printed) > 1.2  # one request may decode alone at first


@pytest.mark.parametrize("block", [b for b in PYTHON if b.mark == "not run"], ids=lambda b: b.page)
def test_arguments_of_other_snippets_are_vllms(block: Block):
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LLM":
            assert {keyword.arg for keyword in node.keywords} <= known


@pytest.mark.parametrize(("page", "line"), RUN)
def test_a_command_runs(page, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in files_of(page).items():
        Path(name).write_text(text)
    program, *arguments = shlex.split(line, comments=True)
    assert program == "vllm-prefixshare", "mark the block: <!-- not run: REASON -->"
    assert main(arguments) == 0
    assert capsys.readouterr().out
    if "--svg" in arguments:
        name = arguments[arguments.index("--svg") + 1]
        drawn = ROOT / "docs" / "images" / name
        assert Path(name).read_text() == drawn.read_text(), f"draw {drawn} again: {line}"


@pytest.mark.parametrize(("page", "line"), CHECKED)
def test_the_options_of_a_command_exist(page, line, pytestconfig):
    check(line, pytestconfig)


@pytest.mark.parametrize("line", FOREIGN)
def test_what_other_frameworks_hand_to_vllm_exists(line, pytestconfig):
    """Check what a framework passes to vLLM; its own options are not checked."""
    environment = dict(re.findall(r'\b(VLLM_[A-Z_]+)(?:=|": ")(\w+)', line))
    options = re.findall(r"engine_kwargs\.vllm\.(\w+)=(\w+)", line)
    assert environment or options
    words = [f"{name}={value}" for name, value in environment.items()]
    words += ["vllm", "serve", "MODEL", *(f"--{name}={value}" for name, value in options)]
    check(shlex.join(words), pytestconfig)


def test_tests_that_pages_name_exist():
    files = [*(ROOT / "tests").rglob("test_*.py")]
    known = {p.name for p in files} | {
        name for p in files for name in re.findall(r"^def (test_\w+)\(", p.read_text(), re.M)
    }
    for page in PAGES:
        for name in re.findall(r"(?<![\w/])test_\w+(?:\.py)?", prose(page)):
            assert name in known, f"{page.name}: {name}"


@pytest.mark.parametrize("line", INLINE)
def test_the_options_of_a_command_in_the_text_exist(line, pytestconfig):
    check(line, pytestconfig)


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve MODEL --attention-backnd PREFIX_SHARE",
        "vllm-prefixshare inspect --gpus H200",
        "make demos",
        "make demo DEMO_ARGS=--comparison",
        "python -m benchmarks.engine.cpu --rounds 2",
        "python -m pytest tests/gone",
        "VLLM_PREFIXSHARE_SHRE=auto vllm-prefixshare doctor",
        "pip install .[gpus]",
        "curl localhost",
    ],
)
def test_a_wrong_command_is_found(line, pytestconfig):
    with pytest.raises(WrongCommandError):
        check(line, pytestconfig)
