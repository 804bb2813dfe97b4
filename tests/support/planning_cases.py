"""Batches, cost models and Hypothesis settings that the planning tests share."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import Forest
from vllm_prefixshare.kernels.geometry import GPU
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable, Fingerprint, Grid
from vllm_prefixshare.planning.forest.prefix_tree import forest_from_blocks
from vllm_prefixshare.planning.planner import DecodePlanner

NULL_BLOCK = 0
LLAMA = AttentionConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, block_size=16)


def quick(max_examples: int, **more: int) -> settings:
    """Reproducible settings; use as a decorator."""
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=max_examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        **more,
    )


def forest_of_ids(requests: list[list[int]], block_size: int, null: int | None = None) -> Forest:
    """The forest of requests with these filled blocks, one row each. All rows continue with the
    same block ids, which are no part of the forest.
    """
    lengths = np.array([len(ids) for ids in requests], np.int32)
    table = np.full((len(requests), lengths.max(initial=0) + 3), 7777, np.int32)
    for row, ids in enumerate(requests):
        table[row, : len(ids)] = ids
    return forest_from_blocks(table, lengths, block_size, null)


@dataclass(frozen=True)
class LinearCost:
    """A cost model whose values are easy to compute by hand."""

    launch: float = 1.0
    per_token: float = 1.0
    per_row_token: float = 0.0
    merge_per_row: float = 0.0
    unshared_launch: float = 1.0

    def tile(self, rows, kv_len, readers=1):
        rows, kv_len = np.asarray(rows, float), np.asarray(kv_len, float)
        return self.launch + kv_len * (self.per_token + self.per_row_token * rows)

    def unshared(self, rows, kv_len):
        rows, kv_len = np.asarray(rows, float), np.asarray(kv_len, float)
        return self.unshared_launch + kv_len * (self.per_token + self.per_row_token * rows)

    def merge(self, rows):
        return self.merge_per_row * np.asarray(rows, float)


def fingerprint(**changes: object) -> Fingerprint:
    return replace(Fingerprint.of(LLAMA, device="NVIDIA H200", kernel="v1"), **changes)


def flashforge_table() -> CostTable:
    """Table 2 of FlashForge (thread block execution time), in microseconds. Two queries over 512
    tokens take less time there than one query.
    """
    milliseconds = [
        [0.036, 0.035, 0.036, 0.043, 0.048, 0.074, 0.112],
        [0.043, 0.043, 0.044, 0.054, 0.062, 0.109, 0.122],
        [0.060, 0.059, 0.059, 0.079, 0.094, 0.124, 0.145],
        [0.092, 0.092, 0.093, 0.126, 0.147, 0.156, 0.183],
        [0.156, 0.157, 0.156, 0.199, 0.189, 0.195, 0.266],
        [0.283, 0.282, 0.283, 0.301, 0.303, 0.471, 0.746],
    ]
    grid = Grid(
        rows=np.array([1.0, 2, 5, 10, 20, 50, 100]),
        kv_len=np.array([512.0, 1024, 2048, 4096, 8192, 16384]),
        microseconds=1000 * np.array(milliseconds).T,
    )
    return CostTable(fingerprint(), grid, merge_us=0.05)


COSTS = {
    "h200": analytic_cost(LLAMA, "hopper"),
    "cpu": analytic_cost(LLAMA, "torch"),
    "paper": flashforge_table(),
    "bytes": LinearCost(launch=0.001),
    "launch": LinearCost(launch=1000.0, unshared_launch=1000.0),
    "merge": LinearCost(merge_per_row=5.0, per_row_token=0.1),
}


@dataclass(frozen=True)
class Batch:
    """The planner's input, and the block size of the table."""

    block_table: np.ndarray
    seq_lens: np.ndarray
    block_size: int

    def grown(self, tokens: list[int]) -> "Batch":
        """The batch with request ``i`` longer by ``tokens[i]``, in new blocks of its own."""
        seq_lens = self.seq_lens + np.array(tokens, np.int32)
        width = int((-(-seq_lens // self.block_size)).max(initial=0))
        table = np.pad(self.block_table, ((0, 0), (0, max(0, width - self.block_table.shape[1]))))
        fresh = int(table.max(initial=0)) + 1
        for row, (old, new) in enumerate(zip(self.seq_lens, seq_lens, strict=True)):
            for column in range(-(-int(old) // self.block_size), -(-int(new) // self.block_size)):
                table[row, column] = fresh
                fresh += 1
        return Batch(table, seq_lens, self.block_size)

    def taken(self, rows: list[int]) -> "Batch":
        """The batch with only these rows, in this order."""
        return Batch(self.block_table[rows], self.seq_lens[rows], self.block_size)


def make_batch(prefixes: list[list[int]], tails: list[int], block_size: int) -> Batch:
    """One row per request: its ``prefixes`` entry as filled blocks, then ``tails`` tokens in blocks
    of its own. Unused columns hold the null block.
    """
    fresh = 1 + max((b for ids in prefixes for b in ids), default=0)
    rows = []
    for ids, tail in zip(prefixes, tails, strict=True):
        own = -(-tail // block_size)
        rows.append([*ids, *range(fresh, fresh + own)])
        fresh += own
    table = np.full((len(rows), 2 + max(map(len, rows), default=0)), NULL_BLOCK, np.int32)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = ids
    lens = [len(ids) * block_size + n for ids, n in zip(prefixes, tails, strict=True)]
    return Batch(table, np.array(lens, np.int32), block_size)


def block_ids(symbols: int = 5, max_size: int = 5) -> st.SearchStrategy[list[int]]:
    """Block ids of one request: distinct, from so few ids that prefixes often coincide."""
    return st.lists(st.integers(1, symbols), unique=True, max_size=max_size)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Forests of every shape: several roots, equal requests, requests that are prefixes of others,
    and requests that share nothing.
    """
    block_size = draw(st.sampled_from([1, 4, 16]))
    stretch = draw(st.integers(1, 6))  # blocks per symbol
    words = draw(st.lists(block_ids(4, 4), min_size=1, max_size=9))
    prefixes = [[s * stretch + i for s in word for i in range(stretch)] for word in words]
    tail = st.integers(1, 4 * block_size)
    tails = draw(st.lists(tail, min_size=len(words), max_size=len(words)))
    return make_batch(prefixes, tails, block_size)


def document_qa(
    documents: int, readers: int, document_blocks: int, tail: int, block_size: int = 16
) -> Batch:
    """``documents`` documents, each shared by equally many requests."""
    prefixes = [
        list(range(1 + d * document_blocks, 1 + (d + 1) * document_blocks))
        for d in range(documents)
        for _ in range(readers)
    ]
    return make_batch(prefixes, [tail] * len(prefixes), block_size)


def gpu_config(**options: object) -> PlannerConfig:
    """A configuration with a GPU's tile geometry.

    Args:
        options: fields of ``PlannerConfig``, and ``spread`` and ``query_cut_size`` of its geometry.
    """
    of_tiles = {name: options.pop(name) for name in ("spread", "query_cut_size") if name in options}
    return PlannerConfig(geometry=GPU._replace(**of_tiles), **options)


def make_planner(
    block_size: int = 16, cost: object = COSTS["h200"], gqa: int = 4, **config: object
) -> DecodePlanner:
    """A planner that shares all that it can, unless ``share`` is given; see ``gpu_config``."""
    settings_ = {"share": "always", "null_block_id": NULL_BLOCK, **config}
    return DecodePlanner(gpu_config(**settings_), cost, block_size, gqa)
