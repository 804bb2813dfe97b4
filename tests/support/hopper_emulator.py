"""The Hopper kernel's walk over the device arrays, in NumPy and float64.

Gluon has no interpreter. Without a GPU, errors of the walk can be found: which block lies in which
slot of which KV tile, which rows read it, where results go. The emulator follows the kernel step by
step over the same arrays; only the arithmetic of the tiles is in plain NumPy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_prefixshare.config import part_size
from vllm_prefixshare.kernels.hopper.arrays import OUTPUT, PARTIAL, PLAIN_START, RESULTS

TILE_ROWS = 128
HALF_ROWS = 64


@dataclass(frozen=True)
class Slot:
    """A piece of a block in a KV tile: rows ``[first, last)`` of the tile read the first ``tokens``
    that begin at token ``offset`` of the block. ``tail`` is the position of the piece's first token
    among the query tokens of its request, ``start`` that in the request.
    """

    block: int
    offset: int
    first: int
    last: int
    tokens: int
    tail: int
    start: int


def kv_tiles(
    plan: Mapping[str, np.ndarray],
    tile: int,
    chunk: int,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    rows: int,
    block_size: int,
    kv_tile: int,
    max_runs: int,
) -> list[list[Slot]]:
    """KV tiles of a work tile, in the order in which the producers fetch them."""
    _, num_runs, wide_runs, low_runs = plan["tile_info"][tile, :4].tolist()
    assert num_runs <= max_runs, "a tile has more runs than the kernel holds"
    piece = part_size(block_size)
    nb = kv_tile // piece
    r = np.arange(num_runs)
    row = plan["run_row"][tile, r]
    start = plan["run_kv_start"][tile, r]
    end = plan["run_kv_end"][tile, r]
    end = np.where(end == -1, seq_lens[row], end)
    readers = plan["run_readers"][tile, r]
    first_query = seq_lens[row] - np.diff(query_start_loc)[row]
    pieces = np.maximum(-(-(end - start) // piece), 0)
    kinds = np.where(r < wide_runs, 0, np.where(r < wide_runs + low_runs, 1, 2))
    per_kind = [int(pieces[kinds == kind].sum()) for kind in range(3)]
    wide, low, high = (-(-n // nb) for n in per_kind)
    starts = np.cumsum(pieces) - pieces
    starts = starts + np.where(kinds >= 1, wide * nb - per_kind[0], 0)
    starts = starts + np.where(kinds >= 2, low * nb - per_kind[1], 0)
    half = int(plan["tile_info"][tile, 5])

    def tile_row(reader: int, is_end: int) -> int:
        if rows > HALF_ROWS:
            return min(max(reader * rows - chunk * TILE_ROWS, 0), TILE_ROWS)
        return reader * rows if reader < half + is_end else HALF_ROWS + (reader - half) * rows

    tiles = max(wide + low + high, min(num_runs, 1))
    pairs, both = (low + high) // 2, min(low, high)
    all_pairs = pairs + wide // 2
    result = []
    for t in range(tiles):
        if t // 2 < all_pairs:
            before = 2 * (t // 2 * pairs // all_pairs)
            is_narrow = (t // 2 + 1) * pairs // all_pairs * 2 > before
            index = t - before
        else:
            before = 2 * pairs
            is_narrow = t < wide // 2 * 2 + low + high
            index = t - low - high
        if is_narrow:
            n = before + t % 2
            is_high = n & 1 if n < 2 * both else high > low
            index = wide + (low if is_high else 0) + (n >> 1 if n < 2 * both else n - both)
        slots: list[Slot] = []
        for slot in range(index * nb, index * nb + nb):
            found = int(np.searchsorted(starts, slot, "right")) - 1
            in_run = slot - int(starts[found])
            if in_run >= pieces[found]:  # padding repeats the tile's first piece, if any
                repeated = (slots[0].block, slots[0].offset) if slots else (0, 0)
                slots.append(Slot(*repeated, 0, 0, 0, -piece, 0))
                continue
            at = int(start[found]) + in_run * piece
            first, last = int(readers[found]) & 0xFFFF, int(readers[found]) >> 16
            low_row, high_row = tile_row(first, 0), tile_row(last, 1)
            assert 0 <= low_row < high_row <= TILE_ROWS, "each must fit in a byte"
            slots.append(
                Slot(
                    int(block_table[row[found], at // block_size]),
                    at % block_size,
                    low_row,
                    high_row,
                    min(int(end[found]) - at, piece),
                    max(at - int(first_query[found]), -piece),
                    at,
                )
            )
        result.append(slots)
    if plan["tile_info"][tile, RESULTS] & PLAIN_START:
        # what the producers copy before they know the lengths, if it is their worker's first tile
        at = start[0] + np.arange(nb) * piece
        copied = [(int(block_table[row[0], x // block_size]), int(x % block_size)) for x in at]
        if [(slot.block, slot.offset) for slot in result[0]] != copied:
            result.insert(0, [Slot(*place, 0, 0, 0, -piece, 0) for place in copied])
    return result


def emulate(
    plan: Mapping[str, np.ndarray],
    num_workers: int,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    query_len: int,
    max_runs: int,
    kv_tile: int = 128,
    tree_mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    soft_cap: float = 0.0,
    scales: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    window: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the kernel and of merge states. The arguments are those of the
    kernel, with NHD caches. ``scales`` of queries, K and V are ``[num_kv_heads]`` each.
    """
    q_scale, k_scale, v_scale = np.ones((3, k_cache.shape[2])) if scales is None else scales
    num_qo_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_qo_heads // num_kv_heads
    rows = query_len * group
    partials = int(plan["merge_indptr"].max(initial=0))
    out = np.full(q.shape, np.nan)
    out_lse = np.full(q.shape[:2], np.nan)
    partial_out = np.full((partials * query_len, num_qo_heads, head_dim), np.nan)
    partial_lse = np.full((partials * query_len, num_qo_heads), np.nan)

    def write(tile: int, slot: int, row: int, head: int, result: np.ndarray, lse: float) -> None:
        request = int(plan["slot_row"][tile, slot])
        partial = int(plan["slot_partial"][tile, slot])
        results = int(plan["tile_info"][tile, RESULTS])
        query, qo_head = row // group, head * group + row % group
        if partial < 0:
            if sinks is not None:  # the kernel starts the sum with the sink; the result is the same
                most = max(lse, sinks[qo_head])
                total = np.exp(lse - most) + np.exp(sinks[qo_head] - most)
                result, lse = result * np.exp(lse - most) / total, most + np.log(total)
            assert results & OUTPUT, "the kernel would skip the tile's outputs"
            assert np.isnan(out[query_start_loc[request] + query, qo_head]).all(), "written twice"
            out[query_start_loc[request] + query, qo_head] = result
            out_lse[query_start_loc[request] + query, qo_head] = lse
        else:
            assert results & PARTIAL, "the kernel would skip the tile's partial results"
            assert np.isnan(partial_lse[partial * query_len + query, qo_head]), "written twice"
            partial_out[partial * query_len + query, qo_head] = result
            partial_lse[partial * query_len + query, qo_head] = lse

    for tile in range(num_workers):
        while tile >= 0:
            for chunk in range(-(-rows // TILE_ROWS)):
                tiles = kv_tiles(
                    plan, tile, chunk, block_table, seq_lens, query_start_loc, rows, block_size,
                    kv_tile, max_runs,
                )  # fmt: skip
                num_reqs = int(plan["tile_info"][tile, 0])
                half_reqs = int(plan["tile_info"][tile, 5])
                for tile_row in range(TILE_ROWS):
                    half = tile_row // HALF_ROWS * HALF_ROWS
                    if rows > HALF_ROWS:
                        slot, row = 0, chunk * TILE_ROWS + tile_row
                        if row >= rows * num_reqs:
                            continue
                    else:
                        slot = (tile_row - half) // rows + (half_reqs if half else 0)
                        row = (tile_row - half) % rows
                        if slot >= (num_reqs if half else half_reqs):
                            continue
                    request = int(plan["slot_row"][tile, slot])
                    query = row // group
                    token = int(query_start_loc[request]) + query
                    if token >= query_start_loc[request + 1]:
                        continue
                    of_tile = seq_lens[plan["slot_row"][tile, :num_reqs]]
                    queries = query_start_loc[request + 1] - query_start_loc[request]
                    position = int(seq_lens[request] - queries) + query
                    keys: list[tuple[int, int]] = []
                    for kv in tiles:
                        used = [s for s in kv if s.tokens]
                        low = min((s.first for s in used), default=255)
                        high = max((s.last for s in used), default=0)
                        if not (high > half and low < half + HALF_ROWS):
                            continue  # the half skips this KV tile
                        for s in kv:
                            if not s.first <= tile_row < s.last:
                                continue
                            for c in range(s.tokens):
                                key = s.tail + c
                                if key >= 0 and tree_mask is not None:
                                    if not int(tree_mask[token, key >> 5]) >> (key & 31) & 1:
                                        continue
                                elif key > query:
                                    continue
                                if window is not None and s.start + c <= position - window:
                                    assert s.start < of_tile.max() - window, "no mask here"
                                    continue
                                keys.append((s.block, s.offset + c))
                    if not keys:  # this piece of the request lies after this query
                        for head in range(num_kv_heads):
                            write(tile, slot, row, head, np.zeros(head_dim), -np.inf)
                        continue
                    block, column = np.array(keys).T
                    for head in range(num_kv_heads):
                        k = k_cache[block, column, head].astype(np.float64)
                        v = v_cache[block, column, head].astype(np.float64)
                        s = k @ q[token, head * group + row % group]
                        s *= head_dim**-0.5 * q_scale[head] * k_scale[head]
                        if soft_cap:
                            s = soft_cap * (1 - 2 / (np.exp(2 * s / soft_cap) + 1))
                        p = np.exp(s - s.max())
                        o = p @ v / p.sum() * v_scale[head]
                        write(tile, slot, row, head, o, s.max() + np.log(p.sum()))
            tile = int(plan["tile_info"][tile, 4]) - 1

    for request in range(len(seq_lens)):
        low, high = plan["merge_indptr"][request : request + 2].tolist()
        if low == high:
            continue
        for query in range(query_start_loc[request + 1] - query_start_loc[request]):
            at = np.arange(low, high) * query_len + query
            lse, parts = partial_lse[at], partial_out[at]
            if sinks is not None:  # the sink is a state whose output is zero
                lse = np.concatenate([lse, sinks[None]])
                parts = np.concatenate([parts, np.zeros_like(parts[:1])])
            largest = lse.max(axis=0)
            weight = np.exp(lse - largest)[..., None]
            merged = (weight * parts).sum(axis=0) / weight.sum(axis=0)
            out[query_start_loc[request] + query] = merged
            out_lse[query_start_loc[request] + query] = largest + np.log(weight.sum(axis=0))[..., 0]
    return out, out_lse
