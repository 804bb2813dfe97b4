"""The command line of a benchmark, and programs that a benchmark starts.

It imports no kernels, see ``results.py``.
"""

import argparse
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec

from vllm_prefixshare.core import PrefixShareError

#: root of the repository
ROOT = Path(__file__).resolve().parents[2]
#: kernels of other projects that are taken from the user's own checkouts
CHECKOUTS = ("fasttree", "deft", "pat")
RESUME = "--resume"

P = ParamSpec("P")


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Parser of ``python -m program``; ``description`` is shown as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``."""
    parser.add_argument("--out", type=Path, help="write the results here as JSON")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume``; see ``results.resumed``."""
    parser.add_argument(
        RESUME,
        action="store_true",
        help="keep what the same command has already written to --out, and measure the rest",
    )


def recorded_command(program: str) -> str:
    """The command with which ``program`` was started, as published files record it."""
    return shlex.join(["python", "-m", program, *(x for x in sys.argv[1:] if x != RESUME)])


def one_sentence(
    program: str, *errors: type[Exception]
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates a ``main``: an error is one sentence on standard error, and exit status 2.

    Args:
        program: name of the module that is run.
        errors: besides ``PrefixShareError``.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except (PrefixShareError, *errors) as e:
                print(f"{program}: error: {e}", file=sys.stderr)
                return 2

        return guarded

    return decorate


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of the repository with this interpreter.

    The module is found from any folder with ``environment``.
    """
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Variables of a process that imports modules of the repository, from any folder."""
    path = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def visible_gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them, or all."""
    import torch

    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(i) for i in range(torch.cuda.device_count())]


def run(
    command: Sequence[str], minutes: float, variables: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``command``, and end it with all processes that it has started when its time is up.

    Args:
        command: such as ``module_command`` makes.
        variables: in addition to ``environment``.

    Returns:
        its exit status and what it printed.

    Raises:
        TimeoutError: it took more than ``minutes``, and was ended; the message is a sentence.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **(variables or {})},
        start_new_session=True,  # so that the engines and ranks that it starts can be ended with it
    ) as process:
        try:
            out, err = process.communicate(timeout=60 * minutes)
        except BaseException as e:  # an interrupt does not reach another session, either
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            name = command[2] if command[1] == "-m" else Path(command[0]).name
            raise TimeoutError(f"{name} took more than {minutes:g} minutes and was ended") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def measured(
    module: str, arguments: Sequence[str], minutes: float
) -> tuple[dict[str, Any] | None, str]:
    """Run a benchmark of the repository.

    Returns:
        what it wrote to ``--out``, None for nothing; and why it has not written more, in a line.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        try:
            done = run(module_command(module, *arguments, "--out", str(out)), minutes)
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        except TimeoutError as e:
            reason = str(e)
        return (json.loads(out.read_text()) if out.exists() else None), reason
