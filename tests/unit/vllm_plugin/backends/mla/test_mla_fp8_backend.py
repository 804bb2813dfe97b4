"""The backend for fp8 latent KV caches without a GPU: vLLM's builder and layer, driven with
hand-made metadata.

Our kernel runs in Triton's interpreter. FLASHMLA does not run here: a stand-in computes in float64
what it is asked for.
"""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla import flashmla
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.support.gpu_backend import WITHOUT_GPU
from tests.support.latent_backend import HEADS, SPEC, LatentGroup, interpret_latents
from tests.support.latent_batches import RANK, WIDTH, expected, latent_batch, quantised
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.reference_attention import reference_attention
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.vllm_plugin.backends.mla import fp8, latent
from vllm_prefixshare.vllm_plugin.eligibility.layer import FP8_LATENT_BLOCK, LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, GPU_EXTRAS, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import gpu_builder, host_tables

pytestmark = WITHOUT_GPU
E4M3 = torch.float8_e4m3fn
SCALES = {"q": 0.5, "k": 1.5}


def theirs(impl, q, cache, metadata, layer):
    """What ``FlashMLAImpl.forward_mqa`` is asked for."""
    assert metadata.decode.scheduler_metadata.num_splits is not None
    each = len(q) // metadata.num_decodes
    starts = torch.arange(metadata.num_decodes + 1) * each
    caches = cache[:, :, None], cache[:, :, None, :RANK]
    lists = metadata.decode.block_table, metadata.decode.seq_lens, starts
    scales = LayerExtras(q_scale=layer._q_scale, k_scale=layer._k_scale, v_scale=layer._k_scale)
    out = reference_attention(q, *caches, *lists, sm_scale=impl.scale, extras=scales)
    return out.bfloat16(), None


@pytest.fixture(autouse=True)
def schedules(monkeypatch, tmp_path) -> list[int]:
    """FLASHMLA on a CPU; returns the number of requests of each schedule that it makes."""
    interpret_latents(monkeypatch, tmp_path)
    made: list[int] = []

    def schedule(lens, *args):
        made.append(len(lens))
        return torch.zeros(4, 8, dtype=torch.int32), torch.zeros(len(lens) + 1, dtype=torch.int32)

    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (True, None))
    monkeypatch.setattr(flashmla, "num_compute_units", lambda device: 4)
    stand_in = SimpleNamespace(tile_scheduler_metadata=None, num_splits=None)
    monkeypatch.setattr(flashmla, "get_mla_metadata", lambda *args, **kwargs: (stand_in, None))
    monkeypatch.setattr(flashmla, "get_mla_metadata_dense_fp8", schedule)
    monkeypatch.setattr(flashmla.FlashMLAImpl, "forward_mqa", theirs)
    return made


class FP8Group(LatentGroup):
    """One KV-cache group with one MLA layer and an fp8 cache."""

    impl_cls = fp8.PrefixShareFP8MLAImpl
    builder_cls = fp8.PrefixShareFP8MLAMetadataBuilder
    cache, dtype, stored, block_size = "fp8", torch.bfloat16, torch.uint8, 64

    def forward(self, batch: PagedBatch, metadata: object, num_tokens: int) -> torch.Tensor:
        """Output of the rows that are decodes to vLLM, from queries that it quantised."""
        q = torch.zeros(num_tokens, HEADS, WIDTH).to(E4M3)
        used = min(num_tokens, len(batch.q))
        q[:used] = batch.q[:used]
        out, lse = self.impl.forward_mqa(q, batch.k_cache[:, :, 0], metadata, self.layer)
        assert lse is None and out.dtype == torch.bfloat16
        assert out.shape == (num_tokens, HEADS, RANK)
        return out

    def assert_right(self, batch: PagedBatch, padding: int = 0, rows: int | None = None) -> object:
        """Build the step's metadata, run the layer, and compare the output with float64.

        Args:
            rows: query tokens that are decodes to vLLM; None for all.
        """
        metadata = self.build(batch, padding)
        rows = len(batch.q) if rows is None else rows
        assert metadata.num_decode_tokens == rows + padding
        out = self.forward(batch, metadata, rows + padding)
        q, k = self.layer._q_scale, self.layer._k_scale
        wanted, _ = expected(batch, LayerExtras(q_scale=q, k_scale=k, v_scale=k))
        assert relative_error(out[:rows], wanted[:rows]) < 1e-2
        return metadata


def batch_of(counts: list[int] | None = None, requests: int = 3) -> PagedBatch:
    """Requests on one document, each with so many query tokens."""
    shape = {"documents": 1, "requests": requests, "block_size": 64, "query_lens": 1}
    batch = latent_batch(HEADS, dtype=torch.float16, **shape)
    batch.k_cache.nan_to_num_(0.5)
    return quantised(batch if counts is None else batch.with_queries(counts))


def test_decodes_share_under_one_plan_while_they_grow(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch, scales=SCALES), batch_of()
    expected = AttentionConfig(HEADS, 1, WIDTH, 64, "bfloat16", FP8, FP8, kv_lora_rank=RANK)
    assert group.builder.executor.attention == expected
    group.start(batch)
    for _ in range(3):
        metadata = group.assert_right(batch, padding=2)
        assert metadata.rest is None and metadata.num_planned_tokens == len(batch.q) + 2
        batch.seq_lens[:] += 1
    assert STATS.plans == 1 and STATS.shared_steps == STATS.decode_steps == 3
    assert STATS.kv_tokens_stock > 1.3 * STATS.kv_tokens_read
    assert schedules == [], "FlashMLA runs in no such step"


def test_what_a_graph_holds_reads_later_plans(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch), batch_of()
    held = group.builder.build_for_cudagraph_capture(group.common(batch))
    assert STATS.decode_steps == 0
    group.start(batch)
    metadata = group.assert_right(batch)
    out = group.forward(batch, held, len(batch.q))
    assert torch.equal(out, group.forward(batch, metadata, len(batch.q))) and schedules == []


def test_decodes_with_as_many_drafts_share(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch, scales=SCALES, drafts=2), batch_of([3, 3, 3])
    group.start(batch)
    metadata = group.assert_right(batch)
    assert metadata.num_planned_tokens == 9 and schedules == []
    assert STATS.shared_steps == STATS.decode_steps == 1


def test_decodes_with_unlike_numbers_of_drafts_are_the_parents(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch, scales=SCALES, drafts=2), batch_of([3, 3, 2])
    batch.seq_lens[2] = 2  # a prefill to FLASHMLA: what is cached would be gathered on the GPU
    group.start(batch)
    metadata = group.assert_right(batch, rows=6)
    assert type(metadata) is flashmla.FlashMLAMetadata and schedules == [2]
    assert STATS.decode_steps == STATS.kv_tokens_stock == 0, "nothing was shared"


def test_decodes_of_several_tokens_are_the_parents(monkeypatch, schedules):
    # FLASHMLA calls requests of up to 128 new tokens decodes, if all have as many
    group, batch = FP8Group(monkeypatch, scales=SCALES), batch_of([7, 7, 7])
    group.start(batch)
    metadata = group.assert_right(batch)
    assert type(metadata) is flashmla.FlashMLAMetadata and schedules == [3]
    assert STATS.decode_steps == 0
    # the first request decides
    batch = batch_of([7, 1, 1])
    batch.seq_lens[1:] = 1  # nothing cached: what is would be gathered on the GPU
    group.start(batch)
    metadata = group.assert_right(batch, rows=7)
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 2) and schedules == [3, 1]


def test_behind_decodes_of_one_token_all_else_is_a_prefill(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch, scales=SCALES), batch_of([1, 1, 7, 2], requests=4)
    batch.seq_lens[2:] = 7, 2
    group.start(batch)
    metadata = group.assert_right(batch, rows=2)
    assert metadata.num_planned_tokens == metadata.num_decodes == 2
    assert metadata.prefill.query_start_loc.tolist() == [0, 7, 9]
    assert (
        group.builder.planner.current.num_reqs == 2 and STATS.shared_steps == 1 and schedules == []
    )


def test_a_batch_of_prefills_has_an_empty_plan(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch), batch_of([200, 200, 200])
    batch.seq_lens[:] = 200
    metadata = group.started(batch)
    assert metadata.decode is None and metadata.num_prefills == 3 and schedules == []


def test_a_dummy_batch_of_decodes_and_prefills_is_the_parents(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch), batch_of([1, 1, 7])
    batch.seq_lens[2] = 7
    group.start(batch)
    host_tables.note_batch(group.tables, None)
    metadata = group.build(batch)
    assert type(metadata) is flashmla.FlashMLAMetadata and schedules == [2]


def test_the_parents_schedule_is_made_where_a_layer_needs_it(monkeypatch, schedules):
    group, batch = FP8Group(monkeypatch), batch_of()
    group.add_a_layer_that_is_not_served()
    group.start(batch)
    metadata = group.assert_right(batch)
    assert metadata.num_planned_tokens == 3 and schedules == [3]


def test_a_layer_that_is_not_served_keeps_its_parent(monkeypatch, schedules):
    group = FP8Group(monkeypatch, drafts=8)
    reason = "8 drafts and multi-head latent attention of more than 3 heads a GPU"
    assert not group.impl.shares and STATS.fallbacks == {reason: 1}
    batch = batch_of()
    group.start(batch)
    metadata = group.assert_right(batch)
    assert type(metadata) is flashmla.FlashMLAMetadata and not STATS.decode_steps


def test_a_group_of_another_kind_of_cache_keeps_its_parent(monkeypatch):
    spec = FullAttentionSpec(**{**SPEC, "block_size": 64, "dtype": torch.uint8})
    assert FP8Group(monkeypatch, spec).builder.executor is None
    assert STATS.fallbacks == {"a KV cache of FullAttentionSpec": 1}


@pytest.mark.parametrize("letter", "qk")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0, -1.0])
def test_scales_that_are_no_numbers_are_refused_at_start_up(monkeypatch, letter, bad):
    with pytest.raises(PrefixShareError, match=f"{letter}_scale must be positive and finite"):
        FP8Group(monkeypatch, scales={letter: bad})


def test_the_scale_of_values_is_not_read(monkeypatch):
    group, batch = FP8Group(monkeypatch, scales={"k": 1.5, "v": torch.nan}), batch_of()
    group.start(batch)
    group.assert_right(batch)


@pytest.mark.parametrize("letter", "qk")
def test_scales_that_are_loaded_anew_are_checked_before_a_graph_replays(monkeypatch, letter):
    group, batch = FP8Group(monkeypatch), batch_of()
    group.start(batch)
    common = group.common(batch)
    group.builder.build(0, common)
    scale = getattr(group.layer, f"_{letter}_scale")
    # as vLLM reloads weights: into the tensors that graphs have captured
    scale.fill_(2.0)
    group.impl.process_weights_after_loading(torch.bfloat16)
    group.assert_right(batch)
    scale.fill_(torch.inf)
    group.impl.process_weights_after_loading(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(PrefixShareError, match=f"{letter}_scale must be positive and finite"):
            group.builder.build(0, common)


@pytest.mark.parametrize("letter", "qk")
def test_another_tensor_of_a_scale_takes_its_place(monkeypatch, letter):
    group, batch = FP8Group(monkeypatch, scales=SCALES), batch_of()
    attention = group.builder.executor.attention
    kept = group.impl.extras_of(group.layer, attention)
    assert group.impl.extras_of(group.layer, attention) is kept, "it is checked once"
    group.start(batch)
    setattr(group.layer, f"_{letter}_scale", torch.tensor(2.0))
    group.assert_right(batch)
    assert group.impl.extras_of(group.layer, attention) is not kept


@pytest.mark.parametrize("capturing", [False, True])
def test_latents_are_written_finite(monkeypatch, capturing):
    written = []
    parent = flashmla.FlashMLAImpl
    monkeypatch.setattr(parent, "do_kv_cache_update", lambda self, *args: written.append(args))
    group = FP8Group(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    latents = torch.tensor([[1.0, torch.nan, torch.inf]]).bfloat16()
    others = "rope", "cache", "slots", "fp8", "scale", "skip_scale"  # the last from vLLM 0.33 on
    group.impl.do_kv_cache_update(latents, *others)
    assert written[0][0].isfinite().all() and written[0][0][0, 0] == 1
    assert written[0][1:] == others


def test_a_plan_is_made_anew_after_sleep(monkeypatch):
    group, batch = FP8Group(monkeypatch), batch_of()
    group.start(batch)
    group.assert_right(batch)
    group.layer.kv_cache[3] = 0x7F
    gpu_builder.after_wake_up()
    assert group.layer.kv_cache.view(E4M3).float().isfinite().all()
    group.assert_right(batch)
    assert STATS.plans == 2


def test_our_metadata_hides_no_field_of_theirs():
    found = {f.name for f in fields(flashmla.FlashMLAMetadata)}
    assert not found & {f.name for f in fields(latent.PlannedLatents)}


def test_what_the_backend_inherits():
    builder = fp8.PrefixShareFP8MLAMetadataBuilder
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    backend = fp8.PrefixShareFP8MLABackend
    assert backend.is_mla() and backend.get_name() == "PREFIX_SHARE"
    assert backend.get_supported_kernel_block_sizes() == [FP8_LATENT_BLOCK]
    assert {"fp8", "fp8_e4m3"} <= set(backend.supported_kv_cache_dtypes)
    gpu = Platform(CUDA_DTYPES, GPU_EXTRAS)
    latents = LayerSpec(576, "bfloat16", "fp8", use_mla=True)
    assert refusal(latents, gpu) is None
    assert refusal(replace(latents, dtype="float16"), gpu) == "dtype float16"
