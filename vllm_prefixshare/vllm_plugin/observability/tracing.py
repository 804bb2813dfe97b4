"""Records the batches that an engine plans for; ``vllm-prefixshare inspect`` reads them."""

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.observability.log import logger

VARIABLE = "VLLM_PREFIXSHARE_TRACE"
#: Maximum size of a trace; later batches are not recorded.
MAX_BYTES = 16 << 20
#: Start of the first line that ``Trace.record`` writes; it fits in ``FIRST_BYTES`` bytes.
FIRST_LINE = re.compile(rb'\{"time":[\d.]+,"block_size":\d+,"kv_lens":\[')
FIRST_BYTES = 128


def open_file(path: Path) -> int:
    """Open a file for a trace without changing its content; creates it if it is missing.

    Raises:
        PrefixShareError: it cannot be written.
    """
    try:
        # O_NONBLOCK: a pipe would wait for a reader
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file")
    except OSError as e:
        raise _unusable(path, e) from None


def drop_unwritable(path: Path) -> None:
    """In the front end: record nothing where the named file cannot be written, with one warning.
    Workers inherit the environment without it.
    """
    try:
        os.close(open_file(path))
    except PrefixShareError as e:
        os.environ.pop(VARIABLE, None)
        settings.cache_clear()
        logger().warning("Nothing is recorded: %s", e)


def _unusable(path: Path, e: OSError) -> PrefixShareError:
    return PrefixShareError(
        f"{VARIABLE}={path} cannot be written ({e.strerror}): name another file, or unset it."
    )


class Trace:
    """A file with a JSON object on each line. If several processes name the same file, only the
    first records: the workers of one engine have the same batches.

    Raises:
        PrefixShareError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._open = True
        self._file = open_file(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as the process lasts
        except BlockingIOError:
            self._open = False
            return
        except OSError:  # a file system without locks
            pass
        try:
            os.ftruncate(self._file, 0)
        except OSError as e:
            os.close(self._file)
            raise _unusable(path, e) from None

    def record(
        self,
        divider: str,
        plan: DecodePlan,
        plan_seconds: float,
        block_table: IntArray,
        seq_lens: IntArray,
    ) -> None:
        """Add a batch and a summary of its plan.

        Args:
            block_table: ``[num_reqs, max_blocks]`` block ids.
            seq_lens: ``[num_reqs]`` tokens.
        """
        if plan.num_reqs == 0:
            return
        lens = np.clip(seq_lens, 1, block_table.shape[1] * plan.block_size)
        blocks = -(-lens // plan.block_size)
        rows = zip(block_table, blocks.tolist(), strict=True)
        self.write(
            {
                "time": round(time.time(), 3),
                "block_size": plan.block_size,
                "kv_lens": lens.tolist(),
                "block_tables": [row[:count].tolist() for row, count in rows],
                "plan": {
                    "divider": divider,
                    "workers": plan.num_workers,
                    "kv_tokens_read": plan.kv_tokens_read(seq_lens),
                    "tiles": plan.num_tiles,
                    "partials": plan.num_partials,
                    "busiest_worker_us": round(float(plan.worker_us.max()), 2),
                    "plan_ms": round(plan_seconds * 1e3, 3),
                },
            }
        )

    def write(self, record: dict[str, Any]) -> None:
        """Add a line. If the trace is full or cannot be written, it ends; the engine continues."""
        if not self._open:
            return
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        try:
            if self._size + len(line) > MAX_BYTES:
                raise OSError(f"it has reached {MAX_BYTES >> 20} MiB")
            if os.pwrite(self._file, line, self._size) != len(line):
                raise OSError("the disk is full")
        except OSError as e:
            self._open = False
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # drop a partial line
            logger().warning("The trace %s ends here: %s.", self._path, e)
        else:
            self._size += len(line)


@cache
def trace_to(path: Path) -> Trace | None:
    """The trace that all KV-cache groups of a process share; None, with a warning, if the file can
    no longer be written: the front end dropped what could not be written at first.
    """
    try:
        return Trace(path)
    except PrefixShareError as e:
        logger().warning("Nothing is recorded: %s", e)
        return None
