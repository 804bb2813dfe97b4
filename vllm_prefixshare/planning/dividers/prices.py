"""Prices by which depth-first cuts are chosen: of a work tile, and of merging."""

from vllm_prefixshare.core import FloatArray
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.utils.numba_cache import compiled

#: Rows of ``TileRates.lines``.
READING_END = 0
TILE_END = 1
BASE = 2
SLOPE = 3


@compiled
def _line(ends: FloatArray, value: float) -> int:
    """The line of ``TileRates.lines`` for a value; the last first, because most tiles are long."""
    at = len(ends) - 1
    while at > 0 and ends[at - 1] > value:
        at -= 1
    return at


@compiled
def tile_us(lines: FloatArray, reading: float) -> float:
    """Microseconds of a tile whose runs take ``reading`` by their rates."""
    at = _line(lines[READING_END], reading)
    return lines[BASE, at] + lines[SLOPE, at] * reading


@compiled
def reading_in(lines: FloatArray, us: float) -> float:
    """The inverse of ``tile_us``: microseconds for reading in a tile of ``us`` microseconds,
    negative where ``us`` is too little for any tile.
    """
    at = _line(lines[TILE_END], us)
    if at:
        return (us - lines[BASE, at]) / lines[SLOPE, at]
    return us - lines[TILE_END, 0]


@compiled
def merging_us(rates: TileRates, rows: int, max_partials: int) -> float:
    """Microseconds of merging. One program merges all partial results of a query token, and the
    tokens of a request are merged side by side.

    Args:
        rows: query rows of a query token on one KV head.
        max_partials: maximum number of partial results of a request.
    """
    each = min(max(rates.merge * rows, rates.min_merge), rates.max_merge)
    return rates.merge_launch + max_partials * each if max_partials > 1 else 0.0
