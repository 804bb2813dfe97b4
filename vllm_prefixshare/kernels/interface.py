"""Interfaces: ``Executor`` runs plans on a device, ``Kernel`` is a GPU kernel that it launches."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_prefixshare.config import PlannerConfig
from vllm_prefixshare.core import IntArray, PieceLimits
from vllm_prefixshare.kernels.catalog import KernelLimits
from vllm_prefixshare.kernels.common.groups import Outputs
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.window import tokens_seen


class HostBatch(NamedTuple):
    """The batch of one step as the host knows it.

    block_table: int32 ``[num_reqs, max_blocks]``.
    seq_lens: int32 ``[num_reqs]``, the queries included.
    query_start_loc: int32 ``[num_reqs + 1]`` query tokens of each request.
    tree_mask: int32 ``[num_tokens, words]``, see ``tree.token_tree``; None for chains.
    rows: batch rows to compute, each with all of its runs; None for all.
    """

    block_table: IntArray
    seq_lens: IntArray
    query_start_loc: IntArray
    tree_mask: IntArray | None = None
    rows: IntArray | None = None

    def tokens_seen(self, sliding_window: int | None) -> int:
        """KV tokens of all requests that any of their queries sees."""
        max_query_len = int(np.diff(self.query_start_loc).max(initial=1))
        return tokens_seen(self.seq_lens, sliding_window, max_query_len)


class Executor(Protocol):
    """Runs plans on one device."""

    @property
    def name(self) -> str:
        """The kernel's name; each kernel has its own cost tables."""
        ...

    @property
    def query_len(self) -> int | None:
        """Maximum number of query tokens of a request; None if unlimited."""
        ...

    @property
    def row_tiles(self) -> int:
        """Tiles that the query rows of one request fill. Each tile reads all KV of the request; on
        a GPU in lockstep, so that all but one read it from the L2 cache.
        """
        ...

    @property
    def trusts_estimates(self) -> bool:
        """Whether sharing pays where the analytic estimate says so. If not, only a measured cost
        table can tell.
        """
        ...

    @property
    def takes_token_trees(self) -> bool:
        """Whether the query tokens of a request may form a tree."""
        ...

    def planner_config(
        self, divider: str | None = None, share: str = "always", **options: Any
    ) -> PlannerConfig:
        """Configuration of the planner for this executor.

        Args:
            divider: name of a divider; None for the executor's default.
            options: other fields of ``PlannerConfig``.
        """
        ...

    def prepare(self, plan: DecodePlan, batch: HostBatch) -> None:
        """Make ``plan`` the current one for the layers that follow. Once per step."""
        ...

    def reserve(self, plan: DecodePlan, room: float = 2.0) -> None:
        """Make room for plans ``room`` times as large, before a CUDA graph is captured."""
        ...

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: Any,
        seq_lens: Any,
        out: torch.Tensor,
        sm_scale: float,
        *,
        lse: torch.Tensor | None = None,
        extras: LayerExtras | None = None,
    ) -> torch.Tensor:
        """Attention of one layer under the current plan. Once per layer.

        Args:
            q, out: ``[num_tokens, num_qo_heads, head_dim]``; out has V's width.
            k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, any strides
                that the executor can follow. In an MLA cache (``kv_lora_rank``) V is a view of K's
                first elements.
            block_table, seq_lens: the batch's, int32 on the device. A CPU executor uses those
                given to ``prepare`` instead.
            sm_scale: softmax scale.
            lse: float32 ``[num_tokens, num_qo_heads]``, contiguous: where to write the log-sum-exp
                of each query's scaled scores, natural logarithm; not computed if None.
            extras: what the layer adds to plain attention.

        Raises:
            PrefixShareError: a tensor of another shape, dtype, device or layout.
        """
        ...


class Tensors(NamedTuple):
    """Arguments of one launch, on the device and checked.

    q: ``[num_tokens, num_qo_heads, head_dim]``, bfloat16, float16 or e4m3.
    k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with the same strides,
        multiples of 8 elements; head_dim contiguous. NHD and HND alike. An e4m3 cache has that
        dtype or holds the bits as uint8; its strides are multiples of 16 elements if head_dim is.
        In an MLA cache V is a view of K's first elements.
    block_table: int32 ``[num_reqs, max_blocks]``.
    seq_lens: int32 ``[num_reqs]``, the queries included.
    query_start_loc: int32 ``[num_reqs + 1]``, read if requests may have several query tokens;
        if None, each has ``query_len``.
    tree_mask: int32 ``[num_tokens, words]``: bit ``j`` of a query token's words says that it sees
        query token ``j`` of its request. Causal order if None.
    partial_out: float32 ``[num_partials * query_len, num_qo_heads, head_dim]``.
    partial_lse: float32 ``[num_partials * query_len, num_qo_heads]``, natural logarithm.
    out: like ``q``, 16 bits wide; its last dimension, like that of partial_out, is V's.
    out_lse: float32 ``[num_tokens, num_qo_heads]``, contiguous: written where ``out`` is.
    extras: the layer's extras; scales are tensors where values are quantised, see
        ``extras.checked_extras``.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    tree_mask: torch.Tensor | None
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor | None = None
    extras: LayerExtras = PLAIN

    @property
    def outputs(self) -> Outputs:
        """What the launch writes."""
        return Outputs(self.partial_out, self.partial_lse, self.out, self.out_lse)


class Capacity(NamedTuple):
    """Room for the plans of a number of requests.

    max_tiles, max_runs, max_partials: maximum work tiles, KV ranges and partial results of a plan.
    sizes: entries of each array of its layout.
    """

    max_tiles: int
    max_runs: int
    max_partials: int
    sizes: dict[str, int]


class Kernel(Protocol):
    """A GPU kernel for partial attention.

    limits: what plans for the kernel are made with.
    row_tiles: see ``Executor.row_tiles``.
    starts_merging: the launch that follows may begin before this kernel has ended, see
        ``dependent`` of ``merge_states``.
    """

    name: str
    limits: KernelLimits
    starts_merging: bool
    row_tiles: int

    def layout(self, plan: DecodePlan) -> dict[str, IntArray]:
        """The plan as int32 arrays for the device."""
        ...

    def capacity(self, num_reqs: int, pieces: PieceLimits | None = None) -> Capacity:
        """Room for all plans of at most ``num_reqs`` requests; at least one tile per request,
        without partial results.

        Args:
            pieces: limits of the divider ``batch_invariant``, if plans are made with it.
        """
        ...

    def launch(self, plan: Mapping[str, torch.Tensor], t: Tensors, sm_scale: float) -> None:
        """Write ``out``, and ``out_lse`` if it is there, where a request has one tile, else
        partial results.
        """
        ...
