"""Checks that every plan must pass, whichever divider made it."""

import numpy as np

from vllm_prefixshare.core import OPEN_END, IntArray
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.window import first_in_window


class InvariantError(AssertionError):
    """A plan would compute a wrong result: a bug in the planner."""


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def check(
    plan: DecodePlan,
    block_table: IntArray,
    seq_lens: IntArray,
    sliding_window: int | None = None,
    query_len: int = 1,
) -> None:
    """Verify that ``plan`` reads each (request, KV token) exactly once. Tokens that no query of the
    request sees may be read or not, from any block.

    Args:
        block_table: ``[num_reqs, max_blocks]``.
        seq_lens: ``[num_reqs]``, the planned lengths or any longer ones.
        sliding_window: as in ``AttentionConfig``.
        query_len: maximum number of query tokens of a request.

    Raises:
        InvariantError: naming the request and what is wrong.
    """
    num_reqs = plan.num_reqs
    _require(len(seq_lens) == num_reqs == len(block_table), "plan and batch differ in requests")
    _check_indptr(plan.work_indptr, plan.num_tiles, "work_indptr")
    _check_indptr(plan.tile_req_indptr, len(plan.tile_req_indices), "tile_req_indptr")
    _check_indptr(plan.tile_run_indptr, plan.num_runs, "tile_run_indptr")
    _check_indptr(plan.merge_indptr, plan.num_partials, "merge_indptr")
    _require(np.all((plan.tile_req_indices >= 0) & (plan.tile_req_indices < num_reqs)), "rows")

    for name in ("run_row", "run_kv_start", "run_kv_end", "run_reader_start", "run_reader_end"):
        _require(len(getattr(plan, name)) == plan.num_runs, name)
    _require(len(plan.merge_indptr) == num_reqs + 1, "merge_indptr is not one range per request")
    _require(np.all(plan.run_kv_start >= 0), "a run starts before token 0")
    _require(np.all((plan.run_row >= 0) & (plan.run_row < num_reqs)), "run_row")
    open_rows = plan.run_row[plan.run_kv_end == OPEN_END]
    _require(
        np.array_equal(np.sort(open_rows), np.arange(num_reqs)),
        "a request has no open run, or several",
    )

    first_seen = first_in_window(seq_lens, sliding_window, query_len)
    # windows of longer requests have moved on, by unlike numbers of tokens
    first_planned = first_in_window(plan.planned_seq_lens, sliding_window, query_len)
    reads = [np.zeros(max(int(n), 1) + 1, np.int64) for n in seq_lens]  # difference arrays
    touched = np.zeros(len(plan.tile_req_indices), bool)
    lengths = plan.run_lengths(seq_lens)
    for tile in range(plan.num_tiles):
        low, high = plan.tile_req_indptr[tile : tile + 2]
        requests = plan.tile_req_indices[low:high]
        _require(len(np.unique(requests)) == len(requests), f"tile {tile} repeats a request")
        for run in range(*plan.tile_run_indptr[tile : tile + 2]):
            start = int(plan.run_reader_start[run])
            end = int(plan.run_reader_end[run])
            _require(0 <= start < end <= len(requests), f"run {run}: readers out of range")
            touched[low + start : low + end] = True
            readers = requests[start:end]
            start = int(plan.run_kv_start[run])
            stop = start + int(lengths[run])
            row = int(plan.run_row[run])
            _require(row in readers, f"run {run}: row {row} is not among its readers")
            open_end = plan.run_kv_end[run] == OPEN_END
            _require(not open_end or len(readers) == 1, f"run {run}: open, but shared")
            filled = -(-stop // plan.block_size) * plan.block_size
            _require(
                len(readers) == 1 or np.all(filled <= seq_lens[readers]),
                f"run {run}: shares a block that is not filled",
            )
            end = -(-stop // plan.block_size)
            for request in readers.tolist():
                seen = slice(max(start, int(first_seen[request])) // plan.block_size, end)
                _require(
                    first_planned[row] <= first_planned[request]
                    and np.all(block_table[request, seen] == block_table[row, seen]),
                    f"run {run}: its readers do not hold the same blocks",
                )
                _require(stop <= seq_lens[request], f"run {run} passes the end of {request}")
                reads[request][start] += 1
                reads[request][stop] -= 1
    for request, change in enumerate(reads):
        counts = np.cumsum(change)[: int(seq_lens[request])]
        counts[: first_seen[request]] = 1
        wrong = np.flatnonzero(counts != 1)
        if len(wrong):
            token = int(wrong[0])
            raise InvariantError(f"token {token} of request {request} read {counts[token]} times")
    _require(touched.all(), "a tile holds a request that none of its runs reads")
    _check_partials(plan)


def _check_indptr(indptr: IntArray, total: int, name: str) -> None:
    ok = indptr[0] == 0 and indptr[-1] == total and np.all(np.diff(indptr) >= 0)
    _require(ok, f"{name} is not an indptr over {total}")


def _check_partials(plan: DecodePlan) -> None:
    tiles_of = np.bincount(plan.tile_req_indices, minlength=plan.num_reqs)
    direct = plan.partial_indices < 0
    _require(
        np.array_equal(direct, tiles_of[plan.tile_req_indices] == 1),
        "a request is written directly though it has several tiles, or the reverse",
    )
    slots = plan.partial_indices[~direct]
    owners = plan.tile_req_indices[~direct]
    _require(len(np.unique(slots)) == len(slots) == plan.num_partials, "partial slots collide")
    _require(
        np.all((plan.merge_indptr[owners] <= slots) & (slots < plan.merge_indptr[owners + 1])),
        "a partial result is merged into another request",
    )
