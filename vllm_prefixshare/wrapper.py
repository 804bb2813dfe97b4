"""PrefixShareDecodeWrapper: plan once, run once per layer, like FlashInfer's wrappers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import ArrayLike

from vllm_prefixshare.config import LATENT_SHAPE, AttentionConfig
from vllm_prefixshare.core import IntArray, PrefixShareError, host_integers
from vllm_prefixshare.kernels.executors import executor_for
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.costs.lookup import cost_model
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.forest.block_ids import block_id_range
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """Figures of the last plan at the last lengths, and the time that planning took.

    kv_tokens_read: KV tokens the plan reads in one layer, each KV range once.
    row_tiles: CTAs that walk each KV range, on a GPU: 1 up to 128 query rows per KV head (64 in the
        portable kernel), more for larger token trees; all but one read it from the L2 cache.
    kv_tokens_per_request: KV tokens that a kernel without sharing reads.
    updates, plans: calls of ``plan``, and how many of them made a new plan.
    plan_seconds: total time of new plans.
    """

    kv_tokens_read: int
    kv_tokens_per_request: int
    work_tiles: int
    partials: int
    updates: int
    plans: int
    plan_seconds: float
    row_tiles: int

    @property
    def share_factor(self) -> float:
        """KV tokens that a kernel without sharing reads, over those that the plan reads."""
        return self.kv_tokens_per_request / max(1, self.kv_tokens_read)


class PrefixShareDecodeWrapper:
    """Decode attention that reads every shared KV block from memory once.

    Args:
        num_qo_heads: query heads of the layer.
        num_kv_heads: KV heads of the layer; 1 with ``kv_lora_rank``.
        head_dim: width of a head, a multiple of 8 from 64 to 512; 576 with ``kv_lora_rank``.
        block_size: tokens per KV block.
        dtype: float32 (CPU only), bfloat16 or float16, for queries, cache and output.
        device: "cpu", or a CUDA device of compute capability 8.0 or more.
        divider: name of the strategy that divides KV into work tiles; the fastest one measured
            on this kind of device if None.
        num_workers: work queues of a CPU plan. A GPU has its own number.
        share: "always" shares every common prefix, "auto" only where the cost model expects a
            gain, "never" none.
        sm_scale: softmax scale; ``head_dim ** -0.5`` if None.
        cost: cost model; if None, the measured table that fits, else the analytic estimate.
        kernel: "hopper", "portable" or "auto", on a GPU.
        max_query_len: maximum number of query tokens of a request per step, on a GPU.
        kv_dtype: ``torch.float8_e4m3fn`` for a quantised cache; ``dtype`` if None.
        query_dtype: ``torch.float8_e4m3fn`` for quantised queries, which need a quantised cache.
            With ``kv_lora_rank`` both are quantised, or neither.
        features: names that a layer's extras may use: "sinks", "soft_cap", "alibi".
        kv_lora_rank: multi-head latent attention after absorption, as in DeepSeek V3: the KV cache
            holds one vector of ``head_dim`` numbers for each token, and its first
            ``kv_lora_rank`` are the value. head_dim 576, kv_lora_rank 512, one KV head, sm_scale
            given. Not with query_parents.
        sliding_window: tokens that each query sees, its own included; all if None. Blocks before
            the first of them may be any finite ones. Not with query_parents.

    Raises:
        PrefixShareError: an argument is out of range, or the device has no executor.

    A wrapper holds one plan and the buffers of its runs: use it from one thread, and on a GPU on
    one stream.
    """

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str = "cpu",
        divider: str | None = None,
        num_workers: int = 1,
        share: str = "always",
        sm_scale: float | None = None,
        cost: CostModel | None = None,
        kernel: Literal["auto", "hopper", "portable"] = "auto",
        max_query_len: int = 1,
        kv_dtype: torch.dtype | str | None = None,
        query_dtype: torch.dtype | str | None = None,
        features: Iterable[str] = (),
        kv_lora_rank: int | None = None,
        sliding_window: int | None = None,
    ) -> None:
        name, kv, queries = (str(x).removeprefix("torch.") for x in (dtype, kv_dtype, query_dtype))
        self.attention = AttentionConfig(
            *(num_qo_heads, num_kv_heads, head_dim, block_size, name),
            kv_dtype=None if kv_dtype is None else kv,
            query_dtype=None if query_dtype is None else queries,
            features=tuple(sorted(set(features))),
            kv_lora_rank=kv_lora_rank,
            sliding_window=sliding_window,
        )
        self.dtype = getattr(torch, name)
        self.device = torch.device(device)
        if kv_lora_rank is not None and sm_scale is None:
            raise PrefixShareError(
                "kv_lora_rank needs sm_scale, of the heads before absorption: such as 192**-0.5."
            )
        self.sm_scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
        if not (self.sm_scale > 0 and math.isfinite(self.sm_scale)):
            raise PrefixShareError(f"sm_scale must be positive and finite, got {sm_scale}.")
        self._executor = executor_for(
            self.attention,
            self.device,
            kernel=kernel,
            query_len=max_query_len,
            num_workers=num_workers,
        )
        self._planner = DecodePlanner(
            self._executor.planner_config(divider, share),
            cost or cost_model(self.attention, self._executor.name),
            block_size,
            self.attention.gqa_group_size,
        )
        self._planner.warm_up()
        self._plan: DecodePlan | None = None
        self._batch = HostBatch(
            np.zeros((0, 0), np.int32), *(np.zeros(n, np.int32) for n in (0, 1))
        )
        self._given_table: ArrayLike = self._batch.block_table
        self._greatest_block, self._longest = -1, 0

    def __repr__(self) -> str:
        a, divider = self.attention, self._planner.config.divider
        default = " (default)" if divider == self._executor.planner_config().divider else ""
        state = "no plan yet"
        if self._plan is not None:
            state = f"share factor {self.stats().share_factor:.2f}"
        return (
            f"PrefixShareDecodeWrapper({a.num_qo_heads} query and {a.num_kv_heads} KV heads, "
            f"head_dim {a.head_dim}, {a.dtype}, KV cache {a.of_cache}, blocks of {a.block_size} "
            f"tokens; {self._executor.name} kernel on {self.device}, divider {divider}{default}; "
            f"{state})"
        )

    @property
    def last_plan(self) -> DecodePlan:
        """The current plan.

        Raises:
            PrefixShareError: ``plan`` was not called yet.
        """
        if self._plan is None:
            raise PrefixShareError("there is no plan yet: call plan(block_table, seq_lens) first.")
        return self._plan

    def plan(
        self,
        block_table: ArrayLike,
        seq_lens: ArrayLike,
        query_start_loc: ArrayLike | None = None,
        query_parents: ArrayLike | None = None,
    ) -> DecodePlan:
        """Plan for the batch; make a new plan only if the last one no longer holds.

        Args:
            block_table: host ``[num_reqs, max_blocks]`` physical block ids.
            seq_lens: host ``[num_reqs]`` tokens of each request, its queries included. 0 for a
                request of one query that sees no token here, because the tokens of its context lie
                elsewhere: its output is 0 and its log-sum-exp ``-inf``.
            query_start_loc: host ``[num_reqs + 1]`` query tokens of each request, which are
                its last ones; one query each if None.
            query_parents: host ``[num_tokens]``: the queries of a request form a tree, and this
                is each one's parent among them, -1 for a root. A chain if None. GPU only.

        Raises:
            PrefixShareError: shapes that disagree, ids below 0, lengths beyond the table, more
                queries than ``max_query_len``, a plan too large for a captured CUDA graph.
        """
        table, lens, starts, greatest = self._check_batch(block_table, seq_lens, query_start_loc)
        most = int(np.diff(starts).max(initial=1))
        limit = self._executor.query_len
        if limit is not None and most > limit:
            raise PrefixShareError(
                f"a request has {most} queries: make the wrapper with max_query_len={most}."
            )
        mask = None
        if query_parents is not None:
            if not self._executor.takes_token_trees:
                raise PrefixShareError(
                    "query_parents need a GPU, and no kv_lora_rank: else queries form a chain."
                )
            if (limit or most) > 1:
                parents = host_integers(query_parents, "query_parents", 1)
                mask = ancestor_masks(parents, starts)
        plan = self._planner.update(table, lens, limit or most).plan
        batch = HostBatch(table, lens.copy(), starts, mask)
        self._executor.prepare(plan, batch)
        self._plan, self._batch, self._given_table = plan, batch, block_table
        self._greatest_block, self._longest = greatest, int(lens.max(initial=0))
        return plan

    def _check_batch(
        self, block_table: ArrayLike, seq_lens: ArrayLike, query_start_loc: ArrayLike | None
    ) -> tuple[IntArray, IntArray, IntArray, int]:
        """Table, lengths and query starts as arrays, and the greatest block id in use."""
        table = host_integers(block_table, "block_table", 2)
        lens = host_integers(seq_lens, "seq_lens", 1)
        n = len(lens)
        starts = (
            np.arange(n + 1, dtype=np.int32)
            if query_start_loc is None
            else host_integers(query_start_loc, "query_start_loc", 1)
        )
        size = self.attention.block_size
        if len(table) != n:
            raise PrefixShareError(
                f"block_table has {len(table)} rows, seq_lens {n}: make them one."
            )
        if len(starts) != n + 1 or (n and (starts[0] != 0 or np.any(np.diff(starts) < 1))):
            raise PrefixShareError(
                f"query_start_loc must rise from 0 over {n + 1} entries: every request has a query."
            )
        queries = np.diff(starts)
        short = np.flatnonzero((lens < queries) & ((lens != 0) | (queries > 1)))
        if len(short):
            raise PrefixShareError(
                f"seq_lens[{short[0]}] = {lens[short[0]]} is less than its own queries."
            )
        long = np.flatnonzero(lens > table.shape[1] * size)
        if len(long):
            raise PrefixShareError(
                f"seq_lens[{long[0]}] = {lens[long[0]]} goes beyond the block table: "
                f"{table.shape[1]} blocks of {size} tokens."
            )
        least, greatest = block_id_range(table, lens, size)
        if least < 0:
            used = np.arange(table.shape[1]) < -(-lens[:, None] // size)
            row, column = np.argwhere((table < 0) & used)[0]
            raise PrefixShareError(
                f"block_table[{row}, {column}] = {table[row, column]}: block ids start at 0."
            )
        return table, lens, starts, greatest

    # fmt: off
    @overload
    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None,
        block_table: ArrayLike | torch.Tensor, seq_lens: ArrayLike | torch.Tensor,
        out: torch.Tensor | None = None, *, lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False, extras: LayerExtras | None = None,
    ) -> torch.Tensor: ...

    @overload
    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None,
        block_table: ArrayLike | torch.Tensor, seq_lens: ArrayLike | torch.Tensor,
        out: torch.Tensor | None = None, *, lse: torch.Tensor | None = None,
        return_lse: Literal[True], extras: LayerExtras | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    # fmt: on

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        block_table: ArrayLike | torch.Tensor,
        seq_lens: ArrayLike | torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        extras: LayerExtras | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer under the current plan, for inference: without gradients.

        Args:
            q: ``[num_tokens, num_qo_heads, head_dim]``; ``num_tokens = num_reqs`` with one
                query each.
            k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; with ``kv_lora_rank``
                the KV cache ``[num_blocks, block_size, head_dim]``.
            v_cache: like ``k_cache``; None with ``kv_lora_rank``.
            block_table: as given to ``plan``; rows may have further blocks since. If other
                entries have changed, call ``plan`` again: a change in place is not detected. An
                int32 tensor on a GPU, where this call may be captured in a CUDA graph that is
                replayed under later plans.
            seq_lens: as given to ``plan``; sequences may have grown as far as the plan still
                holds. An int32 tensor on a GPU.
            out: output tensor, shaped like ``q``; with ``kv_lora_rank``
                ``[num_tokens, num_qo_heads, kv_lora_rank]``.
            lse: where the log-sum-exp is written, shaped and typed as it is returned, contiguous.
            return_lse: return the log-sum-exp as well: the logarithm of the sum of the
                exponentials of a query's scaled scores, with which ``merge_states`` merges results
                over other KV tokens of the same queries. On a GPU the first such call compiles
                another binary: make it before a capture.
            extras: sinks, soft cap, ALiBi slopes and scales of the layer. On a GPU the first call
                with a record checks it and compiles another binary: make it before a capture.

        Returns:
            ``out``; with ``return_lse`` the pair of ``out`` and the log-sum-exp, float32
            ``[num_tokens, num_qo_heads]``, natural logarithm.

        Raises:
            PrefixShareError: no plan yet, or a tensor of another shape, dtype or device.
        """
        if self.attention.kv_lora_rank is not None:
            k_cache, v_cache = self._latent_views(k_cache, v_cache)
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out, "lse": lse}
        for name, x in given.items():
            if not isinstance(x, torch.Tensor) and (x is not None or name not in ("out", "lse")):
                raise PrefixShareError(f"{name} must be a torch tensor, got {type(x).__name__}.")
        assert v_cache is not None
        if out is None:
            out = q.new_empty((*q.shape[:-1], self.attention.v_head_dim), dtype=self.dtype)
        if return_lse and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        num_reqs = self.last_plan.num_reqs
        if not num_reqs:
            if len(q):
                raise PrefixShareError(
                    f"the current plan has no requests, but q has {len(q)} rows: call plan() first."
                )
            return out if lse is None or not return_lse else (out, lse)
        if self.device.type == "cpu":
            self._follow(block_table, seq_lens)
        elif isinstance(block_table, torch.Tensor) and block_table.dim() == 2:
            columns, size = block_table.shape[1], self.attention.block_size
            if columns * size < self._longest:
                raise PrefixShareError(
                    f"block_table has {columns} blocks of {size} tokens, but a planned request "
                    f"has {self._longest} tokens."
                )
        self._check_cache(k_cache, v_cache)
        arguments = q, k_cache, v_cache, block_table, seq_lens, out, self.sm_scale
        self._executor.run(*arguments, lse=lse, extras=extras)
        return out if lse is None or not return_lse else (out, lse)

    def _follow(self, block_table: ArrayLike, seq_lens: ArrayLike) -> None:
        """Check a host batch that is not the one last prepared, and prepare it: sequences may
        have grown since ``plan``.
        """
        table, lens, starts, *_ = self._batch
        if np.array_equal(seq_lens, lens) and (
            block_table is self._given_table or np.array_equal(block_table, table)
        ):
            return  # another layer of the same step
        table, lens, _, greatest = self._check_batch(block_table, seq_lens, starts)
        if not self._planner.holds(table, lens, int(np.diff(starts).max(initial=1))):
            raise PrefixShareError("this batch is not the planned one: call plan() for it first.")
        self._batch = self._batch._replace(block_table=table, seq_lens=lens.copy())
        self._given_table, self._greatest_block = block_table, greatest
        self._executor.prepare(self.last_plan, self._batch)

    @staticmethod
    def _latent_views(
        cache: torch.Tensor, v_cache: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of an MLA cache, as views."""
        if v_cache is not None or not isinstance(cache, torch.Tensor) or cache.dim() != 3:
            raise PrefixShareError(
                "with kv_lora_rank, k_cache is the KV cache [num_blocks, block_size, head_dim] and "
                "v_cache None."
            )
        return cache[:, :, None], cache[:, :, None, : LATENT_SHAPE[1]]

    def _check_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        limit = min(len(x) if x.dim() else 0 for x in (k_cache, v_cache))
        if self._greatest_block >= limit:
            raise PrefixShareError(
                f"block_table names block {self._greatest_block}, but the cache has {limit} blocks."
            )

    def reserve(self, room: float = 2.0) -> None:
        """Make room on a GPU for plans ``room`` times as large as the current one. Call it
        before a CUDA graph is captured: from then on the workspace cannot grow.

        Raises:
            PrefixShareError: ``plan`` was not called yet, or a CUDA graph holds less room.
        """
        self._executor.reserve(self.last_plan, room)

    def stats(self) -> DecodeStats:
        """Figures of the current plan; see ``DecodeStats``.

        Raises:
            PrefixShareError: ``plan`` was not called yet.
        """
        plan, counters = self.last_plan, self._planner.counters
        return DecodeStats(
            kv_tokens_read=plan.kv_tokens_read(self._batch.seq_lens),
            kv_tokens_per_request=self._batch.tokens_seen(self.attention.sliding_window),
            work_tiles=plan.num_tiles,
            partials=plan.num_partials,
            updates=counters.updates,
            plans=counters.plans,
            plan_seconds=counters.plan_seconds,
            row_tiles=self._executor.row_tiles,
        )
