"""What the hooks rely on in this release of vLLM: names, parameters, metadata fields."""

import dataclasses
import inspect
import os
from types import SimpleNamespace

import pytest
import vllm.version
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.integration import compat, hooks, register


def parameters(function: object) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_the_release_under_test_is_the_one_asked_for():
    version = os.environ.get("PREFIXSHARE_EXPECT_VLLM")
    if version is not None:
        assert str(compat.vllm_version()) == version
        assert version in vllm.version.__version__ or version in inspect.getfile(vllm)
    compat.check_vllm_version()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (BlockTables.append_block_ids, ["self", "req_index", "new_block_ids", "overwrite"]),
        (BlockTables.get_dummy_block_tables, ["self", "num_reqs"]),
        (GPUModelRunner.prepare_attn, ["self", "input_batch"]),
        (Worker.wake_up, ["self", "tags"]),
        (
            FlashAttentionMetadataBuilder.__init__,
            ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"],
        ),
        (
            FlashAttentionMetadataBuilder.build,
            ["self", "common_prefix_len", "common_attn_metadata", "fast_build"],
        ),
        (
            FlashAttentionImpl.forward,
            [
                "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
                "output_scale", "output_block_scale",
            ],
        ),
        (
            FlashAttentionImpl.do_kv_cache_update,
            ["self", "layer", "key", "value", "kv_cache", "slot_mapping"],
        ),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)  # fmt: skip
def test_functions_have_the_parameters_that_we_pass(function, expected):
    assert parameters(function) == expected


def test_metadata_has_the_fields_that_we_read():
    common = {f.name for f in dataclasses.fields(CommonAttentionMetadata)}
    assert common >= {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound",
        "num_reqs", "num_actual_tokens", "max_query_len", "block_table_tensor", "slot_mapping",
        "causal",
    }  # fmt: skip
    flash = {f.name for f in dataclasses.fields(FlashAttentionMetadata)}
    assert flash >= {"block_table", "seq_lens", "query_start_loc"}
    assert not flash & {"executor", "decode_tokens", "rest"}, "ours must not hide theirs"


def test_the_selector_names_what_we_refuse_by():
    assert set(AttentionSelectorConfig._fields) >= {
        "head_size", "dtype", "kv_cache_dtype", "use_mla", "has_sink", "use_sparse",
        "use_mm_prefix", "attn_type", "has_sliding_window", "use_batch_invariant",
    }  # fmt: skip


def test_hooks_are_in_force():
    register.register()
    for function in (
        BlockTable.__init__,
        BlockTables.__init__,
        BlockTables.append_block_ids,
        BlockTables.get_dummy_block_tables,
        GPUModelRunner.prepare_attn,
        Worker.wake_up,
    ):
        assert hasattr(function, "__wrapped__")
        assert not hasattr(function.__wrapped__, "__wrapped__"), "once only"


def test_another_plugin_keeps_the_only_free_backend(monkeypatch):
    enum = registry.AttentionBackendEnum
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
        registry.register_backend(enum.CUSTOM, "someone.elses.Backend")
        ours = hooks.backend_member()
        assert enum.CUSTOM.get_path() == "someone.elses.Backend"
        assert not hooks.is_ours(enum.CUSTOM)
        assert not hooks.is_ours(None)
        if hasattr(enum, "register"):  # from 0.32 on there is room for all
            assert hooks.is_ours(ours)
        else:
            assert ours is None
            patch.setenv("VLLM_ATTENTION_BACKEND", "PREFIX_SHARE")
            arguments = SimpleNamespace(attention_backend=None, attention_config=None)
            with pytest.raises(PrefixShareError, match="which another plugin has"):
                hooks._select_from_environment(arguments)
    assert hooks.is_ours(hooks.backend_member())


def test_the_backend_resolves_by_its_name():
    member = hooks.backend_member()
    assert registry.AttentionBackendEnum["PREFIX_SHARE"] is member
    assert member.get_class().get_name() == "PREFIX_SHARE"
