"""Plans made to be timed: every worker does the same work, tile after tile."""

import numpy as np

from vllm_prefixshare.core import IntArray
from vllm_prefixshare.planning.plan import DecodePlan


def repeated_tiles(
    num_workers: int,
    requests: int,
    kv_len: int,
    repeats: int,
    block_size: int,
    partials: bool = False,
) -> DecodePlan:
    """A plan with ``repeats`` tiles for each worker, all for the worker's own ``requests``.

    Worker ``w`` has the batch rows ``[w * requests, (w + 1) * requests)``. Its tile ``i`` reads
    the tokens ``[i * kv_len, (i + 1) * kv_len)`` once for all of them.

    Args:
        kv_len: tokens of a tile, whole blocks.
        partials: leave a partial result per tile and request and merge them, as a plan does
            that cuts a long segment. Without it every tile writes its output directly, over
            that of the tile before: wrong as attention unless ``repeats`` is 1, but the price
            of a tile alone.
    """
    num_reqs = num_workers * requests
    num_tiles = num_workers * repeats
    worker, index = np.divmod(np.arange(num_tiles, dtype=np.int32), repeats)
    rows = worker[:, None] * requests + np.arange(requests, dtype=np.int32)
    slots = rows * repeats + index[:, None] if partials else np.full_like(rows, -1)
    return DecodePlan(
        num_reqs=num_reqs,
        block_size=block_size,
        work_indptr=_steps(num_workers, repeats),
        tile_cost=np.ones(num_tiles),
        tile_req_indptr=_steps(num_tiles, requests),
        tile_req_indices=rows.ravel(),
        tile_run_indptr=_steps(num_tiles, 1),
        run_row=rows[:, 0].copy(),
        run_kv_start=index * kv_len,
        run_kv_end=(index + 1) * kv_len,
        run_reader_start=np.zeros(num_tiles, np.int32),
        run_reader_end=np.full(num_tiles, requests, np.int32),
        partial_indices=slots.ravel(),
        merge_indptr=_steps(num_reqs, repeats if partials else 0),
        planned_seq_lens=np.full(num_reqs, repeats * kv_len, np.int32),
    )


def _steps(count: int, step: int) -> IntArray:
    return np.arange(count + 1, dtype=np.int32) * np.int32(step)
