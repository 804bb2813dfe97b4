"""PREFIX_SHARE on vLLM's CPU platform.

Subclasses CPU_ATTN for its KV cache, its prefill and its kernel for requests that share nothing.
Decodes that share KV blocks run in the executor of this package. One step:

    build():   block table, lengths -> StepPlanner -> Executor.prepare (requests that share KV)
                                                   -> CPU_ATTN metadata (the others)
    forward(): Executor.run  and  CPU_ATTN forward, each on its own tokens  [per layer]
"""

import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray
from vllm_prefixshare.kernels.cpu.executor import cache_views, cpu_executor
from vllm_prefixshare.kernels.interface import Executor, HostBatch
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.backends.platform_backend import BackendMethods
from vllm_prefixshare.vllm_plugin.compat import decode_query_len
from vllm_prefixshare.vllm_plugin.eligibility.fallback import fall_back
from vllm_prefixshare.vllm_plugin.eligibility.groups import builder_refusal
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CPU
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step.host_tables import HOST_TABLES, RowTable
from vllm_prefixshare.vllm_plugin.step.planner import StepBatch, StepPlanner


def kernel_isa(isa: str) -> str:
    """The instruction set that CPU_ATTN runs with, ``isa`` unless that is AMX: its kernels store K
    in tiles that our executors cannot read, where the vector kernels store it transposed per
    block.
    """
    if isa != "amx" or settings().share == "never":
        return isa
    logger().warning_once(
        "PREFIX_SHARE runs CPU_ATTN's vector kernels instead of AMX: prefill and requests that "
        "share nothing are slower here than with stock vLLM."
    )
    return "vec"


@dataclass
class PrefixShareCPUMetadata(CPUAttentionMetadata):
    """CPU_ATTN's metadata of the whole batch, and how this step divides it.

    executor: holds the plan of the decodes that share KV. None if no decodes share: CPU_ATTN then
        runs the whole batch, and the two fields below are None.
    unshared_metadata: CPU_ATTN's metadata of the other requests; None if there are none.
    unshared_tokens: int64, their query tokens.
    """

    executor: Executor | None = None
    unshared_metadata: CPUAttentionMetadata | None = None
    unshared_tokens: torch.Tensor | None = None


class PrefixShareCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans for one KV-cache group; called once per step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dtype = str(self.dtype).removeprefix("torch.")
        attention = AttentionConfig(
            self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, dtype
        )
        query_len = decode_query_len(self.vllm_config)
        self._executor = cpu_executor(attention, logger().info_once)
        self._planner = StepPlanner(self._executor, attention, self.vllm_config, query_len)
        self.reorder_batch_threshold = query_len  # decode rows first
        self._can_share = (
            builder_refusal(self, PrefixShareCPUMetadataBuilder) is None
            and self._some_layer_shares(self.layer_names)
            and self._check_layout()
        )

    def _set_isa_to_layers(self, layer_names: list[str]) -> None:
        self.isa: str = kernel_isa(self.isa)
        super()._set_isa_to_layers(layer_names)

    def _some_layer_shares(self, layer_names: list[str]) -> bool:
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, layer_names)
        return any(getattr(layer.impl, "shares", False) for layer in layers.values())

    def _check_layout(self) -> bool:
        """Whether a block that vLLM writes has the layout that ``cache_views`` reads."""
        assert isinstance(self.dtype, torch.dtype)  # a dtype by now, not the config's name
        shape = (1, self.num_kv_heads, self.block_size, 2 * self.head_dim)
        cache = torch.zeros(shape, dtype=self.dtype)
        tokens = (self.block_size, self.num_kv_heads, self.head_dim)
        key, value = (torch.randn(tokens).to(self.dtype) for _ in range(2))
        packed = cache.view(1, self.num_kv_heads, 2 * self.block_size, self.head_dim)
        k, v = packed.chunk(2, dim=2)
        slots = torch.arange(self.block_size)
        ops.cpu_attn_reshape_and_cache(
            key, value, k, v, slots, self.isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        k, v = cache_views(cache)
        if torch.equal(k[0], key) and torch.equal(v[0], value):
            return True
        fall_back(f"the {self.isa} cache layout of this processor")
        return False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PrefixShareCPUMetadata:
        """As ``CPUAttentionMetadataBuilder.build``, and the plan of the decodes that share KV."""
        common = common_attn_metadata
        stock = super().build(common_prefix_len, common, fast_build)
        metadata = PrefixShareCPUMetadata(**{f.name: getattr(stock, f.name) for f in fields(stock)})
        if not self._can_share or common.causal is not True:
            return metadata
        began = time.perf_counter()
        # the runner's table is itself on the host; the copy shows whether the batch is a dummy
        table, copy = RowTable(common.block_table_tensor.numpy()), HOST_TABLES.table_of(common)
        if copy is not None:
            table.in_dummy_batch = not copy.num_reqs(common.query_start_loc_cpu.numpy())
        batch = StepBatch.of(common, table, common.seq_lens)
        step = self._planner.plan(batch)
        step.record()
        if step.plan is not None:
            self._share(metadata, common, step.plan, step.num_reqs)
        STATS.build_seconds += time.perf_counter() - began
        return metadata

    def _share(
        self,
        metadata: PrefixShareCPUMetadata,
        common: CommonAttentionMetadata,
        plan: DecodePlan,
        num_decodes: int,
    ) -> None:
        """Where some of the planned decodes share KV, divide the batch."""
        shared = plan.shared_rows
        if not len(shared):
            return
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        seq_lens = common.seq_lens[:num_decodes].numpy()
        table = common.block_table_tensor[:num_decodes].numpy()
        whole_batch = len(shared) == common.num_reqs and starts[-1] == common.num_actual_tokens
        batch = HostBatch(table, seq_lens, starts[: num_decodes + 1])
        self._executor.prepare(plan, batch if whole_batch else batch._replace(rows=shared))
        metadata.executor = self._executor
        if not whole_batch:
            others = np.setdiff1d(np.flatnonzero(np.diff(starts)), shared)
            if len(others):
                metadata.unshared_metadata, metadata.unshared_tokens = self._unshared(
                    common, starts, others
                )

    def _unshared(
        self, common: CommonAttentionMetadata, starts: IntArray, rows: IntArray
    ) -> tuple[CPUAttentionMetadata, torch.Tensor]:
        """CPU_ATTN's metadata for ``rows`` alone, and their query tokens."""
        lengths = np.diff(starts)[rows]
        tokens = torch.from_numpy(
            np.concatenate([np.arange(starts[r], starts[r + 1], dtype=np.int64) for r in rows])
        )
        index = torch.from_numpy(rows)
        query_start_loc = torch.zeros(len(rows) + 1, dtype=torch.int32)
        query_start_loc[1:] = torch.from_numpy(np.cumsum(lengths))
        part = common.replace(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=common.seq_lens[index],
            num_reqs=len(rows),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[tokens],
        )
        return super().build(0, part), tokens


class PrefixShareCPUImpl(CPUAttentionBackendImpl):
    """One layer: requests that share KV in the executor of this package, the others in CPU_ATTN."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = refusal(LayerSpec.of_impl(self, full_context=-1), CPU)
        self.shares = reason is None
        if reason is None:
            HOST_TABLES.want(self)
        else:
            fall_back(reason)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``CPUAttentionBackendImpl.forward``: query and output
        ``[num_tokens, num_heads, head_size]``, written in place.
        """
        metadata = attn_metadata
        if (
            not isinstance(metadata, PrefixShareCPUMetadata)
            or metadata.executor is None
            or not self.shares
            or output_scale is not None
            or output_block_scale is not None
        ):
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        others = metadata.unshared_metadata
        if others is not None:
            tokens = metadata.unshared_tokens
            assert tokens is not None
            part = output.new_empty((len(tokens), *output.shape[1:]))
            super().forward(
                layer, query[tokens], key, value, kv_cache, others, part, output_scale,
                output_block_scale,
            )  # fmt: skip
            output[tokens] = part
        n = metadata.num_actual_tokens
        began = time.perf_counter()
        tables = metadata.block_table, metadata.seq_lens
        metadata.executor.run(query[:n], *cache_views(kv_cache), *tables, output[:n], self.scale)
        STATS.layer_calls += 1
        STATS.layer_seconds += time.perf_counter() - began
        return output


class PrefixShareCPUBackend(BackendMethods, CPUAttentionBackend):
    """CPU_ATTN, except for decodes that share KV."""

    on_gpu = False
    impl_cls = PrefixShareCPUImpl
    builder_cls = PrefixShareCPUMetadataBuilder

    @classmethod
    def supports_cpu(cls) -> bool:
        """Asked by a vLLM with the patches of ``patches/``: yes."""
        return True
