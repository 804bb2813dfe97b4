"""Code that an engine compiles while it starts, and when no compilation is needed."""

import errno
import subprocess
from importlib.metadata import PackageNotFoundError
from threading import Thread
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin import background_compilation
from vllm_prefixshare.vllm_plugin.hooks import selection
from vllm_prefixshare.vllm_plugin.scheduling import order

LAYER = AttentionConfig(32, 8, 128, 16)


def config(cache: str = "auto", drafting: object = None) -> SimpleNamespace:
    cache_config = SimpleNamespace(cache_dtype=cache)
    return SimpleNamespace(speculative_config=drafting, cache_config=cache_config)


CONFIG = config()


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[list[str]]:
    """Command lines of the processes that would be started; none runs."""
    found: list[list[str]] = []

    def popen(command: list[str], **options: object) -> SimpleNamespace:
        found.append(command)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", popen)
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: hopper)
    return found


def test_planning_is_compiled_once_for_all_models(started):
    background_compilation.start_planning()
    (command,) = started
    assert command[3:5] == ["planning", "--capability=9.0"]
    done = background_compilation.done_file("planning", command[4:-1])
    assert command[-1] == f"--done={done}"
    done.touch()
    background_compilation.start_planning()
    assert len(started) == 1


def test_kernels_are_compiled_once_for_each_shape(started):
    background_compilation.start_kernels(LAYER, CONFIG)
    (command,) = started
    assert command[3] == "kernels"
    assert {"--num-qo-heads=32", "--query-len=1"} <= set(command)
    done = background_compilation.done_file("kernels", command[4:-1])
    assert command[-1] == f"--done={done}"
    done.touch()
    background_compilation.start_kernels(LAYER, CONFIG)
    assert len(started) == 1
    drafting = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    background_compilation.start_kernels(LAYER, config(drafting=drafting))
    assert "--query-len=4" in started[1]


def test_latents_are_compiled_for_their_own_kernel(started):
    background_compilation.start_kernels(AttentionConfig(16, 1, 576, 64, kv_lora_rank=512), CONFIG)
    assert {"--head-dim=576", "--kv-lora-rank=512"} <= set(started[0])


def test_the_kernel_is_that_of_the_kv_cache(started):
    latents = AttentionConfig(16, 1, 576, 16, kv_lora_rank=512)
    for cache in ("bfloat16", "fp8", "fp8_e4m3"):
        background_compilation.start_kernels(LAYER, config(cache))
    widths = ["--kv-dtype=float8_e4m3fn" in command for command in started]
    assert widths == [False, True, True]
    others = (LAYER, "float16"), (LAYER, "fp8_e5m2"), (latents, "fp8_ds_mla")
    for layer, cache in others:
        background_compilation.start_kernels(layer, config(cache))
    assert len(started) == 3, "such layers keep vLLM's backend"
    for cache in ("auto", "fp8"):
        background_compilation.start_kernels(latents, config(cache))
    assert "--block-size=16" in started[3] and "--kv-dtype=float8_e4m3fn" not in started[3]
    assert {"--block-size=64", "--kv-dtype=float8_e4m3fn"} <= set(started[4])


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def missing(name: str) -> str:
    raise PackageNotFoundError(name)  # a build of Triton under another name


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (subprocess, "Popen", fails),
        (Thread, "start", fails),
        (background_compilation, "version", missing),
        (type(current_platform), "get_device_capability", fails),
    ],
)
def test_an_engine_starts_although_nothing_can_be_compiled_ahead(
    started, monkeypatch, owner, name, fault
):
    monkeypatch.setattr(owner, name, fault)
    background_compilation.start_planning()
    with background_compilation.best_effort():
        background_compilation.start_kernels(LAYER, CONFIG)


@pytest.mark.parametrize("folder", ["file", "a" * 300, "read-only", "of others"])
def test_nothing_is_compiled_ahead_where_it_cannot_be_kept(started, monkeypatch, tmp_path, folder):
    (tmp_path / "file").touch()
    compiled = tmp_path / "of others" / "compiled"
    compiled.mkdir(parents=True)
    compiled.chmod(0o777)
    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path / folder))
    if folder == "read-only":  # not for root
        monkeypatch.setattr(background_compilation.os, "access", lambda path, mode: False)
    background_compilation.start_planning()
    background_compilation.start_kernels(LAYER, CONFIG)
    assert started == []


@pytest.mark.parametrize("fault", [AttributeError("head_size"), PrefixShareError("no kernel")])
def test_an_engine_of_another_shape_starts(started, monkeypatch, fault):
    """Whatever the model's configuration lacks."""

    def unknown(_: object) -> None:
        raise fault

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda *_: False)
    monkeypatch.setattr(selection, "_attention_of", unknown)
    monkeypatch.setattr(selection.metrics, "start_for_engine", lambda *_, **__: None)
    monkeypatch.setattr(order, "order_requests", lambda *_: None)
    passes = SimpleNamespace(fuse_rope_kvcache_cat_mla=True)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls="own"),
        compilation_config=SimpleNamespace(pass_config=passes, cudagraph_mode=None),
    )
    selection._check_engine_config(config, frozenset(), offline=False)
    assert started == []
    assert not passes.fuse_rope_kvcache_cat_mla, "latents are written by the implementation"


@pytest.mark.parametrize(("use_mla", "head_size"), [(True, 576), (False, 192)])
def test_the_shape_of_a_model_with_latents(use_mla, head_size):
    model = SimpleNamespace(
        use_mla=use_mla, dtype="torch.bfloat16", get_num_attention_heads=lambda parallel: 16,
        get_num_kv_heads=lambda parallel: 1 if use_mla else 16, get_head_size=lambda: head_size,
    )  # fmt: skip
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    cache = SimpleNamespace(block_size=64)
    config = SimpleNamespace(model_config=model, parallel_config=parallel, cache_config=cache)
    shape = selection._attention_of(config)
    assert (shape.head_dim, shape.kv_lora_rank) == (head_size, 512 if use_mla else None)
