"""Windows of neighbouring requests, and the runs of KV tokens that the requests of each read.

A window is what one work tile can hold. Its runs follow each other root to leaves, in preorder,
so that the readers of any piece of the list are neighbours, too.
"""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.costs.rates import TileRates
from vllm_prefixshare.records import FloatArray, Forest, IntArray


class Runs(NamedTuple):
    """The runs of all windows, laid end to end; each array has an entry per run.

    window_end: first run of the next window.
    start, tokens: KV tokens, planned, in whole blocks.
    reader_start, reader_end: depth-first positions of the readers, clipped to the window.
        Consecutive tokens with the same readers are one run, so that the tokens that a single
        request of the window reads are its open run.
    rate: microseconds per token.
    before: ``[num_runs + 1]`` microseconds of all runs before this one.
    """

    window_end: IntArray
    start: IntArray
    tokens: IntArray
    reader_start: IntArray
    reader_end: IntArray
    rate: FloatArray
    before: FloatArray


@compiled
def _window_ends(
    n: int, size: int, start: IntArray, end: IntArray, tokens: IntArray, price: FloatArray
) -> tuple[IntArray, float]:
    """``[n]`` end of the window of each position, windows of ``size`` at most; and what they cost.

    A node that lies across the end of a window is read once more. The ends are chosen so that
    this costs least, by dynamic programming over positions: ``price[0]`` a window and
    ``price[1]`` a token. start, end: depth-first positions of the readers of each node.
    """
    crossing = np.zeros(n + 1)  # cost of ending a window before a position
    for v in range(len(start)):
        crossing[start[v] + 1] += tokens[v] * price[1]
        crossing[end[v]] -= tokens[v] * price[1]
    for p in range(1, n + 1):
        crossing[p] += crossing[p - 1]
    cost = np.zeros(n + 1)  # of the best windows up to a position
    begin = np.zeros(n + 1, np.int32)  # of the last of them
    queue = np.zeros(n + 1, np.int32)  # candidates for it, the best first
    head, tail = 0, 1
    for stop in range(1, n + 1):
        while queue[head] < stop - size:
            head += 1
        begin[stop] = queue[head]
        cost[stop] = cost[begin[stop]] + price[0]
        if stop < n:
            cost[stop] += crossing[stop]
        while tail > head and cost[queue[tail - 1]] > cost[stop]:
            tail -= 1
        queue[tail] = stop
        tail += 1
    ends = np.empty(n, np.int32)
    stop = n
    while stop > 0:
        ends[begin[stop] : stop] = stop
        stop = begin[stop]
    return ends, cost[n]


@compiled
def window_ends(forest: Forest, size: int, rates: TileRates) -> tuple[IntArray, IntArray]:
    """``[num_reqs]`` end of the window of each depth-first position, windows of at most ``size``
    requests; in two ways, whose windows are as many and cost the same if they differ.

    Returns:
        windows as even as they can be, 10 and 10 requests, which can be cut at the same places;
        and windows of which all but one are full, 4 and 16, which may suit the number of workers.
    """
    n = len(forest.request_rows)
    start, end = forest.node_reader_start, forest.node_reader_end
    tokens = forest.node_end - forest.node_start
    price = np.array([rates.overhead, rates.cached[1]])
    full, cost = _window_ends(n, size, start, end, tokens, price)
    count = 1 + (np.diff(full) != 0).sum()
    even, even_cost = _window_ends(n, (n + count - 1) // count, start, end, tokens, price)
    return (even, full) if even_cost <= cost else (full, full)


@compiled
def list_runs(
    forest: Forest,
    kv_lens: IntArray,
    ends: IntArray,
    rows_per_request: int,
    half_rows: int,
    cut_size: int,
    rates: TileRates,
) -> Runs:
    """The runs of all windows, each in preorder.

    Args:
        kv_lens: ``[num_reqs]`` planned length of each batch row, in tokens.
        ends: ``[num_reqs]`` as from ``window_ends``.
        rows_per_request: query rows of one request on one KV head.
        half_rows: query rows of half a tile.
        cut_size: private parts are rounded up to multiples of so many tokens.
    """
    request_rows, private_start = forest.request_rows, forest.private_start
    node_start, node_end = forest.node_start, forest.node_end
    node_reader_start, node_reader_end = forest.node_reader_start, forest.node_reader_end
    memory, cached = rates.memory, rates.cached
    n, num_nodes = len(request_rows), len(node_reader_start)
    number = np.zeros(n, np.int32)  # window of each position
    for p in range(1, n):
        number[p] = number[p - 1] + (ends[p] != ends[p - 1])
    most = n
    for v in range(num_nodes):
        most += 1 + number[node_reader_end[v] - 1] - number[node_reader_start[v]]

    window_end, start, tokens, reader_start, reader_end = np.empty((5, most), np.int32)
    rate = np.empty(most)
    above = np.empty(num_nodes + 1, np.int32)  # nodes on the path to the current position
    depth = 0
    count = v = begun = origin = 0
    for p in range(n):
        new_window = p == 0 or ends[p] != ends[p - 1]
        if new_window:
            window_end[begun:count] = count
            begun, origin = count, p
        while depth and node_reader_end[above[depth - 1]] <= p:
            depth -= 1
        skip = 0 if new_window else depth  # nodes from the last window are read again
        while v < num_nodes and node_reader_start[v] == p:
            above[depth] = v
            depth += 1
            v += 1
        half = origin + (ends[p] - origin + 1) // 2
        for level in range(skip, depth + 1):
            if level < depth:
                node = above[level]
                low, length, stop = node_start[node], node_end[node] - node_start[node], ends[p]
                stop = min(node_reader_end[node], stop)
                readers = 1 + number[node_reader_end[node] - 1] - number[node_reader_start[node]]
            else:
                low, stop, readers = private_start[p], p + 1, 1
                length = max(1, kv_lens[request_rows[p]] - low)
                length = (length + cut_size - 1) // cut_size * cut_size
            if p < half < stop or rows_per_request > half_rows:
                per_token = cached[1] + (memory[1] - cached[1]) / readers
            elif ends[p] > half:  # the other half reads something else meanwhile
                per_token = max(cached[0] / 2, memory[0] / readers)
            else:
                per_token = cached[0] + (memory[0] - cached[0]) / readers
            above_it = count - 1
            if (
                count > begun
                and reader_start[above_it] == p
                and reader_end[above_it] == stop
                and start[above_it] + tokens[above_it] == low
            ):  # the same readers continue: one run
                cost = rate[above_it] * tokens[above_it] + per_token * length
                tokens[above_it] += length
                rate[above_it] = cost / tokens[above_it]
                continue
            start[count], tokens[count] = low, length
            reader_start[count], reader_end[count], rate[count] = p, stop, per_token
            count += 1
    window_end[begun:count] = count
    before = np.zeros(count + 1)
    before[1:] = np.cumsum(rate[:count] * tokens[:count])
    return Runs(
        window_end[:count], start[:count], tokens[:count], reader_start[:count],
        reader_end[:count], rate[:count], before,
    )  # fmt: skip


@compiled
def ends_of_windows(runs: Runs) -> IntArray:
    """``[num_windows]`` the run after the last of each window."""
    ends = np.empty(len(runs.tokens), np.int32)
    count = end = 0
    while end < len(runs.tokens):
        end = runs.window_end[end]
        ends[count] = end
        count += 1
    return ends[:count]
