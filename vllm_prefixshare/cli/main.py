"""``vllm-prefixshare``: prefix-shared decode attention for vLLM."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import vllm_prefixshare
from vllm_prefixshare.cli import doctor, estimate, inspect_plans, measure_costs
from vllm_prefixshare.cli.options import HelpFormatter
from vllm_prefixshare.core import PrefixShareError

COMMANDS: dict[str, ModuleType] = {
    "doctor": doctor,
    "inspect": inspect_plans,
    "estimate": estimate,
    "profile": measure_costs,
}

EXAMPLE = """\
Start here:

    vllm-prefixshare doctor                  # can the backend be chosen here?

'vllm-prefixshare COMMAND --help' has an example of each command."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``args.run`` is the one that was named."""
    root = argparse.ArgumentParser(
        prog="vllm-prefixshare", description=__doc__, epilog=EXAMPLE, formatter_class=HelpFormatter
    )
    root.add_argument(
        "--version", action="version", version=f"vllm-prefixshare {vllm_prefixshare.__version__}"
    )
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.__doc__,
            description=module.__doc__,
            epilog=f"example:\n{module.EXAMPLE}",
            formatter_class=HelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=module.run)
    return root


@contextlib.contextmanager
def _notices_shown() -> Iterator[None]:
    """Write the package's log messages to standard error, where that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    logger = logging.getLogger(vllm_prefixshare.__name__)
    handler, level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def main(argv: list[str] | None = None) -> int:
    """Run a command. A user's mistake is one line on standard error and exit status 2."""
    try:
        with contextlib.suppress(AttributeError):  # closed, or a stream of another kind
            # names of files may have what the terminal's encoding has not
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        with _notices_shown():
            args = parser().parse_args(argv)
            status: int = args.run(args)
            print(end="", flush=True)
            return status
    except PrefixShareError as e:
        print(f"vllm-prefixshare: error: {e}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "vllm_prefixshare":
            raise  # a bug in this package
        print(
            f"vllm-prefixshare: error: this command needs {e.name}: install it with pip first.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        # for what is left, which Python writes as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the shell's status for a closed pipe
    except KeyboardInterrupt:
        return 130  # the shell's status for Ctrl-C
