"""Frozen configuration, checked once where it is made."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_prefixshare.core import PrefixShareError

DTYPES = ("float32", "bfloat16", "float16")
MIN_HEAD_DIM, MAX_HEAD_DIM = 64, 512
#: ``head_dim`` and ``kv_lora_rank`` of multi-head latent attention in DeepSeek V2 to R1 and Kimi
#: K2: compressed KV of 512 numbers and 64 rotated ones
LATENT_SHAPE = 576, 512
#: dtype that queries and KV cache may have in place of the layer's
FP8 = "float8_e4m3fn"
#: vLLM's names of a KV cache of that dtype, with scales of tensors or heads
FP8_CACHES = ("fp8", "fp8_e4m3")
#: features that a layer may add to plain attention, see ``kernels.extras``
FEATURES = ("sinks", "soft_cap", "alibi")
#: maximum number of tokens, and of workers, in plans: they are integers of 32 bits
MAX_TOKENS, MAX_WORKERS = 2**31 - 1, 2**16
SHARE_POLICIES = ("auto", "always", "never")
#: names of GPU kernels, and "auto" for the first that serves
KERNELS = ("auto", "hopper", "portable")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shape of one attention layer on this rank.

    dtype: dtype of the output, and of queries and KV cache unless they are quantised.
    kv_dtype, query_dtype: "float8_e4m3fn", or None for ``dtype``. Queries can only be quantised
        where the KV cache is; with ``kv_lora_rank`` both are, or neither.
    features: the ``FEATURES`` that the layer may ask for.
    sliding_window: tokens that each query sees, its own included; None for all.
    kv_lora_rank: width of the compressed KV in multi-head latent attention, else None. There is one
        KV head: V is a token's compressed KV, K the same and then the rotated part of the key,
        ``head_dim`` numbers in all.

    Raises:
        PrefixShareError: naming the argument that is out of range.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    query_dtype: str | None = None
    features: tuple[str, ...] = ()
    kv_lora_rank: int | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "block_size"):
            _require_positive(name, getattr(self, name))
        for name in ("block_size", "sliding_window"):
            _require_at_most(name, getattr(self, name) or 0, MAX_TOKENS)
        if self.num_qo_heads % self.num_kv_heads:
            raise PrefixShareError(
                f"num_qo_heads must be a multiple of num_kv_heads, got {self.num_qo_heads} "
                f"and {self.num_kv_heads}."
            )
        if self.kv_lora_rank is not None:
            self._check_latent()
        elif not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            raise PrefixShareError(
                f"head_dim must be a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, "
                f"got {self.head_dim}."
            )
        self._check_dtypes()
        if self.sliding_window is not None:
            _require_positive("sliding_window", self.sliding_window)
        for feature in self.features:
            if feature not in FEATURES:
                raise PrefixShareError(
                    f"features must be some of {', '.join(FEATURES)}, got {feature!r}."
                )

    def _check_dtypes(self) -> None:
        if self.dtype not in DTYPES:
            raise PrefixShareError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}.")
        for name in ("kv_dtype", "query_dtype"):
            if getattr(self, name) not in (None, FP8):
                raise PrefixShareError(f"{name} must be {FP8} or None, got {getattr(self, name)}.")
        if self.query_dtype is not None and self.kv_dtype is None:
            raise PrefixShareError(f"query_dtype {FP8} needs kv_dtype {FP8}.")

    def _check_latent(self) -> None:
        if (self.head_dim, self.kv_lora_rank) != LATENT_SHAPE:
            wide, rank = LATENT_SHAPE
            raise PrefixShareError(
                f"with kv_lora_rank, head_dim must be {wide} and kv_lora_rank {rank}, got "
                f"{self.head_dim} and {self.kv_lora_rank}."
            )
        if self.num_kv_heads != 1:
            raise PrefixShareError(
                f"kv_lora_rank needs one KV head, got num_kv_heads={self.num_kv_heads}."
            )
        if self.features or self.sliding_window is not None:
            raise PrefixShareError("kv_lora_rank goes with neither features nor sliding_window.")
        if self.kv_dtype != self.query_dtype:
            raise PrefixShareError(
                "with kv_lora_rank, kv_dtype and query_dtype must be the same, got "
                f"{self.kv_dtype} and {self.query_dtype}."
            )

    @property
    def v_head_dim(self) -> int:
        """Width of V and of the output of a head."""
        return self.kv_lora_rank or self.head_dim

    @property
    def of_queries(self) -> str:
        """Name of the dtype that queries have."""
        return self.query_dtype or self.dtype

    @property
    def of_cache(self) -> str:
        """Name of the dtype that the KV cache has."""
        return self.kv_dtype or self.dtype

    @property
    def gqa_group_size(self) -> int:
        """Query heads for each KV head."""
        return self.num_qo_heads // self.num_kv_heads


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise PrefixShareError(f"{name} must be at least 1, got {value}.")


def _require_at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise PrefixShareError(f"{name} must be at most {limit}, got {value}.")


def _require_one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise PrefixShareError(f"{name} must be one of {', '.join(names)}, got {value!r}.")


def require_launchable(kernel: str, query_len: int) -> None:
    """Raise ``PrefixShareError`` for an unknown kernel or an invalid ``max_query_len``."""
    _require_one_of("kernel", kernel, KERNELS)
    _require_positive("max_query_len", query_len)


def part_size(block_size: int) -> int:
    """Tokens of a block that the GPU kernels for plain attention read at once: the largest power of
    two up to 32 that divides it. KV ranges are padded to such parts: with parts of 64 tokens trees
    of short nodes took 1.2 to 1.4 times as long (docs/notes/l2-and-memory.md).
    """
    return math.gcd(32, block_size)


class TileGeometry(NamedTuple):
    """Properties of a kernel's work tiles that plans depend on.

    half_rows: query rows of half a tile. The halves work in parallel: KV that both read is
        compute-bound, KV that one half reads is memory-bound.
    kv_tile: long KV ranges are split at multiples of this number of tokens; a multiple of the
        tokens per iteration of the kernel's loop.
    query_cut_size: a tile with several queries of one request has a multiple of this number of KV
        tokens, rounded up, because the rest of a loop iteration would be masked for each query;
        0: a multiple of ``PlannerConfig.cut_size``.
    spread: each KV split of a window may get a part of the KV that all of its requests share and a
        part of the rest, so that splits take equal times whatever the relative costs.
    spread_gain: time saved by spreading, as a fraction of the finish.
    lockstep_gain, uncached_lockstep_gain: time saved by windows that read shared KV in lockstep, as
        a fraction of the finish: if L2 holds that KV, and if it does not. The second counts twice
        for half tiles, which have half the arithmetic per byte.
    cached_tokens: shared tokens of a KV head that stay L2-resident for each worker while it reads
        private KV.
    partial_write_us: microseconds to write a tile's results as partial results.
    merge_launch_us: microseconds to launch the merging.
    min_merge_us, max_merge_us: bounds of the microseconds to merge one partial result of all rows
        of a request: few rows are bound by memory latency, and many are merged in parallel.
    """

    half_rows: int
    kv_tile: int
    query_cut_size: int
    spread: bool
    spread_gain: float
    lockstep_gain: float
    uncached_lockstep_gain: float
    cached_tokens: int
    partial_write_us: float
    merge_launch_us: float
    min_merge_us: float
    max_merge_us: float

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return 2 * self.half_rows


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """How plans are made.

    geometry: work tiles of the kernel that runs the plans.
    divider: name of the divider strategy (``planning.dividers.registry.DIVIDERS``).
    share: ``always``, ``never``, or ``auto``: only trees for which the cost model expects a gain.
    num_workers: work queues that run in parallel (1 on a CPU).
    max_tile_requests: maximum requests in one work tile (a Q tile's rows / gqa_group_size).
    max_tile_runs: maximum KV ranges in one work tile.
    max_tiles, max_runs, max_partials: maximum work tiles, KV ranges and partial results of a plan;
        a larger plan is replaced by one without sharing, with one tile for each request.
    grouping: merge short nodes into their children (FastTree, section 4.2).
    cut_size: ``depth_first`` may split a KV range at multiples of this number of tokens, a divisor
        of the block size; None for whole blocks.
    num_splits: KV splits of each group, for the divider ``fixed``.
    kv_chunk_size: tokens of a KV split, for ``deft_node_chunk``, ``deft_flatten_chunk`` and
        ``batch_invariant``.
    rebalance_factor: replan once the estimated load of the busiest worker exceeds this factor of
        what it would be with all tokens after the plan spread over all workers; not in the first 16
        steps.
    kept_plans: number of cached plans, for batches that alternate.
    null_block_id: block id that pads a table row and is never shared (0 in vLLM).
    sliding_window: as in ``AttentionConfig``.
    """

    geometry: TileGeometry = field(kw_only=True)
    divider: str = "flashforge"
    share: str = "auto"
    num_workers: int = 1
    max_tile_requests: int = 1 << 30
    max_tile_runs: int = 1 << 30
    max_tiles: int = 1 << 30
    max_runs: int = 1 << 30
    max_partials: int = 1 << 30
    grouping: bool = True
    cut_size: int | None = None
    num_splits: int = 4
    kv_chunk_size: int = 512
    rebalance_factor: float = 1.05
    kept_plans: int = 1
    null_block_id: int | None = None
    sliding_window: int | None = None
    check_plans: bool = False

    def __post_init__(self) -> None:
        _require_one_of("share", self.share, SHARE_POLICIES)
        _require_positive("num_workers", self.num_workers)
        _require_at_most("num_workers", self.num_workers, MAX_WORKERS)
