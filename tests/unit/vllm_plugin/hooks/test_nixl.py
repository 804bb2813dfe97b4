"""NIXL's check that a prefill and a decode instance have like KV caches, as each release makes it:
the functions of its worker run up to the hash, without NIXL itself.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend

from tests.support.latent_backend import flashattn_mla
from vllm_prefixshare.vllm_plugin import compat, register
from vllm_prefixshare.vllm_plugin.backends.cpu.backend import PrefixShareCPUBackend
from vllm_prefixshare.vllm_plugin.backends.cuda.backend import PrefixShareCUDABackend
from vllm_prefixshare.vllm_plugin.backends.mla import fp8, unquantized

#: Ours, and the backend of vLLM with the same KV-cache layout.
PAIRS = [
    (PrefixShareCUDABackend, FlashAttentionBackend),
    (unquantized.PrefixShareMLABackend, flashattn_mla.FlashAttnMLABackend),
    (fp8.PrefixShareFP8MLABackend, FlashMLABackend),
    (PrefixShareCPUBackend, CPUAttentionBackend),
]
#: The same, with the composite, which derives from neither.
ALIKE = list(PAIRS)
if compat.has_composite():
    from vllm_prefixshare.vllm_plugin.backends.cuda import composite

    ALIKE.append((composite.PrefixShareCompositeBackend, composite.TritonFlashAttentionBackend))


@pytest.fixture(autouse=True)
def _registered():
    register.register()


class ReachedError(Exception):
    """Ends ``register_kv_caches`` where the hash is there."""


class Layer(AttentionLayerBase):
    """A layer with a backend."""

    def __init__(self, backend: type[AttentionBackend]) -> None:
        self.backend = backend

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


def run_where_backends_are_found(worker: Any, config: Any) -> None:
    """Run the statements of the worker's own ``__init__`` that find its backends and their name;
    the others need NIXL and a distributed group.
    """
    source = inspect.getsource(base_worker.NixlBaseConnectorWorker.__init__)
    (function,) = ast.parse(textwrap.dedent(source)).body
    lines = [ast.unparse(statement) for statement in function.body]
    first = next(i for i, line in enumerate(lines) if "get_current_attn_backends(" in line)
    last = next(i for i, line in enumerate(lines) if line.startswith("self.backend_name = "))
    found = compile("\n".join(lines[first : last + 1]), base_worker.__file__, "exec")
    exec(found, {**vars(base_worker), "self": worker, "vllm_config": config})


class Worker(base_worker.NixlBaseConnectorWorker):
    """A worker that has what its ``register_kv_caches`` reads before the hash."""

    _TRANSFER_MODE = "pull"
    tp_rank = transfer_tp_rank = 0
    world_size = transfer_tp_size = dcp_size = 1
    engine_id = "engine"
    _has_mamba = _is_csa_linear = False
    _has_packed_cache = _supports_pp_hma = False
    block_size = 16
    compat_hash = None

    def __init__(self, config: Any, packed: bool) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.use_mla = config.model_config.use_mla
        self._has_packed_cache = self._supports_pp_hma = packed
        run_where_backends_are_found(self, config)

    def _requires_layer_name_routing(self) -> bool:
        return False

    @property
    def use_host_buffer(self) -> bool:
        raise ReachedError


def config_of(*backends: type[AttentionBackend], **changes: Any) -> Any:
    """A configuration with a layer of each backend."""
    model = {"dtype": torch.bfloat16, "cache_dtype": "auto", "head_size": 128, **changes}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer.{i}": Layer(b) for i, b in enumerate(backends)}
        ),
        model_config=SimpleNamespace(
            model="model",
            dtype=model["dtype"],
            use_mla=False,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: model["head_size"],
            get_total_num_hidden_layers=lambda: len(backends),
        ),
        cache_config=SimpleNamespace(cache_dtype=model["cache_dtype"], block_size=16),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )


@pytest.fixture
def hash_of(monkeypatch):
    """The hash of an instance, by the backends of its layers."""
    monkeypatch.setattr(base_worker, "TransferTopology", lambda **_: None)

    def compute(*backends: type[AttentionBackend], packed: bool = False, **changes: Any) -> str:
        worker = Worker(config_of(*backends, **changes), packed)
        with pytest.raises(ReachedError):
            worker.register_kv_caches({"layer.0": torch.zeros(1)})
        assert worker.compat_hash
        return str(worker.compat_hash)

    return compute


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), ALIKE)
def test_instances_with_like_caches_accept_each_other(hash_of, ours, theirs, packed):
    assert hash_of(ours, packed=packed) == hash_of(theirs, packed=packed)
    # layers that are not served keep vLLM's backend, wherever they come
    expected = hash_of(theirs, theirs, packed=packed)
    assert hash_of(ours, theirs, packed=packed) == expected
    assert hash_of(theirs, ours, packed=packed) == expected


@pytest.mark.parametrize(("ours", "theirs"), ALIKE)
def test_a_worker_names_the_owner_of_the_layout(ours, theirs):
    """By this name a worker on a CPU decides whether it reorders the blocks that it receives."""
    worker = Worker(config_of(ours), packed=False)
    assert worker.backend_name == theirs.get_name()
    assert ours.get_name() == "PREFIX_SHARE"


def test_instances_with_different_caches_reject_each_other(hash_of):
    found = [
        hash_of(PrefixShareCUDABackend),
        hash_of(PrefixShareCUDABackend, dtype=torch.float16),
        hash_of(PrefixShareCUDABackend, cache_dtype="fp8"),
        hash_of(PrefixShareCUDABackend, head_size=64),
        hash_of(PrefixShareCUDABackend, PrefixShareCUDABackend),
        hash_of(unquantized.PrefixShareMLABackend),
        hash_of(fp8.PrefixShareFP8MLABackend),
        hash_of(PrefixShareCPUBackend),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_layout_is_the_owners(ours, theirs):
    """The names hide no difference: whatever shapes the cache is inherited."""
    shaping = {name for name in dir(AttentionBackend) if "cache" in name or "block_size" in name}
    # whether models may write into the cache themselves: no part of the layout
    shaping -= {"supports_kv_cache_update_bypass"}
    assert "supported_kv_cache_layouts" in shaping
    for name in shaping:
        assert all(name not in vars(c) for c in ours.__mro__[: ours.__mro__.index(theirs)]), name


def test_other_backends_are_left_alone():
    config = config_of(FlashAttentionBackend, CPUAttentionBackend, FlashAttentionBackend)
    found = Worker(config, packed=False).attn_backends
    assert found == [FlashAttentionBackend, CPUAttentionBackend]
