"""Run a server, or any program with vLLM, and record its plans."""

import argparse
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin.observability.tracing import FIRST_BYTES, FIRST_LINE

EXAMPLE = """\
Record a server until it is stopped by Ctrl-C, then look at the plan of its largest batch:

    vllm-prefixshare trace trace.jsonl -- vllm serve MODEL --attention-backend PREFIX_SHARE
    vllm-prefixshare inspect trace.jsonl --svg plan.svg

The file has a line for each new plan, and 16 MiB at most. This command only sets
VLLM_PREFIXSHARE_TRACE for the program; the exit status is the program's."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    command.add_argument("file", type=Path, help="where to record")
    command.add_argument("command", nargs="+", help="a program with its arguments, after --")


def run(args: argparse.Namespace) -> int:
    """Run the program with tracing on; the exit status is its own.

    Raises:
        PrefixShareError: the program cannot be run, or the file is not one to record in.
    """
    program = args.command[0]
    # before the file is touched: if FILE was forgotten, it is the user's own script
    if shutil.which(program) is None:
        raise PrefixShareError(
            f"{program} is not a program that can be run: write trace FILE -- PROGRAM."
        )
    # the functions of pathlib raise for an unknown user and for what cannot be looked up
    path = Path(os.path.expanduser(args.file)).absolute()
    # a device has no end, and a pipe waits for a reader
    if os.path.exists(path) and not os.path.isfile(path):
        raise PrefixShareError(f"{path} is not a regular file: name another.")
    try:
        _empty(path)
    except OSError as e:
        raise PrefixShareError(f"{path} cannot be written ({e.strerror}).") from None
    try:
        child = subprocess.Popen(
            args.command, env={**os.environ, "VLLM_PREFIXSHARE_TRACE": str(path)}
        )
    except OSError as e:
        raise PrefixShareError(f"{program} cannot be run ({e.strerror}).") from None

    def pass_on(number: int, _: Any) -> None:
        child.send_signal(number)

    # a terminal sends Ctrl-C to the program as well, which ends in its own way
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        recorded = path.read_bytes()
    except OSError:  # the program removed it
        recorded = b""
    plans, size = recorded.count(b"\n"), len(recorded)
    if args.json:
        report = {"path": str(path), "plans": plans, "bytes": size, "status": status}
        print(json.dumps(report, indent=1))
    else:
        print(f"{plans} plans recorded in {path}, {size} bytes; the program ended with {status}")
        if not plans:
            print(
                "It made no plans: start vLLM with --attention-backend PREFIX_SHARE, and let it "
                "decode."
            )
    return status if status >= 0 else 128 - status


def _empty(path: Path) -> None:
    """Make an empty file, in place of an earlier trace.

    Raises:
        OSError: it cannot be read and written.
        PrefixShareError: it has something else in it, which is left alone.
    """
    with path.open("a+b") as file:
        file.seek(0)
        start = file.read(FIRST_BYTES)
        if start and not FIRST_LINE.match(start):
            raise PrefixShareError(f"{path} exists and is not a trace: name another file.")
        file.truncate(0)
