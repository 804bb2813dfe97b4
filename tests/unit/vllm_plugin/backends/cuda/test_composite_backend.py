"""PREFIX_SHARE as the causal child of vLLM's composite backend, without a GPU: vLLM decides which
child a step goes to; TRITON_ATTN does not run here, so only its metadata is checked.
"""

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.support.gpu_backend import (
    BLOCK,
    HEAD_DIM,
    KV_HEADS,
    SPEC,
    WITHOUT_GPU,
    Group,
    interpret,
    share_whatever_it_costs,
    shared_batch,
    vllm_config,
)
from tests.support.paged_batches import relative_error
from tests.support.variables import set_variables
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.vllm_plugin import compat, register, signatures
from vllm_prefixshare.vllm_plugin.backends.cuda import backend as cuda
from vllm_prefixshare.vllm_plugin.backends.cuda import metadata as cuda_metadata
from vllm_prefixshare.vllm_plugin.backends.platform_backend import BackendMethods
from vllm_prefixshare.vllm_plugin.eligibility import platform
from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine, LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CPU, CUDA_DTYPES, Platform
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.hooks import selection
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import mixed_graphs

REASON = "bidirectional multimodal prefixes"
pytestmark = [
    WITHOUT_GPU,
    pytest.mark.skipif(not compat.has_composite(), reason="this vLLM has no composite backend"),
]
if compat.has_composite():
    from vllm.v1.attention.backends import composite as vllm_composite
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    from vllm_prefixshare.vllm_plugin.backends.cuda import composite


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    register.register()
    interpret(monkeypatch, PortableKernel)
    share_whatever_it_costs(monkeypatch)
    for module in ("vllm.utils.torch_utils", "vllm.v1.attention.backends.flash_attn"):
        monkeypatch.setattr(f"{module}.PIN_MEMORY", False)


class CompositeGroup(Group):
    """A group of a model whose image tokens attend to later tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: int | None = None) -> None:
        self.builder_cls = composite.PrefixShareCompositeBackend.get_builder_cls()
        self.impl_cls = composite.PrefixShareCompositeBackend.get_impl_cls()
        config = vllm_config(model_config={"is_mm_prefix_lm": True})
        spec = FullAttentionSpec(**SPEC)
        if window is not None:
            spec = SlidingWindowSpec(**SPEC, sliding_window=window)
        super().__init__(monkeypatch, spec=spec, config=config, sliding_window=window)


@pytest.fixture(params=[None, 70], ids=["full attention", "a window"])
def group(request, monkeypatch) -> CompositeGroup:
    monkeypatch.setattr(
        "vllm_prefixshare.vllm_plugin.eligibility.measured.shortest_window", lambda _: 1
    )
    return CompositeGroup(monkeypatch, request.param)


def test_the_causal_child_is_served(group):
    assert group.impl.causal_impl.shares and STATS.fallbacks == {}
    builder = group.builder.causal_builder
    assert type(builder) is cuda_metadata.PrefixShareMetadataBuilder
    assert builder.executor is not None and builder.all_layers
    assert group.impl.causal_impl.cache_write is not None
    assert group.builder.reorder_batch_threshold == builder.reorder_batch_threshold
    assert builder._first_step is None or builder.planner.window is None


@pytest.mark.parametrize("ranges", [None, {}, {0: [(2, 9)], 1: [(50, 60)]}])
def test_decodes_are_shared_also_after_an_image(monkeypatch, ranges):
    group, batch = CompositeGroup(monkeypatch), shared_batch([70, 90, 61, 55])
    group.start(batch)
    common = group.common(batch)
    common.mm_req_doc_ranges = ranges
    metadata = group.builder.build(0, common)
    assert isinstance(metadata, cuda_metadata.PrefixShareCUDAMetadata)
    out = group.forward(batch, metadata, len(batch.q))
    assert relative_error(out, batch.expected()[0]) < 2e-3
    assert STATS.shared_steps == 1


def test_a_step_with_an_image_is_triton_attns_and_not_counted(monkeypatch):
    group = CompositeGroup(monkeypatch)
    batch = shared_batch([70, 90, 61, 55])
    group.start(batch)
    group.assert_right(batch)
    counted = STATS.as_dict()
    plan = group.builder.causal_builder.planner.current

    # the third request prefills an image, while the others decode
    image = shared_batch([71, 91, 77, 56], counts=[1, 1, 16, 1])
    common = group.common(image)
    common.mm_req_doc_ranges = {2: [(62, 75)]}
    metadata = group.builder.build(0, common)
    assert isinstance(metadata, triton_attn.TritonAttentionMetadata)
    assert metadata.mm_prefix_range == {2: [(62, 75)]}
    assert group.impl.get_impl_for_metadata(metadata) is group.impl.general_impl
    assert STATS.as_dict() == counted
    assert group.builder.causal_builder.planner.current is plan

    # the next step reads what that one added
    later = shared_batch([72, 92, 78, 57])
    metadata = group.builder.build(0, group.common(later))
    assert isinstance(metadata, cuda_metadata.PrefixShareCUDAMetadata)
    out = group.forward(later, metadata, len(later.q))
    assert relative_error(out, later.expected()[0]) < 2e-3
    assert STATS.shared_steps == 2


def test_a_prompt_without_an_image_is_flash_attentions(monkeypatch):
    group = CompositeGroup(monkeypatch)
    batch = shared_batch([70, 90, 80], counts=[1, 1, 60])
    group.start(batch)
    common = group.common(batch)
    common.mm_req_doc_ranges = {0: [(2, 9)]}
    metadata = group.builder.build(0, common)
    assert metadata.num_planned_tokens == 2
    assert metadata.prefill_metadata.seq_lens.tolist() == [80]


def test_both_children_leave_finite_values_in_the_cache(monkeypatch):
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        cuda.FlashAttentionImpl,
        "do_kv_cache_update",
        lambda impl, layer, *args: written.append(args),
    )
    group = CompositeGroup(monkeypatch)
    key = torch.randn(3, KV_HEADS, HEAD_DIM).half()
    value = key.clone()
    value[1] = torch.nan
    group.impl.do_kv_cache_update(group.layer, key, value, group.layer.kv_cache, torch.arange(3))
    ((_, kept, *_),) = written
    assert torch.equal(kept, torch.nan_to_num(value))
    assert not composite.PrefixShareCompositeBackend.supports_kv_cache_update_bypass


def test_scales_and_wake_up_reach_the_causal_child(monkeypatch):
    group = CompositeGroup(monkeypatch)
    group.impl.process_weights_after_loading(torch.float16)
    assert not group.builder.causal_builder._scales_checked
    batch = shared_batch([70, 90])
    group.start(batch)
    group.assert_right(batch)
    group.layer.kv_cache[0] = torch.nan
    group.builder.after_wake_up(None)
    assert group.builder.causal_builder.planner.current is None
    assert not group.layer.kv_cache.isnan().any()


def test_a_class_that_vllm_derives_plans_nothing(monkeypatch):
    group = CompositeGroup(monkeypatch)
    derived = create_fast_prefill_custom_backend("Fast", composite.PrefixShareCompositeBackend)
    group.builder_cls = derived.get_builder_cls()
    builder = group.builder_for(FullAttentionSpec(**SPEC))
    assert builder.causal_builder.executor is builder.causal_builder.planner is None
    assert list(STATS.fallbacks) == ["metadata of FastPrefillAttentionBuilder"]
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match="metadata of FastPrefillAttentionBuilder"):
        group.builder_for(FullAttentionSpec(**SPEC))


def test_a_window_too_short_to_gain_leaves_both_children_to_vllm(monkeypatch):
    monkeypatch.setattr(
        "vllm_prefixshare.vllm_plugin.eligibility.measured.shortest_window", lambda _: 1024
    )
    group = CompositeGroup(monkeypatch, window=70)
    assert not group.impl.causal_impl.shares
    assert group.builder.causal_builder.executor is None


@pytest.mark.parametrize(
    ("clamps", "expected"),
    [
        (False, AttentionCGSupport.NEVER),
        (True, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
    ],
)
def test_graphs_hold_decodes_at_most(monkeypatch, clamps, expected):
    config = vllm_config(model_config={"is_mm_prefix_lm": True, "is_multimodal_model": False})
    config.use_v2_model_runner, config.kv_transfer_config = True, None
    model = config.model_config
    model.use_mla = model.is_encoder_decoder = False
    model.attention_chunk_size, model.hf_text_config = None, SimpleNamespace()
    monkeypatch.setattr("vllm.platforms.current_platform.is_device_capability", lambda _: True)
    monkeypatch.setattr(mixed_graphs, "vllm_version", lambda: mixed_graphs.FIRST_RELEASE)
    windowed = SimpleNamespace(sliding_window=70, mm_prefix_clamp_sliding_window=clamps)
    config.compilation_config.static_forward_context["windowed"] = windowed
    assert mixed_graphs.mixed_graphs_refusal(config) == "a multimodal model"
    builder = composite.PrefixShareCompositeBackend.get_builder_cls()
    assert builder.get_cudagraph_support(config, FullAttentionSpec(**SPEC)) is expected


def test_vllm_finds_the_member_by_the_backends_name():
    backend = composite.PrefixShareCompositeBackend
    assert AttentionBackendEnum[backend.get_name()].name == "PREFIX_SHARE"
    assert vars(composite)[backend.full_cls_name()[1]] is backend
    assert backend.general_backend_cls is triton_attn.TritonAttentionBackend
    assert backend.general_backend_cls is composite.TritonFlashAttentionBackend.general_backend_cls
    assert backend.supports_mm_prefix() and backend.supports_sliding_window()
    assert backend.supports_block_size(BLOCK)
    causal = get_supported_kv_cache_layouts([cuda.PrefixShareCUDABackend])
    assert list(backend.supported_kv_cache_layouts()) == causal


def test_vllm_routes_an_image_as_these_tests_assume(monkeypatch):
    group = CompositeGroup(monkeypatch)
    batch = shared_batch([70, 80], counts=[1, 16])
    common = group.common(batch)
    for ranges, expected in (({1: [(60, 66)]}, True), ({1: [(10, 20)]}, False), ({}, False)):
        common.mm_req_doc_ranges = ranges
        assert vllm_composite.requires_mm_prefix(common) is expected


LAYER = LayerSpec(256, "bfloat16", num_heads=16, num_kv_heads=8, use_mm_prefix=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"has_sliding_window": True, "sliding_window": 1024}, None),
        ({"logits_soft_cap": True}, None),
        ({"has_sink": True}, REASON),
        ({"use_batch_invariant": True}, REASON),
        ({"use_dcp": True}, REASON),
        ({"kv_cache_dtype": "fp8"}, REASON),
        ({"engine": Engine(query_len=3)}, REASON),
        ({"engine": Engine(shards=2)}, REASON),
        ({"head_size": 512}, "head_dim 512"),
    ],
    ids=str,
)
def test_layers_are_served_where_the_composite_serves_them(changes, expected):
    gpu = Platform(CUDA_DTYPES, platform.gpu_extras(anywhere=True))
    layer = replace(LAYER, **changes)
    assert refusal(layer, gpu) == expected
    without = gpu._replace(extras=gpu.extras - {"mm_prefix"})
    assert refusal(layer, without) == REASON
    assert refusal(LAYER, CPU) == REASON


def test_a_vllm_that_chooses_one_class_for_all_layers_declines_them(monkeypatch):
    """As with the patches of patches/, which know no composite."""
    monkeypatch.setattr(compat, "can_combine_backends", compat.can_combine_backends.__wrapped__)
    monkeypatch.setattr(signatures, "defines", lambda name: True)
    extras = platform.gpu_extras(anywhere=True)  # also what `doctor` reads
    assert extras == platform.GPU_EXTRAS - {"mm_prefix"}
    monkeypatch.setattr(platform, "gpu_extras", lambda anywhere=False: extras)
    layer = SimpleNamespace(**{**vars(LAYER), "dtype": torch.bfloat16})

    class Ours(BackendMethods):
        on_gpu = True

    assert Ours.decline_layer(layer) == REASON and list(STATS.fallbacks) == [REASON]
    layer.use_mm_prefix = False
    assert Ours.decline_layer(layer) is None


def test_blocks_that_a_window_has_left_are_not_read(monkeypatch):
    monkeypatch.setattr(
        "vllm_prefixshare.vllm_plugin.eligibility.measured.shortest_window", lambda _: 1
    )
    window = 70
    group = CompositeGroup(monkeypatch, window)
    batch = shared_batch([150, 140, 130])
    group.start(batch)
    gone = np.maximum(batch.seq_lens - window, 0) // BLOCK
    held = batch.block_table.copy()
    batch.block_table = np.where(np.arange(held.shape[1]) < gone[:, None], 0, held)
    metadata = group.build(batch)
    out = group.forward(batch, metadata, len(batch.q))
    assert relative_error(out, batch.expected(sliding_window=window)[0]) < 2e-3


@pytest.mark.parametrize(
    ("changes", "ours"),
    [({}, True), ({"has_sliding_window": True}, True), ({"has_sink": True}, False)],
    ids=str,
)
def test_vllms_platform_resolves_the_composite(monkeypatch, changes, ours):
    for name in ("vllm._C_stable_libtorch", "vllm.platforms.cuda"):  # the latter is dropped after
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules["vllm.platforms.cuda"]
    platform_cls = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase
    hopper = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(platform_cls, "get_device_capability", hopper)
    monkeypatch.setattr(platform, "gpu_extras", lambda anywhere=False: platform.GPU_EXTRAS)
    layer = AttentionSelectorConfig(
        256, torch.bfloat16, "auto", None, use_mm_prefix=True, attn_type="decoder", **changes
    )
    path = platform_cls.get_attn_backend_cls(selection.backend_member(), layer, num_heads=8)
    found = resolve_obj_by_qualname(path)
    assert (found is composite.PrefixShareCompositeBackend) == ours
    assert found.supports_mm_prefix()
