"""Another program, which ends with all processes that it has started when its time is up."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


def run(
    command: list[str], minutes: float, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``command``; its status and what it printed.

    Args:
        environment: variables beside those of this process.

    Raises:
        TimeoutError: it took more than ``minutes``, and was ended; the message is a sentence.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # so that the engines and ranks that it starts can be ended with it
    ) as process:
        try:
            out, err = process.communicate(timeout=60 * minutes)
        except BaseException as e:  # an interrupt does not reach another session, either
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            name = Path(command[1] if command[1].endswith(".py") else command[0]).name
            raise TimeoutError(f"{name} took more than {minutes:g} minutes and was ended") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
