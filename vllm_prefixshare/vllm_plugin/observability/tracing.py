"""Records the plans of an engine with their batches; ``vllm-prefixshare inspect`` reads them."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.vllm_plugin.observability.log import logger

VARIABLE = "VLLM_PREFIXSHARE_TRACE"
#: Maximum size of a trace; later batches are not recorded.
MAX_BYTES = 16 << 20
#: Arrays of integers of a ``DecodePlan`` that a trace holds.
PLAN_ARRAYS = (
    "work_indptr",
    "tile_req_indptr",
    "tile_req_indices",
    "tile_run_indptr",
    "run_row",
    "run_kv_start",
    "run_kv_end",
    "run_reader_start",
    "run_reader_end",
    "partial_indices",
    "merge_indptr",
)


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """What the plans of a KV-cache group are made for.

    attention: shape of its layers.
    query_len: maximum number of query tokens of a decode.
    device: GPU or processor, with the number of its multiprocessors or cores.
    kernel: name of the kernel, or of the CPU executor.
    divider, default_divider: the divider of the plans, and the kernel's default.
    """

    attention: AttentionConfig
    query_len: int
    device: str
    kernel: str
    divider: str
    default_divider: str


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """A new plan and its batch; times are microseconds of a layer's attention, estimated.

    block_table: ``[num_reqs, max_blocks]`` block ids.
    seq_lens: ``[num_reqs]`` tokens.
    kv_tokens, kv_tokens_read: KV tokens per layer that the baseline reads, and those that the plan
        reads.
    merge_us: merging partial results, spread over the work queues.
    unshared_us: a kernel without sharing, its work balanced over the work queues.
    unshared: why the plan shares nothing; None if it shares.
    seconds: time that making the plan took.
    """

    plan: DecodePlan
    block_table: IntArray
    seq_lens: IntArray
    kv_tokens: int
    kv_tokens_read: int
    merge_us: float
    unshared_us: float
    unshared: str | None
    seconds: float


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
        #: Whether plans are still recorded.
        self.is_open = True
        self._file = open_file(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as the process lasts
        except BlockingIOError:
            self.is_open = False
            return
        except OSError:  # a file system without locks
            pass
        try:
            os.ftruncate(self._file, 0)
        except OSError as e:
            os.close(self._file)
            raise _unusable(path, e) from None

    def record(self, engine: TracedEngine, made: TracedPlan) -> None:
        """Add a plan, with its batch and its engine."""
        plan = made.plan
        lens = np.clip(made.seq_lens, 1, made.block_table.shape[1] * plan.block_size)
        blocks = -(-lens // plan.block_size)
        rows = zip(made.block_table, blocks.tolist(), strict=True)
        shape = asdict(engine.attention)
        del shape["block_size"]
        self.write(
            {
                "time": round(time.time(), 3),
                "block_size": plan.block_size,
                "kv_lens": lens.tolist(),
                "block_tables": [row[:count].tolist() for row, count in rows],
                "engine": {
                    "attention": {name: value for name, value in shape.items() if value},
                    "query_len": engine.query_len,
                    "device": engine.device,
                    "kernel": engine.kernel,
                },
                "plan": {
                    "divider": engine.divider,
                    "default_divider": engine.default_divider,
                    "kv_tokens": made.kv_tokens,
                    "kv_tokens_read": made.kv_tokens_read,
                    "unshared": made.unshared,
                    "merge_us": round(made.merge_us, 2),
                    "unshared_us": round(made.unshared_us, 2),
                    "plan_ms": round(made.seconds * 1e3, 3),
                    "tile_us": np.round(plan.tile_cost, 2).tolist(),
                    **{name: getattr(plan, name).tolist() for name in PLAN_ARRAYS},
                },
            }
        )

    def write(self, record: dict[str, Any]) -> None:
        """Add a line. If the trace is full or cannot be written, it ends; the engine continues."""
        if not self.is_open:
            return
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        try:
            if self._size + len(line) > MAX_BYTES:
                raise OSError(f"it has reached {MAX_BYTES >> 20} MiB")
            if os.pwrite(self._file, line, self._size) != len(line):
                raise OSError("the disk is full")
        except OSError as e:
            self.is_open = False
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # drop a partial line
            logger().warning("The trace %s ends here: %s.", self._path, e)
        else:
            self._size += len(line)


@cache
def trace_to(path: Path) -> Trace | None:
    """The trace that all KV-cache groups of a process share; None, with a warning, if the file
    cannot be written.
    """
    try:
        return Trace(path)
    except PrefixShareError as e:
        logger().warning("Nothing is recorded: %s", e)
        return None
