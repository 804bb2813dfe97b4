"""TileRates: a cost model as the few numbers that planning's loops use."""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.config import TileGeometry
from vllm_prefixshare.core import FloatArray, PrefixShareError
from vllm_prefixshare.planning.costs.model import CostModel

#: tokens of the tiles at which ``TileRates`` reads a cost model
SIZES = 64 << np.arange(8)


class TileRates(NamedTuple):
    """A ``CostModel`` for one attention shape as a few numbers, for loops that ask it often.

    Reading a token has a rate that depends on its readers. The rest of a tile's cost depends on
    its size: short tiles cost less than the line through long ones, and none less than a launch.

    memory, cached: ``[2]`` microseconds of a token read by this tile only, and by very many
        tiles at the same time; for half tiles and for full ones.
    lines: ``[4, 9]`` cost of a tile as a function of its tokens' cost by their rates: nine
        straight lines, the first one level. Rows: the tokens' cost and the tile's cost at which a
        line ends; the tile's cost where the line meets no tokens; its slope. One array, because a
        record of many arrays is copied at each call of a compiled function.
    overhead: cost of a long tile extras its reading.
    merge: cost of merging one row of one partial result.
    partial_write, merge_launch, min_merge, max_merge: as in ``TileGeometry``, microseconds.
    """

    memory: FloatArray
    cached: FloatArray
    lines: FloatArray
    overhead: float
    merge: float
    partial_write: float
    merge_launch: float
    min_merge: float
    max_merge: float

    @classmethod
    def of(cls, cost: CostModel, geometry: TileGeometry) -> "TileRates":
        """The rates of ``cost`` for a kernel, from its tiles of 64 to 8192 tokens.

        Raises:
            PrefixShareError: a price that is no finite number; planning's loops would end anywhere.
        """
        rows = np.array([[geometry.half_rows], [geometry.tile_rows]])
        readers = np.array([[[1]], [[1 << 20]]])
        us = np.broadcast_to(cost.tile(rows, SIZES, readers), (2, 2, len(SIZES)))
        if not (np.isfinite(us).all() and np.isfinite(cost.merge(1)).all()):
            raise PrefixShareError("cost model: microseconds must be finite.")
        short = 4  # 1024 tokens; rates are taken between these
        long = 6  # and 4096
        rate = np.maximum((us[..., long] - us[..., short]) / (SIZES[long] - SIZES[short]), 1e-9)
        extra = us - rate[..., None] * SIZES
        reading = rate.mean() * SIZES
        tile = np.maximum(np.maximum.accumulate(reading + extra.mean((0, 1))), 1e-3)
        slope = np.concatenate([[0.0], np.diff(tile) / np.diff(reading), [1.0]])
        base = np.append(tile[0], tile - slope[1:] * reading)
        return cls(
            memory=rate[0].copy(),
            cached=rate[1].copy(),
            lines=np.array([np.append(reading, np.inf), np.append(tile, np.inf), base, slope]),
            overhead=max(1e-3, float(extra[..., short].mean())),
            merge=max(0.0, float(cost.merge(1))),
            partial_write=geometry.partial_write_us,
            merge_launch=geometry.merge_launch_us,
            min_merge=geometry.min_merge_us,
            max_merge=geometry.max_merge_us,
        )
