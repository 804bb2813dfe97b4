"""Prices by which depth-first cuts are chosen: of a KV token, of a work tile, of merging."""

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.records import FloatArray

#: Rows of ``TileRates.lines``.
READING_END = 0
TILE_END = 1
BASE = 2
SLOPE = 3


@compiled
def token_us(
    memory: FloatArray, cached: FloatArray, windows: int, both_halves: bool, paired: bool
) -> float:
    """Microseconds of a token that a tile reads.

    Args:
        memory, cached: as in ``TileRates``.
        windows: windows that read the token at about the same time; memory is read once.
        both_halves: both halves of the tile read it, which is bound by arithmetic.
        paired: only one half reads it, and the other half reads something else meanwhile.
    """
    if both_halves:
        return cached[1] + (memory[1] - cached[1]) / windows
    if paired:
        return max(cached[0] / 2, memory[0] / windows)
    return cached[0] + (memory[0] - cached[0]) / windows


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
