"""Decode context parallelism without a GPU: every rank's builder and layer, one after the other.

The group is a stand-in that knows the queries of all ranks. What the layers leave is merged by
vLLM's own reference of its combine, and compared with float64 attention over the whole KV.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import workspace

from tests.support.gpu_backend import (
    BLOCK,
    CPU,
    HEAD_DIM,
    SPEC,
    WITHOUT_GPU,
    Group,
    interpret,
    shard_of,
    shared_batch,
    vllm_config,
)
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.variables import set_variables
from vllm_prefixshare.cli.served import falls_back
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.vllm_plugin import register
from vllm_prefixshare.vllm_plugin.backends.context_parallel import check_collectives
from vllm_prefixshare.vllm_plugin.backends.cuda import backend as cuda
from vllm_prefixshare.vllm_plugin.eligibility import measured
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step.shards import Interleaved

pytestmark = WITHOUT_GPU
MAX_TOKENS = 64
#: query heads of a rank, which all share one KV head
HEADS = 2


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    register.register()
    interpret(monkeypatch, PortableKernel)


@dataclass
class StandIn:
    """A group whose other ranks have sent their queries."""

    world_size: int
    rank_in_group: int
    queries: torch.Tensor

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        own = self.rank_in_group * HEADS
        assert dim == 1
        assert torch.equal(x, self.queries[: len(x), own : own + HEADS])
        return self.queries[: len(x)].clone()


class World:
    """All ranks of a group, with the shards of one batch.

    Args:
        size, interleave: as in ``Interleaved``.
        whole: the batch in blocks of ``size * BLOCK`` tokens, with the query heads of all ranks.
    """

    def __init__(self, monkeypatch, size: int, interleave: int, whole: PagedBatch) -> None:
        self.size, self.interleave, self.whole = size, interleave, whole
        self._monkeypatch = monkeypatch
        self._config = flash_attn_config(size, interleave)
        monkeypatch.setattr(flash_attn, "get_current_vllm_config_or_none", lambda: self._config)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none
        workspace.init_workspace_manager(CPU)
        spec = FullAttentionSpec(**{**SPEC, "num_kv_heads": 1})
        self.groups = []
        for rank in range(size):
            self.be(rank)
            group = Group(
                monkeypatch, spec=spec, config=self._config, num_heads=HEADS, num_kv_heads=1
            )
            assert group.impl.shares
            assert group.builder.executor.attention.num_qo_heads == HEADS * size
            group.start(self.shard(rank))
            self.groups.append(group)

    def be(self, rank: int) -> None:
        """Let vLLM take this process for a rank."""
        group = StandIn(self.size, rank, self.whole.q)
        self._monkeypatch.setattr(parallel_state, "_DCP", group)

    def shard(self, rank: int) -> PagedBatch:
        return shard_of(self.whole, self.size, rank, self.interleave)

    def metadata(self, rank: int, padding: int = 0):
        """The step's metadata on a rank, from lengths as vLLM passes them."""
        shard, lens = self.shard(rank), self.whole.seq_lens
        common = self.groups[rank].common(shard, padding)
        common.seq_lens = torch.from_numpy(np.pad(lens, (0, padding)))
        common.seq_lens_cpu_upper_bound = common.seq_lens
        common.max_seq_len = int(lens.max())
        common.dcp_local_seq_lens = torch.from_numpy(np.pad(shard.seq_lens, (0, padding)))
        return self.groups[rank].builder.build(0, common)

    def partial(self, rank: int, metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer of a rank hands to vLLM's combine."""
        self.be(rank)
        shard, impl = self.shard(rank), self.groups[rank].impl
        cache = torch.cat([shard.k_cache, shard.v_cache], dim=-1).transpose(1, 2)
        n = len(shard.q)
        own = shard.q[:, rank * HEADS :][:, :HEADS]
        found = []

        def combine(out, lse, group):
            assert group.rank_in_group == rank
            found.append((out.clone(), lse.clone()))
            return torch.full((n, HEADS, HEAD_DIM), float(rank), dtype=out.dtype)

        impl.dcp_combine = combine
        written = torch.full(own.shape, torch.nan, dtype=torch.float16)
        kv = torch.zeros(n, 1, HEAD_DIM, dtype=torch.float16)
        impl.forward(self.groups[rank].layer, own, kv, kv, cache, metadata, written)
        assert (written == rank).all(), "the layer's output is what the combine returned"
        return found[0]

    def attention(self, padding: int = 0) -> torch.Tensor:
        """One layer of one step on all ranks, merged by vLLM."""
        parts = [self.partial(r, self.metadata(r, padding)) for r in range(self.size)]
        outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
        return vllms_combine()(outs.double(), lses.double())


def vllms_combine():
    """The combine of vLLM, in torch operators."""
    from vllm.v1.attention.ops import dcp

    return dcp._lse_weighted_combine


def flash_attn_config(size: int, interleave: int) -> SimpleNamespace:
    sizes = {"decode_context_parallel_size": size, "cp_kv_cache_interleave_size": interleave}
    return vllm_config(
        parallel_config=sizes, scheduler_config={"max_num_batched_tokens": MAX_TOKENS}
    )


def whole_batch(size: int, seq_lens: list[int], counts: list[int] | None = None) -> PagedBatch:
    """Requests that share their first three blocks, each of which is spread over all ranks."""
    batch = shared_batch(seq_lens, counts)
    cache = torch.randn(2, 120, BLOCK * size, 1, HEAD_DIM).half()
    q = torch.randn(len(batch.q), HEADS * size, HEAD_DIM).half()
    return replace(batch, q=q, k_cache=cache[0], v_cache=cache[1])


@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
@pytest.mark.parametrize("size", [2, 3])
def test_lengths_of_shards(size, interleave):
    lens = np.arange(5 * size * BLOCK, dtype=np.int32)
    for rank in range(size):
        positions = lens[:, None] > lens
        held = (positions & (lens // interleave % size == rank)).sum(1)
        found = Interleaved(size, rank, interleave).local_seq_lens(lens)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, held)
        vllms = get_dcp_local_seq_lens(torch.from_numpy(lens), size, rank, interleave)
        np.testing.assert_array_equal(found, vllms.numpy())


@pytest.mark.parametrize(
    ("size", "interleave", "divider"), [(2, 1, None), (2, BLOCK, "flashforge"), (3, 4, None)]
)
def test_ranks_together_see_every_token(monkeypatch, size, interleave, divider):
    chosen = {"DIVIDER": divider} if divider else {}
    set_variables(monkeypatch, SHARE="always", CHECK_PLANS="1", **chosen)
    # the last two begin with empty shards, which later steps fill under the same plan
    whole = whole_batch(size, [180, 233, 155, 1, size])
    whole.block_table[3:, 0] = [118, 119]
    world = World(monkeypatch, size, interleave, whole)
    empty = sum((world.shard(rank).seq_lens == 0).sum() for rank in range(size))
    assert empty >= size - 1
    steps = 3
    for _ in range(steps):
        assert relative_error(world.attention(), whole.expected()[0]) < 2e-3
        whole.seq_lens += interleave
    assert STATS.decode_steps == size * steps
    assert STATS.plans == size
    if divider:  # the default one finds reading so few tokens twice cheaper
        assert STATS.shared_steps == size * steps


def test_padding_of_a_full_graph_is_no_request(monkeypatch):
    whole = whole_batch(2, [70, 90, 61])
    metadata = World(monkeypatch, 2, 1, whole).metadata(0, padding=2)
    assert metadata.num_planned_tokens == 5
    assert metadata.local_seq_lens.tolist() == [35, 45, 31, 0, 0]
    assert metadata.seq_lens.tolist() == [70, 90, 61, 0, 0]


def test_a_prefill_finds_room_once_graphs_are_captured(monkeypatch):
    whole = whole_batch(2, [70, 90])
    world = World(monkeypatch, 2, 1, whole)
    world.attention()
    manager = workspace.current_workspace_manager()
    manager.lock()
    flash_attns = (MAX_TOKENS, 2 * HEADS, HEAD_DIM), torch.float16
    manager.get_simultaneous(flash_attns)
    with pytest.raises(AssertionError, match="locked"):
        manager.get_simultaneous(flash_attns, flash_attns)


@pytest.mark.parametrize("every_layer", [True, False])
def test_prefill_rows_keep_the_lengths_of_their_shards(monkeypatch, every_layer):
    # the second prefill goes on behind 36 tokens, the first has no context
    whole = whole_batch(2, [70, 90, 64, 100], counts=[1, 1, 64, 64])
    world = World(monkeypatch, 2, 1, whole)
    world.groups[1].builder.all_layers = every_layer
    metadata = world.metadata(1)
    assert metadata.num_planned_tokens == 2
    assert metadata.dcp_context_kv_lens.tolist() == [34, 44, 0, 18]
    prefill = metadata.prefill_metadata
    assert prefill.dcp_context_kv_lens.tolist() == [0, 18]
    assert prefill.max_dcp_context_kv_len >= 18
    world.whole = replace(whole, seq_lens=np.array([70, 90, 64, 64], np.int32))
    assert world.metadata(1).prefill_metadata.max_dcp_context_kv_len == 0


@pytest.mark.parametrize(
    ("layer", "drafts", "reason"),
    [
        ({}, 2, "drafts under decode context parallelism"),
        ({"alibi_slopes": [0.5, 0.1]}, 0, "ALiBi slopes under decode context parallelism"),
        ({"sinks": torch.zeros(HEADS)}, 0, "attention sinks under decode context parallelism"),
        ({"kv_cache_dtype": "fp8"}, 0, "an fp8 KV cache under decode context parallelism"),
        ({"sliding_window": 4096}, 0, "a sliding window under decode context parallelism"),
        ({"logits_soft_cap": 30.0}, 0, None),
    ],
)
def test_what_does_not_fit_shards_keeps_flash_attention(monkeypatch, layer, drafts, reason):
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    supports = "flash_attn_supports_kv_cache_dtype"
    monkeypatch.setattr(flash_attn, supports, lambda *args, **kwargs: True, raising=False)
    available = "is_flash_attn_varlen_func_available"
    monkeypatch.setattr(flash_attn, available, lambda: True, raising=False)
    set_variables(monkeypatch, EXPERIMENTAL="alibi")
    config = vllm_config(drafts)
    monkeypatch.setattr(cuda, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(measured, "shortest_window", lambda attention: 64)
    shape = {"num_heads": HEADS, "head_size": HEAD_DIM, "scale": 0.1, "num_kv_heads": 1}
    plain = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    queries = torch.zeros(0)
    for size in (1, 2):
        monkeypatch.setattr(parallel_state, "_DCP", StandIn(size, 0, queries))
        impl = cuda.PrefixShareCUDAImpl(**{**shape, **plain, **layer})
        assert impl.shares == (size == 1 or reason is None)
    assert list(STATS.fallbacks) == ([reason] if reason else [])
    kind = LayerKind(
        name="full attention", count=1, head_size=HEAD_DIM, num_heads=HEADS, num_kv_heads=1,
        dtype="float16",
        alibi="alibi_slopes" in layer,
        has_sink="sinks" in layer,
        logits_soft_cap="logits_soft_cap" in layer,
        sliding_window=layer.get("sliding_window"),
        kv_cache_dtype=layer.get("kv_cache_dtype", "auto"),
        use_dcp=True,
    )  # fmt: skip
    assert falls_back(replace(kind, engine=Engine(1 + drafts, shards=2)), None) == reason


@pytest.mark.parametrize("collective", ["ag_rs", "a2a"])
def test_a_reduce_scatter_that_writes_nothing_is_refused(monkeypatch, collective):
    config = flash_attn_config(2, 1)
    config.parallel_config.dcp_comm_backend = collective
    group = StandIn(2, 0, torch.zeros(0))
    monkeypatch.setattr(parallel_state, "_DCP", group)
    for disabled in (False, True):
        nccl = SimpleNamespace(disabled=disabled)
        group.device_communicator = SimpleNamespace(pynccl_comm=nccl)
        if disabled and collective == "ag_rs":
            with pytest.raises(PrefixShareError, match=r"dcp_comm_backend='a2a'.*NCCL"):
                check_collectives(config)
        else:
            check_collectives(config)


def test_an_empty_shard_has_no_weight(monkeypatch):
    whole = whole_batch(2, [1, 40])
    world = World(monkeypatch, 2, BLOCK, whole)
    out, lse = world.partial(1, world.metadata(1))
    assert lse[0].isneginf().all()
    assert (out[0] == 0).all()
    assert lse[1].isfinite().all()
