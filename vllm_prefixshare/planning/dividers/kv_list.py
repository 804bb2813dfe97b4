"""Windows of neighbouring requests, and the list of KV ranges that the requests of each read.

A window fits one work tile. Its ranges are in preorder from root to leaves, so that the readers of
consecutive ranges are neighbours, too.
"""

from typing import NamedTuple

import numpy as np

from vllm_prefixshare.core import FloatArray, Forest, IntArray
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.utils.numba_cache import compiled


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
    this costs a minimum, by dynamic programming over positions: ``price[0]`` a window and
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
    head = 0
    tail = 1
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
    start = forest.node_reader_start
    end = forest.node_reader_end
    tokens = forest.node_end - forest.node_start
    price = np.array([rates.overhead, rates.cached[1]])
    full, cost = _window_ends(n, size, start, end, tokens, price)
    count = 1 + (np.diff(full) != 0).sum()
    even, even_cost = _window_ends(n, (n + count - 1) // count, start, end, tokens, price)
    return (even, full) if even_cost <= cost else (full, full)


@compiled
def _number_windows(ends: IntArray) -> IntArray:
    """``[num_reqs]`` number of the window of each depth-first position."""
    number = np.zeros(len(ends), np.int32)
    for p in range(1, len(ends)):
        number[p] = number[p - 1] + (ends[p] != ends[p - 1])
    return number


@compiled
def list_runs(  # noqa: PLR0915 - functions for parts of its loop took 8% of a plan's time
    forest: Forest,
    planned_seq_lens: IntArray,
    ends: IntArray,
    rows_per_request: int,
    half_rows: int,
    cut_size: int,
    rates: TileRates,
) -> Runs:
    """The runs of all windows, each in preorder.

    Args:
        planned_seq_lens: ``[num_reqs]`` tokens of each batch row.
        ends: ``[num_reqs]`` as from ``window_ends``.
        rows_per_request: query rows of one request on one KV head.
        half_rows: query rows of half a tile.
        cut_size: private parts are rounded up to multiples of so many tokens.
    """
    request_rows = forest.request_rows
    private_start = forest.private_start
    node_start = forest.node_start
    node_end = forest.node_end
    node_reader_start = forest.node_reader_start
    node_reader_end = forest.node_reader_end
    memory = rates.memory
    cached = rates.cached
    n = len(request_rows)
    num_nodes = len(node_reader_start)
    number = _number_windows(ends)
    max_runs = n
    for v in range(num_nodes):
        max_runs += 1 + number[node_reader_end[v] - 1] - number[node_reader_start[v]]

    window_end, start, tokens, reader_start, reader_end = np.empty((5, max_runs), np.int32)
    rate = np.empty(max_runs)
    above = np.empty(num_nodes + 1, np.int32)  # nodes on the path to the current position
    depth = 0
    count = 0
    v = 0
    begun = 0
    origin = 0
    for p in range(n):
        while depth and node_reader_end[above[depth - 1]] <= p:
            depth -= 1
        skip = depth
        if p == 0 or ends[p] != ends[p - 1]:
            window_end[begun:count] = count
            begun = count
            origin = p
            skip = 0  # nodes of the last window are read again
        while v < num_nodes and node_reader_start[v] == p:
            above[depth] = v
            depth += 1
            v += 1
        half = origin + (ends[p] - origin + 1) // 2
        for level in range(skip, depth + 1):
            if level < depth:
                node = above[level]
                low = node_start[node]
                length = node_end[node] - low
                stop = min(node_reader_end[node], ends[p])
                windows = 1 + number[node_reader_end[node] - 1] - number[node_reader_start[node]]
            else:
                low = private_start[p]
                length = max(1, planned_seq_lens[request_rows[p]] - low)
                length = (length + cut_size - 1) // cut_size * cut_size
                stop = p + 1
                windows = 1
            if p < half < stop or rows_per_request > half_rows:
                us = cached[1] + (memory[1] - cached[1]) / windows
            elif ends[p] > half:  # the other half reads something else meanwhile
                us = max(cached[0] / 2, memory[0] / windows)
            else:
                us = cached[0] + (memory[0] - cached[0]) / windows
            last = count - 1
            if (
                count > begun
                and reader_start[last] == p
                and reader_end[last] == stop
                and start[last] + tokens[last] == low
            ):  # the same readers continue: one run
                cost = rate[last] * tokens[last] + us * length
                tokens[last] += length
                rate[last] = cost / tokens[last]
                continue
            start[count] = low
            tokens[count] = length
            reader_start[count] = p
            reader_end[count] = stop
            rate[count] = us
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
    count = 0
    end = 0
    while end < len(runs.tokens):
        end = runs.window_end[end]
        ends[count] = end
        count += 1
    return ends[:count]
