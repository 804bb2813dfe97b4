"""Whether a file that this package has kept on the disk may be somebody else's work."""

import os
import stat
from pathlib import Path


def distrusted(path: Path) -> str | None:
    """Why a file in the cache folder is not to be used, in words, or None.

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
