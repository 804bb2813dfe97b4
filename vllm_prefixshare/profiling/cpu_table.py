"""Measuring the cost table of this machine's processor, all cores busy.

FlashForge, section 5.2.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.executor import cache_views, cpu_executor
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.costs.lookup import fingerprint
from vllm_prefixshare.planning.costs.table import CostTable, Grid
from vllm_prefixshare.profiling.repeated_tiles import repeated_tiles

REQUESTS = (1, 4, 16, 64)
TOKENS = (256, 1024, 4096, 16384)
#: Requests that are timed together without sharing.
ALONE = 8


#: (requests, tokens of each) -> seconds of one layer that reads every request on its own
UnsharedTimer = Callable[[int, int], float]


def median_seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median time of ``call`` after two calls to warm up."""
    call()
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_cpu(attention: AttentionConfig, unshared: UnsharedTimer | None = None) -> CostTable:
    """The cost table of this machine's CPU executor; takes well under two minutes.

    Args:
        unshared: times the backend's own kernel; without it the table has no column for
            requests that share nothing.
    """
    size = attention.block_size
    group = attention.gqa_group_size
    tokens = sorted({-(-n // size) * size for n in TOKENS})
    num_blocks = tokens[-1] // size
    dtype = getattr(torch, attention.dtype)
    shape = (num_blocks + 1, attention.num_kv_heads, size, 2 * attention.head_dim)
    caches = cache_views(torch.randn(shape).to(dtype))
    executor = cpu_executor(attention)
    # scattered, so that they are gathered and not read in place
    ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)

    def tile_seconds(requests: int, kv_len: int, splits: int = 1) -> float:
        plan = repeated_tiles(1, requests, kv_len // splits, splits, size, partials=splits > 1)
        lens = plan.planned_seq_lens
        table = np.broadcast_to(ids[: kv_len // size], (requests, kv_len // size))
        starts = np.arange(requests + 1, dtype=np.int32)
        executor.prepare(plan, HostBatch(table, lens, starts))
        q = torch.randn(requests, attention.num_qo_heads, attention.head_dim).to(dtype)
        out = torch.empty_like(q)
        scale = attention.head_dim**-0.5
        return median_seconds(lambda: executor.run(q, *caches, table, lens, out, scale))

    tile = np.array([[tile_seconds(n, kv) for kv in tokens] for n in REQUESTS]) * 1e6
    longer = max(1, 2048 // size) * 2 * size  # two halves of whole blocks
    # cutting a tile in two costs a launch and a merge; the rest of the difference is small, so
    # a floor keeps it positive
    requests = REQUESTS[-1]
    halves = (tile_seconds(requests, longer, 2) - tile_seconds(requests, longer)) * 1e6
    merge = max(halves - tile[0, 0], 0.0) / (requests * group)
    rows = np.array(REQUESTS, np.float64) * group
    alone = None
    if unshared is not None:
        times = [unshared(ALONE, kv) / ALONE * 1e6 for kv in tokens]
        alone = Grid(
            rows[:2], np.array(tokens, np.float64), np.array(times) * (rows[:2, None] / group)
        )
    return CostTable(
        fingerprint=fingerprint(attention, executor.name),
        tile_us=Grid(rows, np.array(tokens, np.float64), np.maximum.accumulate(tile, axis=1)),
        merge_us=max(merge, 0.01),
        unshared_us=alone,
    )
