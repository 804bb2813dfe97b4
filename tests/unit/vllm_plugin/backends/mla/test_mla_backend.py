"""The backend for latent KV caches without a GPU: vLLM's builder and layer, driven with hand-made
metadata.

Our kernel's own source runs under Triton's interpreter. FLASH_ATTN_MLA does not run here: a
stand-in computes in float64 what it is asked for, from the metadata that it gets.
"""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.support.gpu_backend import BLOCK, WITHOUT_GPU, shard_of, shared_batch
from tests.support.latent_backend import HEADS, SPEC, LatentGroup, flashattn_mla, interpret_latents
from tests.support.latent_batches import RANK, WIDTH, expected, latent_batch
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.variables import set_variables
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.cli.served import falls_back
from vllm_prefixshare.vllm_plugin.backends.mla import latent, unquantized
from vllm_prefixshare.vllm_plugin.eligibility import measured, platform
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import gpu_builder

pytestmark = [
    WITHOUT_GPU,
    # rows without any token divide by zero and are then discarded, as on a GPU
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch, tmp_path):
    interpret_latents(monkeypatch, tmp_path)


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
    group.started(batch)
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

    def shard(self) -> PagedBatch:
        return shard_of(self.whole, self.size, self.rank, self.interleave)

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
    metadata = group.started(batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.prefill.query_start_loc.tolist() == [0, 80] and metadata.rest is None
    rows = batch.rows(slice(2))
    assert relative_error(group.forward(rows, metadata, 2), expected(rows)[0]) < 2e-3


def test_the_parents_schedule_is_made_where_a_layer_needs_it(monkeypatch):
    made = []

    def get_scheduler_metadata(**options):
        made.append(options["batch_size"])
        return torch.zeros(9, dtype=torch.int32)

    monkeypatch.setattr(flashattn_mla, "get_flash_attn_version", lambda: 3)
    monkeypatch.setattr(flashattn_mla, "get_scheduler_metadata", get_scheduler_metadata)
    group, batch = LatentGroup(monkeypatch), batch_of()
    group.started(batch)
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
        assert falls_back(replace(kind, engine=Engine(1 + drafts, shards)), None) == reason
    if heads == HEADS and not changes:
        made, batch = group(), batch_of()
        metadata = made.assert_right(batch)
        assert (
            not isinstance(metadata, unquantized.PrefixShareMLAMetadata) and not STATS.decode_steps
        )
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match=reason):
        group()


def test_the_portable_kernel_has_no_latents(monkeypatch):
    set_variables(monkeypatch, KERNEL="portable")
    assert not LatentGroup(monkeypatch).impl.shares
    assert STATS.fallbacks == {"multi-head latent attention and kernel 'portable'": 1}


def test_a_layer_of_another_class_keeps_its_parent(monkeypatch):
    """It may write its KV cache itself, as Kimi K3's does."""
    monkeypatch.setenv("VLLM_PREFIXSHARE_STRICT", "0")
    group = LatentGroup(monkeypatch)
    own = type("MultiHeadLatentAttention", (torch.nn.Module,), {})()
    vars(own).update(vars(group.layer))
    group.layers["layer"] = own
    builder = group.builder_for(group.builder.kv_cache_spec)
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
