"""DecodePlan: what a kernel walks, as named integer arrays.

A plan stays right while its sequences grow: shared runs are whole, filled blocks, and each
request has one open run that reads to whatever length it has when the kernel runs.
"""

from dataclasses import dataclass

import numpy as np

from vllm_prefixshare.planning.scheduler import longest_first
from vllm_prefixshare.types import OPEN_END, FloatArray, IntArray, WorkTile


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """Work for one batch; all arrays int32 unless said otherwise.

    Tiles, sorted by worker:
        work_indptr: ``[num_workers + 1]`` tiles of each worker.
        tile_cost: ``[num_tiles]`` float64, estimated microseconds.
        tile_req_indptr: ``[num_tiles + 1]`` into tile_req_indices.
        tile_req_indices: batch rows whose queries the tile holds.
        tile_run_indptr: ``[num_tiles + 1]`` into the run arrays.
    Runs, ``[num_runs]``:
        run_row: batch row whose block table entries name the blocks (any reader would do).
        run_kv_start, run_kv_end: tokens; the end is OPEN_END for a request's last run.
        run_first, run_last: readers, as positions within the tile's requests.
    Partial results:
        partial_indices: parallel to tile_req_indices: row of partial_out and partial_lse,
            or -1 where the request has one tile only and is written directly.
        merge_indptr: ``[num_reqs + 1]`` partial rows to merge into each request.
    planned_seq_lens: ``[num_reqs]`` lengths that the division was balanced for.
    """

    num_reqs: int
    block_size: int
    work_indptr: IntArray
    tile_cost: FloatArray
    tile_req_indptr: IntArray
    tile_req_indices: IntArray
    tile_run_indptr: IntArray
    run_row: IntArray
    run_kv_start: IntArray
    run_kv_end: IntArray
    run_first: IntArray
    run_last: IntArray
    partial_indices: IntArray
    merge_indptr: IntArray
    planned_seq_lens: IntArray

    @property
    def num_workers(self) -> int:
        return len(self.work_indptr) - 1

    @property
    def num_tiles(self) -> int:
        return len(self.tile_req_indptr) - 1

    @property
    def num_runs(self) -> int:
        return len(self.run_row)

    @property
    def num_partials(self) -> int:
        return int(self.merge_indptr[-1])

    @property
    def shared_rows(self) -> IntArray:
        """Batch rows that read some KV together with another row, ascending."""
        low = np.repeat(self.tile_req_indptr[:-1], np.diff(self.tile_run_indptr))
        several = np.flatnonzero(self.run_last - self.run_first > 1)
        read = [
            self.tile_req_indices[low[r] + self.run_first[r] : low[r] + self.run_last[r]]
            for r in several
        ]
        return np.unique(np.concatenate(read)) if read else np.zeros(0, np.int32)

    def run_lengths(self, seq_lens: IntArray) -> IntArray:
        """``[num_runs]`` tokens that each run reads when the requests have ``seq_lens``."""
        end = np.where(self.run_kv_end == OPEN_END, seq_lens[self.run_row], self.run_kv_end)
        return np.maximum(end - self.run_kv_start, 0)

    def kv_tokens_read(self, seq_lens: IntArray) -> int:
        """KV tokens that this plan reads; a per-request kernel reads ``seq_lens.sum()``."""
        return int(self.run_lengths(seq_lens).sum())


def build_plan(
    tiles: list[WorkTile], num_workers: int, block_size: int, seq_lens: IntArray
) -> DecodePlan:
    """Schedule ``tiles`` and write them down.

    Args:
        tiles: together covering every token of every request once.
        seq_lens: ``[num_reqs]`` lengths the tiles were made for.
    """
    costs = np.array([t.cost for t in tiles], np.float64)
    order, work_indptr, _ = longest_first(costs, num_workers)
    tiles = [tiles[i] for i in order]
    num_reqs = len(seq_lens)

    def indptr(counts: list[int] | IntArray) -> IntArray:
        out = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=out[1:])
        return out

    requests = np.concatenate([t.rows for t in tiles]) if tiles else np.zeros(0, np.int32)
    runs = np.array([run for t in tiles for run in t.runs], np.int32).reshape(-1, 5).T
    tiles_of = np.bincount(requests, minlength=num_reqs)
    merge_indptr = indptr(np.where(tiles_of > 1, tiles_of, 0))
    by_request = np.argsort(requests, kind="stable")
    rank = np.empty_like(by_request)  # of a tile among the tiles of its request
    rank[by_request] = np.arange(len(requests)) - indptr(tiles_of)[requests[by_request]]
    partial = np.where(tiles_of[requests] > 1, merge_indptr[requests] + rank, -1)

    return DecodePlan(
        num_reqs=num_reqs,
        block_size=block_size,
        work_indptr=work_indptr,
        tile_cost=costs[order],
        tile_req_indptr=indptr([len(t.rows) for t in tiles]),
        tile_req_indices=requests.astype(np.int32),
        tile_run_indptr=indptr([len(t.runs) for t in tiles]),
        run_row=runs[0].copy(),
        run_kv_start=runs[1].copy(),
        run_kv_end=runs[2].copy(),
        run_first=runs[3].copy(),
        run_last=runs[4].copy(),
        partial_indices=partial.astype(np.int32),
        merge_indptr=merge_indptr,
        planned_seq_lens=seq_lens.astype(np.int32),
    )
