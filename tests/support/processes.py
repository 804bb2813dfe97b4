"""What a process and all that it has started hold: memory and open files."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Held:
    """Of a process and its descendants. rss: resident bytes, pages that they share counted once
    for each.
    """

    processes: int
    rss: int
    open_files: int


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that has ended and waits for its parent does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants, as far as they are alive."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if alive(process)]


def held_by(pid: int) -> Held:
    """What the process and its descendants hold now."""
    rss = open_files = count = 0
    for process in tree(pid):
        try:
            memory, files = process.memory_info().rss, process.num_fds()
        except psutil.NoSuchProcess:  # it ended just now
            continue
        rss, open_files, count = rss + memory, open_files + files, count + 1
    return Held(count, rss, open_files)
