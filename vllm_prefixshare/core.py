"""Records that several folders of the package share: no torch, no triton, no vllm."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.signedinteger[Any]]
FloatArray = NDArray[np.float64]

#: ``kv_end`` of a KV range that ends at the current length of its only request.
OPEN_END = -1
#: Columns of ``WorkTiles.runs``.
RUN_ROW = 0
RUN_KV_START = 1
RUN_KV_END = 2
RUN_READER_START = 3
RUN_READER_END = 4
RUN_COLUMNS = 5


class PrefixShareError(ValueError):
    """A user's mistake; the message is one sentence that names the remedy."""


class Forest(NamedTuple):
    """The shared part of the prefix tree, with requests in depth-first order.

    In that order the requests below a node are one interval, so a node needs two integers
    where DeFT (section 3.3) keeps a bit mask. Only nodes with two requests or more are
    listed; the tokens of a request after its last node are its private part.

    request_rows: ``[num_reqs]`` batch row of each depth-first position.
    private_start: ``[num_reqs]`` first private token, by depth-first position.
    node_parent: ``[num_nodes]`` index of the parent node, -1 for a root; parents come first.
    node_start, node_end: ``[num_nodes]`` token range of the node in each of its requests.
    node_reader_start, node_reader_end: ``[num_nodes]`` depth-first positions below it.
    """

    request_rows: IntArray
    private_start: IntArray
    node_parent: IntArray
    node_start: IntArray
    node_end: IntArray
    node_reader_start: IntArray
    node_reader_end: IntArray

    @classmethod
    def alone(cls, num_reqs: int) -> "Forest":
        """A forest without sharing, its requests in the order of the batch."""
        no_nodes = [np.zeros(0, np.int32) for _ in range(5)]
        rows = np.arange(num_reqs, dtype=np.int32)
        return cls(rows, np.zeros(num_reqs, np.int32), *no_nodes)

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.request_rows)

    @property
    def num_nodes(self) -> int:
        """Number of shared nodes."""
        return len(self.node_parent)


class KVSegment(NamedTuple):
    """Tokens ``[kv_start, kv_end)`` of batch row ``row``; the same physical blocks in every
    request that shares them. ``kv_end`` may be ``OPEN_END``.
    """

    row: int
    kv_start: int
    kv_end: int


class QueryGroup(NamedTuple):
    """A KV segment with the batch rows that read it; ``kv_len`` is its planned length in
    tokens (an open segment grows past it).
    """

    segment: KVSegment
    rows: IntArray
    kv_len: int


@dataclass(frozen=True, slots=True)
class WorkTiles:
    """Units of kernel work: each has some requests and the KV ranges that they read.

    row_indptr: ``[num_tiles + 1]`` int32, into ``rows``.
    rows: ``[num_slots]`` int32 batch rows, the requests of tile after tile.
    run_indptr: ``[num_tiles + 1]`` int32, into ``runs``.
    runs: int32 ``[num_runs, RUN_COLUMNS]``. A KV range is tokens ``[RUN_KV_START, RUN_KV_END)`` of
        batch row ``RUN_ROW``, read for the requests ``[RUN_READER_START, RUN_READER_END)`` of its
        tile, through that row of the block table.
    cost: ``[num_tiles]`` float64, estimated microseconds.
    worker: ``[num_tiles]`` int32, ascending: work queue of each tile, in this order; None leaves
        the assignment to ``planning.plan.longest_first``.
    """

    row_indptr: IntArray
    rows: IntArray
    run_indptr: IntArray
    runs: IntArray
    cost: FloatArray
    worker: IntArray | None = None

    @classmethod
    def none(cls) -> "WorkTiles":
        """An empty list of tiles."""
        rows = np.zeros(0, np.int32)
        start = np.zeros(1, np.int32)
        return cls(start, rows, start, np.zeros((0, RUN_COLUMNS), np.int32), np.zeros(0))


def host_integers(value: ArrayLike, name: str, ndim: int) -> IntArray:
    """``value`` as int32 with ``ndim`` dimensions.

    Raises:
        PrefixShareError: ``value`` is anything else; the message calls it ``name``.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise PrefixShareError(
            f"{name} must be {ndim}-dimensional integers on the host ({e})."
        ) from None
    if array.ndim != ndim or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise PrefixShareError(
            f"{name} must be {ndim}-dimensional integers on the host, "
            f"got {array.dtype} with shape {list(array.shape)}."
        )
    if (
        array.dtype.itemsize >= 4
        and array.dtype != np.int32
        and array.size
        and not (-(2**31) <= array.min() <= array.max() < 2**31)
    ):
        raise PrefixShareError(f"{name} has entries beyond 32 bits.")
    return array.astype(np.int32, copy=False)


class PieceLimits(NamedTuple):
    """Limits of KV splits in plans of the divider ``batch_invariant``.

    per_request: maximum KV splits of a request.
    in_cache: number of whole KV splits that fit the KV cache.
    """

    per_request: int
    in_cache: int

    def max_tiles(self, num_reqs: int, max_tile_requests: int) -> int:
        """Maximum number of work tiles of a plan that shares every common prefix."""
        partials = num_reqs * self.per_request
        # A tile reads a KV split of a node or of a private part. Splits lie in different blocks,
        # except where a node or a private part begins within a split: at most 2 per request, plus
        # its last split, which is not whole. More readers than a tile holds need more tiles.
        pieces = min(partials, self.in_cache + 3 * num_reqs)
        return min(partials, pieces + partials // max_tile_requests)
