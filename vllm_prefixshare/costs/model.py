"""What a work tile costs: the questions that every cost model answers.

``table`` answers them from measured times, ``roofline`` with an estimate.
"""

from typing import Protocol

from numpy.typing import ArrayLike

from vllm_prefixshare.records import FloatArray


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
        """One request read whole, as the backend does that shares nothing."""
        ...

    def merge(self, rows: ArrayLike) -> FloatArray:
        """Merging one partial result of ``rows`` rows into its request."""
        ...
