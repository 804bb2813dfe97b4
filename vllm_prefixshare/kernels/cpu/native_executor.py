"""The CPU executor for bfloat16 and float32 on processors with AVX-512: ``native.c``.

On a CPU the thirty small operators of the torch executor cost as much as the attention
itself, and torch has no product of bfloat16 matrices that keeps a float32 result. The C file
is compiled once per machine and type with the compiler that vLLM's CPU build needs anyway.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray
from vllm_prefixshare.kernels.cpu.base import CpuExecutor, CpuTensors
from vllm_prefixshare.kernels.cpu.partials import (
    PrivateRuns,
    merge_slots,
    private_runs,
    shared_runs,
    tokens_of,
)
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.settings import settings
from vllm_prefixshare.utils.trusted_files import distrusted

SOURCE = Path(__file__).with_name("native.c")
#: -march=native: the library is built where it runs. libgomp is not linked: the symbols come from
#: the runtime that torch has loaded.
COMPILE = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-c")
#: Further options for each dtype.
DTYPES: dict[str, tuple[str, ...]] = {"bfloat16": (), "float32": ("-DFLOAT32",)}
MAX_ROWS = 128  # query rows of a piece: its scores and outputs stay in the L2 cache
MAX_HEAD_DIM = 256
MIN_TOKENS = 512  # minimum tokens of a split of a longer KV range


class NativeUnavailableError(RuntimeError):
    """The native executor cannot be used here; the message says why."""


class _Work(ctypes.Structure):
    """``Work`` in native.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "num_pieces", "num_tokens", "max_partials",
            "num_kv_heads", "gqa_group_size", "head_dim", "block_size",
            "q_token", "q_head", "out_token", "out_head",
            "cache_block", "cache_head", "v_offset", "table_row",
        )),
        ("sm_scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in (
            "q", "cache", "out", "block_table",
            "piece_row", "piece_start", "piece_end", "piece_indptr", "token_of", "visible",
            "merge_slots", "out_tokens", "partial_out", "partial_lse", "out_lse",
        )),
    )  # fmt: skip


def load_library(dtype: str) -> ctypes.CDLL:
    """Load the library for a dtype; compile ``native.c`` first if this machine has not yet.

    Raises:
        NativeUnavailableError: no AVX-512, no compiler, or compiling failed.
    """
    found = _find_library(dtype)
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


def processor_flags() -> frozenset[str]:
    """Features of the processor, by Linux's names; empty on another system."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@cache  # caches failures too, so that compiling is not retried for every layer
def _find_library(dtype: str) -> ctypes.CDLL | str:
    flags = processor_flags()
    if not {"avx512f", "avx512bw"} <= flags:
        return "the processor has no AVX-512"
    compiler = next((path for path in map(shutil.which, ("gcc", "cc")) if path), None)
    if compiler is None:
        return "there is no C compiler (gcc or cc)"
    # the flags, because machines of one processor model may hide different instructions
    options = (*COMPILE, *DTYPES[dtype])
    key = hashlib.sha256(
        "\0".join((SOURCE.read_text(), *sorted(flags), compiler, *options)).encode()
    )
    library = settings().cache / f"native-{key.hexdigest()[:16]}.so"
    try:
        if not library.is_file():
            _compile([compiler, *options], library)
        if (why := distrusted(library)) is not None:
            return why
        loaded = ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as e:
        detail = e.stderr.strip()[-300:] if isinstance(e, subprocess.CalledProcessError) else e
        return f"{library.name} cannot be built or loaded ({detail})"
    loaded.prefix_share_scratch.restype = ctypes.c_int64
    loaded.prefix_share_decode.restype = None
    return loaded


def _compile(command: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "native.o", Path(folder) / "native.so"
        steps = (
            [*command, str(SOURCE), "-o", str(built[0])],
            [command[0], "-shared", str(built[0]), "-lm", "-o", str(built[1])],
        )
        for step in steps:
            subprocess.run(step, capture_output=True, text=True, check=True)
        os.replace(built[1], library)  # atomic: other processes may compile, too


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Arrays of ``Work``: int32, one entry per piece or per partial result."""

    row: np.ndarray
    start: np.ndarray
    end: np.ndarray
    num_tokens: np.ndarray
    token_of: np.ndarray
    visible: np.ndarray


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan made ready for one step; holds the arrays that ``work`` points to."""

    work: _Work
    scratch_bytes: int
    num_partials: int
    arrays: tuple[np.ndarray, ...]


class NativeExecutor(CpuExecutor):
    """Runs DecodePlans on CPU_ATTN's own KV cache, in bfloat16 or float32.

    Args:
        attention: shape of the layer; head_dim and block_size must be multiples of 32.

    Raises:
        NativeUnavailableError: this machine cannot run or build it, or the shape does not fit.
    """

    name = "native"

    def __init__(self, attention: AttentionConfig, num_workers: int = 1) -> None:
        super().__init__(attention, num_workers)
        head_dim, block_size = attention.head_dim, attention.block_size
        if attention.dtype not in DTYPES or attention.kv_dtype:
            names = " or ".join(DTYPES)
            raise NativeUnavailableError(f"it computes in {names}, not {attention.of_cache}")
        if attention.features:
            raise NativeUnavailableError(f"it has no {' and no '.join(attention.features)}")
        if attention.sliding_window is not None:
            raise NativeUnavailableError("it has no sliding window")
        if head_dim % 32 or block_size % 32 or head_dim > MAX_HEAD_DIM:
            raise NativeUnavailableError(
                f"head_dim (at most {MAX_HEAD_DIM}) and block_size must be multiples of 32"
            )
        self._library = load_library(attention.dtype)
        self._shape = attention.num_kv_heads, attention.gqa_group_size, head_dim, block_size
        self._shared: tuple[tuple[DecodePlan, bytes], _Pieces] | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._step: _Step | None = None

    def prepare(self, plan: DecodePlan, batch: HostBatch) -> None:
        """As ``interface.Executor.prepare``."""
        super().prepare(plan, batch)
        block_table, seq_lens, query_start_loc, _, rows = batch
        key = plan, query_start_loc.tobytes()
        if self._shared is None or self._shared[0] != key:
            self._shared = key, self._shared_pieces(plan, query_start_loc)
        chunk = -(-2 * MIN_TOKENS // plan.block_size) * plan.block_size
        private = private_runs(plan, seq_lens, rows, chunk)
        parts = self._shared[1], self._private_pieces(private, seq_lens, query_start_loc)
        pieces = [
            np.concatenate([getattr(p, name) for p in parts]).astype(np.int32)
            for name in _Pieces.__slots__
        ]
        row, start, end, num_tokens, token_of, visible = pieces
        table = merge_slots(token_of, int(query_start_loc[-1]), -1)
        wanted = np.arange(len(table)) if rows is None else tokens_of(rows, query_start_loc)
        indptr = np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int32)
        merge, out_tokens = table[wanted].astype(np.int32), wanted.astype(np.int32)
        block_table = np.ascontiguousarray(block_table, np.int32)

        heads, group, dim, size = self._shape
        work = _Work(
            num_pieces=len(row),
            num_tokens=len(out_tokens),
            max_partials=merge.shape[1],
            num_kv_heads=heads,
            gqa_group_size=group,
            head_dim=dim,
            block_size=size,
            v_offset=dim * size,
            table_row=block_table.shape[1],
        )
        arrays = {
            "block_table": block_table,
            "piece_row": row,
            "piece_start": start,
            "piece_end": end,
            "piece_indptr": indptr,
            "token_of": token_of,
            "visible": visible,
            "merge_slots": merge,
            "out_tokens": out_tokens,
        }
        for name, array in arrays.items():
            setattr(work, name, array.ctypes.data)
        scratch = self._library.prefix_share_scratch(ctypes.byref(work))
        self._step = _Step(work, scratch, len(token_of), tuple(arrays.values()))

    def _shared_pieces(self, plan: DecodePlan, starts: IntArray) -> _Pieces:
        """Shared KV ranges, in splits that keep all threads busy to the end."""
        size = plan.block_size
        max_tokens = max(1, MAX_ROWS // self._shape[1])
        found: list[tuple[int, int, int, np.ndarray]] = []
        for run in shared_runs(plan, starts):
            chunk = max(MIN_TOKENS, (run.kv_end - run.kv_start) // (4 * torch.get_num_threads()))
            chunk = -(-chunk // size) * size
            for at in range(run.kv_start, run.kv_end, chunk):
                for part in np.array_split(run.tokens, -(-len(run.tokens) // max_tokens)):
                    found.append((run.row, at, min(at + chunk, run.kv_end), part))
        tokens_per_piece = np.array([len(t) for *_, t in found], np.int32)
        row, start, end = (np.array([f[i] for f in found], np.int32) for i in range(3))
        token_of = np.concatenate([t for *_, t in found]) if found else np.zeros(0, np.int64)
        return _Pieces(
            row, start, end, tokens_per_piece, token_of, np.repeat(end, tokens_per_piece)
        )

    @staticmethod
    def _private_pieces(runs: PrivateRuns, seq_lens: IntArray, starts: IntArray) -> _Pieces:
        row, start, end = runs.row, runs.kv_start, runs.kv_start + runs.kv_len
        tokens = np.diff(starts)[row]
        token_of = tokens_of(row, starts)
        # a query sees the tokens up to its own
        position = np.repeat(seq_lens[row] - starts[row + 1], tokens) + token_of + 1
        visible = np.minimum(np.repeat(end, tokens), position)
        return _Pieces(row, start, end, tokens, token_of, visible)

    def _compute(self, t: CpuTensors) -> None:
        # the caches are ``cache_views`` of CPU_ATTN's KV cache; extras are not served
        q, k_cache, v_cache, out, lse, sm_scale, _ = t
        step = self._step
        assert step is not None, "prepare comes first"
        heads, group, dim, size = self._shape
        assert q.stride(2) == out.stride(2) == k_cache.stride(1) == v_cache.stride(3) == 1
        assert k_cache.stride(3) == size and v_cache.stride(1) == dim
        assert v_cache.data_ptr() - k_cache.data_ptr() == k_cache.element_size() * dim * size
        work, threads = step.work, torch.get_num_threads()
        partial = step.num_partials * heads * group
        work.partial_out = self._buffer("partial_out", partial * dim * 4)
        work.partial_lse = self._buffer("partial_lse", partial * 4)
        scratch = self._buffer("scratch", step.scratch_bytes * threads + 64)
        work.q_token, work.q_head = q.stride(0), q.stride(1)
        work.out_token, work.out_head = out.stride(0), out.stride(1)
        work.cache_block, work.cache_head = k_cache.stride(0), k_cache.stride(2)
        work.sm_scale = sm_scale
        work.q, work.cache, work.out = q.data_ptr(), k_cache.data_ptr(), out.data_ptr()
        work.out_lse = None if lse is None else lse.data_ptr()
        self._library.prefix_share_decode(
            ctypes.byref(work), ctypes.c_void_p(-(-scratch // 64) * 64), threads
        )

    def _buffer(self, name: str, num_bytes: int) -> int:
        """Address of scratch memory that is kept from layer to layer."""
        found = self._buffers.get(name)
        if found is None or found.numel() < num_bytes:
            found = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return found.data_ptr()
