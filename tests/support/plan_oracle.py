"""Brute-force answers, which share nothing with the code under test."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from vllm_prefixshare.core import OPEN_END, Forest
from vllm_prefixshare.planning.plan import DecodePlan

Requests = Mapping[Hashable, Sequence[int]]


def shared_runs(blocks: Requests) -> dict[frozenset, tuple[int, int]]:
    """Block range ``[start, end)`` of every maximal run that two or more requests share, by the set
    of requests that share it.
    """
    sharers: dict[tuple[int, ...], set] = {}
    for request, ids in blocks.items():
        for depth in range(1, len(ids) + 1):
            sharers.setdefault(tuple(ids[:depth]), set()).add(request)
    runs: dict[frozenset, tuple[int, int]] = {}
    for prefix, requests in sharers.items():
        if len(requests) > 1:
            key, depth = frozenset(requests), len(prefix)
            start, end = runs.get(key, (depth - 1, depth))
            runs[key] = min(start, depth - 1), max(end, depth)
    return runs


def longest_shared_prefix(blocks: Requests, request: Hashable) -> int:
    """Blocks that ``request`` has in common with the request most like it."""

    def common(a: Sequence[int], b: Sequence[int]) -> int:
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        return n

    others = (ids for other, ids in blocks.items() if other != request)
    return max((common(blocks[request], ids) for ids in others), default=0)


def assert_forest(
    forest: Forest, blocks: Requests, order: Sequence[Hashable], block_size: int
) -> None:
    """Assert that ``forest`` is the shared part of ``blocks``, for the batch rows ``order``."""
    assert sorted(forest.request_rows.tolist()) == list(range(len(order)))
    assert forest.num_reqs == len(order)
    by_position = [order[row] for row in forest.request_rows.tolist()]
    for request, private in zip(by_position, forest.private_start.tolist(), strict=True):
        assert private == longest_shared_prefix(blocks, request) * block_size

    expected = shared_runs(blocks)
    found = []
    for node in range(forest.num_nodes):
        first, last = int(forest.node_reader_start[node]), int(forest.node_reader_end[node])
        assert 0 <= first < last <= len(order)
        requests = frozenset(by_position[first:last])
        span = int(forest.node_start[node]), int(forest.node_end[node])
        assert requests in expected, f"{set(requests)} share no run of their own"
        assert span == tuple(depth * block_size for depth in expected[requests])
        parent = int(forest.node_parent[node])
        assert parent < node
        if parent < 0:
            assert span[0] == 0
        else:
            assert found[parent] > requests
            assert int(forest.node_end[parent]) == span[0]
        found.append(requests)
    assert len(found) == len(set(found)) == len(expected)


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
        out.append(
            (
                row,
                start,
                stop,
                rows[int(plan.run_reader_start[run]) : int(plan.run_reader_end[run])],
            )
        )
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
