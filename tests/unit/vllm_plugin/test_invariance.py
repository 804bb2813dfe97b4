"""Batch invariance without a GPU: what VLLM_BATCH_INVARIANT=1 changes in the backend and its hooks.

Our portable kernel runs under Triton's interpreter. FlashAttention does not run here: a stand-in
marks the rows that it is asked for.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests.support.gpu_backend import (
    BLOCK,
    MAX_REQS,
    WITHOUT_GPU,
    Group,
    interpret,
    shared_batch,
    vllm_config,
)
from tests.support.paged_batches import relative_error
from tests.support.variables import set_variables
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance, register
from vllm_prefixshare.vllm_plugin.backends import common
from vllm_prefixshare.vllm_plugin.backends.cuda import backend as cuda
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine, LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CUDA_DTYPES, GPU_EXTRAS, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.hooks import runners, selection
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import gpu_builder

pytestmark = WITHOUT_GPU
PIECE = 32


@pytest.fixture(autouse=True)
def _invariant(monkeypatch):
    """Batch invariance, with pieces of two blocks."""
    register.register()
    interpret(monkeypatch, PortableKernel)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(invariance, "MIN_PIECE", PIECE)
    monkeypatch.setattr(invariance, "KV_TILE", PIECE)
    settings.cache_clear()
    yield
    gpu_builder._BUILDERS.clear()


def test_there_is_no_room_for_the_pieces_of_rows_that_are_never_planned(monkeypatch):
    """Each would have room for all pieces of the longest request, in every layer's buffers."""
    reserved, reserve = [], common.reserve_partials

    def note(*args):
        partials = reserve(*args)
        reserved.append(len(partials.lse))
        return partials

    monkeypatch.setattr(common, "reserve_partials", note)
    group = Group(monkeypatch)
    assert group.builder._first_step is None and group.impl.shares
    assert reserved == [len(group.impl.partials.lse)]


def test_a_larger_engine_in_one_process_gets_partial_results_of_its_own(monkeypatch):
    first = Group(monkeypatch)
    kept = first.impl.partials
    kept.captured = True  # by its graphs, which read that memory
    assert Group(monkeypatch).impl.partials is kept
    room = len(kept.lse)
    several = vllm_config()
    several.scheduler_config.max_num_seqs *= 64
    several.cache_config.num_gpu_blocks *= 64
    larger = Group(monkeypatch, config=several)
    assert larger.impl.partials is not kept and len(larger.impl.partials.lse) > room
    assert first.impl.partials is kept and len(kept.lse) == room


def cuts_of(plan: DecodePlan, row: int) -> list[tuple[int, int]]:
    """Start and end of the runs of a request, in the order in which its results are merged."""
    found = []
    for tile in range(plan.num_tiles):
        slots = slice(*plan.tile_req_indptr[tile : tile + 2])
        readers = plan.tile_req_indices[slots].tolist()
        if row in readers:
            place = int(plan.partial_indices[slots][readers.index(row)])
            for run in range(*plan.tile_run_indptr[tile : tile + 2]):
                found.append((place, int(plan.run_kv_start[run]), int(plan.run_kv_end[run])))
    return [cut[1:] for cut in sorted(found)]


def test_a_request_has_the_same_plan_and_the_same_bits_in_every_batch(monkeypatch):
    lens = [70, 90, 61, 128, 33, 20]
    whole = shared_batch(lens)
    cuts: dict[int, list[list[tuple[int, int]]]] = {i: [] for i in range(len(lens))}
    outs: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(lens))}
    shared = 0
    for rows in ([0], [3], [0, 1, 2, 3, 4, 5], [5, 3, 0], [1, 2, 4, 5, 0]):
        group = Group(monkeypatch)
        assert group.builder.planner.decode_planner.config.kv_chunk_size == PIECE
        batch = whole.rows(rows)
        metadata = group.started(batch)
        out = group.forward(batch, metadata, len(rows))
        shared += len(group.builder.planner.current.shared_rows)
        for row, i in enumerate(rows):
            cuts[i].append(cuts_of(group.builder.planner.current, row))
            outs[i].append(out[row])
    assert shared >= 8
    for i, length in enumerate(lens):
        starts = list(range(0, length, PIECE))
        assert cuts[i] == [[*zip(starts, [*starts[1:], -1], strict=True)]] * len(cuts[i])
        assert all(torch.equal(x, outs[i][0]) for x in outs[i])


def test_growing_requests_are_planned_anew_where_one_reaches_its_next_piece(monkeypatch):
    group = Group(monkeypatch)
    batch = shared_batch([61, 94])
    group.start(shared_batch([190, 190]))
    plans = []
    for _ in range(6):
        group.assert_right(batch)
        plans.append(STATS.plans)
        batch.seq_lens += 1
    # 94 -> 97 and 61 -> 65 begin pieces
    assert plans == [1] * 3 + [2] + [3] * 2


def test_the_room_that_is_reserved_holds_every_plan(monkeypatch):
    group = Group(monkeypatch)
    room = group.builder.executor._capacity
    assert room.max_partials >= MAX_REQS * 12 * BLOCK // PIECE
    batch = shared_batch([190] * MAX_REQS)
    batch.block_table[:, 3:] = np.arange(1, 9 * MAX_REQS + 1).reshape(-1, 9)
    group.started(batch)
    assert STATS.plans == 1 and not STATS.fallbacks
    assert not group.builder.planner.decode_planner.counters.fallbacks


def marked_by_flash_attention(monkeypatch) -> list[object]:
    """Replace FLASH_ATTN's forward by one that writes 7; returns the metadata of its calls."""
    calls: list[object] = []

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        assert len(query) == len(output) == metadata.num_actual_tokens
        calls.append(metadata)
        return output.fill_(7)

    monkeypatch.setattr(cuda.FlashAttentionImpl, "forward", forward)
    return calls


@pytest.mark.parametrize("mixed", [False, True])
def test_a_prompt_token_that_comes_alone_runs_in_flash_attention(monkeypatch, mixed):
    calls = marked_by_flash_attention(monkeypatch)
    group = Group(monkeypatch)
    lens, counts = [70, 90, 61, 55], [1, 1, 1, 1]
    if mixed:
        lens, counts = [*lens, 100], [*counts, 30]
    batch = shared_batch(lens, counts)
    group.start(batch)
    common = group.common(batch)
    common.is_prefilling = torch.tensor([False, True, False, True] + [True] * mixed)
    metadata = group.builder.build(0, common)
    single = metadata.single_prefills
    assert metadata.single_rows.tolist() == [1, 3]
    assert single.seq_lens.tolist() == [90, 55] and single.max_query_len == 1
    assert single.query_start_loc.tolist() == [0, 1, 2]
    assert torch.equal(single.block_table, common.block_table_tensor[[1, 3]])
    out = group.forward(batch, metadata, len(batch.q))
    by_flash_attention = (out == 7).flatten(1).all(dim=1)
    assert by_flash_attention.tolist() == [False, True, False, True] + [True] * 30 * mixed
    decodes = batch.rows([0, 2])
    assert relative_error(out[[0, 2]], decodes.expected()[0]) < 2e-3
    assert len(calls) == 1 + mixed
    common.is_prefilling = torch.tensor([False] * 4 + [True] * mixed)
    assert group.builder.build(0, common).single_prefills is None


@pytest.mark.parametrize(
    ("tokens", "ranks", "reason"),
    [
        (0, 1, None),
        (3, 1, "drafts under batch invariance"),
        (0, 2, "decode context parallelism under batch invariance"),
    ],
)
def test_what_is_not_served_with_batch_invariance(monkeypatch, tokens, ranks, reason):
    config = vllm_config(tokens)
    config.parallel_config.decode_context_parallel_size = ranks
    layer = LayerSpec(128, "bfloat16", engine=Engine.of_config(config))
    gpu = Platform(CUDA_DTYPES, GPU_EXTRAS)
    assert refusal(layer, gpu) == reason
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert refusal(layer, gpu) is None


def test_batch_invariance_is_served_except_for_latents():
    layer = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16,
        use_batch_invariant=True,
    )  # fmt: skip
    assert invariance.is_possible()
    gpu = Platform(CUDA_DTYPES, GPU_EXTRAS)
    assert refusal(LayerSpec.of_selector(layer), gpu) is None
    without = Platform(CUDA_DTYPES, GPU_EXTRAS - {"invariance"})
    assert refusal(LayerSpec.of_selector(layer), without) == "batch invariance"
    latent = layer._replace(use_mla=True, head_size=576)
    assert refusal(LayerSpec.of_selector(latent), gpu) == "batch invariance"


@pytest.mark.parametrize("divider", ["auto", "batch_invariant", "flashforge"])
def test_another_divider_is_refused(monkeypatch, divider):
    set_variables(monkeypatch, DIVIDER=divider)
    if divider != "flashforge":
        return selection.check_settings()
    with pytest.raises(PrefixShareError, match="needs the divider batch_invariant: unset"):
        selection.check_settings()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    return selection.check_settings()


@pytest.mark.parametrize(
    ("longest", "piece", "pieces"), [(192, 512, 1), (32768, 512, 64), (131072, 2048, 64)]
)
def test_pieces_get_longer_where_requests_may_be_long(monkeypatch, longest, piece, pieces):
    monkeypatch.setattr(invariance, "MIN_PIECE", 512)
    monkeypatch.setattr(invariance, "KV_TILE", 128)
    config = vllm_config()
    config.model_config.max_model_len = longest
    assert invariance.piece_tokens(config) == piece
    assert invariance.piece_limits(config, 16) == (pieces, 120 * 16 // piece)
    config.cache_config.num_gpu_blocks = None
    assert invariance.piece_limits(config, 16) == (pieces, MAX_REQS * pieces)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert invariance.piece_limits(config, 16) is None


class Runner:
    """What the hooks read of a V1 runner, and of a V2 runner."""

    def __init__(self, computed: list[int], prompts: list[int]) -> None:
        self.input_batch = SimpleNamespace(
            num_computed_tokens_cpu=np.array([*computed, 0]),
            num_prompt_tokens=np.array([*prompts, 9]),
        )
        self.has_prefill = computed[-1] < prompts[-1]

    def _determine_batch_execution_and_padding(self, num_reqs, force_uniform_decode=None):
        return force_uniform_decode

    def gather_batch_req_state(self, scheduler_output, dummy_run):
        return None if dummy_run else SimpleNamespace(has_prefill=self.has_prefill), 1


@pytest.mark.parametrize("served", [False, True])
def test_no_graph_of_decodes_is_chosen_for_prompt_tokens(monkeypatch, served):
    class Hooked(Runner):
        _determine_batch_execution_and_padding = Runner._determine_batch_execution_and_padding
        gather_batch_req_state = Runner.gather_batch_req_state

    module = SimpleNamespace(GPUModelRunner=Hooked)
    runners.hook_v1_graph_choice(module)
    runners.hook_v2_graph_choice(module)
    group = Group(monkeypatch) if served else None
    assert gpu_builder.is_invariant() == (group is not None)
    decodes, mixed = Hooked([40, 30], [40, 20]), Hooked([40, 19], [40, 20])
    choose = "_determine_batch_execution_and_padding"
    assert getattr(decodes, choose)(num_reqs=2) is None
    assert getattr(mixed, choose)(num_reqs=2) is (False if served else None)
    assert getattr(mixed, choose)(num_reqs=1) is None
    assert getattr(mixed, choose)(num_reqs=2, force_uniform_decode=True) is True
    assert decodes.gather_batch_req_state(None, False)[1] == 1
    assert mixed.gather_batch_req_state(None, False)[1] == (None if served else 1)
    assert mixed.gather_batch_req_state(None, True) == (None, 1)
