"""The CUDA backend without a GPU: vLLM's builder and layer, driven with hand-made metadata.

Our portable kernel runs under Triton's interpreter. FlashAttention does not run here, so for
prefill rows only the metadata that it would get is checked.
"""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.support.faults import failing_at
from tests.support.gpu_backend import (
    BLOCK,
    CPU,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MAX_REQS,
    PATCHED,
    SPEC,
    WITHOUT_GPU,
    Group,
    estimated_cost,
    interpret,
    share_whatever_it_costs,
    shared_batch,
    vllm_config,
)
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.variables import set_variables
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.cli import doctor
from vllm_prefixshare.cli.served import in_engine
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.kernels.portable import launch as portable_launch
from vllm_prefixshare.planning.planner import PLANNING_FAILED
from vllm_prefixshare.vllm_plugin import compat, register
from vllm_prefixshare.vllm_plugin.backends.cuda import backend as cuda
from vllm_prefixshare.vllm_plugin.backends.cuda import metadata as cuda_metadata
from vllm_prefixshare.vllm_plugin.eligibility import measured
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import layer_kinds
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine, LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import (
    first_step,
    gpu_builder,
    host_tables,
    mixed_graphs,
    planner,
)

pytestmark = WITHOUT_GPU


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    register.register()
    interpret(monkeypatch, portable_launch.PortableKernel)


@pytest.fixture
def group(monkeypatch) -> Group:
    return Group(monkeypatch)


#: FULL graphs of mixed steps
FULL_GRAPHS = {"cudagraph_mode": CUDAGraphMode.FULL, "cudagraph_capture_sizes": [8, 96]}
FP8 = torch.float8_e4m3fn
FP8_SPEC = FullAttentionSpec(**{**SPEC, "dtype": torch.uint8})


def let_flash_attention_serve_extras(monkeypatch) -> None:
    """Let FLASH_ATTN find what it needs for attention sinks and fp8 KV caches."""
    for name in (
        "flash_attn_supports_sinks",
        "flash_attn_supports_kv_cache_dtype",
        "is_flash_attn_varlen_func_available",
    ):
        monkeypatch.setattr(flash_attn, name, lambda *args, **kwargs: True, raising=False)


def assert_of_flash_attention(metadata: object) -> None:
    assert not isinstance(metadata, cuda_metadata.PrefixShareCUDAMetadata)


def planned(monkeypatch, seq_lens: list[int]) -> tuple[Group, PagedBatch]:
    """A group that has a plan for a batch with these lengths."""
    group = Group(monkeypatch)
    batch = shared_batch(seq_lens)
    group.started(batch)
    return group, batch


def test_a_padded_decode_batch_runs_under_one_plan_while_it_grows(monkeypatch):
    share_whatever_it_costs(monkeypatch)
    group = Group(monkeypatch)
    batch = shared_batch([70, 90, 61, 55])
    group.start(batch)
    for _ in range(3):
        metadata = group.build(batch, padding=2)
        assert metadata.prefill_metadata is None
        assert metadata.num_planned_tokens == 6
        out = group.forward(batch, metadata, 6)
        assert relative_error(out[:4], batch.expected()[0]) < 2e-3
        assert out[4:].isnan().all()
        batch.seq_lens += 1
    assert STATS.plans == 1
    assert STATS.decode_steps == STATS.shared_steps == 3
    assert STATS.kv_tokens_stock - STATS.kv_tokens_read == 3 * 3 * 48


def test_batches_that_take_turns_in_a_pipeline_keep_their_plans(monkeypatch):
    share_whatever_it_costs(monkeypatch)
    config = vllm_config(parallel_config={"pipeline_parallel_size": 2})
    group = Group(monkeypatch, config=config)
    whole = shared_batch([70, 90, 61, 55])
    group.start(whole)
    slots = group.slots
    parts = [whole.rows(slice(0, 2)), whole.rows(slice(2, 4))]
    for _ in range(3):
        for rows, batch in zip((slots[:2], slots[2:]), parts, strict=True):
            host_tables.note_batch(group.tables, rows)
            group.assert_right(batch)
            batch.seq_lens += 1
    assert STATS.plans == 2
    assert STATS.shared_steps == 6


def test_lengths_below_those_of_the_plan_ask_for_a_new_one(monkeypatch):
    group, batch = planned(monkeypatch, [70, 90])
    batch.seq_lens -= 20
    group.assert_right(batch)
    assert STATS.plans == 2


def test_vllms_own_cascade_is_not_used(monkeypatch):
    args = 100000, np.ones(64, np.int32), HEADS, KV_HEADS, False, False, False, 132, False
    group = Group(monkeypatch)
    assert not group.builder.use_cascade_attention(*args)


def test_a_captured_launch_reads_an_empty_plan(group):
    batch = shared_batch([70, 90])
    host_tables.note_batch(group.tables, None)
    metadata = group.builder.build_for_cudagraph_capture(group.common(batch))
    assert metadata.num_planned_tokens == 2
    assert group.forward(batch, metadata, 2).isnan().all()
    assert STATS.decode_steps == 0


def test_a_dummy_batch_reads_nothing_even_if_its_rows_look_real(monkeypatch):
    group, batch = planned(monkeypatch, [70, 90])
    host_tables.note_batch(group.tables, None)
    metadata = group.build(batch)
    assert group.forward(batch, metadata, 2).isnan().all()
    host_tables.note_batch(group.tables, group.slots)
    group.assert_right(batch)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("divider", ["flashforge", "depth_first"])
def test_a_request_that_overflowed_spoils_no_other(monkeypatch, divider, bad):
    # depth first puts private parts of several requests into one tile
    monkeypatch.setenv("VLLM_PREFIXSHARE_DIVIDER", divider)
    set_variables(monkeypatch, SHARE="always")
    written = []
    monkeypatch.setattr(
        cuda.FlashAttentionImpl, "do_kv_cache_update", lambda *args: written.append(args)
    )
    group = Group(monkeypatch)
    batch = shared_batch([70, 90, 61, 55])
    last = batch.block_table[1, 4], 3
    batch.v_cache[last] = bad
    group.impl.do_kv_cache_update(None, None, batch.v_cache, None, None)
    batch = replace(batch, v_cache=written[0][3])
    assert batch.v_cache[last].abs().min() in (0, torch.finfo(torch.float16).max)
    metadata = group.started(batch)
    out = group.forward(batch, metadata, 4)
    others = [0, 2, 3]
    assert out.isfinite().all()
    assert relative_error(out[others], batch.expected()[0][others]) < 2e-3


@pytest.fixture
def no_writes_kept():
    """Compile the cache write anew, whatever earlier tests have compiled."""
    gpu_builder.cache_write.cache_clear()
    yield
    gpu_builder.cache_write.cache_clear()


def new_tokens() -> tuple[torch.Tensor, ...]:
    """Key, value, KV cache and slots of five tokens; values have overflowed, two have no slot."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 5, KV_HEADS, HEAD_DIM).half().unbind(0)
    value[1, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    cache = torch.zeros(8, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.float16)
    return key, value, cache, torch.tensor([BLOCK + 3, -1, 2, 8 * BLOCK - 1, -1])


def parents_writes(monkeypatch) -> list[tuple]:
    """The arguments of each write that reaches FLASH_ATTN from now on, without the layer."""
    written: list[tuple] = []
    monkeypatch.setattr(
        cuda.FlashAttentionImpl,
        "do_kv_cache_update",
        lambda impl, layer, *args: written.append(args),
    )
    return written


def test_a_graph_writes_new_tokens_in_one_launch(monkeypatch):
    written = parents_writes(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group, (key, value, cache, slots) = Group(monkeypatch), new_tokens()
    group.impl.do_kv_cache_update(group.layer, key, value, cache, slots)
    assert written == []
    expected = torch.zeros_like(cache)
    for token, (block, place) in {0: (1, 3), 2: (0, 2), 3: (7, BLOCK - 1)}.items():
        expected[block, :, place] = torch.cat([key[token], torch.nan_to_num(value[token])], dim=-1)
    assert torch.equal(cache, expected)


def test_outside_of_a_graph_vllm_writes_new_tokens(monkeypatch):
    written = parents_writes(monkeypatch)
    group, (key, value, cache, slots) = Group(monkeypatch), new_tokens()
    assert group.impl.cache_write is not None
    group.impl.do_kv_cache_update(group.layer, key, value, cache, slots)
    ((k, v, *others),) = written
    assert k is key and others == [cache, slots] and not cache.any()
    assert torch.equal(v, torch.nan_to_num(value))


@pytest.mark.parametrize("why", ["an fp8 cache", "another block size", "no builder"])
def test_what_the_launch_does_not_suit_vllm_writes_in_a_graph(monkeypatch, why):
    written = parents_writes(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group, (key, value, cache, slots) = Group(monkeypatch), new_tokens()
    if why == "an fp8 cache":
        attention = AttentionConfig(HEADS, KV_HEADS, HEAD_DIM, BLOCK, "float16", "float8_e4m3fn")
        group.impl.cache_write = gpu_builder.cache_write(attention, CPU)
        assert group.impl.cache_write is None
        cache = cache.view(torch.uint8)[..., : 2 * HEAD_DIM]
    elif why == "another block size":
        cache = cache.view(4, KV_HEADS, 2 * BLOCK, 2 * HEAD_DIM)
    else:  # a layer that no builder of ours has
        del group.impl.cache_write
    group.impl.do_kv_cache_update(group.layer, key, value, cache, slots)
    assert torch.equal(written[0][1], torch.nan_to_num(value)) and not cache.any()


@pytest.mark.usefixtures("no_writes_kept")
def test_a_triton_that_cannot_compile_the_write_leaves_it_to_vllm(monkeypatch):
    said, tried = [], []
    logger = SimpleNamespace(
        info_once=lambda *_: None, warning_once=lambda text, *args: said.append(text % args)
    )
    monkeypatch.setattr(gpu_builder, "logger", lambda: logger)

    def fail(write, device):
        tried.append(write)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(CacheWrite, "write_nothing", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    written = parents_writes(monkeypatch)
    for _ in range(2):
        group, (key, value, cache, slots) = Group(monkeypatch), new_tokens()
        group.impl.do_kv_cache_update(group.layer, key, value, cache, slots)
    assert len(written) == 2 and torch.equal(written[1][1], torch.nan_to_num(value))
    (sentence,) = said
    assert len(tried) == 1
    assert "(RuntimeError: PassManager::run failed): values are made finite in" in sentence


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_drafts_that_are_rejected_ask_for_no_new_plan(monkeypatch, accepted):
    # Synchronous steps: a row with drafts, then the same row without. Lengths shrink by the
    # rejected drafts.
    group = Group(monkeypatch, num_speculative_tokens=3)
    group.config.scheduler_config.async_scheduling = False
    rng = np.random.default_rng(0)
    lens = np.array([70, 90, 61])
    batch = shared_batch(lens.tolist(), counts=[4, 4, 4])
    group.start(shared_batch([190] * 3))  # blocks for the tokens of later steps
    for _ in range(20):
        counts = np.where(rng.random(3) < 0.5, 4, 1)
        batch = replace(
            batch,
            seq_lens=(lens + counts).astype(np.int32),
            query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )
        group.build(batch)
        lens += 1 + np.minimum(counts - 1, accepted)
    assert STATS.decode_steps == 20
    assert STATS.plans <= 4  # plans change because private parts grow


def planners_warnings(monkeypatch) -> list[str]:
    said: list[str] = []
    logger = SimpleNamespace(warning=said.append, info_once=lambda *_: None)
    monkeypatch.setattr(planner, "logger", lambda: logger)
    return said


@pytest.mark.parametrize(
    ("place", "calls", "failing"),
    [
        # what takes the place of the plan is laid out and loaded as well
        ("layout", (1, 4), (1, 3)),
        ("load", (1, 4), (1, 3)),
        *(("_make_plan", (at, at + 2), (at, at + 2)) for at in range(1, 5)),
    ],
)
def test_a_step_without_its_plan_is_right_and_the_next_shares_again(
    monkeypatch, place, calls, failing
):
    share_whatever_it_costs(monkeypatch)
    said = planners_warnings(monkeypatch)
    group = Group(monkeypatch)
    executor = group.builder.executor
    owner = {
        "layout": executor._kernel,
        "load": executor.workspace.plan,
        # not of every planner: another one may still be compiling in the background
        "_make_plan": group.builder.planner.decode_planner,
    }[place]
    fault = IndexError("planted") if place == "_make_plan" else torch.OutOfMemoryError("planted")
    monkeypatch.setattr(owner, place, failing_at(getattr(owner, place), *calls, error=fault))
    failures = 0
    for step in range(1, 8):
        group.start(batch := shared_batch([60 + step, 70, 80, 61][: 2 + step % 3]))
        before, plans = STATS.shared_steps, STATS.plans
        group.assert_right(batch)
        failures += step in failing
        assert STATS.fallbacks.get(PLANNING_FAILED, 0) == failures
        assert STATS.shared_steps == before + (step not in failing)
        assert STATS.plans == plans + 1
    (line,) = said
    assert f"{type(fault).__name__}: planted" in line


def test_a_plan_is_made_anew_after_sleep(monkeypatch):
    # sleep frees the memory of the plan; without a reset the plan would look valid
    group, batch = planned(monkeypatch, [70, 90])
    arrays = group.builder.executor.workspace.plan.arrays
    for array in arrays.values():
        array.fill_(-1)
    cache = group.layer.kv_cache
    cache.fill_(1.0)
    cache[3:5] = torch.tensor([torch.nan, torch.inf])[:, None, None, None]
    gpu_builder.after_wake_up()
    assert cache.isfinite().all()
    assert (cache == 1.0).sum() == cache.numel() - 2 * cache[0].numel()
    group.assert_right(batch)
    assert STATS.plans == 2


def test_prefill_rows_go_to_flash_attention(group):
    batch = shared_batch([70, 90, 100, 64], counts=[1, 1, 30, 64])
    group.start(batch)
    common = group.common(batch)
    metadata = group.builder.build(0, common)
    assert metadata.num_planned_tokens == 2
    prefill = metadata.prefill_metadata
    assert prefill.num_actual_tokens == 94
    assert prefill.query_start_loc.tolist() == [0, 30, 94]
    assert prefill.seq_lens.tolist() == [100, 64]
    assert prefill.max_query_len == 64
    assert torch.equal(prefill.block_table, common.block_table_tensor[2:])
    assert len(prefill.slot_mapping) == 94


@pytest.fixture
def worth_it(monkeypatch):
    """Share always, and plan new tokens on a context of any length: up to 24 of a request."""
    share_whatever_it_costs(monkeypatch)
    monkeypatch.setattr(first_step, "MIN_NUMBERS", 1)
    monkeypatch.setattr(cuda_metadata, "KERNELS", ("portable",))


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_few_new_tokens_on_a_shared_context_are_planned_with_the_decodes(
    group, monkeypatch, runner
):
    counts = [1, 1, 5, 2, 16]
    batch = shared_batch([70, 90, 61, 55, 66], counts=counts)
    group.start(batch)
    if runner == "V1":
        table = host_tables.RowTable(batch.block_table)
        monkeypatch.setattr(host_tables.HOST_TABLES, "table_of", lambda common: table)
    for steps in (1, 2):
        metadata = group.build(batch)
        assert metadata.prefill_metadata is None
        assert metadata.num_planned_tokens == 25
        assert STATS.plans == STATS.shared_steps == steps  # such a plan is for one step
    out = group.forward(batch, metadata, 25)
    assert relative_error(out, batch.expected()[0]) < 2e-3
    assert STATS.kv_tokens_stock == 2 * sum(batch.seq_lens)
    batch.seq_lens += 1
    group.assert_right(batch.rows(slice(5)))
    assert STATS.plans == 3


def test_images_stay_with_their_requests(monkeypatch):
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    group = Group(monkeypatch)
    batch = shared_batch([70, 90, 80], [1, 60, 10])
    group.start(batch)
    common = group.common(batch)
    common.mm_req_doc_ranges = {0: [(2, 9)], 2: [(72, 76)]}
    parts = []
    monkeypatch.setattr(group.builder, "_build_part", parts.append)
    assert group.builder.build(0, common).num_planned_tokens == 1
    assert [part.mm_req_doc_ranges for part in parts] == [{1: [(72, 76)]}]


@pytest.mark.skipif(not compat.can_combine_backends(), reason="no composite backend here")
def test_image_ranges_are_those_of_a_parts_own_tokens(monkeypatch):
    for module in ("vllm.utils.torch_utils", "vllm.v1.attention.backends.flash_attn"):
        monkeypatch.setattr(f"{module}.PIN_MEMORY", False)
    config = vllm_config(
        model_config={"is_mm_prefix_lm": True}, scheduler_config={"max_num_batched_tokens": 256}
    )
    group = Group(monkeypatch, config=config)
    batch = shared_batch([70, 90, 80], [1, 60, 10])
    group.start(batch)
    common = group.common(batch)
    common.mm_req_doc_ranges = {2: [(72, 76)]}
    prefill = group.builder.build(0, common).prefill_metadata
    ranges = prefill.mm_prefix_query_range_tensor
    assert len(ranges) == 70, "of the tokens in prefill"
    assert (ranges[:, 0] >= 0).nonzero().flatten().tolist() == list(range(62, 67))
    common.mm_req_doc_ranges = None
    assert group.builder.build(0, common).prefill_metadata.mm_prefix_query_range_tensor is None


@pytest.mark.usefixtures("worth_it")
def test_requests_after_one_with_many_new_tokens_go_to_flash_attention(group):
    batch = shared_batch([70, 61, 76, 55], counts=[1, 5, 25, 2])
    metadata = group.started(batch)
    assert metadata.num_planned_tokens == 6
    metadata.rows.fill()
    assert metadata.local_seq_lens.tolist() == [70, 57, 58, 59, 60, 61]
    prefill = metadata.prefill_metadata
    assert prefill.query_start_loc.tolist() == [0, 25, 27]
    assert prefill.seq_lens.tolist() == [76, 55]


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("counts", [[1, 1, 30, 16], [40], [1, 70, 1]], ids=str)
def test_a_step_that_fits_a_full_graph_is_planned_whole(group, counts):
    vars(group.config.compilation_config).update(FULL_GRAPHS)
    batch = shared_batch([70, 90, 61, 66][: len(counts)], counts=counts)
    group.start(batch)
    common = replace(group.common(batch), num_actual_tokens=80)
    metadata = group.builder.build(0, common)
    assert metadata.prefill_metadata is None
    assert metadata.num_planned_tokens == sum(counts)
    out = group.forward(batch, metadata, 80)
    assert relative_error(out[: sum(counts)], batch.expected()[0]) < 2e-3
    assert metadata.kv_table.shape[0] == len(metadata.local_seq_lens) == 80
    assert not metadata.local_seq_lens[sum(counts) :].any()
    # a decode step reads the same buffers: they are what a graph has captured
    decodes = shared_batch([72, 93])
    group.start(decodes)
    later = group.build(decodes)
    assert later.kv_table.data_ptr() == metadata.kv_table.data_ptr()
    assert later.local_seq_lens.data_ptr() == metadata.local_seq_lens.data_ptr()
    assert relative_error(group.forward(decodes, later, 2), decodes.expected()[0]) < 2e-3
    # larger steps are in no graph
    large = replace(common, num_actual_tokens=97)
    assert group.builder.build(0, large).rows is not metadata.rows


@pytest.mark.usefixtures("worth_it")
def test_a_dummy_batch_with_several_new_tokens_is_not_planned(group):
    host_tables.note_batch(group.tables, None)
    metadata = group.builder.build(0, group.common(shared_batch([61, 66], counts=[5, 3])))
    assert metadata.num_planned_tokens == 0
    assert metadata.prefill_metadata.seq_lens.tolist() == [61, 66]


@pytest.mark.usefixtures("worth_it")
def test_padding_after_the_last_request_is_left_to_nobody(group):
    batch = shared_batch([61, 66], counts=[5, 3])
    group.start(batch)
    metadata = group.builder.build(0, replace(group.common(batch), num_actual_tokens=16))
    assert metadata.num_planned_tokens == 8
    assert metadata.prefill_metadata is None
    out = group.forward(batch, metadata, 16)
    assert relative_error(out[:8], batch.expected()[0]) < 2e-3


@pytest.mark.parametrize(
    ("shared", "contexts", "expected"),
    [
        (9, [256, 300, 511], True),  # 16 to 31 blocks of context: all have block 8
        (8, [256, 300, 511], False),
        (5, [128, 130, 511], True),  # two of three
        (5, [128, 300, 511], False),
        (0, [0, 0, 0], False),
    ],
)
def test_new_tokens_are_planned_where_half_of_the_requests_share_a_quarter(
    shared, contexts, expected
):
    table = np.arange(120, dtype=np.int32).reshape(3, 40)
    table[:, :shared] = table[0, :shared]
    new = np.array([2, 5, 3], np.int32)
    starts = np.array([0, 2, 7, 10], np.int32)
    step = first_step.FirstStep(max_new_tokens=5, min_context=0, block_size=16)
    rows = step.rows(starts, np.array(contexts, np.int32) + new, table, np.arange(3))
    assert (rows is not None) == expected
    if rows is not None:
        assert rows.requests.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
        assert rows.later.tolist() == [1, 0, 4, 3, 2, 1, 0, 2, 1, 0]


REASONS = ["alone", "room", "batch_invariant", "drafts", "short contexts", "portable"]


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("case", REASONS)
def test_new_tokens_that_are_not_planned_go_to_flash_attention(monkeypatch, case):
    batch = shared_batch([70, 61, 66], counts=[1, 5, 5])
    if case == "alone":
        batch.block_table[1:, :3] = [[121, 122, 123], [124, 125, 126]]
    elif case == "room":
        monkeypatch.setattr(first_step, "MAX_ROWS", 5)
    elif case == "batch_invariant":
        set_variables(monkeypatch, DIVIDER=case)
    elif case == "short contexts":
        monkeypatch.setattr(first_step, "MIN_NUMBERS", 256 * (56 + 61 + 1))
    elif case == "portable":
        monkeypatch.setattr(cuda_metadata, "KERNELS", ("hopper",))
    group = Group(monkeypatch, num_speculative_tokens=3 if case == "drafts" else 0)
    metadata = group.started(batch)
    assert metadata.num_planned_tokens == 1
    assert metadata.prefill_metadata.seq_lens.tolist() == [61, 66]


def test_drafted_tokens_are_decoded_in_causal_order(monkeypatch):
    group = Group(monkeypatch, num_speculative_tokens=3)
    assert group.builder.reorder_batch_threshold == 4
    batch = shared_batch([70, 90, 61], counts=[4, 4, 2])
    metadata = group.started(batch)
    assert metadata.prefill_metadata is None
    out = group.forward(batch, metadata, 10)
    assert relative_error(out, batch.expected()[0]) < 2e-3


def test_lengths_that_assumed_too_many_drafts_are_still_right(monkeypatch):
    # the host counts drafts as accepted; up to 6 tokens of two steps may be rejected later
    group = Group(monkeypatch, num_speculative_tokens=3)
    batch = shared_batch([64, 64 + 6], counts=[4, 4])
    group.start(batch)
    common = group.common(batch)
    common.seq_lens = torch.tensor([64 - 6, 64], dtype=torch.int32)
    metadata = group.builder.build(0, common)
    batch.seq_lens -= 6
    assert relative_error(group.forward(batch, metadata, 8), batch.expected()[0]) < 2e-3


SINKS = torch.tensor([2.0, -1.0, 0.5, 4.0])
SLOPES = [0.5, 0.2, 0.1, 0.05]
#: name -> arguments of the layer, expected extras
EXTRAS = {
    "sinks": ({"sinks": SINKS.to(torch.float16)}, LayerExtras(sinks=SINKS)),
    "softcap": ({"logits_soft_cap": 2.5}, LayerExtras(soft_cap=2.5)),
    "alibi": ({"alibi_slopes": SLOPES}, LayerExtras(alibi_slopes=torch.tensor(SLOPES))),
    "fp8": ({"kv_cache_dtype": "fp8"}, LayerExtras(q_scale=0.8, k_scale=1.3, v_scale=0.7)),
    "fp8, scales of heads": (
        {"kv_cache_dtype": "fp8_e4m3"},
        LayerExtras(
            q_scale=torch.tensor([0.8, 1.1]),
            k_scale=torch.tensor([1.3, 0.4]),
            v_scale=torch.tensor([0.7, 1.9]),
        ),
    ),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_layer_with_extras_is_served(monkeypatch, name):
    let_flash_attention_serve_extras(monkeypatch)
    share_whatever_it_costs(monkeypatch)
    changes, extras = EXTRAS[name]
    if name == "alibi":  # no engine on a GPU has run it
        assert not Group(monkeypatch, **changes).impl.shares
        assert list(STATS.fallbacks) == ["ALiBi slopes"]
        set_variables(monkeypatch, EXPERIMENTAL=name)
    batch, spec = shared_batch([70, 90, 61, 55]), FullAttentionSpec(**SPEC)
    is_fp8 = name.startswith("fp8")
    if is_fp8:
        batch, spec = batch.as_type(FP8, FP8), FP8_SPEC
    group = Group(monkeypatch, spec=spec, **changes)
    assert group.impl.shares
    for letter in "qkv":
        value = getattr(extras, f"{letter}_scale")
        scale = torch.as_tensor(1.0 if value is None else value).clone()
        setattr(group.layer, f"_{letter}_scale", scale)
    metadata = group.started(batch)
    out = group.forward(batch, metadata, len(batch.q))
    wanted, _ = batch.expected(extras)
    assert relative_error(out, wanted) < 2e-3
    assert STATS.shared_steps == 1
    if is_fp8:  # a changed scale holds from the next call on
        group.layer._v_scale.mul_(2)
        again = group.forward(batch, metadata, len(batch.q))
        assert relative_error(again, 2 * wanted) < 2e-3
        group.layer._k_scale = torch.tensor(torch.nan)  # weights that are loaded anew
        with pytest.raises(PrefixShareError, match="k_scale must be positive and finite"):
            group.forward(batch, metadata, len(batch.q))


def quantised_group(monkeypatch, config=None, **scales: object) -> tuple[Group, PagedBatch]:
    """A layer with an fp8 KV cache, and a batch for it."""
    let_flash_attention_serve_extras(monkeypatch)
    takes = "supports_kv_cache_dtype"
    monkeypatch.setattr(flash_attn.FlashAttentionBackend, takes, lambda dtype: True)
    batch = shared_batch([70, 90]).as_type(FP8, FP8)
    group = Group(monkeypatch, spec=FP8_SPEC, config=config, kv_cache_dtype="fp8", scales=scales)
    assert group.impl.shares
    group.start(batch)
    return group, batch


@pytest.mark.parametrize("letter", "qkv")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0, [1.0, torch.nan]])
def test_scales_that_are_no_numbers_are_refused_at_start_up(monkeypatch, letter, bad):
    with pytest.raises(PrefixShareError, match=f"{letter}_scale must be positive and finite"):
        quantised_group(monkeypatch, **{letter: bad})


@pytest.mark.parametrize("letter", "qkv")
def test_scales_that_are_loaded_anew_are_checked_before_a_graph_replays(monkeypatch, letter):
    group, batch = quantised_group(monkeypatch)
    common = group.common(batch)
    group.builder.build(0, common)
    scale = getattr(group.layer, f"_{letter}_scale")
    # as vLLM reloads weights: into the tensors that graphs have captured
    scale.fill_(2.0)
    group.impl.process_weights_after_loading(torch.float16)
    group.builder.build(0, common)
    scale.fill_(torch.inf)
    group.impl.process_weights_after_loading(torch.float16)
    for _ in range(2):
        with pytest.raises(PrefixShareError, match=f"{letter}_scale must be positive and finite"):
            group.builder.build(0, common)


@pytest.mark.parametrize("letter", "qkv")
def test_another_tensor_of_a_scale_takes_its_place(monkeypatch, letter):
    group, batch = quantised_group(monkeypatch)
    metadata = group.build(batch)
    out = group.forward(batch, metadata, len(batch.q))
    setattr(group.layer, f"_{letter}_scale", torch.tensor(2.0))
    again = group.forward(batch, metadata, len(batch.q))
    expected = 2 * out if letter == "v" else group.forward(batch, metadata, len(batch.q))
    assert torch.equal(again, expected)
    assert not torch.equal(again, out)
    setattr(group.layer, f"_{letter}_scale", torch.tensor(torch.nan))
    with pytest.raises(PrefixShareError, match=f"{letter}_scale must be positive and finite"):
        group.forward(batch, metadata, len(batch.q))


def test_a_quantised_cache_is_cleaned_after_sleep(monkeypatch):
    group, _ = planned(monkeypatch, [70, 90])
    layer = group.layer
    layer.kv_cache = torch.arange(256, dtype=torch.uint8).view(2, 2, 2, 32)
    gpu_builder.after_wake_up()
    numbers = layer.kv_cache.view(torch.float8_e4m3fn).float()
    assert numbers.isfinite().all()
    assert (layer.kv_cache.flatten() == torch.arange(256)).sum() == 254


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi_slopes": [1.0] * HEADS}, "ALiBi slopes"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
    ],
)
def test_a_layer_that_is_not_served_keeps_flash_attention(monkeypatch, changes, reason):
    group = Group(monkeypatch, **changes)
    assert not group.impl.shares
    batch = shared_batch([70, 90])
    metadata = group.build(batch)
    assert_of_flash_attention(metadata)
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match=reason):
        Group(monkeypatch, **changes)


@pytest.fixture
def windows(monkeypatch):
    """Serve sliding windows from 64 tokens on."""
    monkeypatch.setattr(measured, "cost_model", estimated_cost)
    monkeypatch.setattr(measured, "min_window", lambda *arguments: 64)
    measured.shortest_window.cache_clear()
    yield
    measured.shortest_window.cache_clear()


@pytest.mark.parametrize(("kernel", "shortest"), [("hopper", 1), ("portable", 64)])
def test_only_the_hopper_kernel_serves_every_window(monkeypatch, windows, kernel, shortest):
    serving = SimpleNamespace(
        name=kernel, limits=SimpleNamespace(max_tile_requests=8, geometry=None)
    )
    monkeypatch.setattr(measured, "kernels_that_may_serve", lambda *arguments: [serving])
    monkeypatch.setattr(measured, "this_device", lambda: None)
    assert measured.shortest_window(AttentionConfig(16, 4, 64, 16)) == shortest


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # rows that see nothing of a run
def test_a_sliding_window_moves_while_its_plan_holds(monkeypatch, windows):
    # the windows begin in the document, before it, and after it
    window, lens = 70, [101, 105, 60, 150, 99, 100, 102, 103]
    batch = shared_batch(lens)
    group = Group(
        monkeypatch,
        spec=SlidingWindowSpec(**SPEC, sliding_window=window),
        sliding_window=window,
    )
    assert group.impl.shares
    group.start(batch)
    held = batch.block_table.copy()
    plans = []
    for _ in range(4):
        # as vLLM does, in the device's table only
        gone = np.maximum(batch.seq_lens - window, 0) // BLOCK
        batch.block_table = np.where(np.arange(held.shape[1]) < gone[:, None], 0, held)
        metadata = group.build(batch)
        out = group.forward(batch, metadata, len(batch.q))
        wanted, _ = batch.expected(sliding_window=window)
        assert relative_error(out, wanted) < 2e-3
        plans.append(group.builder.planner.current)
        batch.seq_lens = batch.seq_lens + 3
    assert plans[0] is plans[-1] and plans[0].shared_rows.size >= 2
    assert STATS.as_dict()["kv_tokens_stock"] == sum(
        min(n + 3 * step, window) for n in lens for step in range(4)
    )


def doctor_says(window: int, hybrid: bool = False, drafts: int = 0) -> str | None:
    """Why layers with this window would not be served, by a model's ``config.json``."""
    other = "linear_attention" if hybrid else "full_attention"
    config = {
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "torch_dtype": "float16",
        "sliding_window": window,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", other],
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        kinds = in_engine(layer_kinds(Path(folder)), "auto", gpus=1, drafts=drafts)
    machine = doctor.Machine(kinds, query_len=1 + drafts, on_cpu=False)
    doctor.layers(machine)
    return machine.served[0]["falls_back"]


@pytest.mark.parametrize(
    ("drafts", "hybrid", "window", "reason"),
    [
        (2, False, 128, "drafts with a sliding window"),
        (0, True, 128, "a sliding window next to linear attention"),
        (0, False, 63, "a sliding window of 63 tokens where sharing pays from 64 tokens on"),
    ],
)
def test_a_window_that_is_not_served_keeps_flash_attention(
    monkeypatch, windows, drafts, hybrid, window, reason
):
    config = vllm_config(drafts, model_config={"is_hybrid": hybrid})
    spec = SlidingWindowSpec(**SPEC, sliding_window=window)

    def group() -> Group:
        return Group(monkeypatch, spec=spec, config=config, sliding_window=window)

    assert not group().impl.shares and list(STATS.as_dict()["fallbacks"]) == [reason]
    assert doctor_says(window, hybrid, drafts) == reason and doctor_says(64) is None
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match=reason):
        group()


def test_a_group_of_another_kind_of_cache_keeps_flash_attention(monkeypatch):
    group = Group(monkeypatch, spec=SlidingWindowSpec(**SPEC, sliding_window=64))
    batch = shared_batch([70, 90])
    metadata = group.build(batch)
    assert_of_flash_attention(metadata)
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match="a KV cache of SlidingWindowSpec"):
        Group(monkeypatch, spec=SlidingWindowSpec(**SPEC, sliding_window=64))


#: What vLLM adds to the one group of all layers where its hybrid KV cache manager is off, as by
#: default for Llama 4: all blocks are kept for all tokens.
OTHERS_IN_GROUP = [{"sliding_window": 64}, {"attention_chunk_size": 64}]


@pytest.mark.parametrize("others", OTHERS_IN_GROUP)
def test_full_attention_in_one_group_with_windows_or_chunks_is_served(monkeypatch, others):
    share_whatever_it_costs(monkeypatch)
    group = Group(monkeypatch, spec=FullAttentionSpec(**SPEC, **others))
    batch = shared_batch([70, 90, 100, 64])
    group.start(batch)
    group.assert_right(batch)
    assert group.builder.planner.current.shared_rows.size == 4 and not STATS.as_dict()["fallbacks"]


def test_windows_in_one_group_with_full_attention_keep_flash_attention(monkeypatch, windows):
    full = Group(monkeypatch)
    own = SlidingWindowSpec(**SPEC, sliding_window=70)
    windowed = Group(monkeypatch, spec=own, sliding_window=70)
    assert windowed.impl.shares
    full.layers["windowed"] = windowed.layer
    spec = FullAttentionSpec(**SPEC, sliding_window=70)
    for names, served in ((["layer", "windowed"], True), (["windowed"], False)):
        windowed.impl.shares = True
        builder = full.builder_for(spec, names)
        assert (builder.executor is not None) == served and not builder.all_layers
        assert not served or builder.planner.window is None
        assert full.impl.shares and not windowed.impl.shares
    assert list(STATS.as_dict()["fallbacks"]) == ["a sliding window"]
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match="a sliding window"):
        Group(monkeypatch, spec=spec, sliding_window=70)


def test_a_quantised_cache_beside_caches_of_16_bits_is_served(monkeypatch):
    skipped = ["sliding_window"]
    config = vllm_config(cache_config={"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": skipped})
    assert Engine.of_config(config).mixed_caches
    quantised_group(monkeypatch, config)
    assert not STATS.as_dict()["fallbacks"]


def mixed_group(monkeypatch) -> Group:
    """Full attention in one group with a layer that has a window."""
    group, windowed = Group(monkeypatch), Group(monkeypatch, sliding_window=70)
    group.layers["windowed"] = windowed.layer
    group.builder = group.builder_for(FullAttentionSpec(**SPEC, sliding_window=70))
    return group


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("kind", ["full", "windows", "both"])
def test_prefills_are_scheduled_for_their_layers_window(monkeypatch, windows, kind, captures):
    made = []

    def schedule(window_size, **kwargs):
        made.append(window_size)
        return torch.zeros(1, dtype=torch.int32)

    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 3)
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", schedule, raising=False)
    if kind == "both":
        group = mixed_group(monkeypatch)
    else:
        window = 70 if kind == "windows" else None
        spec = SlidingWindowSpec(**SPEC, sliding_window=window) if window else None
        group = Group(monkeypatch, spec=spec, sliding_window=window)
    if captures:  # a graph's batch has no prefills, and FLASH_ATTN builds for the first time
        group.builder.build_for_cudagraph_capture(group.common(shared_batch([70, 90])))
        assert not made
    batch = shared_batch([70, 90, 100], counts=[1, 1, 30])
    group.start(batch)
    assert group.build(batch).prefill_metadata is not None
    # FlashAttention makes those for windows itself when it is launched
    assert made == ([(-1, -1)] if kind == "full" else [])


def test_models_do_not_write_the_cache_themselves():
    # they would skip do_kv_cache_update, and so what makes values finite
    assert not cuda.PrefixShareCUDABackend.supports_kv_cache_update_bypass


def test_windows_beside_caches_of_another_type_keep_flash_attention(monkeypatch, windows):
    spec = SlidingWindowSpec(**SPEC, sliding_window=70)

    def shares(cache: str) -> bool:
        config = vllm_config(
            cache_config={"cache_dtype": cache, "kv_cache_dtype_skip_layers": ["0"]}
        )
        return Group(monkeypatch, spec=spec, config=config, sliding_window=70).impl.shares

    assert shares("auto"), "nothing is quantised"
    assert not shares("fp8")
    fallbacks = STATS.as_dict()["fallbacks"]
    assert list(fallbacks) == ["a sliding window next to KV caches of another type"]
    assert Group(monkeypatch).impl.shares


@pytest.mark.parametrize(
    ("page_bytes", "kernel"),
    # a token takes 512 bytes, a page without padding 8192
    [(None, "auto"), (8192 + 512, "auto"), (8192 + 256, "portable")],
)
def test_pages_that_are_no_whole_tokens_apart_are_left_to_the_portable_kernel(page_bytes, kernel):
    spec = FullAttentionSpec(**SPEC, page_size_padded=page_bytes)
    assert gpu_builder.kernel_for(spec) == kernel


def test_a_group_with_block_tables_of_its_own_keeps_flash_attention(monkeypatch):
    batch = shared_batch([70, 90])
    group = Group(monkeypatch)
    common = group.common(batch)
    common.block_table_tensor = common.block_table_tensor.clone()
    if PATCHED:
        common.block_table_cpu = None
    metadata = group.builder.build_for_cudagraph_capture(common)
    assert_of_flash_attention(metadata)
    # the choice is final: CUDA graphs hold the other kernel now
    metadata = group.build(batch)
    assert_of_flash_attention(metadata)

    group = Group(monkeypatch)
    group.builder.executor.workspace.plan.captured = True
    with pytest.raises(PrefixShareError, match="does not know a block table that it knew"):
        group.builder.build(0, common)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "metadata of Derived"), ({"attention_chunk_size": 64}, "chunked local attention")],
)
def test_a_builder_made_from_ours_keeps_flash_attention(monkeypatch, fields, reason):
    # vLLM derives some builders, which change the metadata
    class Derived(cuda_metadata.PrefixShareMetadataBuilder):
        pass

    group = Group(monkeypatch)
    group.builder_cls = Derived
    builder = group.builder_for(FullAttentionSpec(**SPEC, **fields))
    metadata = builder.build(0, group.common(shared_batch([70, 90])))
    assert_of_flash_attention(metadata)
    assert list(STATS.as_dict()["fallbacks"]) == [reason]


def test_layers_of_a_draft_model_keep_flash_attention(monkeypatch):
    from vllm.compilation.backends import set_model_tag

    with set_model_tag("eagle_head"):
        assert not Group(monkeypatch, num_speculative_tokens=2).impl.shares
    assert Group(monkeypatch, num_speculative_tokens=2).impl.shares


def test_without_lengths_on_the_host_nothing_is_shared(group):
    batch = shared_batch([70, 90, 61])
    group.start(batch)
    common = group.common(batch)
    common.seq_lens_cpu_upper_bound = None
    for _ in range(2):
        metadata = group.builder.build(0, common)
        assert relative_error(group.forward(batch, metadata, 3), batch.expected()[0]) < 2e-3
    assert STATS.plans == 1
    assert STATS.shared_steps == 0


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("parallel_config", {"use_ubatching": True}, "micro-batches"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("model_config", {"is_diffusion": True}, "diffusion decoding"),
    ],
)
def test_a_configuration_that_is_not_served_keeps_flash_attention(
    monkeypatch, part, changes, reason
):
    config = vllm_config(**{part: changes})
    layer = LayerSpec(128, "bfloat16", engine=Engine.of_config(config))
    assert refusal(layer, Platform(CUDA_DTYPES)) == reason


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 2, 3]], ids=str)
def test_a_graph_of_mixed_steps_holds_every_token(group, counts):
    vars(group.config.compilation_config).update(FULL_GRAPHS)
    batch = shared_batch([70, 90, 61], counts=counts)
    metadata = group.builder.build_for_cudagraph_capture(group.common(batch))
    assert metadata.num_planned_tokens == len(metadata.local_seq_lens) == sum(counts)
    assert metadata.prefill_metadata is None


#: what keeps mixed steps out of FULL graphs: a field of the configuration and its value
NOT_MIXED = {
    "the V1 model runner": ("use_v2_model_runner", False),
    "speculative decoding": (
        "speculative_config", SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
    ),
    "decode context parallelism": ("parallel_config.decode_context_parallel_size", 2),
    "prefill context parallelism": ("parallel_config.prefill_context_parallel_size", 2),
    "micro-batches": ("parallel_config.use_ubatching", True),
    "a KV connector": ("kv_transfer_config", object()),
    "multi-head latent attention": ("model_config.use_mla", True),
    "a multimodal model": ("model_config.is_multimodal_model", True),
    "diffusion decoding": ("model_config.is_diffusion", True),
    "chunked attention": ("model_config.attention_chunk_size", 8192),
    "another FlashAttention": ("attention_config.flash_attn_version", 2),
    "hybrid": ("model_config.is_hybrid", True),
    "encoder-decoder": ("model_config.is_encoder_decoder", True),
    "sliding windows": ("model_config.hf_text_config.sliding_window", 128),
}  # fmt: skip


@pytest.mark.parametrize("reason", [None, *NOT_MIXED])
def test_mixed_steps_run_in_full_graphs_unless_something_forbids_it(monkeypatch, reason):
    monkeypatch.setattr("vllm.platforms.current_platform.is_device_capability", lambda _: True)
    monkeypatch.setattr(mixed_graphs, "vllm_version", lambda: mixed_graphs.FIRST_RELEASE)
    config = vllm_config()
    config.use_v2_model_runner, config.kv_transfer_config = True, None
    model = config.model_config
    model.use_mla = model.is_encoder_decoder = model.is_multimodal_model = False
    model.attention_chunk_size = None
    model.hf_text_config = SimpleNamespace(sliding_window=None)
    if reason is not None:
        path, value = NOT_MIXED[reason]
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(config) if owner else config, name, value)
    assert (reason or "") in (mixed_graphs.mixed_graphs_refusal(config) or "")
    support = cuda_metadata.PrefixShareMetadataBuilder.get_cudagraph_support(config, None)
    mixed_graphs.choose_mixed_graphs(config, frozenset())
    if reason is None:
        assert support is AttentionCGSupport.ALWAYS
        assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL
        assert mixed_graphs.graph_rows(config) == 1024
    else:
        assert support is AttentionCGSupport.UNIFORM_BATCH
        assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
        assert mixed_graphs.graph_rows(config) == 0


@pytest.mark.parametrize(
    ("named", "mode", "largest"),
    [
        ({"cudagraph_mode"}, CUDAGraphMode.FULL_AND_PIECEWISE, MAX_REQS),
        ({"cudagraph_capture_sizes"}, CUDAGraphMode.FULL, MAX_REQS),
        (set(), CUDAGraphMode.FULL, 1024),
    ],
    ids=str,
)
def test_what_the_user_has_chosen_of_graphs_is_kept(monkeypatch, named, mode, largest):
    monkeypatch.setattr(mixed_graphs, "mixed_graphs_refusal", lambda config: None)
    args = SimpleNamespace(compilation_config=SimpleNamespace(**dict.fromkeys(named, 8)))
    assert mixed_graphs.named_by_user(args) == named
    config = vllm_config()
    mixed_graphs.choose_mixed_graphs(config, frozenset(named))
    compilation = config.compilation_config
    assert compilation.cudagraph_mode is mode
    sizes = compilation.cudagraph_capture_sizes
    assert max(sizes) == compilation.max_cudagraph_capture_size == largest
    assert sizes == sorted(set(sizes))
    if not named:
        assert set(np.diff(sizes[1:])) == {16, 32} and {512, 544} < set(sizes)


@pytest.mark.parametrize(
    ("given", "maximum", "added"),
    [
        ([8, 496], 8192, [512, 544]),
        ([8, 520], 600, [544, 576]),
        ([8], 20, [16]),
        ([1024], 2048, []),
    ],
    ids=str,
)
def test_graph_sizes_end_at_the_maximum_number_of_tokens_of_a_step(
    monkeypatch, given, maximum, added
):
    monkeypatch.setattr(mixed_graphs, "mixed_graphs_refusal", lambda config: None)
    config = vllm_config(
        scheduler_config={"max_num_batched_tokens": maximum},
        compilation_config={"cudagraph_capture_sizes": given},
    )
    mixed_graphs.choose_mixed_graphs(config, frozenset())
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert sizes[len(given) :][:2] == added and max(sizes) <= maximum


@pytest.mark.parametrize("sizes", [None, [], [8, 4096]], ids=str)
def test_a_plan_may_have_as_many_rows_as_a_graph(monkeypatch, sizes):
    reserved = []
    reserve = GpuExecutor.reserve_for
    monkeypatch.setattr(
        GpuExecutor, "reserve_for", lambda self, n, *a: reserved.append(n) or reserve(self, n, *a)
    )
    config = vllm_config(compilation_config={"cudagraph_capture_sizes": sizes})
    Group(monkeypatch, config=config)
    assert reserved == [max(sizes) if sizes else first_step.MAX_ROWS]


@pytest.mark.usefixtures("worth_it")
def test_a_builder_that_leaves_a_part_to_flash_attention_serves_no_mixed_graph(monkeypatch):
    monkeypatch.setattr(cuda_metadata, "mixed_graphs_refusal", lambda config: None)
    group = Group(monkeypatch)
    of_class = cuda_metadata.PrefixShareMetadataBuilder.get_cudagraph_support
    assert group.builder.get_cudagraph_support(group.config, None) == of_class(group.config, None)
    assert of_class(group.config, None) is AttentionCGSupport.ALWAYS
    monkeypatch.setattr(first_step, "KERNELS", ())
    monkeypatch.setattr(cuda_metadata, "KERNELS", ())
    other = Group(monkeypatch).builder
    assert other.get_cudagraph_support(group.config, None) is AttentionCGSupport.UNIFORM_BATCH


def test_non_causal_batches_are_refused(group):
    batch = shared_batch([70, 90])
    common = group.common(batch)
    common.causal = False
    with pytest.raises(PrefixShareError, match="non-causal"):
        group.builder.build(0, common)
