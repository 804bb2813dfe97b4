"""The backend for latent KV caches without a GPU: vLLM's builder and layer, driven with hand-made
metadata.

Our kernel's own source runs under Triton's interpreter. FLASH_ATTN_MLA does not run here: a
stand-in computes in float64 what it is asked for, from the metadata that it gets.
"""

import sys
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import MLAAttention, mla_attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.support.gluon_interpreter import load_kernel
from tests.support.latent_batches import RANK, SCALE, WIDTH, expected, latent_batch
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.portable_kernel import H100_SHARED_MEMORY
from tests.unit.vllm_plugin.backends.cuda.test_cuda_backend import (
    BLOCK,
    CPU,
    MAX_REQS,
    Group,
    analytic,
    shared_batch,
    vllm_config,
)
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.cli.served import falls_back
from vllm_prefixshare.kernels import gpu_executor as gpu
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.mla_hopper import launch as kernel
from vllm_prefixshare.kernels.reference import reference_attention
from vllm_prefixshare.kernels.registry import Choice
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.backends import common as backends_common
from vllm_prefixshare.vllm_plugin.eligibility import measured, platform
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import host_tables, planner

# FLASH_ATTN_MLA imports functions that need a GPU, up to vLLM 0.32 from this package
extension = ModuleType("vllm.vllm_flash_attn")
for module in (extension, fa_utils):
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        if not hasattr(module, name):
            setattr(module, name, None)
sys.modules[extension.__name__] = extension
from vllm.v1.attention.backends.mla import flashattn_mla  # noqa: E402

del sys.modules[extension.__name__]
from vllm_prefixshare.vllm_plugin.backends.mla import latent, unquantized  # noqa: E402
from vllm_prefixshare.vllm_plugin.step import gpu_builder  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has a real engine"),
    # rows without any token divide by zero and are then discarded, as on a GPU
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
HEADS = 4
SHAPE = {
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PREFILL = SimpleNamespace(prepare_metadata=lambda metadata: None, get_name=lambda: "FLASH_ATTN")
SPEC = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float16}


class DCPManager(mla_attention.MLADCPManager):
    """Of a rank that holds a shard, where prefills gather nothing."""

    def __init__(self) -> None:
        pass

    def init_kv_gather(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch, tmp_path):
    """Make the executor treat the CPU as a GPU with four multiprocessors."""
    h100 = Gpu((9, 0), 4, H100_SHARED_MEMORY)

    def choose(attention, device, kernel_name, query_len):
        return Choice(kernel.LatentHopperKernel(attention, query_len, h100), None)

    source = load_kernel("vllm_prefixshare.kernels.mla_hopper", tmp_path)
    monkeypatch.setattr(kernel, "partial_attention", source)
    # an instruction in assembler, which the interpreter does not run
    monkeypatch.setattr(kernel.LatentHopperKernel, "starts_merging", False)
    monkeypatch.setattr(gpu, "choose_kernel", choose)
    for module in (backends_common, measured):
        monkeypatch.setattr(module, "kernels_that_may_serve", lambda *x: [choose(*x).kernel])
        monkeypatch.setattr(module, "this_device", lambda: CPU)
    monkeypatch.setattr(planner, "cost_model", lambda attention, name, log: analytic(attention))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(mla_attention, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(flashattn_mla, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(flashattn_mla.FlashAttnMLAImpl, "forward_mqa", stand_in)
    # so few tokens are read twice by default
    monkeypatch.setenv("VLLM_PREFIXSHARE_DIVIDER", "flashforge")
    monkeypatch.setenv("VLLM_PREFIXSHARE_SHARE", "always")
    settings.cache_clear()
    STATS.reset()


def stand_in(impl, q, cache, metadata, layer):
    """What ``FlashAttnMLAImpl.forward_mqa`` is asked for, in float64."""
    decode = metadata.decode
    q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    caches = cache[:, :, None], cache[:, :, None, :RANK]
    lists = decode.block_table, decode.seq_lens, decode.query_start_loc
    return reference_attention(q, *caches, *lists, sm_scale=impl.scale).to(q.dtype), None


class LatentGroup(Group):
    """One KV-cache group with one MLA layer, its cache and its V2 block tables.

    dtype: the model's. stored: the cache's, for vLLM. scales: of queries and latents.
    """

    impl_cls, builder_cls = (
        unquantized.PrefixShareMLAImpl,
        unquantized.PrefixShareMLAMetadataBuilder,
    )
    cache, dtype, stored = "auto", torch.float16, torch.float16

    def __init__(
        self, monkeypatch, spec=None, num_heads=HEADS, drafts=0, parallel=None, scales=None
    ) -> None:
        self.config = config = vllm_config(drafts)
        vars(config.parallel_config).update(parallel or {})
        config.cache_config.cache_dtype = self.cache
        config.model_config.dtype = self.dtype
        config.model_config.max_model_len = 64 * self.block_size
        config.model_config.get_head_size = lambda: WIDTH
        config.attention_config.use_prefill_query_quantization = False
        config.scheduler_config.max_num_batched_tokens = 1024
        for module in (latent, mla_attention):
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
        self.impl = self.impl_cls(
            num_heads=num_heads, head_size=WIDTH, scale=SCALE, num_kv_heads=1, alibi_slopes=None,
            sliding_window=None, kv_cache_dtype=self.cache, logits_soft_cap=None,
            attn_type="decoder", kv_sharing_target_layer_name=None, qk_head_dim=192,
            kv_b_proj=None, **SHAPE,
        )  # fmt: skip
        layer = self.layer = MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(layer)
        vars(layer).update(
            SHAPE, impl=self.impl, num_heads=num_heads,
            prefill_backend=SimpleNamespace(clone=lambda: PREFILL), dcp_manager=DCPManager(),
            kv_cache=torch.zeros(8, self.block_size, WIDTH, dtype=self.stored),
        )  # fmt: skip
        for letter in "qkv":
            scale = torch.tensor((scales or {}).get(letter, 1.0))
            setattr(layer, f"_{letter}_scale", scale)
        config.compilation_config.static_forward_context["layer"] = layer
        if spec is None:
            own = {"block_size": self.block_size, "dtype": self.stored}
            spec = MLAAttentionSpec(**{**SPEC, **own})
        self.builder = self.builder_cls(spec, ["layer"], config, CPU)
        self.tables = SimpleNamespace(
            max_num_reqs=MAX_REQS,
            input_block_tables=[torch.zeros(MAX_REQS, 64, dtype=torch.int32)],
        )
        host_tables.HOST_TABLES.keep_v2_tables(self.tables)

    def add_a_layer_that_is_not_served(self) -> None:
        """Make the builder anew, for two layers."""
        impl = SimpleNamespace(shares=False, num_heads=HEADS)
        other = MLAAttention.__new__(MLAAttention)
        torch.nn.Module.__init__(other)
        vars(other).update({**vars(self.layer), "impl": impl})
        self.config.compilation_config.static_forward_context["other"] = other
        spec, layers = self.builder.kv_cache_spec, ["layer", "other"]
        self.builder = self.builder_cls(spec, layers, self.config, CPU)

    def forward(self, batch: PagedBatch, metadata: object, num_tokens: int) -> torch.Tensor:
        """Output of the rows that are decodes to vLLM, from queries in two parts."""
        q = torch.zeros(num_tokens, *batch.q.shape[1:], dtype=batch.q.dtype)
        q[: len(batch.q)] = batch.q
        parts = q[..., :RANK].contiguous(), q[..., RANK:].contiguous()
        out, lse = self.impl.forward_mqa(parts, batch.k_cache[:, :, 0], metadata, self.layer)
        assert lse is None and out.shape == (num_tokens, HEADS, RANK)
        return out

    def assert_right(self, batch: PagedBatch, padding: int = 0) -> object:
        """Build the step's metadata, run the layer, and compare the output with float64."""
        metadata = self.builder.build(0, self.common(batch, padding))
        out = self.forward(batch, metadata, len(batch.q) + padding)
        assert relative_error(out[: len(batch.q)], expected(batch)[0]) < 2e-3
        return metadata


def batch_of(**shape) -> PagedBatch:
    shape = {"documents": 1, "requests": 3, "block_size": BLOCK, "query_lens": 1, **shape}
    return latent_batch(HEADS, dtype=torch.float16, **shape)


def test_decodes_share_under_one_plan_while_they_grow(monkeypatch):
    group, batch = LatentGroup(monkeypatch), batch_of()
    batch.k_cache.nan_to_num_(0.5)
    group.start(batch)
    for _ in range(3):
        metadata = group.assert_right(batch, padding=2)
        assert metadata.rest is None and metadata.num_planned_tokens == len(batch.q) + 2
        batch.seq_lens[:] += 1
    assert STATS.plans == 1 and STATS.shared_steps == STATS.decode_steps == 3
    assert STATS.kv_tokens_stock > 1.3 * STATS.kv_tokens_read


def test_what_a_graph_holds_reads_later_plans(monkeypatch):
    group, batch = LatentGroup(monkeypatch), batch_of()
    held = group.builder.build_for_cudagraph_capture(group.common(batch))
    assert STATS.decode_steps == 0
    group.start(batch)
    group.builder.build(0, group.common(batch))
    out = group.forward(batch, held, len(batch.q))
    assert relative_error(out, expected(batch)[0]) < 2e-3


def be_rank(monkeypatch, size: int, rank: int) -> None:
    """Let vLLM take this process for a rank of a group."""
    place = SimpleNamespace(world_size=size, rank_in_group=rank)
    monkeypatch.setattr(parallel_state, "_DCP", place)


@dataclass
class Rank:
    """A rank of a group under decode context parallelism, and what it holds of a batch.

    interleave: tokens that follow each other on one rank.
    whole: the batch, in blocks of ``size * BLOCK`` tokens.
    """

    monkeypatch: pytest.MonkeyPatch
    size: int
    rank: int
    interleave: int
    whole: PagedBatch

    def __post_init__(self) -> None:
        be_rank(self.monkeypatch, self.size, self.rank)
        sizes = {
            "decode_context_parallel_size": self.size,
            "cp_kv_cache_interleave_size": self.interleave,
        }
        self.group = LatentGroup(self.monkeypatch, num_heads=HEADS // self.size, parallel=sizes)
        assert self.group.impl.shares
        self.group.start(self.shard())

    def holds(self, position: int) -> bool:
        return position // self.interleave % self.size == self.rank

    def shard(self) -> PagedBatch:
        """What the rank holds, found token by token."""
        whole = self.whole
        cache = whole.k_cache[:, [o for o in range(BLOCK * self.size) if self.holds(o)]]
        held = [sum(self.holds(p) for p in range(n)) for n in whole.seq_lens]
        lens = np.array(held, np.int32)
        return replace(whole, k_cache=cache, v_cache=cache[..., :RANK], seq_lens=lens)

    def attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp over the shard, from queries that vLLM has gathered."""
        shard, group = self.shard(), self.group
        common = group.common(shard)
        common.dcp_local_seq_lens = common.seq_lens
        common.seq_lens = common.seq_lens_cpu_upper_bound = torch.from_numpy(self.whole.seq_lens)
        common.max_seq_len = int(self.whole.seq_lens.max())
        metadata = group.builder.build(0, common)
        out, lse = group.impl.forward_mqa(shard.q, shard.k_cache[:, :, 0], metadata, group.layer)
        assert lse.dtype == torch.float32 and lse.shape == out.shape[:2]
        assert out.isfinite().all()
        return out.double(), lse.double()


def in_shards(size: int, seq_lens: list[int], counts: list[int]) -> PagedBatch:
    """Requests that share their first three blocks, each of which is spread over all ranks."""
    batch = shared_batch(seq_lens, counts)
    q = torch.randn(len(batch.q), HEADS, WIDTH).half()
    cache = torch.randn(120, BLOCK * size, 1, WIDTH).half()
    return replace(batch, q=q, k_cache=cache, v_cache=cache[..., :RANK])


def combined(ranks: list[Rank]) -> torch.Tensor:
    outs, lses = (torch.stack(part) for part in zip(*(r.attention() for r in ranks), strict=True))
    weights = torch.softmax(lses, dim=0)
    return (weights[..., None] * outs).sum(0)


@pytest.mark.parametrize("interleave", [1, BLOCK])
def test_ranks_with_shards_together_see_every_token(monkeypatch, interleave):
    # the last begins with an empty shard, which a later step fills under the same plan
    whole = in_shards(2, [180, 233, 155, 1], [1] * 4)
    whole.block_table[3, 0] = 118
    ranks = [Rank(monkeypatch, 2, rank, interleave, whole) for rank in range(2)]
    assert ranks[1].shard().seq_lens[3] == 0
    for _ in range(3):
        assert relative_error(combined(ranks), expected(whole)[0]) < 2e-3
        whole.seq_lens += interleave
    assert STATS.plans == 2 and STATS.shared_steps == STATS.decode_steps == 6


def test_short_prefills_of_shards_go_to_the_parent(monkeypatch):
    asked = []

    def parent(impl, q, cache, metadata, layer):
        asked.append(metadata.decode)
        return q[..., :RANK], torch.full(q.shape[:2], 7.0).T.contiguous().T

    monkeypatch.setattr(flashattn_mla.FlashAttnMLAImpl, "forward_mqa", parent)
    whole = in_shards(2, [180, 233, 90], [1, 1, 5])
    out, lse = Rank(monkeypatch, 2, 1, 1, whole).attention()
    assert torch.equal(out[2:], whole.q[2:, :, :RANK].double()) and (lse[2:] == 7).all()
    assert (lse[:2] != 7).all() and not torch.equal(out[:2], whole.q[:2, :, :RANK].double())
    assert asked[0].seq_lens.tolist() == [45] and asked[0].dcp_tot_seq_lens.tolist() == [90]


def test_short_prefills_go_to_the_parent(monkeypatch):
    # FLASH_ATTN_MLA calls requests of up to 512 new tokens decodes
    group, batch = LatentGroup(monkeypatch), batch_of(requests=4).with_queries([1, 1, 7, 2])
    group.start(batch)
    metadata = group.assert_right(batch)
    assert metadata.num_decode_tokens == 11 and metadata.num_planned_tokens == 2
    assert metadata.rest.decode.query_start_loc.tolist() == [0, 7, 9]
    assert metadata.rest.decode.scheduler_metadata is None
    assert group.builder.planner.current.num_reqs == 2 and STATS.shared_steps == 1


def test_decodes_share_with_their_drafts(monkeypatch):
    # ragged, as drafts of n-grams are
    group, batch = LatentGroup(monkeypatch, drafts=2), batch_of().with_queries([3, 1, 2])
    batch.k_cache.nan_to_num_(0.5)
    group.start(batch)
    for _ in range(3):
        metadata = group.assert_right(batch, padding=2)
        assert metadata.rest is None and metadata.num_planned_tokens == 6 + 2
        batch.seq_lens[:] += (2, 1, 1)
    assert STATS.plans == 1 and STATS.shared_steps == STATS.decode_steps == 3
    assert STATS.kv_tokens_stock > 1.3 * STATS.kv_tokens_read


def test_short_prefills_behind_drafts_go_to_the_parent(monkeypatch):
    group = LatentGroup(monkeypatch, drafts=2)
    batch = batch_of(requests=4).with_queries([2, 3, 7, 1])
    group.start(batch)
    metadata = group.assert_right(batch)
    assert metadata.num_decode_tokens == 13 and metadata.num_planned_tokens == 5
    assert metadata.rest.decode.query_start_loc.tolist() == [0, 7, 8]


def test_lengths_that_assumed_too_many_drafts_are_still_right(monkeypatch):
    # the host counts drafts as accepted; up to 4 tokens of two steps may be rejected later
    group, batch = (
        LatentGroup(monkeypatch, drafts=2),
        batch_of(document_blocks=12).with_queries([3, 3, 3]),
    )
    shared = BLOCK * 12  # the document, which all may read only up to the earliest query
    batch.seq_lens[:] = shared, shared + 4, shared + 9
    batch.k_cache.nan_to_num_(0.5)
    group.start(batch)
    common = group.common(batch)
    common.seq_lens = torch.from_numpy(batch.seq_lens - 4)
    metadata = group.builder.build(0, common)
    batch.seq_lens -= 4
    out = group.forward(batch, metadata, 9)
    assert relative_error(out, expected(batch)[0]) < 2e-3 and STATS.shared_steps == 1


def test_long_prefills_are_the_parents_own(monkeypatch):
    group, batch = LatentGroup(monkeypatch), batch_of().with_queries([1, 1, 80])
    batch.seq_lens[2] = 80  # nothing cached: what is would be gathered on the GPU
    group.builder.reorder_batch_threshold = 64  # 512 in vLLM
    group.start(batch)
    metadata = group.builder.build(0, group.common(batch))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.prefill.query_start_loc.tolist() == [0, 80] and metadata.rest is None
    rows = replace(
        batch, q=batch.q[:2], block_table=batch.block_table[:2], seq_lens=batch.seq_lens[:2],
        query_start_loc=batch.query_start_loc[:3],
    )  # fmt: skip
    assert relative_error(group.forward(rows, metadata, 2), expected(rows)[0]) < 2e-3


def test_the_parents_schedule_is_made_where_a_layer_needs_it(monkeypatch):
    made = []

    def get_scheduler_metadata(**options):
        made.append(options["batch_size"])
        return torch.zeros(9, dtype=torch.int32)

    monkeypatch.setattr(flashattn_mla, "get_flash_attn_version", lambda: 3)
    monkeypatch.setattr(flashattn_mla, "get_scheduler_metadata", get_scheduler_metadata)
    group, batch = LatentGroup(monkeypatch), batch_of()
    group.start(batch)
    group.builder.build(0, group.common(batch))
    assert made == []
    group.add_a_layer_that_is_not_served()
    group.assert_right(batch)
    assert made == [3]


@pytest.mark.parametrize(
    ("heads", "drafts", "changes", "reason"),
    [
        (33, 0, {}, "multi-head latent attention of more than 32 heads a GPU"),
        (
            16,
            2,
            {},
            "2 drafts and multi-head latent attention of more than 10 heads a GPU",
        ),
        (
            17,
            0,
            {"decode_context_parallel_size": 2},
            "multi-head latent attention of more than 32 heads a GPU",
        ),
        (4, 1, {"decode_context_parallel_size": 2}, "drafts under decode context parallelism"),
        (4, 0, {"use_ubatching": True}, "micro-batches"),
    ],
)
def test_a_layer_that_is_not_served_keeps_its_parent(monkeypatch, heads, drafts, changes, reason):
    be_rank(monkeypatch, changes.get("decode_context_parallel_size", 1), 0)

    def group() -> LatentGroup:
        return LatentGroup(monkeypatch, num_heads=heads, drafts=drafts, parallel=changes)

    assert not group().impl.shares and STATS.fallbacks == {reason: 1}
    if "use_ubatching" not in changes:
        shards = changes.get("decode_context_parallel_size", 1)
        kind = LayerKind(
            576, "float16", num_heads=heads, use_mla=True, name="full attention", count=1
        )
        kind = replace(kind, kv_lora_rank=512, use_dcp=shards > 1)
        assert falls_back(kind, None, Engine(1 + drafts, shards)) == reason
    if heads == HEADS and not changes:
        made, batch = group(), batch_of()
        metadata = made.assert_right(batch)
        assert (
            not isinstance(metadata, unquantized.PrefixShareMLAMetadata) and not STATS.decode_steps
        )
    monkeypatch.setenv("VLLM_PREFIXSHARE_STRICT", "1")
    settings.cache_clear()
    with pytest.raises(PrefixShareError, match=reason):
        group()


def test_the_portable_kernel_has_no_latents(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_KERNEL", "portable")
    settings.cache_clear()
    assert not LatentGroup(monkeypatch).impl.shares
    assert STATS.fallbacks == {"multi-head latent attention and kernel 'portable'": 1}


def test_a_layer_of_another_class_keeps_its_parent(monkeypatch):
    """It may write its KV cache itself, as Kimi K3's does."""
    monkeypatch.setenv("VLLM_PREFIXSHARE_STRICT", "0")
    group = LatentGroup(monkeypatch)
    own = type("MultiHeadLatentAttention", (torch.nn.Module,), {})()
    vars(own).update(vars(group.layer))
    group.config.compilation_config.static_forward_context["layer"] = own
    builder = group.builder_cls(group.builder.kv_cache_spec, ["layer"], group.config, CPU)
    assert builder.executor is None and not group.impl.shares
    assert "multi-head latent attention in MultiHeadLatentAttention" in STATS.fallbacks


def test_without_a_kernel_every_layer_keeps_its_parent_and_asks_once(monkeypatch):
    asked = []

    def fail(*layer):
        asked.append(layer)
        raise PrefixShareError("this Triton is too old.")

    monkeypatch.setattr(measured, "kernels_that_may_serve", fail)
    measured.kernel_failure.cache_clear()
    assert not any(LatentGroup(monkeypatch).impl.shares for _ in range(3))
    reason = "multi-head latent attention without a kernel (this Triton is too old.)"
    assert STATS.fallbacks == {reason: 3} and len(asked) == 1
    # doctor asks the same function
    monkeypatch.setattr(platform, "gpu_extras", lambda anywhere=False: platform.GPU_EXTRAS)
    kind = LayerKind(
        WIDTH, "float16", num_heads=HEADS, use_mla=True, name="full attention", count=1
    )
    assert falls_back(replace(kind, kv_lora_rank=RANK), on_cpu=False) == reason
    measured.kernel_failure.cache_clear()


def test_a_group_of_another_kind_of_cache_keeps_its_parent(monkeypatch):
    group = LatentGroup(monkeypatch, FullAttentionSpec(**SPEC))
    assert group.builder.executor is None
    assert STATS.fallbacks == {"a KV cache of FullAttentionSpec": 1}


def test_latents_are_written_finite(monkeypatch):
    written = []
    monkeypatch.setattr(
        flashattn_mla.FlashAttnMLAImpl,
        "do_kv_cache_update",
        lambda self, *args: written.append(args),
    )
    latents = torch.tensor([[1.0, torch.nan, torch.inf]]).half()
    others = "rope", "cache", "slots", "auto", "scale"
    LatentGroup(monkeypatch).impl.do_kv_cache_update(latents, *others)
    assert written[0][0].isfinite().all() and written[0][0][0, 0] == 1
    assert written[0][1:] == others


@pytest.mark.parametrize("dims", [2, 3])
def test_a_graph_writes_latents_in_one_launch(monkeypatch, dims):
    written = []
    parent = flashattn_mla.FlashAttnMLAImpl
    monkeypatch.setattr(parent, "do_kv_cache_update", lambda self, *args: written.append(args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    impl = LatentGroup(monkeypatch).impl
    torch.manual_seed(0)
    latents, rotated = torch.randn(2, 3, WIDTH).half().unbind(0)
    latents, rotated = latents[:, :RANK].contiguous(), rotated[:, RANK:]
    latents[2, 1] = torch.nan
    rotated[2, 1] = torch.inf
    k_pe = rotated if dims == 2 else rotated[:, None]
    cache, slots = torch.zeros(8, BLOCK, WIDTH).half(), torch.tensor([5, -1, 3 * BLOCK])
    impl.do_kv_cache_update(latents, k_pe, cache, slots, "auto", None)
    expected = torch.zeros_like(cache)
    for token, at in ((0, (0, 5)), (2, (3, 0))):
        expected[at] = torch.cat([torch.nan_to_num(latents[token]), rotated[token]])
    assert torch.equal(cache, expected) and expected[3, 0, RANK + 1].isinf()
    nothing = torch.zeros(0).half()  # while vLLM measures memory
    impl.do_kv_cache_update(latents, k_pe, nothing, slots, "auto", None)
    assert written[0][2] is nothing


def test_a_plan_is_made_anew_after_sleep(monkeypatch):
    group, batch = LatentGroup(monkeypatch), batch_of()
    group.start(batch)
    group.assert_right(batch)
    for array in group.builder.executor.workspace.plan.arrays.values():
        array.fill_(-1)
    group.layer.kv_cache[3] = torch.nan
    gpu_builder.after_wake_up()
    assert group.layer.kv_cache.isfinite().all()
    group.assert_right(batch)
    assert STATS.plans == 2


def test_our_metadata_hides_no_field_of_theirs():
    theirs = {f.name for f in fields(flashattn_mla.FlashAttnMLAMetadata)}
    assert not theirs & {f.name for f in fields(latent.PlannedLatents)}


def test_full_graphs_are_captured_for_uniform_batches():
    support = unquantized.PrefixShareMLAMetadataBuilder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    backend = unquantized.PrefixShareMLABackend
    assert backend.is_mla() and backend.get_name() == "PREFIX_SHARE"
