"""Checks that a program accepts a command of the documentation.

The program's own parser reads the options; no command runs.
"""

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tomllib

from vllm_prefixshare.cli.main import COMMANDS, parser
from vllm_prefixshare.settings import VARIABLES, read

ROOT = Path(__file__).parents[2]
#: Variables of other programs that may stand before a command.
OTHERS = {
    "GIT_DIR",
    "OMP_NUM_THREADS",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_LOGGING_LEVEL",
    "VLLM_USE_FASTOKENS",
}
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class WrongCommandError(Exception):
    """A command that its program does not accept, with the message that the program would print."""


def check(line: str, config: pytest.Config) -> None:
    """Check one line of a shell, without its comment.

    Args:
        line: the command, with variables before it.
        config: pytest's configuration, whose parser reads the options of pytest.

    Raises:
        WrongCommandError: the program does not accept the command.
    """
    words = shlex.split(line, comments=True)
    while "&&" in words:
        check(shlex.join(words[: words.index("&&")]), config)
        words = words[words.index("&&") + 1 :]
    environment = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    known = OTHERS | VARIABLES.keys() | set(re.findall(r"\b([A-Z_]+)=", MAKEFILE))
    if unknown := environment.keys() - known:
        raise WrongCommandError(f"{unknown} is not a known variable")
    read({k: v for k, v in environment.items() if k in VARIABLES})
    if not words:
        return
    program, *arguments = words
    if re.fullmatch(r"\.venv(-\w+)?/bin/python", program):
        program = "python"
    if program == "python" and arguments[:2] == ["-m", "pytest"]:
        program, arguments = "pytest", arguments[2:]
    if program == "pytest":
        check_pytest(arguments, config)
    elif program not in PROGRAMS:
        raise WrongCommandError(f"no check for {program}: add one to {Path(__file__).name}")
    else:
        PROGRAMS[program](arguments)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> Any:
    """Parse the arguments of a command.

    Raises:
        WrongCommandError: the parser does not accept the arguments.
    """
    try:
        return parser.parse_args(arguments)
    except SystemExit as e:
        if e.code == 0:  # --help
            return None
        raise WrongCommandError(f"{parser.prog} does not take {arguments}") from None


def check_own(arguments: list[str]) -> None:
    if len(arguments) == 1 and arguments[0] in COMMANDS:
        return  # the text only mentions the command
    parse(parser(), arguments)


def check_vllm(arguments: list[str]) -> None:
    parse(vllm_parser(), arguments)


@cache
def vllm_parser() -> argparse.ArgumentParser:
    """The parser of the command ``vllm``, with ``serve``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()  # as the command does, so that the name of the backend is known
    root = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(root.add_subparsers(dest="subparser"))
    return root


def check_make(arguments: list[str]) -> None:
    for argument in arguments:
        name, is_variable, value = argument.partition("=")
        if name == "DEMO_ARGS":
            check_python(["examples/document_qa.py", *shlex.split(value)])
        known = f"$({name})" in MAKEFILE if is_variable else f"\n{name}:" in MAKEFILE
        if not known:
            raise WrongCommandError(f"make has no {argument}")


def check_python(arguments: list[str]) -> None:
    """Run a program until it has read its options."""
    if arguments[0] == "-m":
        name, *options = arguments[1:]
        module = ROOT / name.replace(".", "/")
        if not (module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()):
            raise WrongCommandError(f"there is no module {name}")
        if not name.startswith("benchmarks."):
            return
        run = partial(runpy.run_module, name)
    else:
        name, *options = arguments
        path = ROOT / name
        if not path.is_file():
            raise WrongCommandError(f"there is no {name}")
        run = partial(runpy.run_path, str(path))

    def only(read: Callable[..., Any]) -> Callable[..., Any]:
        def parse_only(self: argparse.ArgumentParser, *_: Any) -> Any:
            read(self, options)
            raise _ParsedError

        return parse_only

    with pytest.MonkeyPatch.context() as patch:
        for method in ("parse_args", "parse_intermixed_args"):
            read = getattr(argparse.ArgumentParser, method)
            patch.setattr(argparse.ArgumentParser, method, only(read))
        patch.setattr(sys, "argv", [name, *options])
        patch.syspath_prepend(str(ROOT / Path(name).parent))
        patch.setattr(os, "environ", {**os.environ})
        try:
            run(run_name="__main__")
        except _ParsedError:
            return
        except SystemExit:
            raise WrongCommandError(f"{name} does not take {options}") from None
    raise WrongCommandError(f"{name} reads no options")


class _ParsedError(Exception):
    """Raised once the options have been read, to stop the program."""


def check_pytest(arguments: list[str], config: pytest.Config) -> None:
    known, unknown = config._parser.parse_known_and_unknown_args(arguments)
    missing = [name for name in known.file_or_dir if not (ROOT / name.split("::")[0]).exists()]
    if unknown or missing:
        raise WrongCommandError(f"pytest does not take {unknown + missing}")


def check_pip(arguments: list[str]) -> None:
    command, *wanted = arguments
    if (command, wanted) == ("uninstall", [PROJECT["name"]]):
        return
    if command != "install":
        raise WrongCommandError(f"no check for pip {command}")
    for name in wanted:
        extras = re.fullmatch(r"(?:\.|vllm-prefixshare)\[(.+)\]", name)
        if extras and not set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys():
            raise WrongCommandError(f"there is no extra {extras[1]}")
        own_clone = f"./{PROJECT['name']}"
        if name.startswith("./") and name != own_clone and not (ROOT / name).exists():
            raise WrongCommandError(f"there is no {name}")


def check_git(arguments: list[str]) -> None:
    command, *rest = arguments
    shown = subprocess.run(["git", command, "-h"], capture_output=True, text=True)
    said = shown.stdout + shown.stderr
    for option in (word for word in rest if word.startswith("-")):
        if option.removeprefix("--no-").strip("-") not in said:
            raise WrongCommandError(f"git {command} has no {option}")


def check_pre_commit(arguments: list[str]) -> None:
    if arguments != ["install"] or not (ROOT / ".pre-commit-config.yaml").is_file():
        raise WrongCommandError(f"no check for pre-commit {arguments}")


PROGRAMS = {
    "vllm-prefixshare": check_own,
    "vllm": check_vllm,
    "make": check_make,
    "python": check_python,
    "pip": check_pip,
    "git": check_git,
    "pre-commit": check_pre_commit,
}
