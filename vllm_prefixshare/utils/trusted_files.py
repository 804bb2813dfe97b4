"""Files that somebody else may have written: whether to use one, how much of it is read, and how
one is put in place.
"""

import contextlib
import os
import stat
from pathlib import Path


def distrusted(path: Path) -> str | None:
    """The reason not to use a file in the cache folder, in words, or None.

    Whoever can write to the file or replace it in its folder decides what is read there. Files
    of this user and of root are trusted, unless anybody may write to them.

    Raises:
        OSError: there is no such file.
    """
    for place in (path, path.parent):
        status = place.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            return f"{place} belongs to another user, or anybody may write to it"
    return None


def own_folder(path: Path) -> Path | None:
    """The folder, made if it is missing; None if it cannot be made or looked at, or others may have
    written what is there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        return path if distrusted(path) is None else None
    except OSError:
        return None


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a file of at most ``max_bytes``; no more is read of a longer one.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer, or not UTF-8 text.
    """
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than the {max_bytes >> 20} MiB that are read")
    return data.decode()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears complete or not at all, in place of what was there. Nothing that
    others put there under the name of the draft is followed or written to.

    Raises:
        OSError: it cannot be written; no draft is left.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)  # of a process that was killed
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
