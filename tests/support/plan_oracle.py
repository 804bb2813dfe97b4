"""Brute-force answers, which share nothing with the code under test."""

from collections.abc import Sequence

import numpy as np

from tests.support.engine_model import Step
from vllm_prefixshare.core import OPEN_END, Forest
from vllm_prefixshare.planning.plan import DecodePlan


def shared_runs(blocks: Sequence[Sequence[int]]) -> dict[frozenset[int], tuple[int, int]]:
    """The prefix tree by definition: the block range ``[start, end)`` of every maximal run that the
    same two or more rows hold, by these rows.
    """
    runs: dict[frozenset[int], tuple[int, int]] = {}
    groups, depth = [list(range(len(blocks)))], 0  # rows with equal blocks up to this depth
    while groups:
        children: dict[tuple[int, int], list[int]] = {}
        for i, group in enumerate(groups):
            for row in group:
                if len(blocks[row]) > depth:
                    children.setdefault((i, blocks[row][depth]), []).append(row)
        groups = [rows for rows in children.values() if len(rows) > 1]
        for rows in groups:
            start, _ = runs.get(frozenset(rows), (depth, depth))
            runs[frozenset(rows)] = start, depth + 1
        depth += 1
    return runs


def assert_forest(
    forest: Forest, blocks: Sequence[Sequence[int]], block_size: int, may_drop: bool = False
) -> None:
    """Assert that ``forest`` is the prefix tree of rows with these filled blocks; with
    ``may_drop``, whole trees may be missing, as where sharing them does not pay.
    """
    rows = forest.request_rows.tolist()
    assert forest.num_reqs == len(blocks)
    assert sorted(rows) == list(range(len(blocks)))
    found: list[tuple[frozenset[int], tuple[int, int]]] = []
    for node in range(forest.num_nodes):
        first, last = int(forest.node_reader_start[node]), int(forest.node_reader_end[node])
        assert 0 <= first < last <= len(rows)
        readers = frozenset(rows[first:last])
        start, end = int(forest.node_start[node]), int(forest.node_end[node])
        assert start % block_size == end % block_size == 0
        parent = int(forest.node_parent[node])
        assert parent < node
        if parent < 0:
            assert start == 0
        else:
            above, (_, above_end) = found[parent]
            assert above > readers and above_end * block_size == start
        found.append((readers, (start // block_size, end // block_size)))
    expected = shared_runs(blocks)
    if may_drop:
        roots = [readers for readers, (start, _) in found if start == 0]
        expected = {r: run for r, run in expected.items() if any(r <= root for root in roots)}
    assert len(found) == len(expected) and dict(found) == expected
    for row, start in zip(rows, forest.private_start.tolist(), strict=True):
        shared = max((end for readers, (_, end) in expected.items() if row in readers), default=0)
        assert start == shared * block_size


def filled_blocks(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    block_size: int,
    query_len: int = 1,
    null_block_id: int | None = None,
) -> list[list[int]]:
    """Block ids of each row that may be shared: filled before this step's queries."""
    rows = []
    for ids, length in zip(block_table.tolist(), seq_lens.tolist(), strict=True):
        ids = ids[: max(0, length - query_len) // block_size]
        if null_block_id in ids:
            ids = ids[: ids.index(null_block_id)]
        rows.append(ids)
    return rows


def distinct_tokens(filled: list[list[int]], seq_lens: np.ndarray, block_size: int) -> int:
    """KV tokens left when each shared prefix is read once."""
    prefixes = {tuple(ids[: d + 1]) for ids in filled for d in range(len(ids))}
    rest = sum(int(n) - len(ids) * block_size for ids, n in zip(filled, seq_lens, strict=True))
    return len(prefixes) * block_size + rest


def tile_rows(plan: DecodePlan, tile: int) -> list[int]:
    """Batch rows of one tile."""
    low, high = plan.tile_req_indptr[tile : tile + 2]
    return plan.tile_req_indices[low:high].tolist()


def tile_runs(
    plan: DecodePlan, tile: int, seq_lens: np.ndarray
) -> list[tuple[int, int, int, list]]:
    """(representative row, start, stop, readers) of each run of one tile."""
    rows = tile_rows(plan, tile)
    out = []
    for run in range(*plan.tile_run_indptr[tile : tile + 2]):
        row, start, stop = (int(x[run]) for x in (plan.run_row, plan.run_kv_start, plan.run_kv_end))
        if stop == OPEN_END:
            stop = int(seq_lens[row])
        readers = rows[int(plan.run_reader_start[run]) : int(plan.run_reader_end[run])]
        out.append((row, start, stop, readers))
    return out


def tile_tokens(plan: DecodePlan, tile: int, seq_lens: np.ndarray) -> int:
    return sum(stop - start for _, start, stop, _ in tile_runs(plan, tile, seq_lens))


def assert_reads_once(plan: DecodePlan, block_table: np.ndarray, seq_lens: np.ndarray) -> None:
    """Assert that each request reads each of its tokens once, from its own blocks."""
    counts = [np.zeros(int(n), int) for n in seq_lens]
    assert plan.num_reqs == len(seq_lens)
    for tile in range(plan.num_tiles):
        for row, start, stop, readers in tile_runs(plan, tile, seq_lens):
            assert 0 <= start <= stop
            assert readers
            columns = range(start // plan.block_size, -(-stop // plan.block_size))
            for reader in readers:
                assert stop <= seq_lens[reader], f"run passes the end of row {reader}"
                assert all(block_table[row, c] == block_table[reader, c] for c in columns)
                counts[reader][start:stop] += 1
    for row, reads in enumerate(counts):
        assert np.all(reads == 1), f"row {row} reads its tokens {reads.tolist()} times"


def assert_reads_what_was_written(
    plan: DecodePlan,
    step: Step,
    memory: np.ndarray,
    block_size: int,
    window: int | None = None,
) -> int:
    """Assert that each request reads each of its tokens once, and finds there a value that it
    wrote, or that another request with the same text wrote. Blocks that this step writes to belong
    to one request only. With a ``window``, tokens that none of the request's queries sees may be
    read or not, from any block. Returns the tokens read.
    """
    assert plan.num_reqs == len(step.true_lens)
    first = np.zeros_like(step.true_lens)
    if window is not None:
        first = np.maximum(step.true_lens - step.queries + 1 - window, 0)
    reads = [np.zeros(n, np.int64) for n in step.true_lens.tolist()]
    total = 0
    for tile in range(plan.num_tiles):
        for row, start, end, readers in tile_runs(plan, tile, step.true_lens):
            assert readers, "a run has no reader"
            total += max(0, end - start)
            ids = step.block_table[row, start // block_size : -(-end // block_size)]
            content = memory[ids].ravel()[start % block_size :]
            for reader in readers:
                context = int(step.true_lens[reader] - step.queries[reader])
                assert end <= step.true_lens[reader], "a run passes the end of a request"
                if len(readers) > 1 or reader != row:
                    assert end <= context // block_size * block_size, "a shared block is written"
                known, seen = min(end, context), max(start, int(first[reader]))
                if known > seen:
                    wrong = content[seen - start : known - start] != step.chains[reader][seen:known]
                    assert not wrong.any(), (
                        f"row {reader} reads another's token at {seen + int(wrong.argmax())}"
                    )
                reads[reader][start:end] += 1
    for row, counts in enumerate(reads):
        counts = counts[first[row] :]
        assert (counts == 1).all(), f"row {row} reads its tokens {counts.tolist()} times"
    return total


def attend(
    plan: DecodePlan, block_table: np.ndarray, seq_lens: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """Attention with one query of value 1 and head_dim 1, computed by following the plan.

    Args:
        k, v: ``[num_blocks * block_size]`` one number per KV slot.
    """
    out = np.full(plan.num_reqs, np.nan)
    partial_out = np.full(plan.num_partials, np.nan)
    partial_lse = np.full(plan.num_partials, np.nan)
    for worker in range(plan.num_workers):
        for tile in range(*plan.work_indptr[worker : worker + 2]):
            rows = tile_rows(plan, tile)
            slots: list[list[int]] = [[] for _ in rows]
            for row, start, stop, readers in tile_runs(plan, tile, seq_lens):
                ids = [
                    int(block_table[row, t // plan.block_size]) * plan.block_size
                    + t % plan.block_size
                    for t in range(start, stop)
                ]
                for reader in readers:
                    slots[rows.index(reader)] += ids
            for i, row in enumerate(rows):
                weights = np.exp(k[slots[i]])
                value = (weights * v[slots[i]]).sum() / weights.sum()
                slot = int(plan.partial_indices[plan.tile_req_indptr[tile] + i])
                if slot < 0:
                    assert np.isnan(out[row]), f"row {row} is written twice"
                    out[row] = value
                else:
                    assert np.isnan(partial_out[slot]), f"partial {slot} is written twice"
                    partial_out[slot], partial_lse[slot] = value, np.log(weights.sum())
    for row in range(plan.num_reqs):
        low, high = plan.merge_indptr[row : row + 2]
        if high > low:
            assert np.isnan(out[row]), f"row {row} is written and merged"
            weights = np.exp(partial_lse[low:high])
            out[row] = (weights * partial_out[low:high]).sum() / weights.sum()
    return out


def attend_dense(
    block_table: np.ndarray, seq_lens: np.ndarray, block_size: int, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """The same attention, computed for each request alone."""
    out = []
    for ids, length in zip(block_table, seq_lens.tolist(), strict=True):
        t = np.arange(length)
        slots = ids[t // block_size] * block_size + t % block_size
        weights = np.exp(k[slots])
        out.append((weights * v[slots]).sum() / weights.sum())
    return np.array(out)
