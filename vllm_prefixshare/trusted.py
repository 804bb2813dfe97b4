"""Check of cached files: whether another user may have written one."""

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
