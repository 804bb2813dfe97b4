"""Every way of choosing the backend works, or is refused in one of our own sentences. The CUDA
builds find no platform on this machine; that is refused after the choice was read.
"""

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tomllib

from tests.support import processes
from tests.support.backend_choices import WAYS
from tests.support.dummy_model import write_llama_8b

ON_CUDA_BUILD = "PREFIXSHARE_EXPECT_VLLM" in os.environ
ON_PATCHED = "PREFIXSHARE_PATCHED" in os.environ


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    model = write_llama_8b(tmp_path_factory.mktemp("model"))
    command = [sys.executable, "-m", "tests.support.backend_choices", model]
    usual = {k: v for k, v in os.environ.items() if k != "VLLM_ATTENTION_BACKEND"}
    done = processes.run(command, cwd=Path(__file__).parents[4], env=usual)
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


def test_vllm_lists_our_name_for_a_misspelt_one(outcomes):
    assert len(outcomes["misspelt"]) == 2
    words = ["Unknown attention backend: 'PREFIXSHARE'", "PREFIX_SHARE"]
    for sentence in outcomes["misspelt"]:
        assert all(word in sentence for word in words)


@pytest.mark.parametrize("way", WAYS)
def test_a_release_that_is_too_old_is_refused(outcomes, way):
    assert outcomes["too_old"][way]["error"] == "PrefixShareError"
    sentence = outcomes["too_old"][way]["sentence"]
    assert sentence.startswith("vLLM 0.25.1 is not supported by PREFIX_SHARE")
    assert sentence.endswith("or choose another attention backend.")


#: Chooses the backend by a dictionary, and writes the configuration to a file.
CHOOSE = """
import pickle, sys
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs(sys.argv[1], skip_tokenizer_init=True, max_model_len=1024,
                  attention_config={"backend": "PREFIX_SHARE"})
attention = args.create_engine_config().attention_config
with open(sys.argv[2], "wb") as file:
    pickle.dump(attention, file)
print(attention.backend.name)
"""

#: Reads it, as a spawned process does.
READ = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    print(pickle.load(file).backend.name)
"""

LOADED = "import sys, torch; print('vllm_prefixshare.vllm_plugin.register' in sys.modules"
LOADED += ", 'vllm_prefixshare.vllm_plugin.hooks.registry' in sys.modules)"


@pytest.fixture
def start(tmp_path):
    """Runs a program with the installed vLLM and the entry points of this checkout, and returns its
    last line.
    """
    if ON_CUDA_BUILD or ON_PATCHED:
        pytest.skip("the program imports the installed vLLM, not the one under test")
    root = Path(__file__).parents[4]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "site" / "vllm_prefixshare-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm_prefixshare\nVersion: 0.1.0\n"
    )
    lines = [
        line
        for group, names in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))

    def run(program: str, *arguments: object, **environment: str) -> str:
        path = os.pathsep.join([str(folder.parent), str(root)])
        command = [sys.executable, "-c", program, *arguments]
        done = processes.run(command, cwd=tmp_path, PYTHONPATH=path, **environment)
        return done.stdout.splitlines()[-1]

    return run


@pytest.mark.parametrize("device", ["CPU", "cuda"])
def test_it_is_chosen_under_any_target_device(start, tmp_path, device):
    """With ``cpu`` vLLM resolves its platform without a look at platform plugins, and importing
    torch has registered the hooks; ``test_hooks`` reads a configuration without it.
    """
    model = write_llama_8b(tmp_path / "model")
    file = tmp_path / "attention_config"
    assert start(CHOOSE, model, file, VLLM_TARGET_DEVICE=device) == "PREFIX_SHARE"
    if device == "CPU":
        assert start(READ, file, VLLM_TARGET_DEVICE=device) == "PREFIX_SHARE"


@pytest.mark.parametrize(
    ("environment", "installed"),
    [
        ({}, False),
        ({"VLLM_TARGET_DEVICE": "cpu"}, True),
        ({"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "other,prefix_share"}, True),
        ({"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""}, False),
    ],
)
def test_importing_torch_installs_hooks_only_where_vllm_calls_no_plugin(
    start, environment, installed
):
    assert start(LOADED, **environment) == f"True {installed}"
