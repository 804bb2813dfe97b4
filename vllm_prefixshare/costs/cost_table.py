"""What a work tile costs: a measured table, or a roofline estimate when there is none.

FlashForge, section 5.2: the time of partial attention follows neither bytes nor FLOPs, so
it is profiled over (query rows, KV length) and interpolated. ``profile_cpu`` and
``profile_gpu`` fill the table; this module only reads, stores and interpolates it.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.records import FloatArray, PrefixShareError

FORMAT = 2
#: microseconds that nothing costs which is priced here; a greater price is a damaged one
MOST_US = 1e9


class CostModel(Protocol):
    """Times in microseconds; arguments broadcast. ``rows`` counts query rows of one KV head
    (queries x gqa_group_size), ``kv_len`` tokens."""

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        """One work tile that leaves a partial result to be merged. ``readers``: work tiles
        that read the same KV at about the same time; all but one find it in a shared cache."""
        ...

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        """One request read whole, as the backend does that shares nothing."""
        ...

    def merge(self, rows: ArrayLike) -> FloatArray:
        """Merging one partial result of ``rows`` rows into its request."""
        ...


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a cost table was measured on; a table is used only where all of it agrees."""

    device: str
    num_kv_heads: int
    gqa_group_size: int
    head_dim: int
    dtype: str
    kv_dtype: str
    block_size: int
    kernel: str

    @classmethod
    def of(cls, attention: AttentionConfig, device: str, kernel: str) -> "Fingerprint":
        return cls(
            device=device,
            num_kv_heads=attention.num_kv_heads,
            gqa_group_size=attention.gqa_group_size,
            head_dim=attention.head_dim,
            dtype=attention.dtype,
            kv_dtype=attention.dtype,
            block_size=attention.block_size,
            kernel=kernel,
        )

    def file_name(self) -> str:
        """A readable, unique name for a table with this fingerprint."""
        text = "-".join(str(v) for v in asdict(self).values() if v)
        return "".join(c if c.isalnum() or c in "-." else "_" for c in text.lower()) + ".json"


@dataclass(frozen=True)
class Grid:
    """Microseconds over a grid, interpolated linearly.

    rows ``[R]`` and kv_len ``[K]`` ascend strictly; microseconds ``[R, K]``. Beyond the last
    entry the last slope goes on, below the first the first value holds: a launch has a price
    that a shorter tile does not escape.
    """

    rows: FloatArray
    kv_len: FloatArray
    microseconds: FloatArray

    def __post_init__(self) -> None:
        if self.microseconds.shape != (len(self.rows), len(self.kv_len)):
            raise PrefixShareError(
                f"cost table: microseconds must be [{len(self.rows)}, {len(self.kv_len)}], "
                f"got {list(self.microseconds.shape)}."
            )
        for name, axis in (("rows", self.rows), ("kv_len", self.kv_len)):
            if (
                axis.ndim != 1
                or len(axis) < 2
                or not np.all(np.diff(axis) > 0)
                or not 1 <= axis[0] < axis[-1] < np.inf
            ):
                raise PrefixShareError(
                    f"cost table: {name} must ascend from 1 or more and have 2 entries."
                )
        if not np.all((self.microseconds > 0) & (self.microseconds < MOST_US)):
            raise PrefixShareError(
                f"cost table: microseconds must be positive and finite, below {MOST_US:.0e}."
            )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Grid":
        return cls(*(np.asarray(data[k], np.float64) for k in ("rows", "kv_len", "microseconds")))

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows.tolist(),
            "kv_len": self.kv_len.tolist(),
            "microseconds": np.round(self.microseconds, 3).tolist(),
        }

    def __call__(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        i, x = self._locate(self.rows, rows)
        j, y = self._locate(self.kv_len, kv_len)
        us = self.microseconds
        low = us[i, j] * (1 - y) + us[i, j + 1] * y
        high = us[i + 1, j] * (1 - y) + us[i + 1, j + 1] * y
        return np.maximum(low * (1 - x) + high * x, us.min())

    @staticmethod
    def _locate(axis: FloatArray, value: ArrayLike) -> tuple[np.ndarray, FloatArray]:
        v = np.maximum(np.asarray(value, np.float64), axis[0])
        i = np.clip(np.searchsorted(axis, v, "right") - 1, 0, len(axis) - 2)
        return i, (v - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True)
class CostTable:
    """A measured ``CostModel``.

    tile_us, unshared_us: grids for ``tile`` and ``unshared``; where the second is missing
        an unshared request costs what a tile of it does.
    merge_us: microseconds to merge one row of one partial result.
    tile_l2_us: ``tile`` whose KV lies in a shared cache already; where it is missing that
        makes no difference.
    """

    fingerprint: Fingerprint
    tile_us: Grid
    merge_us: float
    unshared_us: Grid | None = None
    tile_l2_us: Grid | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.merge_us < MOST_US:
            raise PrefixShareError(
                f"cost table: merge_us must be 0 or more and less than {MOST_US:.0e}."
            )

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        first = self.tile_us(rows, kv_len)
        if self.tile_l2_us is None:
            return first
        cached = self.tile_l2_us(rows, kv_len)
        return cached + (first - cached) / np.asarray(readers, np.float64)

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        return (self.unshared_us or self.tile_us)(rows, kv_len)

    def merge(self, rows: ArrayLike) -> FloatArray:
        return self.merge_us * np.asarray(rows, np.float64)

    def save(self, path: Path) -> None:
        """Write JSON; the file appears whole or not at all.

        Raises:
            PrefixShareError: it cannot be written.
        """
        data = {
            "format": FORMAT,
            "fingerprint": asdict(self.fingerprint),
            "tile": self.tile_us.to_json(),
            "unshared": self.unshared_us.to_json() if self.unshared_us else None,
            "tile_l2": self.tile_l2_us.to_json() if self.tile_l2_us else None,
            "merge_us": self.merge_us,
        }
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(data, indent=1))
            temporary.replace(path)
        except OSError as e:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise PrefixShareError(
                f"the cost table cannot be written to {path} ({e}): make room there, or name "
                "another folder with VLLM_PREFIXSHARE_CACHE."
            ) from None

    @classmethod
    def load(cls, path: Path, expected: Fingerprint | None = None) -> "CostTable":
        """Read JSON.

        Raises:
            PrefixShareError: unreadable, not a cost table, or measured on something other
                than ``expected``; the sentence lists what differs.
        """
        remedy = "measure one with 'vllm-prefixshare profile', or unset the path"
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            table = cls(
                fingerprint=Fingerprint(**data["fingerprint"]),
                tile_us=Grid.from_json(data["tile"]),
                merge_us=float(data["merge_us"]),
                unshared_us=Grid.from_json(data["unshared"]) if data["unshared"] else None,
                tile_l2_us=Grid.from_json(data["tile_l2"]) if data["tile_l2"] else None,
            )
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as e:
            raise PrefixShareError(f"{path} is not a usable cost table ({e}): {remedy}.") from None
        if expected is not None and table.fingerprint != expected:
            have, want = asdict(table.fingerprint), asdict(expected)
            diff = ", ".join(
                f"{k} {have[k]!r} instead of {want[k]!r}" for k in want if have[k] != want[k]
            )
            raise PrefixShareError(f"{path} was measured for {diff}: {remedy}.")
        return table


@dataclass(frozen=True, slots=True)
class Roofline:
    """Round figures of an executor on common hardware.

    launch_us: fixed price of a tile. bytes_per_us, flops_per_us: one worker's share of the
    memory and the arithmetic. cached_bytes_per_us: the same for KV that another tile reads at
    the same time. unshared_flops_per_us: arithmetic that a kernel without query rows to batch
    reaches (matrix-vector rather than matrix-matrix work). one_head: a worker is one thread
    block for each KV head, and these are figures of one of them.
    """

    launch_us: float
    bytes_per_us: float
    cached_bytes_per_us: float
    flops_per_us: float
    unshared_flops_per_us: float
    unshared_launch_us: float
    one_head: bool = False


ROOFLINES = {
    "torch": Roofline(300.0, 1e4, 1e4, 1.2e5, 9e4, 4.0),  # two server cores
    "native": Roofline(20.0, 2e4, 2e4, 2.5e5, 9e4, 4.0),  # the same
    # one multiprocessor of an H200, all of them busy: the Hopper kernel, the portable one
    "triton": Roofline(1.5, 3.15e4, 4.8e4, 4.7e6, 4.7e6, 2.5, one_head=True),
    "portable": Roofline(1.5, 3.15e4, 4.8e4, 3e6, 3e6, 2.5, one_head=True),
}


@dataclass(frozen=True, slots=True)
class AnalyticCost:
    """Roofline estimate of a ``CostModel``, used until a table is measured."""

    attention: AttentionConfig
    roofline: Roofline

    @property
    def _width(self) -> int:
        """Elements of a token's K or V, and of one row over the KV heads of a tile."""
        heads = 1 if self.roofline.one_head else self.attention.num_kv_heads
        return heads * self.attention.head_dim

    def _roof(
        self, rows: ArrayLike, kv_len: ArrayLike, flops_per_us: float, bytes_per_us: float
    ) -> FloatArray:
        rows, kv_len = np.asarray(rows, np.float64), np.asarray(kv_len, np.float64)
        item = 4 if self.attention.dtype == "float32" else 2
        moved = (2 * kv_len + 2 * rows) * self._width * item
        flops = 4.0 * rows * kv_len * self._width
        return np.maximum(moved / bytes_per_us, flops / flops_per_us)

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        r = self.roofline
        first = self._roof(rows, kv_len, r.flops_per_us, r.bytes_per_us)
        cached = self._roof(rows, kv_len, r.flops_per_us, r.cached_bytes_per_us)
        return r.launch_us + cached + (first - cached) / np.asarray(readers, np.float64)

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        r = self.roofline
        work = self._roof(rows, kv_len, r.unshared_flops_per_us, r.bytes_per_us)
        return r.unshared_launch_us + work

    def merge(self, rows: ArrayLike) -> FloatArray:
        moved = 2 * 4 * self._width * np.asarray(rows, np.float64)
        return moved / self.roofline.bytes_per_us


def analytic_cost(attention: AttentionConfig, executor: str) -> AnalyticCost:
    """An ``AnalyticCost`` for an executor: "torch", "native", "triton" or "portable"."""
    return AnalyticCost(attention, ROOFLINES[executor])


@dataclass(frozen=True, slots=True)
class TileRates:
    """A ``CostModel`` for one attention shape as a few numbers, for loops that ask it often:
    a tile costs ``overhead`` and a rate for each of its tokens, in microseconds.

    memory, cached: ``[2]`` rate of tokens read by this tile only, and by very many tiles at
        the same time; for tiles of 64 and of 128 query rows.
    merge: of one row of one partial result.
    partial_write: of writing a tile's results as partial ones; merge_launch: of the launch that
        merges them. Of an H200; on any GPU both are far below what a tile takes.
    """

    overhead: float
    memory: FloatArray
    cached: FloatArray
    merge: float
    partial_write: float = 1.0
    merge_launch: float = 3.0

    @classmethod
    def of(cls, cost: CostModel) -> "TileRates":
        """The line through two long tiles; short ones cost little but the overhead."""
        rows, (short, long) = np.array([[64], [128]]), (1024, 4096)
        readers = np.array([[[1]], [[1 << 20]]])
        us = cost.tile(rows, np.array([short, long]), readers)
        us = np.broadcast_to(us, (2, 2, 2))
        rate = np.maximum((us[..., 1] - us[..., 0]) / (long - short), 1e-9)
        overhead = us[..., 0] - rate * short
        merge = max(0.0, float(cost.merge(1)))
        return cls(max(1e-3, float(overhead.mean())), rate[0], rate[1], merge)
