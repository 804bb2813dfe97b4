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


def test_a_second_start_compiles_only_what_is_not_compiled_yet(started):
    precompiling.start(LAYER, CONFIG)
    assert [command[3] for command in started] == ["kernels", "planning"]
    for command in started:
        assert command[command.index("--query-len") + 1] == "1"
    done = precompiling.done_file("planning", started[1][4:-2])
    assert started[1][-1] == str(done)
    done.parent.mkdir(parents=True)
    done.touch()
    started.clear()
    precompiling.start(LAYER, CONFIG)
    assert [command[3] for command in started] == ["kernels"]


def test_other_layers_are_compiled_anew(started):
    precompiling.start(LAYER, CONFIG)
    drafting = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    precompiling.start(LAYER, SimpleNamespace(speculative_config=drafting))
    assert len({command[-1] for command in started}) == 4
