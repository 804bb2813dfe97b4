"""Resources of a process and of all processes that it has started: memory and open files."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of a process and its descendants. rss: resident bytes; pages that processes share
    are counted for each process.
    """

    processes: int
    rss: int
    open_files: int


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
    rss = open_files = count = 0
    for process in tree(pid):
        try:
            memory, files = process.memory_info().rss, process.num_fds()
        except psutil.NoSuchProcess:  # the process has just ended
            continue
        rss, open_files, count = rss + memory, open_files + files, count + 1
    return Held(count, rss, open_files)
