"""Programs in processes of their own, and the resources of a process and of all processes that it
has started: memory, open files, memory on GPUs.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


def run(
    command: Sequence[object],
    *,
    status: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 1800,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Args:
        status: exit status that it must have; None for any.
        env: environment in place of this process's. variables: added to it.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**(os.environ if env is None else env), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert status in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
    return done


def run_python(
    code: str, *arguments: object, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program, which must end with status 0, with these variables added."""
    return run([sys.executable, "-B", "-c", code, *arguments], timeout=timeout, **variables)


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of a process and its descendants. rss: resident bytes; pages that processes share
    are counted for each process. device: bytes on GPUs, as nvidia-smi says; 0 without it.
    """

    processes: int
    rss: int
    open_files: int
    device: int = 0


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a process that has ended and waits for its parent does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants that run."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if alive(process)]


def held_by(pid: int) -> Held:
    """The resources that the process and its descendants hold now."""
    rss = open_files = count = device = 0
    on_gpus = _device_memory()
    for process in tree(pid):
        try:
            memory, files = process.memory_info().rss, process.num_fds()
        except psutil.NoSuchProcess:  # the process has just ended
            continue
        rss, open_files, count = rss + memory, open_files + files, count + 1
        device += on_gpus.get(process.pid, 0)
    return Held(count, rss, open_files, device)


def _device_memory() -> dict[int, int]:
    """Bytes that each process holds on GPUs."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    rows = (line.split(", ") for line in said.splitlines())
    return {int(row[0]): int(row[1]) << 20 for row in rows if len(row) == 2 and row[1].isdigit()}
