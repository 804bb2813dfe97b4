"""Files in the format of prometheus_client's multi-process mode, and a collector that reads them.

prometheus_client maps its files, and writing to a mapped file on a full disk ends the process with
SIGBUS. Here values are written with ``pwrite``, which raises OSError.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_prefixshare.vllm_plugin.observability.log import logger

#: Start of the name of every metric of this plugin.
PREFIX = "vllm_prefixshare_"
#: Start of the name of folders that are created because the user names none.
TEMPORARY = "vllm-prefixshare-metrics-"
FILES = "*_prefixshare-*.db"
#: Maximum size of a file that is read; a file has hundreds of samples of a few hundred bytes.
MAX_BYTES = 1 << 20
_HEADER = struct.Struct("i4x")


def is_temporary(folder: Path) -> bool:
    """Whether a front end created the folder, and removes it when it ends."""
    return folder.name.startswith(TEMPORARY)


class MetricFile:
    """A file of samples of one kind, locked until it is closed.

    Its name is unique: a folder may serve several hosts and containers with equal process ids.

    Args:
        folder: where the first ``write`` creates the file.
        kind: of prometheus_client's files, such as ``counter`` or ``gauge_sum``.

    Attributes:
        samples: value of each sample that the next ``write`` writes, by its key as
            ``prometheus_client.mmap_dict.mmap_key`` returns it.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._path = folder
        self._file: int | None = None
        self.samples: dict[str, float] = {}

    def write(self) -> None:
        """Bring the file up to date. A file that was removed or replaced is created again under
        another name; what others wrote to it is overwritten.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None and not self._is_there():
            self.close()
        if self._file is None:
            self._create()
        else:
            self._write(self._file)

    def close(self) -> None:
        """Close and unlock the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _is_there(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except OSError:
            return False

    def _create(self) -> None:
        """Create the file. It gets its name once it is complete: a scrape may come at any time."""
        name = f"{self._kind}_prefixshare-{socket.gethostname()}-{os.getpid()}-"
        path = self._folder / f"{name}{uuid.uuid4().hex[:8]}.db"
        draft = path.with_suffix(".new")
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(file)
            draft.rename(path)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        self._file = file
        self._path = path

    def _write(self, file: int) -> None:
        now = time.time()
        data = b"".join(_encode(key, value, now) for key, value in self.samples.items())
        header = _HEADER.pack(_HEADER.size + len(data))
        # The header, which tells how many bytes are read, comes last.
        for part, start in ((data, _HEADER.size), (header, 0)):
            if os.pwrite(file, part, start) != len(part):
                raise OSError("the disk is full")


def _encode(key: str, value: float, now: float) -> bytes:
    """A sample in prometheus_client's format; spaces align the value to 8 bytes."""
    encoded = key.encode()
    size = len(encoded) + 8 - (len(encoded) + 4) % 8
    return struct.pack(f"i{size}sdd", len(encoded), encoded.ljust(size), value, now)


def remove_ended(folder: Path) -> None:
    """Remove the files of ended processes, whose counts this server must not report."""
    for path in folder.glob(FILES):
        # a running process holds locks on its files; without file locks all files stay
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


class FileCollector:
    """Reads every ``MetricFile`` of a folder at each scrape, in the process that created the
    collector. Other files are not read; a damaged file is left out, with one warning.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._reported: set[str] = set()

    def describe(self) -> Iterable[Any]:
        """No names: they are known once a process has written."""
        return ()

    def collect(self) -> Iterable[Any]:
        """The families of metrics in the folder; none in a child that was forked."""
        from prometheus_client.multiprocess import MultiProcessCollector

        if os.getpid() != self._process:
            return ()
        files = [str(path) for path in self._folder.glob(FILES) if self._is_readable(path)]
        try:
            return list(MultiProcessCollector.merge(files))
        except Exception:  # one of them was removed or damaged at this moment
            return ()

    def _is_readable(self, path: Path) -> bool:
        from prometheus_client.multiprocess import MultiProcessCollector

        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ValueError("not a file of metrics")
            for family in MultiProcessCollector.merge([str(path)]):
                for sample in family.samples:
                    texts = [sample.name, *sample.labels, *sample.labels.values()]
                    if not sample.name.startswith(PREFIX) or not all(
                        isinstance(text, str) for text in texts
                    ):
                        raise ValueError(f"it has a sample {sample.name!r}")
        except FileNotFoundError:  # its process has just ended
            return False
        except Exception as e:  # damaged bytes make json and struct raise anything
            if str(path) not in self._reported:
                self._reported.add(str(path))
                logger().warning("PREFIX_SHARE metrics in %s are left out: %s.", path, repr(e))
            return False
        return True
