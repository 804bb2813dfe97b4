"""Every way of choosing the backend works, or is refused in one of our own sentences. The CUDA
builds find no platform on this machine; that is refused after the choice was read.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.integration.ways import WAYS
from tests.support.dummy_model import write_llama_8b

ON_CUDA_BUILD = "PREFIXSHARE_EXPECT_VLLM" in os.environ


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    model = write_llama_8b(tmp_path_factory.mktemp("model"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.ways", str(model)],
        env={k: v for k, v in os.environ.items() if k != "VLLM_ATTENTION_BACKEND"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_entry_points_are_installed():
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        assert "prefix_share" in entry_points(group=group).names, f"reinstall: no {group}"


@pytest.mark.parametrize("way", WAYS)
def test_it_is_chosen(outcomes, way):
    if ON_CUDA_BUILD:
        assert outcomes["here"][way]["error"] == "PrefixShareError"
        assert outcomes["here"][way]["sentence"].startswith(
            "PREFIX_SHARE serves CPUs and NVIDIA GPUs"
        )
    else:
        assert outcomes["here"][way]["full"] == "PREFIX_SHARE"


@pytest.mark.parametrize(
    ("argument", "every_layer", "full_attention"),
    [
        ("attention_backend", "CPU_ATTN", "CPU_ATTN"),
        ("attention_backend auto", "none", "none"),
        ("attention_config", "CPU_ATTN", "CPU_ATTN"),
        # as in vLLM, a kind that is named has its own, and the others what is chosen for all
        ("backend_per_kind", "PREFIX_SHARE", "CPU_ATTN"),
    ],
)
def test_an_argument_wins_over_the_variable(outcomes, argument, every_layer, full_attention):
    found = outcomes["beside"][argument]
    if ON_CUDA_BUILD:
        assert (found.get("error") == "PrefixShareError") == (every_layer == "PREFIX_SHARE")
    else:
        assert found == {"all": every_layer, "full": full_attention}


def test_a_misspelt_name_is_refused_in_our_words(outcomes):
    assert len(outcomes["misspelt"]) == 2
    words = ["'PREFIXSHARE' is not an attention backend: name PREFIX_SHARE, or one"]
    if "PREFIXSHARE_PATCHED" in os.environ:  # its own list has the right name
        words = ["Unknown attention backend: 'PREFIXSHARE'", "PREFIX_SHARE"]
    for sentence in outcomes["misspelt"]:
        assert all(word in sentence for word in words)


@pytest.mark.parametrize("way", WAYS)
def test_a_release_that_is_too_old_is_refused(outcomes, way):
    assert outcomes["too_old"][way]["error"] == "PrefixShareError"
    sentence = outcomes["too_old"][way]["sentence"]
    assert sentence.startswith("vLLM 0.25.1 is not supported by PREFIX_SHARE")
    assert sentence.endswith("or choose another attention backend.")
