"""Code that an engine compiles while it starts, and when no compilation is needed."""

import subprocess
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.integration import precompiling
from vllm_prefixshare.integration.hooks import selection

LAYER = AttentionConfig(32, 8, 128, 16)
CONFIG = SimpleNamespace(speculative_config=None)


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[list[str]]:
    """Command lines of the processes that would be started; none runs."""
    found: list[list[str]] = []

    def popen(command: list[str], **options: object) -> SimpleNamespace:
        found.append(command)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", popen)
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: hopper)
    return found


def test_planning_is_compiled_once_for_all_models(started):
    precompiling.start_planning()
    (command,) = started
    assert command[3:5] == ["planning", "--capability=9.0"]
    done = precompiling.done_file("planning", command[4:-1])
    assert command[-1] == f"--done={done}"
    done.parent.mkdir(parents=True)
    done.touch()
    precompiling.start_planning()
    assert len(started) == 1


def test_kernels_are_compiled_once_for_each_shape(started):
    precompiling.start_kernels(LAYER, CONFIG)
    (command,) = started
    assert command[3] == "kernels"
    assert {"--num-qo-heads=32", "--query-len=1"} <= set(command)
    done = precompiling.done_file("kernels", command[4:-1])
    assert command[-1] == f"--done={done}"
    done.parent.mkdir(parents=True)
    done.touch()
    precompiling.start_kernels(LAYER, CONFIG)
    assert len(started) == 1
    drafting = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    precompiling.start_kernels(LAYER, SimpleNamespace(speculative_config=drafting))
    assert "--query-len=4" in started[1]


def test_latents_are_compiled_for_their_own_kernel(started):
    precompiling.start_kernels(AttentionConfig(16, 1, 576, 64, kv_lora_rank=512), CONFIG)
    assert {"--head-dim=576", "--kv-lora-rank=512"} <= set(started[0])


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
