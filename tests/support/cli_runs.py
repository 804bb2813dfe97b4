"""Runs commands as a user's shell runs them."""

import os
import subprocess
import sys

PROGRAM = "import sys; from vllm_prefixshare.cli.main import main; sys.exit(main())"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``vllm-prefixshare`` with these arguments in a separate process."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
