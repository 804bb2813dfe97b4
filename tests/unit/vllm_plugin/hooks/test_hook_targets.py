"""What the hooks need of the imported vLLM release: names, parameters, fields."""

import dataclasses
import inspect
import os
import pkgutil

import pytest
import vllm.version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu import warmup as gpu_warmup
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner
from vllm.v1.worker.gpu_worker import Worker

from vllm_prefixshare.vllm_plugin import compat, register, signatures
from vllm_prefixshare.vllm_plugin.backends.cuda.metadata import PrefixShareCUDAMetadata
from vllm_prefixshare.vllm_plugin.hooks import selection
from vllm_prefixshare.vllm_plugin.observability.stats import STATS


def test_the_release_under_test_is_the_one_asked_for():
    version = os.environ.get("PREFIXSHARE_EXPECT_VLLM")
    if version is not None:
        assert str(compat.vllm_version()) == version
        assert version in inspect.getfile(vllm)
    compat.check_release()


def test_the_source_is_as_the_hooks_need_it():
    assert signatures.moved() is None


@pytest.mark.parametrize("name", signatures.PARAMETERS)
def test_the_source_says_what_the_imported_function_does(name):
    owner, _, function = name.rpartition(".")
    found = inspect.getattr_static(pkgutil.resolve_name(owner), function)
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert tuple(inspect.signature(found).parameters) == signatures.PARAMETERS[name]


def test_our_metadata_hides_no_field_of_theirs():
    theirs = {f.name for f in dataclasses.fields(FlashAttentionMetadata)}
    assert not theirs & PrefixShareCUDAMetadata.__annotations__.keys()


def test_hooks_are_in_force_unless_patches_do_their_work():
    register.register()
    patched = "PREFIXSHARE_PATCHED" in os.environ
    for function in (
        BlockTable.__init__,
        BlockTables.__init__,
        BlockTables.append_block_ids,
        BlockTables.get_dummy_block_tables,
        GPUModelRunner.prepare_attn,
        GPUModelRunner.gather_batch_req_state,
        V1Runner._determine_batch_execution_and_padding,
        base_worker.get_current_attn_backends,
        Worker.wake_up,
    ):
        assert hasattr(function, "__wrapped__") != patched
        assert patched or not hasattr(function.__wrapped__, "__wrapped__"), "once only"


class ReachedError(Exception):
    """Ends a function of vLLM once the test has seen what it wanted."""


def test_a_worker_that_warms_up_counts_no_steps():
    class Seen:
        def __getattr__(self, name):
            assert STATS.is_warming_up
            raise ReachedError

    register.register()
    assert not STATS.is_warming_up
    with pytest.raises(ReachedError):
        Worker.compile_or_warm_up_model(Seen())
    assert not STATS.is_warming_up


def test_the_warm_up_of_the_v2_runner_makes_up_requests():
    """Where this fails, the hook on ``Worker.compile_or_warm_up_model`` may not be needed."""
    source = inspect.getsource(gpu_warmup)
    assert "SchedulerOutput" in source and "dummy_run" not in source
    assert "warmup_kernels(" in inspect.getsource(gpu_worker)


def test_the_free_backend_is_left_to_other_plugins(monkeypatch):
    enum = registry.AttentionBackendEnum
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    registry.register_backend(enum.CUSTOM, "someone.elses.Backend")
    assert enum.CUSTOM.get_path() == "someone.elses.Backend"
    assert not selection.is_ours(enum.CUSTOM)
    assert not selection.is_ours(None)
    assert selection.is_ours(selection.backend_member())


def test_the_backend_resolves_by_its_name():
    member = selection.backend_member()
    assert registry.AttentionBackendEnum["PREFIX_SHARE"] is member
    assert member.get_class().get_name() == "PREFIX_SHARE"
