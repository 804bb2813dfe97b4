"""FastTree's coefficient model (section 4.2, equations 3 to 11) as a cost model, to compare with.

The paper prices what a group of queries wastes: rows and tokens that pad its tiles, and partial
results. Here a tile's own work is added. It is equal on both sides of each comparison in the
paper, so that decisions stay as published, and the sum can also balance workers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vllm_prefixshare.core import FloatArray

#: prices of an element of padding along the queries, along the context, and of a partial result,
#: relative to an element of work; as in the paper's artifact
ALPHA = 0.66
BETA = 0.33
GAMMA = 0.1


@dataclass(frozen=True, slots=True)
class PaddingCost:
    """FastTree's cost of a query group, as a ``CostModel``.

    tile_rows, tile_tokens: TS_q and TS_c, those of the portable kernel. elements_per_us: elements
    of work (a row times a token times a dimension) that a worker does in a microsecond; a common
    factor that changes no decision.
    """

    head_dim: int
    tile_rows: int = 64
    tile_tokens: int = 64
    elements_per_us: float = 1.2e6

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        """As ``CostModel.tile``; ``readers`` makes no difference."""
        n = np.asarray(rows, np.float64)
        length = np.asarray(kv_len, np.float64)
        along_queries = _padding(self.tile_rows, n) * length
        along_context = n * _padding(self.tile_tokens, np.minimum(length, self.tile_tokens))
        elements = n * length + ALPHA * along_queries + BETA * along_context
        return self._microseconds(elements / np.ones_like(np.asarray(readers, np.float64)))

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        """As ``CostModel.unshared``: a tile like any other."""
        return self.tile(rows, kv_len)

    def merge(self, rows: ArrayLike) -> FloatArray:
        """As ``CostModel.merge``: equation 10."""
        return self._microseconds(GAMMA * np.asarray(rows, np.float64))

    def _microseconds(self, elements: FloatArray) -> FloatArray:
        return elements * self.head_dim / self.elements_per_us


def _padding(tile: int, size: FloatArray) -> FloatArray:
    """Equation 3: the padding of ``size`` to a multiple of ``tile``."""
    return tile - ((size - 1) % tile + 1)
