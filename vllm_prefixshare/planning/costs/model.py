"""The interface of cost models, which price work tiles.

``table`` implements it with measured times, ``roofline`` with an estimate.
"""

from typing import Protocol

from numpy.typing import ArrayLike

from vllm_prefixshare.core import FloatArray


class CostModel(Protocol):
    """Times in microseconds; arguments broadcast. ``rows`` counts query rows of one KV head
    (queries x gqa_group_size), ``kv_len`` tokens.
    """

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        """One work tile that leaves a partial result to be merged. ``readers``: work tiles
        that read the same KV at about the same time; all but one find it in a shared cache.
        """
        ...

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        """All tokens of one request, read by the backend that shares nothing."""
        ...

    def merge(self, rows: ArrayLike) -> FloatArray:
        """Merging one partial result of ``rows`` rows into its request."""
        ...
