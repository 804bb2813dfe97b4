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

#: of every family of this plugin
PREFIX = "vllm_prefixshare_"
#: of the folders that are made where the user names none
TEMPORARY = "vllm-prefixshare-metrics-"
FILES = "*_prefixshare-*.db"
#: Bytes of the largest file that is read; it has hundreds of samples, of a few hundred bytes.
MAX_BYTES = 1 << 20
_HEADER, _LENGTH, _VALUE = struct.Struct("i4x"), struct.Struct("i"), struct.Struct("dd")


def is_temporary(folder: Path) -> bool:
    """Whether a front end made the folder, and removes it when it ends."""
    return folder.name.startswith(TEMPORARY)


class MetricFile:
    """A file of samples of one kind, locked until it is closed.

    Its name is unique: a folder may serve several hosts and containers, where process ids are not.

    Args:
        folder: where it is made by the first ``write``.
        kind: of prometheus_client's files, such as ``counter`` or ``gauge_sum``.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._path = folder
        self._file: int | None = None
        self._data = bytearray(_HEADER.size)
        self._positions: dict[str, int] = {}

    def set(self, key: str, value: float) -> None:
        """Set a sample, which ``write`` writes.

        Args:
            key: as ``prometheus_client.mmap_dict.mmap_key`` returns it.
        """
        position = self._positions.get(key)
        if position is None:
            encoded = key.encode()
            padding = b" " * (8 - (len(encoded) + _LENGTH.size) % 8)
            self._data += _LENGTH.pack(len(encoded)) + encoded + padding
            position = self._positions[key] = len(self._data)
            self._data += bytes(_VALUE.size)
            _HEADER.pack_into(self._data, 0, len(self._data))
        _VALUE.pack_into(self._data, position, value, time.time())

    def write(self) -> None:
        """Bring the file up to date. A file that was removed or replaced is made again under
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
        """Make the file. It gets its name once it is readable, as a scrape may come at any time."""
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
        # The header, which tells how many bytes are read, comes last.
        for start, end in ((_HEADER.size, len(self._data)), (0, _HEADER.size)):
            data = self._data[start:end]
            if os.pwrite(file, data, start) != len(data):
                raise OSError("the disk is full")


def remove_ended(folder: Path) -> None:
    """Remove the files of processes that have ended: this server must not report their counts."""
    for path in folder.glob(FILES):
        # a process keeps its files locked; where the file system has no locks, all files stay
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


class FileCollector:
    """Reads every ``MetricFile`` of a folder at each scrape, in the process that made the
    collector. Files of others are not read; a damaged file is left out, with one warning. Where a
    temporary folder was removed, it is made again.
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
        self._restore_folder()
        files = [str(path) for path in self._folder.glob(FILES) if self._is_readable(path)]
        try:
            return list(MultiProcessCollector.merge(files))
        except Exception:  # one of them was removed or damaged at this moment
            return ()

    def _restore_folder(self) -> None:
        if not is_temporary(self._folder) or self._folder.is_dir():
            return
        try:
            self._folder.mkdir(mode=0o700)
        except OSError as e:
            self._report(self._folder, str(e))
        else:
            self._report(self._folder, "it was removed, and is made again")

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
            self._report(path, repr(e))
            return False
        return True

    def _report(self, path: Path, reason: str) -> None:
        if str(path) not in self._reported:
            self._reported.add(str(path))
            logger().warning("PREFIX_SHARE metrics in %s are left out: %s.", path, reason)
