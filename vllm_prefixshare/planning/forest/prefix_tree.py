"""The prefix tree over physical KV block ids, read off the block table.

The tree of FlashForge (section 4.1) and of DeFT, taken from vLLM's automatic prefix caching:
two requests share a prefix exactly when their rows of the block table start with the same
physical block ids. Several roots are normal, so this is a forest.

Reading the whole table takes tens of microseconds, so no state is carried from batch to batch.
"""

import numpy as np

from vllm_prefixshare.core import Forest, IntArray
from vllm_prefixshare.utils.numba_cache import compiled

#: entries that are compared without looking for the first difference
CHUNK = 64
#: multiplicative hash (Knuth, The Art of Computer Programming, section 6.4)
HASH = 2654435769

#: Rows of the arrays of nodes: parent (-1 for a root), begin and end in blocks, and the readers as
#: depth-first positions. While a tree is searched READERS takes the place of the last two.
PARENT = 0
START = 1
END = 2
READER_START = 3
READER_END = 4
NODE_ROWS = 5
READERS = 3
#: Columns of a group on the stack of ``_forest``: depth of the block that its requests share, node
#: above it, and its leader, the first of its list of requests.
DEPTH = 0
NODE = 1
LEADER = 2
#: Columns of a slot of the hash table of ``_split``: a block, its group, and the split it is of.
BLOCK = 0
GROUP = 1
SPLIT = 2
#: Column of a slot of the hash table of ``_aligned``, after BLOCK: the last row that has the block.
HOLDER = 1


def forest_from_blocks(
    block_table: IntArray,
    num_shareable: IntArray,
    block_size: int,
    null_block_id: int | None = None,
    table_rows: IntArray | None = None,
) -> Forest:
    """The forest of shared leading blocks.

    Siblings are in the order of their lowest batch row; requests that end at a node come before
    requests that continue below it.

    Each shared block of a request is compared about once. However deep the tree, a request takes
    part in at most ``1 + ln(num_reqs)`` comparisons on average: requests that share a block are
    compared with a random one of them, which divides them as a random pivot does in quicksort. The
    pivot has the lowest hash of the row number, so rows in an adversarial order need up to
    ``num_reqs`` comparisons each. In addition, an entry is cleared for each block of the longest
    request.

    Args:
        block_table: int32 ``[num_reqs or more, max_blocks]`` physical block ids.
        num_shareable: int32 ``[num_reqs]`` leading blocks of each request that are filled.
        block_size: tokens in a KV block.
        null_block_id: block id that ends a row's shareable blocks wherever it stands.
        table_rows: ``[num_reqs]`` row of the table that each request has; in order if None.
    """
    null = -1 if null_block_id is None else null_block_id
    table_rows = _rows_of(table_rows, len(num_shareable))
    rows, private, nodes = _forest(block_table, table_rows, num_shareable, null)
    return _in_tokens(rows, private, nodes, block_size)


def windowed_forest(
    block_table: IntArray,
    num_shareable: IntArray,
    first_seen: IntArray,
    band: int,
    block_size: int,
    null_block_id: int | None = None,
    table_rows: IntArray | None = None,
) -> Forest:
    """The forest of a layer with a sliding window, from the first block in each request's window
    on. Earlier entries of the table, such as freed blocks, are ignored.

    A node begins at the earliest window of its readers; the other readers mask the tokens before
    their windows. To limit the masked tokens, requests whose windows begin more than ``band``
    blocks apart share nothing. A node may begin after the end of its parent.

    Args:
        block_table, num_shareable, block_size, null_block_id, table_rows: as in
            ``forest_from_blocks``.
        first_seen: int32 ``[num_reqs]`` first block in the window of each request.
        band: blocks.
    """
    null = -1 if null_block_id is None else null_block_id
    table_rows = _rows_of(table_rows, len(num_shareable))
    if not len(num_shareable):
        return Forest.alone(0)
    aligned = _aligned(block_table, table_rows, num_shareable, first_seen, band, null)
    base = first_seen.min()
    order = np.arange(len(aligned))
    rows, private, nodes = _forest(aligned, order, np.maximum(num_shareable - base, 0), null)
    private, nodes = _in_window(rows, private + base, nodes, base, first_seen)
    return _in_tokens(rows, private, nodes, block_size)


def _rows_of(table_rows: IntArray | None, num_reqs: int) -> IntArray:
    """``table_rows``, in order if None; int64, because Numba compiles again for another dtype."""
    if table_rows is None:
        table_rows = np.arange(num_reqs)
    return table_rows.astype(np.int64, copy=False)


def _in_tokens(rows: IntArray, private: IntArray, nodes: IntArray, block_size: int) -> Forest:
    """The forest that ``_forest`` has found, in tokens."""
    private *= block_size
    nodes[START : END + 1] *= block_size
    return Forest(
        request_rows=rows,
        private_start=private,
        node_parent=nodes[PARENT],
        node_start=nodes[START],
        node_end=nodes[END],
        node_reader_start=nodes[READER_START],
        node_reader_end=nodes[READER_END],
    )


@compiled
def _table_size(entries: int) -> int:
    """Slots of a hash table for so many entries: a power of two, at least half empty."""
    size = 2
    while size < 2 * entries:
        size *= 2
    return size


@compiled
def _slot_of(holder: IntArray, block: int) -> int:
    """The slot with ``block`` in the hash table of ``_aligned``, or the empty slot for it."""
    mask = len(holder) - 1
    slot = (int(block) * HASH >> 12) & mask
    while holder[slot, BLOCK] >= 0 and holder[slot, BLOCK] != block:
        slot = (slot + 1) & mask
    return slot


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
    unique number.
    """
    n = len(num_shareable)
    base = first_seen.min()
    out = np.zeros((n, max(num_shareable.max() - base, 1)), np.int32)
    filled = 0
    for row in range(n):
        filled += max(num_shareable[row] - first_seen[row], 0)
    holder = np.full((_table_size(filled), 2), -1, np.int32)  # block, and the last row that has it
    tree_start = np.zeros(n, np.int32)  # first column of the tree of each row
    for row in np.argsort(first_seen, kind="mergesort"):
        first = first_seen[row]
        end = num_shareable[row]
        ids = table[table_rows[row]]
        before = -1
        if first < end and ids[first] != null:
            slot = _slot_of(holder, ids[first])
            before = holder[slot, HOLDER] if holder[slot, BLOCK] >= 0 else -1
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
            slot = _slot_of(holder, block)
            holder[slot, BLOCK] = block
            holder[slot, HOLDER] = row
    return out


@compiled
def _in_window(
    rows: IntArray, private: IntArray, nodes: IntArray, base: int, first_seen: IntArray
) -> tuple[IntArray, IntArray]:
    """``private`` and ``nodes`` of ``_forest``, ``base`` blocks later, without blocks before all
    windows.
    """
    for position in range(len(rows)):
        private[position] = max(private[position], first_seen[rows[position]])
    kept = np.empty(nodes.shape[1], np.int32)  # new number of each node, or of the one above
    count = 0
    for node in range(nodes.shape[1]):
        low = nodes[READER_START, node]
        high = nodes[READER_END, node]
        first = first_seen[rows[low:high]].min()
        start = max(nodes[START, node] + base, first)
        end = nodes[END, node] + base
        parent = nodes[PARENT, node]
        parent = kept[parent] if parent >= 0 else -1
        kept[node] = parent
        if start < end:
            kept[node] = count
            new = nodes[:, count]
            new[PARENT] = parent
            new[START] = start
            new[END] = end
            new[READER_START] = low
            new[READER_END] = high
            count += 1
    return private, nodes[:, :count].copy()


@compiled
def first_difference(a: IntArray, b: IntArray, start: int, stop: int) -> int:
    """First index in ``[start, stop)`` at which ``a`` and ``b`` differ, else ``stop``."""
    while stop - start >= CHUNK:
        x = a[start : start + CHUNK]
        y = b[start : start + CHUNK]
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
def _first_null(ids: IntArray, null: int, start: int, stop: int) -> int:
    """First index in ``[start, stop)`` at which ``ids`` is ``null``, else ``stop``."""
    nulls = 0
    for i in range(start, stop):  # no branch: a few vector instructions
        nulls += ids[i] == null
    if nulls:
        stop = start
        while ids[stop] != null:
            stop += 1
    return stop


@compiled
def _forest(
    table: IntArray, table_rows: IntArray, num_shareable: IntArray, null: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Depth-first rows, private start by position (in blocks), ``[NODE_ROWS, num_nodes]`` nodes.

    Requests that share a block are a group. All are compared once with one of them, the leader: a
    node on its path ends at each depth at which requests leave the path. Those that leave it there
    with the same next block are a group of their own.
    """
    n = len(num_shareable)
    # the nodes as they are found; node 0 has no blocks and is above the roots
    found = np.zeros((READERS + 1, n + 1), np.int32)
    found[READERS, 0] = n
    num_found = 1
    # place of each request: twice its last node, and one more if it has blocks after that node
    place_of = np.empty(n, np.int32)
    # a list of requests is known by its first row (-1: no request); here is the row after each
    row_after = np.arange(-1, n - 1, 1, np.int32)
    groups = np.empty((n, LEADER + 1), np.int32)  # a stack
    # list of those that leave the path of the leader at each depth
    leaving = np.full(num_shareable.max() + 1 if n else 1, -1, np.int32)
    slots = np.zeros((_table_size(n), SPLIT + 1), np.int32)  # hash table

    splits = 1
    height, _ = _split(
        table, table_rows, num_shareable, null, n - 1, row_after, 0, 0, place_of, groups, 0,
        slots, splits,
    )  # fmt: skip
    while height:
        height -= 1
        start = groups[height, DEPTH]
        node = groups[height, NODE]
        leader = groups[height, LEADER]
        row = row_after[leader]
        if row < 0:  # a single request
            continue
        path = table[table_rows[leader]]
        end = num_shareable[leader]
        shortest = end
        longest = start
        readers = 1
        while row >= 0:
            after = row_after[row]
            stop = min(end, num_shareable[row])
            depth = first_difference(path, table[table_rows[row]], start, stop)
            row_after[row] = leaving[depth]
            leaving[depth] = row
            shortest = min(shortest, depth)
            longest = max(longest, depth)
            readers += 1
            row = after
        row_after[leader] = leaving[longest]
        leaving[longest] = leader
        filled = _first_null(path, null, start, longest)
        for depth in range(shortest, longest + 1):
            if leaving[depth] < 0:
                continue
            end = min(depth, filled)  # requests that share a null block end before it
            if end > start:
                new = found[:, num_found]
                new[PARENT] = node
                new[START] = start
                new[END] = end
                new[READERS] = readers
                node = num_found
                start = end
                num_found += 1
            splits += 1
            height, left = _split(
                table, table_rows, num_shareable, null, leaving[depth], row_after, end, node,
                place_of, groups, height, slots, splits,
            )  # fmt: skip
            leaving[depth] = -1
            readers -= left
    return _depth_first(found[:, :num_found], place_of)


@compiled
def _split(
    table: IntArray,
    table_rows: IntArray,
    num_shareable: IntArray,
    null: int,
    row: int,
    row_after: IntArray,
    depth: int,
    node: int,
    place_of: IntArray,
    groups: IntArray,
    height: int,
    slots: IntArray,
    split: int,
) -> tuple[int, int]:
    """Divide the list that begins with ``row`` by the block at ``depth``, where ``node`` ends, into
    groups, and push these on the stack. The leader of a group is its request with the lowest rank.
    Returns the stack's new height, and the number of requests in the list.
    """
    mask = len(slots) - 1
    count = 0
    while row >= 0:
        after = row_after[row]
        count += 1
        block = table[table_rows[row], depth] if depth < num_shareable[row] else null
        place_of[row] = 2 * node + (block != null)
        if block != null:
            slot = (int(block) * HASH >> 12) & mask
            while slots[slot, SPLIT] == split and slots[slot, BLOCK] != block:
                slot = (slot + 1) & mask
            if slots[slot, SPLIT] != split:
                slots[slot, BLOCK] = block
                slots[slot, GROUP] = height
                slots[slot, SPLIT] = split
                groups[height, DEPTH] = depth
                groups[height, NODE] = node
                groups[height, LEADER] = row
                row_after[row] = -1
                height += 1
            else:
                group = slots[slot, GROUP]
                leader = groups[group, LEADER]
                if _rank(row) < _rank(leader):
                    row_after[row] = leader
                    groups[group, LEADER] = row
                else:
                    row_after[row] = row_after[leader]
                    row_after[leader] = row
        row = after
    return height, count


@compiled
def _rank(row: int) -> int:
    """A hash of ``row``. A single product would rise in even steps, as batches may."""
    product = int(row) * HASH & 0xFFFFFFFF
    return (product ^ product >> 15) * HASH & 0xFFFFFFFF


@compiled
def _depth_first(found: IntArray, place_of: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The result of ``_forest``. Below each node come the requests that end there, then the nodes
    and the other requests in the order of their lowest rows.
    """
    n = len(place_of)
    num_found = found.shape[1]
    parent = found[PARENT]
    start = found[START]
    end = found[END]
    readers = found[READERS]
    # lists of the requests and, as n + node, of the nodes at each place, in falling order of their
    # lowest rows
    item_at = np.full(2 * num_found, -1, np.int32)
    item_after = np.empty(n + num_found, np.int32)
    listed = np.zeros(num_found, np.bool_)
    listed[0] = True
    for row in range(n):
        place = place_of[row]
        item_after[row] = item_at[place]
        item_at[place] = row
        node = place >> 1
        while not listed[node]:
            listed[node] = True
            place = 2 * parent[node] + 1
            item_after[n + node] = item_at[place]
            item_at[place] = n + node
            node = parent[node]

    rows = np.empty(n, np.int32)
    private = np.empty(n, np.int32)
    nodes = np.empty((NODE_ROWS, num_found - 1), np.int32)
    num_nodes = 0
    number = np.full(num_found, -1, np.int32)
    low = np.zeros(num_found, np.int32)  # first position of each node's readers
    stack = np.zeros(num_found, np.int32)  # nodes still to be numbered; at first node 0
    height = 1
    while height:
        height -= 1
        node = stack[height]
        position = low[node] + readers[node]
        if node:
            new = nodes[:, num_nodes]
            new[PARENT] = number[parent[node]]
            new[START] = start[node]
            new[END] = end[node]
            new[READER_START] = low[node]
            new[READER_END] = position
            number[node] = num_nodes
            num_nodes += 1
        for place in (2 * node + 1, 2 * node):
            item = item_at[place]
            while item >= 0:
                if item < n:
                    position -= 1
                    rows[position] = item
                    private[position] = end[node]
                else:
                    child = item - n
                    position -= readers[child]
                    low[child] = position
                    stack[height] = child
                    height += 1
                item = item_after[item]
    return rows, private, nodes
