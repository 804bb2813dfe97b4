"""KV ranges of a plan as CPU executors read them, and the partial results of query tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.core import IntArray
from vllm_prefixshare.planning.plan import DecodePlan


class SharedRun(NamedTuple):
    """A KV range that several requests read: batch row of its block ids, tokens ``[kv_start,
    kv_end)`` and the query tokens that read it, int64.
    """

    row: int
    kv_start: int
    kv_end: int
    tokens: np.ndarray


def shared_runs(plan: DecodePlan, query_start_loc: IntArray) -> Iterator[SharedRun]:
    """The KV ranges of ``plan`` that several requests read."""
    tile_of_run = np.repeat(np.arange(plan.num_tiles), np.diff(plan.tile_run_indptr))
    for run in np.flatnonzero(plan.run_reader_end - plan.run_reader_start > 1).tolist():
        base = int(plan.tile_req_indptr[tile_of_run[run]])
        readers = plan.tile_req_indices[
            base + plan.run_reader_start[run] : base + plan.run_reader_end[run]
        ]
        yield SharedRun(
            row=int(plan.run_row[run]),
            kv_start=int(plan.run_kv_start[run]),
            kv_end=int(plan.run_kv_end[run]),
            tokens=tokens_of(readers, query_start_loc),
        )


class PrivateRuns(NamedTuple):
    """KV ranges with one reader, ``[num_runs]`` each: batch row, first token, number of tokens."""

    row: IntArray
    kv_start: IntArray
    kv_len: IntArray


def private_runs(
    plan: DecodePlan, seq_lens: IntArray, rows: IntArray | None, chunk: int
) -> PrivateRuns:
    """The KV ranges of ``plan`` with one reader, in splits of at most ``chunk`` tokens.

    Args:
        seq_lens: ``[num_reqs]`` current lengths.
        rows: batch rows to take; None for all.
        chunk: tokens, a multiple of the block size.
    """
    lengths = plan.run_lengths(seq_lens)
    runs = np.flatnonzero((plan.run_reader_end - plan.run_reader_start == 1) & (lengths > 0))
    if rows is not None:
        runs = runs[np.isin(plan.run_row[runs], rows)]
    lengths = lengths[runs]
    pieces = -(-lengths // chunk)
    run = np.repeat(runs, pieces)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * chunk
    kv_len = np.minimum(np.repeat(lengths, pieces) - skipped, chunk)
    return PrivateRuns(plan.run_row[run], plan.run_kv_start[run] + skipped, kv_len)


def tokens_of(rows: IntArray, query_start_loc: IntArray) -> np.ndarray:
    """Query tokens of the batch ``rows``, int64, in order."""
    lens = np.diff(query_start_loc)[rows]
    offset = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    return (np.repeat(query_start_loc[rows], lens) + offset).astype(np.int64)


def positions_of(seq_lens: IntArray, query_start_loc: IntArray) -> np.ndarray:
    """``[num_tokens]`` int64: position of each query token in its request."""
    first = (seq_lens - query_start_loc[1:]).astype(np.int64)
    return np.arange(query_start_loc[-1]) + np.repeat(first, np.diff(query_start_loc))


def merge_slots(
    owner: np.ndarray, num_tokens: int, empty: int, padding: np.ndarray | None = None
) -> np.ndarray:
    """Partial results of each token, as a table.

    Args:
        owner: ``[num_partials]`` query token of each partial result.
        empty: value of unused entries.
        padding: bool ``[num_partials]``, results that belong to no token.

    Returns:
        int64 ``[num_tokens, max_partials]``.
    """
    slots = np.arange(len(owner)) if padding is None else np.flatnonzero(~padding)
    owner = owner[slots]
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=num_tokens)
    table = np.full((num_tokens, max(1, int(counts.max(initial=0)))), empty, np.int64)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[owner[order], rank] = slots[order]
    return table
