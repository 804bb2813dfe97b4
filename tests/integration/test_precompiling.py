"""Code that an engine compiles while it starts, and when no compilation is needed."""

import subprocess
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.integration import precompiling

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
