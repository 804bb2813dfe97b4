"""Measuring the cost table of a GPU kernel (FlashForge section 5.2), all multiprocessors busy.

A tile that runs alone has more bandwidth than it ever has in a batch, so every worker runs the same
tile at the same time. The price of a tile is the time of many tiles minus the time of few, over the
difference in tiles: the launch, the first tile's wait for memory and the uneven end of the last one
drop out.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import FloatArray, IntArray
from vllm_prefixshare.kernels.catalog import KernelLimits
from vllm_prefixshare.kernels.interface import Executor, HostBatch
from vllm_prefixshare.planning.costs.lookup import fingerprint
from vllm_prefixshare.planning.costs.table import CostTable, Grid
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.profiling.repeated_tiles import repeated_tiles

ROWS = (16, 64, 128)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Heads that the table is measured with. Its prices hold for others too: a worker has a thread
#: separate block for each KV head, and a block sees query rows, not heads.
NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
#: the same for an MLA cache, whose tiles have as many rows with any number of heads
LATENT_HEADS = 16
BLOCK_SIZE = 16
#: Maximum tiles of a worker, and tokens that it reads. They make block tables a multiple of 16
#: wide. Triton compiles a separate kernel for those widths, so only one kernel is measured.
MAX_TILES = 32
MAX_TOKENS = 16384
MERGE_TOKENS = 256
MERGE_TILES = (2, 8)
#: Least price: keeps a price that is too small to measure positive.
MIN_US = 0.001

#: Microseconds of one call, with cold caches, launches captured in a CUDA graph.
Timer = Callable[[Callable[[], object]], float]


class TileExecutor(Executor, Protocol):
    """The executor that is measured: ``kernels.gpu_executor.GpuExecutor``."""

    device: torch.device
    limits: KernelLimits

    def prepare(self, plan: DecodePlan, batch: HostBatch | None = None) -> None:
        """As ``Executor.prepare``; without a batch each request has one query token."""
        ...


def profiled_shape(attention: AttentionConfig) -> AttentionConfig:
    """The layer measured for all layers with the ``head_dim`` and dtypes of ``attention``."""
    latent = attention.kv_lora_rank is not None
    heads = (LATENT_HEADS, 1) if latent else (NUM_QO_HEADS, NUM_KV_HEADS)
    return AttentionConfig(
        *heads,
        attention.head_dim,
        BLOCK_SIZE,
        attention.dtype,
        attention.kv_dtype,
        attention.query_dtype,
        kv_lora_rank=attention.kv_lora_rank,
    )


def tile_counts(kv_len: int) -> tuple[int, int]:
    """Few and many tiles of ``kv_len`` tokens for a worker to run."""
    many = min(MAX_TILES, max(2, MAX_TOKENS // kv_len))
    return max(1, many // 4), many


def scattered_blocks(num_workers: int, requests: int, num_blocks: int, shared: int) -> IntArray:
    """Block table ``[num_workers * requests, num_blocks]`` whose blocks lie scattered.

    Args:
        shared: 0: each worker reads separate blocks. Otherwise: all workers read the same
            ``shared`` blocks repeatedly.
    """
    ids = np.random.default_rng(0).permutation(num_workers * num_blocks).astype(np.int32)
    if shared:
        return np.broadcast_to(
            np.resize(ids[:shared], num_blocks), (num_workers * requests, num_blocks)
        ).copy()
    return np.repeat(ids.reshape(num_workers, num_blocks), requests, axis=0)


class TileBench:
    """Times plans of repeated tiles on one cache.

    Args:
        attention, make_executor, timer: as in ``measure_gpu``.
        tokens: lengths of the tiles that are timed.
    """

    def __init__(
        self,
        attention: AttentionConfig,
        make_executor: Callable[[AttentionConfig], TileExecutor],
        timer: Timer,
        tokens: Sequence[int] = TOKENS,
    ) -> None:
        self.attention = profiled_shape(attention)
        self.make_executor = lambda: make_executor(self.attention)
        self.timer = timer
        executor = self.make_executor()
        self.name = executor.name
        self.device = executor.device
        self.num_workers = executor.limits.num_workers
        group = self.attention.gqa_group_size
        self.requests = sorted({min(n // group, executor.limits.max_tile_requests) for n in ROWS})
        max_tokens = self.num_workers * max(n * tile_counts(n)[1] for n in tokens)
        a = self.attention
        shape = (max_tokens // BLOCK_SIZE, BLOCK_SIZE, a.num_kv_heads, a.head_dim)
        self.k_cache = self._random(a.of_cache, *shape)
        latent = a.kv_lora_rank is not None
        self.v_cache = (
            self.k_cache[..., : a.v_head_dim] if latent else self._random(a.of_cache, *shape)
        )

    def _random(self, dtype: str, *shape: int) -> torch.Tensor:
        # torch draws no numbers of 8 bits
        drawn = torch.empty(shape, dtype=getattr(torch, self.attention.dtype), device=self.device)
        return drawn.normal_().to(getattr(torch, dtype))

    def microseconds(
        self, requests: int, kv_len: int, repeats: int, *, shared: bool, partials: bool = False
    ) -> float:
        """Time of both launches of a layer under a plan of ``repeated_tiles``."""
        # a new executor for each: a workspace that a CUDA graph holds does not grow
        executor = self.make_executor()
        plan = repeated_tiles(
            self.num_workers, requests, kv_len, repeats, BLOCK_SIZE, partials=partials
        )
        executor.prepare(plan)
        table = scattered_blocks(
            self.num_workers,
            requests,
            repeats * kv_len // BLOCK_SIZE,
            kv_len // BLOCK_SIZE if shared else 0,
        )
        block_table = torch.from_numpy(table).to(self.device)
        seq_lens = torch.from_numpy(plan.planned_seq_lens).to(self.device)
        a = self.attention
        q = self._random(a.of_queries, plan.num_reqs, a.num_qo_heads, a.head_dim)
        out = q.new_empty(*q.shape[:2], a.v_head_dim, dtype=getattr(torch, a.dtype))
        scale = a.head_dim**-0.5
        return self.timer(
            lambda: executor.run(q, self.k_cache, self.v_cache, block_table, seq_lens, out, scale)
        )

    def tile(self, requests: int, kv_len: int, shared: bool) -> float:
        """Time of one tile that writes its output directly."""
        few, many = tile_counts(kv_len)
        times = [self.microseconds(requests, kv_len, n, shared=shared) for n in (few, many)]
        return (times[1] - times[0]) / (many - few)

    def merge(self) -> float:
        """Time to write and merge one row of one partial result."""
        requests = self.requests[-1]
        extra = [
            self.microseconds(requests, MERGE_TOKENS, n, shared=False, partials=True)
            - self.microseconds(requests, MERGE_TOKENS, n, shared=False)
            for n in MERGE_TILES
        ]
        tiles = MERGE_TILES[1] - MERGE_TILES[0]
        return (extra[1] - extra[0]) / (tiles * requests * self.attention.gqa_group_size)

    def grid(self, shared: bool) -> FloatArray:
        """``tile`` over requests and tokens, never falling along either."""
        times = np.array([[self.tile(n, kv, shared) for kv in TOKENS] for n in self.requests])
        times = np.maximum.accumulate(np.maximum(times, MIN_US), axis=0)
        return np.maximum.accumulate(times, axis=1)


def measure_gpu(
    attention: AttentionConfig,
    make_executor: Callable[[AttentionConfig], TileExecutor],
    timer: Timer,
    device_name: str | None = None,
) -> CostTable:
    """The cost table of a GPU kernel; takes well under two minutes, its compilation included.

    Args:
        attention: its ``head_dim`` and dtypes are measured; the table holds for all heads.
        make_executor: an executor for the shape that it is given.
        timer: see ``Timer``.
        device_name: as in ``lookup.fingerprint``.
    """
    bench = TileBench(attention, make_executor, timer)
    rows = np.array(bench.requests, np.float64) * bench.attention.gqa_group_size
    tokens = np.array(TOKENS, np.float64)
    from_memory = bench.grid(shared=False)
    from_cache = np.minimum(bench.grid(shared=True), from_memory)
    return CostTable(
        fingerprint=fingerprint(attention, bench.name, device_name),
        tile_us=Grid(rows, tokens, from_memory),
        merge_us=max(bench.merge(), MIN_US),
        tile_l2_us=Grid(rows, tokens, from_cache),
    )
