"""The prefix tree over physical KV block ids, read off the block table.

The tree of FlashForge (section 4.1) and of DeFT, taken from vLLM's automatic prefix caching:
two requests share a prefix exactly when their rows of the block table start with the same
physical block ids. Several roots are normal, so this is a forest.

Reading the whole table takes tens of microseconds, so nothing is kept from batch to batch.
"""

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.records import Forest, IntArray

#: entries that are compared without looking for the first difference
CHUNK = 64
#: multiplicative hash (Knuth, The Art of Computer Programming, section 6.4)
HASH = 2654435769


def forest_from_blocks(
    block_table: IntArray,
    num_shareable: IntArray,
    block_size: int,
    null_block_id: int | None = None,
    table_rows: IntArray | None = None,
) -> Forest:
    """The forest of shared leading blocks, in time proportional to the shared part.

    Siblings come in the order of their lowest batch row, requests that end at a node before
    those that go on below it.

    Args:
        block_table: int32 ``[num_reqs or more, max_blocks]`` physical block ids.
        num_shareable: int32 ``[num_reqs]`` leading blocks of each request that are filled.
        block_size: tokens in a KV block.
        null_block_id: block id that ends a row's shareable blocks wherever it stands.
        table_rows: ``[num_reqs]`` row of the table that each request has; in order if None.
    """
    null = -1 if null_block_id is None else null_block_id
    if table_rows is None:
        table_rows = np.arange(len(num_shareable))
    table_rows = table_rows.astype(np.int64, copy=False)  # one type, or Numba compiles again
    rows, private, nodes = _forest(block_table, table_rows, num_shareable, null)
    return Forest(
        request_rows=rows,
        private_start=private * np.int32(block_size),
        node_parent=nodes[0],
        node_start=nodes[1] * np.int32(block_size),
        node_end=nodes[2] * np.int32(block_size),
        node_reader_start=nodes[3],
        node_reader_end=nodes[4],
    )


def windowed_forest(
    block_table: IntArray,
    num_shareable: IntArray,
    first_seen: IntArray,
    band: int,
    block_size: int,
    null_block_id: int | None = None,
    table_rows: IntArray | None = None,
) -> Forest:
    """The forest of a layer with a sliding window: of the blocks from each request's first one in
    its window on. What stands before it in the table, such as freed blocks, does not count.

    A node begins where the first window of its readers does; its other readers mask what lies
    before theirs. So that they mask little, requests whose windows begin more than ``band`` blocks
    apart share nothing. A node may begin after the end of its parent.

    Args:
        block_table, num_shareable, block_size, null_block_id, table_rows: as in
            ``forest_from_blocks``.
        first_seen: int32 ``[num_reqs]`` first block in the window of each request.
        band: blocks.
    """
    null = -1 if null_block_id is None else null_block_id
    if table_rows is None:
        table_rows = np.arange(len(num_shareable))
    table_rows = table_rows.astype(np.int64, copy=False)
    if not len(num_shareable):
        return Forest.alone(0)
    aligned = _aligned(block_table, table_rows, num_shareable, first_seen, band, null)
    base = first_seen.min()
    order = np.arange(len(aligned))
    rows, private, nodes = _forest(aligned, order, np.maximum(num_shareable - base, 0), null)
    private, nodes = _in_window(rows, private + base, nodes, base, first_seen)
    return Forest(
        request_rows=rows,
        private_start=private * np.int32(block_size),
        node_parent=nodes[0],
        node_start=nodes[1] * np.int32(block_size),
        node_end=nodes[2] * np.int32(block_size),
        node_reader_start=nodes[3],
        node_reader_end=nodes[4],
    )


@compiled
def _aligned(
    table: IntArray,
    table_rows: IntArray,
    num_shareable: IntArray,
    first_seen: IntArray,
    band: int,
    null: int,
) -> IntArray:
    """The table from the first column that any window sees on, in which rows of a tree begin alike:
    a row gets, before its window, the blocks of an earlier row that has its first block, or a
    number of its own.
    """
    n = len(num_shareable)
    base = first_seen.min()
    out = np.zeros((n, max(num_shareable.max() - base, 1)), np.int32)
    filled = 0
    for row in range(n):
        filled += max(num_shareable[row] - first_seen[row], 0)
    size = 2
    while size < 2 * filled:
        size *= 2
    mask = size - 1
    holder = np.full((size, 2), -1, np.int32)  # hash table: block and the last row that has it
    tree_start = np.zeros(n, np.int32)  # first column of the tree of each row
    for row in np.argsort(first_seen, kind="mergesort"):
        first, end = first_seen[row], num_shareable[row]
        ids = table[table_rows[row]]
        before = -1
        if first < end and ids[first] != null:
            slot = (ids[first] * HASH >> 12) & mask
            while holder[slot, 0] >= 0 and holder[slot, 0] != ids[first]:
                slot = (slot + 1) & mask
            before = holder[slot, 1] if holder[slot, 0] >= 0 else -1
            if before >= 0 and first - tree_start[before] > band:
                before = -1
        if before >= 0:
            tree_start[row] = tree_start[before]
            out[row, : first - base] = out[before, : first - base]
        else:
            tree_start[row] = first
            out[row, : first - base] = -2 - row
        for column in range(first, end):
            block = ids[column]
            out[row, column - base] = block
            if block == null:
                continue
            slot = (block * HASH >> 12) & mask
            while holder[slot, 0] >= 0 and holder[slot, 0] != block:
                slot = (slot + 1) & mask
            holder[slot, 0], holder[slot, 1] = block, row
    return out


@compiled
def _in_window(
    rows: IntArray, private: IntArray, nodes: IntArray, base: int, first_seen: IntArray
) -> tuple[IntArray, IntArray]:
    """``private`` and ``nodes`` of ``_forest``, ``base`` blocks later, without what nobody sees."""
    for position in range(len(rows)):
        private[position] = max(private[position], first_seen[rows[position]])
    kept = np.empty(nodes.shape[1], np.int32)  # new number of each node, or of the one above
    count = 0
    for node in range(nodes.shape[1]):
        parent, start, end, low, high = nodes[:, node]
        first = first_seen[rows[low:high]].min()
        start, end = max(start + base, first), end + base
        parent = kept[parent] if parent >= 0 else -1
        kept[node] = parent
        if start < end:
            kept[node] = count
            new = nodes[:, count]
            new[0], new[1], new[2], new[3], new[4] = parent, start, end, low, high
            count += 1
    return private, nodes[:, :count].copy()


@compiled
def first_difference(a: IntArray, b: IntArray, start: int, stop: int) -> int:
    """First index in ``[start, stop)`` at which ``a`` and ``b`` differ, else ``stop``."""
    while stop - start >= CHUNK:
        x, y = a[start : start + CHUNK], b[start : start + CHUNK]
        difference = 0
        for i in range(CHUNK):  # no branch and a fixed length: a few vector instructions
            difference |= x[i] ^ y[i]
        if difference:
            break
        start += CHUNK
    while start < stop and a[start] == b[start]:
        start += 1
    return start


@compiled
def _forest(
    table: IntArray, table_rows: IntArray, num_shareable: IntArray, null: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Depth-first rows, private start by position (in blocks), and ``[5, num_nodes]`` parent,
    start, end (in blocks), reader start, reader end (positions).
    """
    n = len(num_shareable)
    rows = np.arange(n).astype(np.int32)
    private = np.zeros(n, np.int32)
    nodes = np.empty((5, n), np.int32)
    num_nodes = 0
    # groups of requests that share a block, still to be split: depth of that block, node above,
    # positions of its readers
    stack = np.empty((n, 4), np.int32)
    work = np.empty((3, n + 1), np.int32)
    size = 2
    while size < 2 * n:
        size *= 2
    slots = np.zeros((size, 3), np.int32)  # hash table: key, its number, and its split

    splits = 1
    height = _split(
        table, table_rows, num_shareable, rows, private, 0, -1, 0, n, stack, 0, work, slots, 1
    )
    while height:
        height -= 1
        start, parent, low, high = stack[height]
        leader = table[table_rows[rows[low]]]
        end = num_shareable[rows[low]]
        for position in range(low + 1, high):
            row = rows[position]
            stop = min(end, num_shareable[row])
            end = first_difference(leader, table[table_rows[row]], start, stop)
        filled = start
        while filled < end and leader[filled] != null:
            filled += 1
        node = parent
        if filled > start:
            node = num_nodes
            new = nodes[:, node]
            new[0], new[1], new[2], new[3], new[4] = parent, start, filled, low, high
            num_nodes += 1
        if filled < end:  # a null block, and all are private from there on
            private[low:high] = filled
            continue
        splits += 1
        height = _split(
            table, table_rows, num_shareable, rows, private, end, node, low, high, stack,
            height, work, slots, splits,
        )  # fmt: skip
    return rows, private, nodes[:, :num_nodes].copy()


@compiled
def _split(
    table: IntArray,
    table_rows: IntArray,
    num_shareable: IntArray,
    rows: IntArray,
    private: IntArray,
    depth: int,
    node: int,
    low: int,
    high: int,
    stack: IntArray,
    height: int,
    work: IntArray,
    slots: IntArray,
    split: int,
) -> int:
    """Sort the requests ``[low, high)`` by their block at ``depth``, where their common
    prefix ends. A request alone with its block is private from there; groups are pushed on the
    stack in reverse, so that they are popped in order. Returns the stack's new height.
    """
    key_of, end_of, sorted_rows = work[0], work[1], work[2]
    end_of[0] = 0
    num_keys = 1  # key 0: no block at this depth
    mask = len(slots) - 1
    for position in range(low, high):
        row = rows[position]
        key = 0
        if num_shareable[row] > depth:
            block = table[table_rows[row], depth]
            slot = (int(block) * HASH >> 12) & mask
            while slots[slot, 2] == split and slots[slot, 0] != block:
                slot = (slot + 1) & mask
            if slots[slot, 2] != split:
                slots[slot, 0] = block
                slots[slot, 1] = num_keys
                slots[slot, 2] = split
                end_of[num_keys] = 0
                num_keys += 1
            key = slots[slot, 1]
        key_of[position] = key
        end_of[key] += 1
    num_ended = end_of[0]
    total = low
    for key in range(num_keys):
        count = end_of[key]
        end_of[key] = total  # its start for now; its end once its rows are placed
        total += count
    for position in range(low, high):
        key = key_of[position]
        sorted_rows[end_of[key]] = rows[position]
        end_of[key] += 1
    rows[low:high] = sorted_rows[low:high]
    private[low : low + num_ended] = depth
    for key in range(num_keys - 1, 0, -1):
        start = end_of[key - 1]
        if end_of[key] - start == 1:
            private[start] = depth
        else:
            top = stack[height]
            top[0], top[1], top[2], top[3] = depth, node, start, end_of[key]
            height += 1
    return height
