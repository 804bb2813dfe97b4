"""The backends for GPUs without a GPU: vLLM's configuration, a KV-cache group with its builder and
layer, and batches for it. Our kernels run under Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.portable_kernel import H100_SHARED_MEMORY
from tests.support.variables import set_variables
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels import gpu_executor, merge_states
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.registry import Choice
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.vllm_plugin.backends import common as backends_common
from vllm_prefixshare.vllm_plugin.backends.cuda import backend as cuda
from vllm_prefixshare.vllm_plugin.backends.cuda import metadata as cuda_metadata
from vllm_prefixshare.vllm_plugin.eligibility import measured
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import host_tables, planner

WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu runs the backend in a real engine"
)
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
MAX_REQS = 8
CPU = torch.device("cpu")
PATCHED = hasattr(CommonAttentionMetadata, "block_table_cpu")
SPEC = {
    "block_size": BLOCK,
    "num_kv_heads": KV_HEADS,
    "head_size": HEAD_DIM,
    "dtype": torch.float16,
}


def interpret(monkeypatch: pytest.MonkeyPatch, make_kernel: Callable[..., Any]) -> None:
    """Make the executor treat the CPU as a GPU with four multiprocessors.

    Args:
        make_kernel: makes the kernel from the attention, its query tokens and the GPU.
    """
    h100 = Gpu((9, 0), 4, H100_SHARED_MEMORY)

    def choose(attention: AttentionConfig, device: object, kernel: str, query_len: int) -> Choice:
        return Choice(make_kernel(attention, query_len, h100), None)

    monkeypatch.setattr(gpu_executor, "choose_kernel", choose)
    for module in (backends_common, measured):
        monkeypatch.setattr(module, "kernels_that_may_serve", lambda *x: [choose(*x).kernel])
        monkeypatch.setattr(module, "this_device", lambda: CPU)
    monkeypatch.setattr(planner, "cost_model", estimated_cost)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # the interpreter takes as long for a load that is masked, and few results are merged here
    monkeypatch.setattr(merge_states, "UNROLL", 1)
    STATS.reset()


def estimated_cost(attention: AttentionConfig, *_: object) -> object:
    """In place of ``costs.lookup.cost_model``, which may find a measured table."""
    return analytic_cost(attention, "hopper")


def share_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share always: for so few tokens the default divider finds reading twice cheaper."""
    set_variables(monkeypatch, DIVIDER="flashforge", SHARE="always")


def vllm_config(num_speculative_tokens: int = 0, **changes: dict[str, Any]) -> SimpleNamespace:
    """The fields of a ``VllmConfig`` that the builder and the layer read.

    Args:
        changes: fields of its parts, as in ``parallel_config={"use_ubatching": True}``.
    """
    speculative = SimpleNamespace(
        num_speculative_tokens=num_speculative_tokens, parallel_drafting=False
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS,
            get_num_kv_heads=lambda parallel: KV_HEADS,
            get_head_size=lambda: HEAD_DIM,
            dtype=torch.float16,
            rswa_window=None,
            is_mm_prefix_lm=False,
            is_diffusion=False,
            max_model_len=12 * BLOCK,
            is_hybrid=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            dcp_comm_backend="ag_rs",
            use_ubatching=False,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            block_size=BLOCK,
            num_gpu_blocks=120,
            kv_cache_dtype_skip_layers=[],
            enable_prefix_caching=True,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=[MAX_REQS],
            max_cudagraph_capture_size=MAX_REQS,
            static_forward_context={},
        ),
        attention_config=SimpleNamespace(
            flash_attn_max_num_splits_for_cuda_graph=32, flash_attn_version=None
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=8192, max_num_seqs=MAX_REQS, async_scheduling=True
        ),
        speculative_config=speculative if num_speculative_tokens else None,
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    for part, fields in changes.items():
        vars(getattr(config, part)).update(fields)
    return config


def bare(cls: type[torch.nn.Module], **attributes: object) -> Any:
    """A layer with these attributes, without what its class makes of an engine."""
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    vars(layer).update(attributes)
    return layer


class Group:
    """One KV-cache group with one layer, its cache and its V2 block tables."""

    block_size = BLOCK
    builder_cls: type[Any] = cuda_metadata.PrefixShareMetadataBuilder
    impl_cls: type[Any] = cuda.PrefixShareCUDAImpl

    def __init__(
        self,
        monkeypatch,
        num_speculative_tokens: int = 0,
        spec: KVCacheSpec | None = None,
        config: SimpleNamespace | None = None,
        scales: dict[str, object] | None = None,
        **layer_args: object,
    ) -> None:
        self.config = config or vllm_config(num_speculative_tokens)
        monkeypatch.setattr(cuda, "get_current_vllm_config", lambda: self.config)
        arguments = {
            "num_heads": HEADS,
            "head_size": HEAD_DIM,
            "scale": HEAD_DIM**-0.5,
            "num_kv_heads": KV_HEADS,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": "auto",
        }
        self.impl = self.impl_cls(**{**arguments, **layer_args})
        cache = torch.zeros(8, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.float16)
        self.layer = bare(Attention, impl=self.impl, kv_cache=cache)
        self._build(spec or FullAttentionSpec(**SPEC), scales or {})

    def _build(self, spec: KVCacheSpec, scales: dict[str, object]) -> None:
        """Give the layer its scales and make its builder and block tables."""
        for letter in "qkv":
            setattr(self.layer, f"_{letter}_scale", torch.tensor(scales.get(letter, 1.0)))
        self.layers["layer"] = self.layer
        self.builder = self.builder_for(spec)
        self.tables = SimpleNamespace(
            max_num_reqs=MAX_REQS,
            input_block_tables=[torch.zeros(MAX_REQS, 64, dtype=torch.int32)],
        )
        host_tables.HOST_TABLES.keep_v2_tables(self.tables)

    @property
    def layers(self) -> dict[str, torch.nn.Module]:
        """The layers that the configuration knows, by name."""
        return self.config.compilation_config.static_forward_context

    def builder_for(self, spec: KVCacheSpec, names: list[str] | None = None) -> Any:
        """A builder of metadata for some layers of the configuration, all if None."""
        return self.builder_cls(spec, names or list(self.layers), self.config, CPU)

    def start(self, batch: PagedBatch) -> None:
        """Assign the requests of ``batch`` to slots in reverse order."""
        self.slots = np.arange(len(batch.seq_lens))[::-1].copy()
        for row, slot in enumerate(self.slots):
            used = -(-int(batch.seq_lens[row]) // self.block_size)
            ids = batch.block_table[row, :used].tolist()
            host_tables.note_block_ids(self.tables, int(slot), (ids,), overwrite=True)
        host_tables.note_batch(self.tables, self.slots)

    def build(self, batch: PagedBatch, padding: int = 0) -> Any:
        """The step's metadata, as the builder makes it."""
        return self.builder.build(0, self.common(batch, padding))

    def started(self, batch: PagedBatch) -> Any:
        """The metadata of the first step of new requests."""
        self.start(batch)
        return self.build(batch)

    def common(self, batch: PagedBatch, padding: int = 0) -> CommonAttentionMetadata:
        """The step's metadata, padded as for a full CUDA graph."""
        n = len(batch.seq_lens)
        table = self.tables.input_block_tables[0]
        table[:n, : batch.block_table.shape[1]] = torch.from_numpy(batch.block_table)
        table[n:] = 0
        starts = np.pad(batch.query_start_loc, (0, padding), mode="edge")
        lens = torch.from_numpy(np.pad(batch.seq_lens, (0, padding)))
        num_tokens = int(starts[-1]) + padding
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=lens,
            seq_lens_cpu_upper_bound=lens,
            num_reqs=n + padding,
            num_actual_tokens=num_tokens,
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=table[: n + padding],
            slot_mapping=torch.full((num_tokens,), -1),
        )
        if PATCHED:
            self.pass_host_table(common)
        return common

    def pass_host_table(self, common: CommonAttentionMetadata) -> None:
        """Add the host's block table to the metadata, as the V2 runner of a patched vLLM does."""
        slots = self.tables.prefixshare_slots
        batch = slots.batch
        common.req_idx = np.arange(common.num_reqs) if batch is None else batch
        common.req_serials = None if batch is None else slots.ids[batch]
        copies = self.tables.prefixshare_copies  # no copies where no layer is served
        common.block_table_cpu = copies[0].block_table if copies else None
        if copies and batch is None:
            common.block_table_cpu = np.empty((0, 0), np.int32)

    def forward(self, batch: PagedBatch, metadata: object, num_tokens: int) -> torch.Tensor:
        """Output of all rows; rows that were not written are NaN."""
        caches = [batch.k_cache, batch.v_cache]
        if caches[0].element_size() == 1:
            caches = [cache.view(torch.uint8) for cache in caches]
        cache = torch.cat(caches, dim=-1).transpose(1, 2)  # packed as in vLLM
        q = torch.zeros(num_tokens, HEADS, HEAD_DIM, dtype=torch.float16).to(batch.q.dtype)
        q[: len(batch.q)] = batch.q
        out = torch.full(q.shape, torch.nan, dtype=torch.float16)
        k = v = torch.zeros(num_tokens, KV_HEADS, HEAD_DIM, dtype=torch.float16)
        return self.impl.forward(self.layer, q, k, v, cache, metadata, out)

    def assert_right(self, batch: PagedBatch) -> None:
        """Build the step's metadata, run the layer, and compare the output with float64."""
        out = self.forward(batch, self.build(batch), len(batch.q))
        assert relative_error(out, batch.expected()[0]) < 2e-3


def shared_batch(seq_lens: list[int], counts: list[int] | None = None) -> PagedBatch:
    """Requests that share their first three blocks."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    counts = counts or [1] * len(seq_lens)
    blocks = rng.permutation(np.arange(1, 120)).astype(np.int32)
    table = blocks[: len(seq_lens) * 12].reshape(len(seq_lens), 12).copy()
    table[:, :3] = table[0, :3]
    cache = torch.randn(2, 120, BLOCK, KV_HEADS, HEAD_DIM).half()
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = torch.randn(int(starts[-1]), HEADS, HEAD_DIM).half()
    return PagedBatch(
        q=q,
        k_cache=cache[0],
        v_cache=cache[1],
        block_table=table,
        seq_lens=np.array(seq_lens, np.int32),
        query_start_loc=starts,
    )


def shard_of(whole: PagedBatch, size: int, rank: int, interleave: int) -> PagedBatch:
    """What a rank holds of a batch under decode context parallelism, found token by token.

    Args:
        whole: the batch, in blocks of ``size`` times the tokens of a rank's block.
        interleave: tokens that follow each other on one rank.
    """

    def holds(position: int) -> bool:
        return position // interleave % size == rank

    own = [offset for offset in range(whole.k_cache.shape[1]) if holds(offset)]
    held = [sum(map(holds, range(length))) for length in whole.seq_lens]
    k_cache, v_cache = whole.k_cache[:, own], whole.v_cache[:, own]
    return replace(whole, k_cache=k_cache, v_cache=v_cache, seq_lens=np.array(held, np.int32))
