"""The measured cost table and its file.

FlashForge, section 5.2: the time of partial attention follows neither bytes nor FLOPs, so
it is profiled over (query rows, KV length) and interpolated. ``vllm_prefixshare.profiling`` fills
the table; this module only reads, stores and interpolates it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import FloatArray, PrefixShareError
from vllm_prefixshare.utils.trusted_files import read_text, write_whole

FORMAT = 2
#: Largest file that is read; a table has some kilobytes.
MAX_BYTES = 1 << 20
#: Maximum microseconds in a table; a table with a longer time is rejected as damaged.
MAX_US = 1e9


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a cost table was measured on; a table is used only where all fields agree."""

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
        """The fingerprint of a layer."""
        a = attention
        heads = (a.num_kv_heads, a.gqa_group_size, a.head_dim)
        dtypes = (a.dtype, a.of_cache)
        return cls(device, *heads, *dtypes, a.block_size, kernel)

    def file_name(self) -> str:
        """A readable, unique name for a table with this fingerprint."""
        text = "-".join(str(v) for v in asdict(self).values() if v)
        return "".join(c if c.isalnum() or c in "-." else "_" for c in text.lower()) + ".json"


@dataclass(frozen=True)
class Grid:
    """Microseconds over a grid, interpolated linearly.

    rows ``[R]`` and kv_len ``[K]`` ascend strictly; microseconds ``[R, K]``. Beyond the last
    entry the last slope continues. Below the first entry its value holds, because the shortest
    tile costs a launch, too.
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
        if not np.all((self.microseconds > 0) & (self.microseconds < MAX_US)):
            raise PrefixShareError(
                f"cost table: microseconds must be positive and finite, below {MAX_US:.0e}."
            )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Grid":
        """A grid from the object that ``to_json`` makes."""
        return cls(*(np.asarray(data[k], np.float64) for k in ("rows", "kv_len", "microseconds")))

    def to_json(self) -> dict[str, Any]:
        """The object that a table's file holds, its times rounded to nanoseconds."""
        return {
            "rows": self.rows.tolist(),
            "kv_len": self.kv_len.tolist(),
            "microseconds": np.round(self.microseconds, 3).tolist(),
        }

    def __call__(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        """Microseconds of ``rows`` query rows and ``kv_len`` tokens, which broadcast."""
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

    tile_us, unshared_us: grids for ``tile`` and ``unshared``; without ``unshared_us`` an
        unshared request costs as much as a tile of its size.
    merge_us: microseconds to merge one row of one partial result.
    tile_l2_us: grid for a ``tile`` whose KV lies in a shared cache already; where it is missing
        such a tile costs as much as any other.
    """

    fingerprint: Fingerprint
    tile_us: Grid
    merge_us: float
    unshared_us: Grid | None = None
    tile_l2_us: Grid | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.merge_us < MAX_US:
            raise PrefixShareError(
                f"cost table: merge_us must be 0 or more and less than {MAX_US:.0e}."
            )

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        """As ``CostModel.tile``."""
        first = self.tile_us(rows, kv_len)
        if self.tile_l2_us is None:
            return first
        cached = self.tile_l2_us(rows, kv_len)
        return cached + (first - cached) / np.asarray(readers, np.float64)

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        """As ``CostModel.unshared``."""
        return (self.unshared_us or self.tile_us)(rows, kv_len)

    def merge(self, rows: ArrayLike) -> FloatArray:
        """As ``CostModel.merge``."""
        return self.merge_us * np.asarray(rows, np.float64)

    def to_json(self) -> dict[str, Any]:
        """The object that ``save`` writes."""
        return {
            "format": FORMAT,
            "fingerprint": asdict(self.fingerprint),
            "tile": self.tile_us.to_json(),
            "unshared": self.unshared_us.to_json() if self.unshared_us else None,
            "tile_l2": self.tile_l2_us.to_json() if self.tile_l2_us else None,
            "merge_us": self.merge_us,
        }

    def save(self, path: Path) -> None:
        """Write JSON; the file appears complete or not at all.

        Raises:
            PrefixShareError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(self.to_json(), indent=1).encode())
        except OSError as e:
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
            data = json.loads(read_text(path, MAX_BYTES))
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
            have = asdict(table.fingerprint)
            want = asdict(expected)
            diff = ", ".join(
                f"{k} {have[k]!r} instead of {want[k]!r}" for k in want if have[k] != want[k]
            )
            raise PrefixShareError(f"{path} was measured for {diff}: {remedy}.")
        return table
