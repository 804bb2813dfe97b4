"""The executor for NVIDIA GPUs: one copy of each plan to the device, one or two launches per layer.

``prepare`` is called outside CUDA graphs, whenever there is a new plan. ``run`` may be
captured: its launches depend on the shapes of its tensors only, and what they do is read from
the plan in the workspace, so that one captured graph serves every plan that is loaded later.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import IntArray, PieceLimits, PrefixShareError
from vllm_prefixshare.kernels.extras import LayerExtras, checked_extras
from vllm_prefixshare.kernels.interface import Capacity, HostBatch, Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.kernels.registry import choose_kernel
from vllm_prefixshare.kernels.workspace import PartialResults, Workspace
from vllm_prefixshare.planning.plan import DecodePlan

#: maximum number of checked ``LayerExtras`` that an executor remembers
MAX_EXTRAS = 1024


class GpuExecutor:
    """Partial attention and merge states on one GPU.

    Args:
        attention: shape of the layer; bfloat16 or float16.
        device: a CUDA device of compute capability 8.0 or more.
        kernel: "hopper", "portable", or "auto": the first that can serve and be compiled.
        query_len: maximum number of query tokens of a request per step.
        partials: shared with other executors of the same heads and query_len, whose launches
            are on the same stream; its own if None.

    Attributes:
        name: the kernel's name.
        passed_over: why a kernel that "auto" prefers does not serve; None if it does.
        limits: what a plan must be made for.
        row_tiles: as in ``interface.Executor``.

    Raises:
        PrefixShareError: the device or the shape has no kernel, or the kernel that was named
            cannot be compiled.
    """

    trusts_estimates = True

    def __init__(
        self,
        attention: AttentionConfig,
        device: torch.device | str = "cuda",
        *,
        kernel: Literal["auto", "hopper", "portable"] = "auto",
        query_len: int = 1,
        partials: PartialResults | None = None,
    ) -> None:
        self.attention = attention
        self.device = torch.device(device)
        if self.device == torch.device("cuda") and torch.cuda.is_available():  # without an index
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.query_len = query_len
        self.takes_token_trees = attention.kv_lora_rank is None
        self._mask_words = -(-query_len // 32)
        self._kernel, self.passed_over = choose_kernel(attention, self.device, kernel, query_len)
        self.name = self._kernel.name
        self.limits = self._kernel.limits
        self.row_tiles = self._kernel.row_tiles
        shape = attention.num_qo_heads, attention.v_head_dim
        self.workspace = Workspace(
            self.device, partials or PartialResults(self.device, shape, query_len)
        )
        self._capacity: Capacity | None = None
        self._plan: DecodePlan | None = None
        self._has_tree = False
        self._num_reqs = self._num_tokens = self._num_partials = 0
        self._checked: set[tuple[object, ...]] = set()
        self._extras: dict[int, tuple[LayerExtras | None, LayerExtras]] = {}

    def planner_config(
        self, divider: str | None = None, share: str = "always", **options: Any
    ) -> PlannerConfig:
        """Configuration of the planner for this executor; ``divider`` None takes the kernel's.
        Plans keep to the room that ``reserve_for`` made, if it was called.

        Args:
            options: other fields of ``PlannerConfig``.
        """
        config = planner_config(self.limits, self.attention, divider, share, **options)
        room = self._capacity
        if room is None:
            return config
        return replace(
            config,
            max_tiles=room.max_tiles,
            max_runs=room.max_runs,
            max_partials=room.max_partials,
        )

    def prepare(self, plan: DecodePlan, batch: HostBatch | None = None) -> None:
        """Make ``plan`` the current one for the launches that follow on this stream; nothing is
        copied if it already is.

        Args:
            batch: its ``query_start_loc`` and ``tree_mask`` are copied to the device if a request
                may have several queries; None if the caller passes them to ``run``.

        Raises:
            PrefixShareError: the plan was made for another executor, or it exceeds a
                workspace that a CUDA graph holds.
        """
        num_workers = self.limits.num_workers
        if plan.num_workers != num_workers:
            raise PrefixShareError(
                f"the plan is for {plan.num_workers} workers, this executor has "
                f"{num_workers}: plan with num_workers={num_workers}."
            )
        queries = None
        if batch is not None and self.query_len > 1:
            queries = self._queries_of(batch)
            # a plan and its queries become current together, or neither does
            self.workspace.queries.reserve({name: array.size for name, array in queries.items()})
        if plan is not self._plan:
            self._load(plan)
        if batch is not None and queries is not None:
            self.workspace.queries.load(queries)
            self._has_tree = batch.tree_mask is not None
            self._num_tokens = int(batch.query_start_loc[-1])
            self._checked.clear()

    def _load(self, plan: DecodePlan) -> None:
        self._plan = None  # what follows may fail half way
        self.workspace.partials.reserve(max(1, plan.num_partials))
        self.workspace.plan.load(self._kernel.layout(plan))
        self._plan = plan
        self._num_reqs, self._num_partials = plan.num_reqs, plan.num_partials
        if self.query_len == 1:
            self._num_tokens = plan.num_reqs
        self._checked.clear()

    def _queries_of(self, batch: HostBatch) -> dict[str, IntArray]:
        mask = np.zeros((0, self._mask_words), np.int32)
        if batch.tree_mask is not None:
            mask = np.zeros((len(batch.tree_mask), self._mask_words), np.int32)
            mask[:, : batch.tree_mask.shape[1]] = batch.tree_mask
        return {"query_start_loc": batch.query_start_loc, "tree_mask": mask}

    @property
    def query_start_loc(self) -> torch.Tensor:
        """``query_start_loc`` of the batch last prepared, on the device; its address is fixed once
        captured.
        """
        return self.workspace.queries.arrays["query_start_loc"]

    @property
    def tree_mask(self) -> torch.Tensor:
        """As ``query_start_loc``."""
        words = self._mask_words
        flat = self.workspace.queries.arrays["tree_mask"]
        return flat[: len(flat) // words * words].view(-1, words)

    def reserve(self, plan: DecodePlan, room: float = 2.0) -> None:
        """Make room before a CUDA graph is captured, for plans ``room`` times as large.

        Raises:
            PrefixShareError: a CUDA graph holds a smaller workspace already.
        """
        arrays = self._kernel.layout(plan)
        self.workspace.plan.reserve({name: int(room * a.size) for name, a in arrays.items()})
        self.workspace.partials.reserve(max(1, int(room * plan.num_partials)))
        num_reqs = int(room * plan.num_reqs)
        mask_size = num_reqs * self.query_len * self._mask_words
        self.workspace.queries.reserve({"query_start_loc": num_reqs + 1, "tree_mask": mask_size})

    def capacity(self, num_reqs: int, pieces: PieceLimits | None = None) -> Capacity:
        """The room that ``reserve_for`` makes."""
        return self._kernel.capacity(num_reqs, pieces)

    def reserve_for(self, num_reqs: int, pieces: PieceLimits | None = None) -> None:
        """Make room before a CUDA graph is captured, for every plan of at most ``num_reqs``
        requests made with ``planner_config`` from now on.

        Args:
            pieces: as in ``interface.Kernel.capacity``.

        Raises:
            PrefixShareError: a CUDA graph holds a smaller workspace already.
        """
        capacity = self._capacity = self.capacity(num_reqs, pieces)
        self.workspace.plan.reserve(capacity.sizes)
        self.workspace.partials.reserve(capacity.max_partials)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
        query_start_loc: torch.Tensor | None = None,
        tree_mask: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
        extras: LayerExtras | None = None,
    ) -> torch.Tensor:
        """Attention of one layer under the current plan.

        Args:
            q: ``[num_tokens, num_qo_heads, head_dim]``.
            k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, NHD or HND
                in memory. Every slot of a block that a request holds must be finite, filled
                or not.
            block_table: int32 ``[num_reqs, max_blocks]``.
            seq_lens: int32 ``[num_reqs]``, the queries included.
            out: like ``q``, V's width.
            query_start_loc: int32 ``[num_reqs + 1]``; the prepared batch's if None.
            tree_mask: int32 ``[num_tokens, words]``: bit ``j`` of a query token's words says
                that it sees query token ``j`` of its request. If both this and ``query_start_loc``
                are None, the prepared batch's; causal if it has none.
            lse: as in ``interface.Executor.run``. The first launch with it compiles: make it before
                a CUDA graph is captured.
            extras: what the layer adds to plain attention. Pass the same record in every call of a
                layer: its tensors are checked at its first call outside of a capture, which waits
                for the GPU.

        Raises:
            PrefixShareError: a tensor of another shape, dtype, device or layout.
        """
        if query_start_loc is None and self._has_tree and tree_mask is None:
            tree_mask = self.tree_mask
        work, partials = self.workspace, self.workspace.partials
        t = Tensors(
            q, k_cache, v_cache, block_table, seq_lens, query_start_loc, tree_mask,
            partials.out, partials.lse, out, lse, self._checked_extras(extras),
        )  # fmt: skip
        signature = (*map(_signature, t[:-1]), t.extras.sinks is None)
        first = signature not in self._checked
        if first:
            self._check(t)
            self._checked.add(signature)
        if not len(seq_lens):  # kernels may read the first length even if there is no work
            return out
        capturing = work.note_launch()
        if query_start_loc is None:
            query_start_loc = self.query_start_loc if self.query_len > 1 else seq_lens
            t = t._replace(query_start_loc=query_start_loc)
        self._kernel.launch(work.plan.arrays, t, sm_scale)
        # A graph merges for the plans to come. So does the first launch of its kind: the kernel is
        # compiled and loaded then, before a capture.
        if first or capturing or self._num_partials:
            merge_states(
                work.plan.arrays["merge_indptr"][: len(seq_lens) + 1],
                partials.out,
                partials.lse,
                out,
                query_start_loc,
                self.query_len,
                lse,
                t.extras.sinks,
                dependent=self._kernel.starts_merging,
            )
        return out

    def _checked_extras(self, extras: LayerExtras | None) -> LayerExtras:
        """The extras of a layer as kernels take them, checked once."""
        if (kept := self._extras.get(id(extras))) is not None:
            return kept[1]
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        checked = checked_extras(extras, self.attention, self.device, read=not capturing)
        if not capturing:
            if len(self._extras) >= MAX_EXTRAS:
                self._extras.clear()
            # kept alive, so that no other object gets its id
            self._extras[id(extras)] = extras, checked
        return checked

    def _check(self, t: Tensors) -> None:
        a = self.attention
        dtype = getattr(torch, a.dtype)
        of_queries, of_cache = getattr(torch, a.of_queries), getattr(torch, a.of_cache)
        # 16-byte loads where head_dim allows them
        step = 16 if a.kv_dtype and a.head_dim % 16 == 0 else 8
        heads = (a.num_qo_heads, a.head_dim)
        block = (a.block_size, a.num_kv_heads)
        n = self._num_reqs
        expected: list[tuple[str, torch.Tensor | None, torch.dtype, int, tuple[int, ...]]] = [
            ("q", t.q, of_queries, 3, heads),
            ("out", t.out, dtype, 3, (a.num_qo_heads, a.v_head_dim)),
            ("k_cache", t.k_cache, of_cache, 4, (*block, a.head_dim)),
            ("v_cache", t.v_cache, of_cache, 4, (*block, a.v_head_dim)),
            ("block_table", t.block_table, torch.int32, 2, ()),
            ("seq_lens", t.seq_lens, torch.int32, 1, ()),
            ("query_start_loc", t.query_start_loc, torch.int32, 1, ()),
            ("tree_mask", t.tree_mask, torch.int32, 2, ()),
            ("lse", t.out_lse, torch.float32, 2, heads[:1]),
        ]
        for name, x, want, dims, tail in expected:
            if x is None:
                continue
            if not isinstance(x, torch.Tensor):
                raise PrefixShareError(f"{name} must be a tensor on {self.device}.")
            if x.device != self.device or x.dtype != want:
                raise PrefixShareError(
                    f"{name} must be {want} on {self.device}, got {x.dtype} on {x.device}."
                )
            if x.dim() != dims or tuple(x.shape[dims - len(tail) :]) != tail:
                shape = ", ".join(["..."] * (dims - len(tail)) + [str(x) for x in tail])
                raise PrefixShareError(f"{name} must be [{shape}], got {list(x.shape)}.")
            if x.stride(-1) != 1 or (dims == 3 and (x.stride(1) != tail[1] or x.stride(0) % 8)):
                raise PrefixShareError(
                    f"{name} has strides {list(x.stride())}: its last dimensions must be "
                    "contiguous, and tokens a multiple of 8 elements apart."
                )
        strides = t.k_cache.stride(), t.v_cache.stride()
        steps = zip(strides[0][:3], t.k_cache.shape, strict=False)
        # the stride of a dimension of size 1 is unused, and may be any number
        if strides[0] != strides[1] or any(s % step for s, n in steps if n > 1):
            raise PrefixShareError(
                f"k_cache and v_cache have strides {list(strides[0])} and {list(strides[1])}: "
                f"they must be the same, in multiples of {step} elements."
            )
        for name, x, min_rows in (
            ("block_table", t.block_table, n),
            ("seq_lens", t.seq_lens, n),
            ("query_start_loc", t.query_start_loc, n + 1),
            ("q", t.q, self._num_tokens),
            ("out", t.out, len(t.q)),
            ("lse", t.out_lse, len(t.q)),
        ):
            if x is not None and len(x) < min_rows:
                raise PrefixShareError(f"{name} has {len(x)} rows, the batch needs {min_rows}.")
        if t.out_lse is not None and not t.out_lse.is_contiguous():
            raise PrefixShareError(
                f"lse must be contiguous, got strides {list(t.out_lse.stride())}."
            )
        if t.tree_mask is not None and (a.sliding_window or a.kv_lora_rank):
            raise PrefixShareError(
                "a token tree (query_parents, tree_mask) goes with neither sliding_window nor "
                "kv_lora_rank: plan without."
            )
        if t.tree_mask is not None and (
            len(t.tree_mask) < len(t.q) or 32 * t.tree_mask.shape[1] < self.query_len
        ):
            raise PrefixShareError(
                f"tree_mask must be [{len(t.q)}, {self._mask_words}] or larger, "
                f"got {list(t.tree_mask.shape)}."
            )


def _signature(t: torch.Tensor | None) -> tuple[object, ...]:
    if not isinstance(t, torch.Tensor):
        return (type(t),)
    return t.shape, t.stride(), t.dtype, t.device
