"""``vllm-prefixshare``: prefix-shared decode attention for vLLM."""

import argparse
import sys
from types import ModuleType

from vllm_prefixshare.cli import doctor, inspect, profile
from vllm_prefixshare.records import PrefixShareError

COMMANDS: dict[str, ModuleType] = {"doctor": doctor, "profile": profile, "inspect": inspect}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="vllm-prefixshare", description=__doc__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.__doc__, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return root


def main(argv: list[str] | None = None) -> int:
    """Run a command. A user's mistake is one line on standard error and exit status 2."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except PrefixShareError as e:
        print(f"vllm-prefixshare: error: {e}", file=sys.stderr)
        return 2
