"""PrefixShareDecodeWrapper: plan once, run once per layer, in the manner of FlashInfer."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike

from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.costs.cost_table import CostModel, analytic_cost
from vllm_prefixshare.kernels.cpu.torch import TorchExecutor, TorchStep
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.records import IntArray, PrefixShareError
from vllm_prefixshare.tree.block_ids import block_id_range
from vllm_prefixshare.tree.token_tree import ancestor_masks

if TYPE_CHECKING:
    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """What the last plan does for the last lengths, and what planning took.

    kv_tokens_read: KV tokens the plan reads in one layer.
    kv_tokens_per_request: KV tokens a kernel that shares nothing reads.
    plan_seconds: time of all plans so far; updates: calls of ``plan``; plans: those of them
        that had to make a new one.
    """

    kv_tokens_read: int
    kv_tokens_per_request: int
    work_tiles: int
    partials: int
    updates: int
    plans: int
    plan_seconds: float

    @property
    def share_factor(self) -> float:
        return self.kv_tokens_per_request / max(1, self.kv_tokens_read)


class PrefixShareDecodeWrapper:
    """Decode attention that reads every shared KV block once.

    Args:
        num_qo_heads, num_kv_heads, head_dim, block_size: shape of the layer.
        dtype: of queries and cache: float32, bfloat16 or float16.
        device: "cpu", or a CUDA device of compute capability 8.0 or more.
        divider: strategy, a name in ``planning.dividers.DIVIDERS``; the fastest one measured
            on this kind of device if None.
        num_workers: work lists that a CPU plan is divided into. A GPU has its own number.
        share: "always" shares every common prefix; "auto" only where the cost model says
            that it pays; "never".
        sm_scale: softmax scale; ``head_dim ** -0.5`` if None.
        cost: cost model; if None, on a GPU the measured table that fits, else the analytic
            estimate.
        kernel: "hopper", "portable" or "auto", on a GPU.
        max_query_len: most query tokens of a request in one step, on a GPU.

    Raises:
        PrefixShareError: an argument is out of range, or the device has no executor.
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
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self.attention = AttentionConfig(num_qo_heads, num_kv_heads, head_dim, block_size, name)
        self.dtype = getattr(torch, name)
        try:
            self.device = torch.device(device)
        except RuntimeError:
            raise PrefixShareError(f"device {device!r} is unknown: use cpu or cuda.") from None
        self.sm_scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
        if not (self.sm_scale > 0 and math.isfinite(self.sm_scale)):
            raise PrefixShareError(f"sm_scale must be positive and finite, got {sm_scale}.")
        self.max_query_len = max_query_len
        group = self.attention.gqa_group_size
        self._gpu: GpuExecutor | None = None
        if self.device.type == "cpu":
            config = PlannerConfig(divider or "flashforge", share, num_workers)
        elif self.device.type == "cuda":
            # triton is only needed here
            from vllm_prefixshare.costs.lookup import cost_model
            from vllm_prefixshare.kernels import gpu_executor as gpu

            self._gpu = gpu.GpuExecutor(
                self.attention, device, kernel=kernel, query_len=max_query_len
            )
            self.device = self._gpu.device
            config = self._gpu.planner_config(divider, share)
            cost = cost or cost_model(self.attention, self._gpu.kernel)
        else:
            raise PrefixShareError(f"device {str(device)!r} has no executor: use cpu or cuda.")
        cost = cost or analytic_cost(self.attention, "torch")
        self._planner = DecodePlanner(config, cost, block_size, group)
        if self._gpu is not None:
            self._planner.warm_up()
        self._executor = TorchExecutor(num_kv_heads, group)
        self._query_len = 1
        self._has_tree = False
        self._greatest_block = -1
        self._plan: DecodePlan | None = None
        self._seq_lens: IntArray = np.zeros(0, np.int32)
        self._query_start_loc: IntArray = np.zeros(1, np.int32)
        self._step: tuple[DecodePlan, IntArray, IntArray, TorchStep] | None = None

    @property
    def last_plan(self) -> DecodePlan:
        """The plan in force.

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
        """Follow the batch; make a new plan only if the last one no longer holds.

        Args:
            block_table: host ``[num_reqs, max_blocks]`` physical block ids.
            seq_lens: host ``[num_reqs]`` tokens of each request, its queries included.
            query_start_loc: host ``[num_reqs + 1]`` query tokens of each request, which are
                its last ones; one query each if None.
            query_parents: host ``[num_tokens]``: the queries of a request form a tree, and this
                is each one's parent among them, -1 for a root. A chain if None. GPU only.

        Raises:
            PrefixShareError: shapes that disagree, ids below 0, lengths beyond the table, more
                queries than ``max_query_len``, a plan too large for a captured CUDA graph.
        """
        table, lens, starts = self._check_batch(block_table, seq_lens, query_start_loc)
        self._query_len = int(np.diff(starts).max(initial=1))
        self._seq_lens, self._query_start_loc = lens, starts
        self._has_tree = query_parents is not None and self.max_query_len > 1
        if self._gpu is not None:
            return self._plan_on_gpu(self._gpu, table, lens, starts, query_parents)
        if query_parents is not None:
            raise PrefixShareError("query_parents need a GPU: on a CPU queries form a chain.")
        self._plan = self._planner.update(table, lens, self._query_len)
        self._step = None
        return self._plan

    def _plan_on_gpu(
        self,
        gpu: "GpuExecutor",
        table: IntArray,
        lens: IntArray,
        starts: IntArray,
        query_parents: ArrayLike | None,
    ) -> DecodePlan:
        if self._query_len > self.max_query_len:
            raise PrefixShareError(
                f"a request has {self._query_len} queries: make the wrapper with "
                f"max_query_len={self._query_len}."
            )
        if self.max_query_len > 1:
            mask = None
            if query_parents is not None:
                parents = _host_integers(query_parents, "query_parents", 1)
                mask = ancestor_masks(parents, starts)
            gpu.set_queries(starts, mask)
        plan = self._planner.update(table, lens, self.max_query_len)
        if plan is not self._plan:
            gpu.prepare(plan)
            self._plan = plan
        return plan

    def _check_batch(
        self, block_table: ArrayLike, seq_lens: ArrayLike, query_start_loc: ArrayLike | None
    ) -> tuple[IntArray, IntArray, IntArray]:
        table = _host_integers(block_table, "block_table", 2)
        lens = _host_integers(seq_lens, "seq_lens", 1)
        n = len(lens)
        starts = (
            np.arange(n + 1, dtype=np.int32)
            if query_start_loc is None
            else _host_integers(query_start_loc, "query_start_loc", 1)
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
        short = np.flatnonzero(lens < np.diff(starts))
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
        least, self._greatest_block = block_id_range(table, lens, size)
        if least < 0:
            used = np.arange(table.shape[1]) < -(-lens[:, None] // size)
            row, column = np.argwhere((table < 0) & used)[0]
            raise PrefixShareError(
                f"block_table[{row}, {column}] = {table[row, column]}: block ids start at 0."
            )
        return table, lens, starts

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: ArrayLike | torch.Tensor,
        seq_lens: ArrayLike | torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer under the plan in force.

        Args:
            q: ``[num_tokens, num_qo_heads, head_dim]``; ``num_tokens = num_reqs`` with one
                query each.
            k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
            block_table, seq_lens: as given to ``plan``; sequences may have grown since, as
                far as the plan still holds. On a GPU int32 tensors there, and this call may be
                captured in a CUDA graph that is replayed under later plans.
            out: where to write, like ``q``.

        Returns:
            ``out``, ``[num_tokens, num_qo_heads, head_dim]``.

        Raises:
            PrefixShareError: no plan yet, or a tensor of another shape, dtype or device.
        """
        plan = self.last_plan
        if self._gpu is not None:
            out = torch.empty_like(q) if out is None else out
            if not len(q):
                return out
            self._check_cache(k_cache, v_cache)
            mask = self._gpu.tree_mask if self._has_tree else None
            batch = cast(torch.Tensor, block_table), cast(torch.Tensor, seq_lens)  # run checks it
            return self._gpu.run(q, k_cache, v_cache, *batch, out, self.sm_scale, None, mask)
        starts = self._query_start_loc
        table, lens, _ = self._check_batch(block_table, seq_lens, starts)
        if not self._planner.holds(table, lens, self._query_len):
            raise PrefixShareError("this batch is not the planned one: call plan() for it first.")
        self._check_tensors(q, k_cache, v_cache, int(starts[-1]))
        out = torch.empty_like(q) if out is None else out
        if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
            raise PrefixShareError(
                f"out must be like q, {q.dtype} {list(q.shape)}, got {out.dtype} {list(out.shape)}."
            )
        if not len(lens):
            return out
        self._seq_lens = lens
        last = self._step  # the layers of one step share it
        if last is None or last[0] is not plan or not _same(last[1:3], (table, lens)):
            step = self._executor.prepare(plan, table, lens, starts)
            last = self._step = plan, table.copy(), lens.copy(), step
        return self._executor.run(last[3], q, k_cache, v_cache, out, self.sm_scale)

    def _check_tensors(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_tokens: int,
    ) -> None:
        a = self.attention
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            if not isinstance(x, torch.Tensor):
                raise PrefixShareError(f"{name} must be a torch tensor, got {type(x).__name__}.")
        expected = (num_tokens, a.num_qo_heads, a.head_dim)
        if tuple(q.shape) != expected:
            raise PrefixShareError(f"q must be {list(expected)}, got {list(q.shape)}.")
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            shape = (a.block_size, a.num_kv_heads, a.head_dim)
            if cache.dim() != 4 or tuple(cache.shape[1:]) != shape:
                raise PrefixShareError(
                    f"{name} must be [num_blocks, {', '.join(map(str, shape))}], "
                    f"got {list(cache.shape)}."
                )
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            if x.dtype != self.dtype or x.device.type != "cpu":
                raise PrefixShareError(
                    f"{name} must be {a.dtype} on the cpu, got {x.dtype} on {x.device}."
                )
        self._check_cache(k_cache, v_cache)

    def _check_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        limit = min(len(k_cache), len(v_cache))
        if self._greatest_block >= limit:
            raise PrefixShareError(
                f"block_table names block {self._greatest_block}, but the cache has {limit} blocks."
            )

    def reserve(self, room: float = 2.0) -> None:
        """Make room on a GPU for plans ``room`` times as large as the one in force. To be
        called before a CUDA graph is captured: from then on the workspace cannot grow.

        Raises:
            PrefixShareError: ``plan`` was not called yet, or a CUDA graph holds less room.
        """
        plan = self.last_plan
        if self._gpu is not None:
            self._gpu.reserve(plan, room)

    def stats(self) -> DecodeStats:
        """Figures of the plan in force; see ``DecodeStats``.

        Raises:
            PrefixShareError: ``plan`` was not called yet.
        """
        plan, counters = self.last_plan, self._planner.counters
        return DecodeStats(
            kv_tokens_read=plan.kv_tokens_read(self._seq_lens),
            kv_tokens_per_request=int(self._seq_lens.sum()),
            work_tiles=plan.num_tiles,
            partials=plan.num_partials,
            updates=counters.updates,
            plans=counters.plans,
            plan_seconds=counters.plan_seconds,
        )


def _same(a: tuple[IntArray, ...], b: tuple[IntArray, ...]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _host_integers(value: ArrayLike, name: str, ndim: int) -> IntArray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise PrefixShareError(
            f"{name} must be {ndim}-dimensional integers on the host ({e})."
        ) from None
    if array.ndim != ndim or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise PrefixShareError(
            f"{name} must be {ndim}-dimensional integers on the host, "
            f"got {array.dtype} with shape {list(array.shape)}."
        )
    if (
        array.dtype.itemsize > 4
        and array.size
        and not (-(2**31) <= array.min() <= array.max() < 2**31)
    ):
        raise PrefixShareError(f"{name} has entries beyond 32 bits.")
    return array.astype(np.int32, copy=False)
