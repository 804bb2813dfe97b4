"""The roofline estimate of a cost model, where no table was measured."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import FloatArray


@dataclass(frozen=True, slots=True)
class Roofline:
    """Round figures of an executor on common hardware.

    launch_us: fixed price of a tile. bytes_per_us, flops_per_us: one worker's share of the
    memory and the arithmetic. cached_bytes_per_us: the same for KV that another tile reads at
    the same time. unshared_flops_per_us: arithmetic that a kernel without query rows to batch
    reaches (matrix-vector rather than matrix-matrix work); unshared_launch_us: fixed price of
    a request in that kernel. one_head: a worker has one thread block for each KV head, and the
    figures are those of one thread block. rows_of_all: query rows that every tile multiplies,
    used or not; None for as many as it has. shares_multiprocessor: a multiprocessor runs several of
    these thread blocks where it has room (``gpus.NamedGpu.portable_blocks``). quantised_flops: what
    flops_per_us is multiplied by for an 8-bit KV cache: its plans were fastest where arithmetic had
    this price, next to the memory of a cache of half the bytes; with an MLA cache, what was
    measured (docs/notes/mla.md).
    """

    launch_us: float
    bytes_per_us: float
    cached_bytes_per_us: float
    flops_per_us: float
    unshared_flops_per_us: float
    unshared_launch_us: float
    one_head: bool = False
    rows_of_all: int | None = None
    shares_multiprocessor: bool = False
    quantised_flops: float = 1.0


ROOFLINES = {
    "torch": Roofline(300.0, 1e4, 1e4, 1.2e5, 9e4, 4.0),  # two server cores
    "native": Roofline(20.0, 2e4, 2e4, 2.5e5, 9e4, 4.0),  # the same
    # on one multiprocessor of an H200, all of them busy; ``gpus.scaled`` for other GPUs
    "hopper": Roofline(1.5, 3.15e4, 4.8e4, 4.7e6, 4.7e6, 2.5, one_head=True, quantised_flops=1.2),
    # one of two thread blocks of the portable kernel on a multiprocessor
    "portable": Roofline(
        3.0,
        1.9e4,
        2.1e4,
        1.5e6,
        1.5e6,
        5.0,
        one_head=True,
        rows_of_all=64,
        shares_multiprocessor=True,
    ),
    # all heads share the compressed KV, so tiles are compute-bound; measured prices gained nothing
    "mla_hopper": Roofline(5.0, 3.3e4, 4.4e4, 4.4e6, 4.4e6, 5.0, one_head=True, rows_of_all=64),
}


@dataclass(frozen=True, slots=True)
class AnalyticCost:
    """Roofline estimate of a ``CostModel``, used until a table is measured."""

    attention: AttentionConfig
    roofline: Roofline

    @property
    def _heads(self) -> int:
        """KV heads of a tile."""
        return 1 if self.roofline.one_head else self.attention.num_kv_heads

    @property
    def _both(self) -> int:
        """Elements multiplied for a token's K and V together; as many are in a row's query and
        output.
        """
        return self._heads * (self.attention.head_dim + self.attention.v_head_dim)

    @property
    def _kept(self) -> int:
        """Elements of a token's K and V in memory; MLA stores its compressed KV once."""
        latent = self.attention.kv_lora_rank is not None
        return self._heads * self.attention.head_dim if latent else self._both

    def _roof(
        self, rows: ArrayLike, kv_len: ArrayLike, flops_per_us: float, bytes_per_us: float
    ) -> FloatArray:
        rows = np.asarray(rows, np.float64)
        kv_len = np.asarray(kv_len, np.float64)
        if self.roofline.rows_of_all is not None:
            rows = np.full_like(rows, self.roofline.rows_of_all)
        item = 4 if self.attention.dtype == "float32" else 2
        kv_item = 1 if self.attention.kv_dtype else item
        moved = kv_len * kv_item * self._kept + rows * item * self._both
        flops = 2.0 * rows * kv_len * self._both
        return np.maximum(moved / bytes_per_us, flops / flops_per_us)

    def tile(self, rows: ArrayLike, kv_len: ArrayLike, readers: ArrayLike = 1) -> FloatArray:
        """As ``CostModel.tile``."""
        r = self.roofline
        flops_per_us = r.flops_per_us * (r.quantised_flops if self.attention.kv_dtype else 1)
        first = self._roof(rows, kv_len, flops_per_us, r.bytes_per_us)
        cached = self._roof(rows, kv_len, flops_per_us, r.cached_bytes_per_us)
        return r.launch_us + cached + (first - cached) / np.asarray(readers, np.float64)

    def unshared(self, rows: ArrayLike, kv_len: ArrayLike) -> FloatArray:
        """As ``CostModel.unshared``."""
        r = self.roofline
        work = self._roof(rows, kv_len, r.unshared_flops_per_us, r.bytes_per_us)
        return r.unshared_launch_us + work

    def merge(self, rows: ArrayLike) -> FloatArray:
        """As ``CostModel.merge``."""
        moved = 2 * 4 * self._heads * self.attention.v_head_dim * np.asarray(rows, np.float64)
        return moved / self.roofline.bytes_per_us


def analytic_cost(attention: AttentionConfig, executor: str) -> AnalyticCost:
    """An ``AnalyticCost`` for an executor, a name in ``ROOFLINES``."""
    return AnalyticCost(attention, ROOFLINES[executor])
