"""The changes made to vLLM: each in force, each once, and the backend survives pickling."""

import importlib
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.config import DTYPES
from vllm_prefixshare.integration import compat, hooks, register, support


@pytest.fixture(autouse=True)
def _installed():
    register.register()


def resolve(target: str) -> object:
    """The object with this dotted name."""
    parts = target.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"{target} cannot be imported")


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda h: h.target.rpartition(".")[2])
def test_every_hook_names_a_real_target_and_why(hook):
    assert resolve(hook.target) is not None
    assert hook.why
    assert hook.until


def test_hooks_are_installed_once():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform

    before = EngineArgs.create_engine_config, CpuPlatform.get_attn_backend_cls
    hooks.install_hooks()
    assert (EngineArgs.create_engine_config, CpuPlatform.get_attn_backend_cls) == before
    for function in before:
        assert hasattr(function, "__wrapped__")
        assert not hasattr(function.__wrapped__, "__wrapped__")


def test_the_backend_member_unpickles_where_no_plugin_was_loaded():
    data = pickle.dumps(hooks.backend_member())
    code = (
        "import pickle, sys; member = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(member.name, member.get_class().get_name())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == ["PREFIX_SHARE", "PREFIX_SHARE"]


def engine_args(**given: object) -> SimpleNamespace:
    defaults = {"attention_backend": None, "attention_config": SimpleNamespace(backend=None)}
    return SimpleNamespace(**{**defaults, **given})


def test_the_environment_variable_chooses_the_backend(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "prefix_share")
    args = engine_args()
    hooks._select_from_environment(args)
    assert args.attention_backend is hooks.backend_member()


def test_an_argument_wins_over_the_environment_variable(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "PREFIX_SHARE")
    args = engine_args(attention_backend="CPU_ATTN")
    hooks._select_from_environment(args)
    assert args.attention_backend == "CPU_ATTN"


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASH_ATTN_VLLM_V1"])  # one of an old release
def test_other_backends_are_left_to_vllm(monkeypatch, name):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
    args = engine_args()
    hooks._select_from_environment(args)
    assert args.attention_backend is None


def test_a_misspelt_name_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "PREFIXSHARE")
    with pytest.raises(PrefixShareError, match="'PREFIXSHARE' is not an attention backend"):
        hooks._select_from_environment(engine_args())


def layer(**changes: object) -> AttentionSelectorConfig:
    given = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 128}
    return AttentionSelectorConfig(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_size": 48}, "head_dim 48"),
        ({"head_size": 512}, "head_dim 512"),
        ({"kv_cache_dtype": "fp8"}, "a fp8 KV cache"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"has_sliding_window": True}, "a sliding window"),
        ({"has_sink": True}, "attention sinks"),
        ({"dtype": torch.float64}, "dtype float64"),
    ],
)
def test_layers_that_cannot_be_served_are_named(changes, reason):
    assert support.selector_refusal(layer(**changes), DTYPES) == reason


def test_refused_layers_keep_the_stock_backend_unless_strict(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    ours = CpuPlatform.get_attn_backend_cls(hooks.backend_member(), layer(), 9)
    assert ours == hooks.CPU_BACKEND
    other = CpuPlatform.get_attn_backend_cls(hooks.backend_member(), layer(head_size=48), 9)
    assert other.endswith("CPUAttentionBackend")
    monkeypatch.setenv("VLLM_PREFIXSHARE_STRICT", "1")
    with pytest.raises(PrefixShareError, match="head_dim 48"):
        CpuPlatform.get_attn_backend_cls(hooks.backend_member(), layer(head_size=48), 9)


def test_other_backends_do_not_pass_through_ours():
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.get_attn_backend_cls(None, layer(), 9).endswith("CPUAttentionBackend")


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.31.0", "0.34.0", "1.0.0"])
def test_unsupported_vllm_versions_are_refused(version):
    with pytest.raises(PrefixShareError, match=f"vLLM {version} is not supported.*install"):
        compat.check_vllm_version(Version(version))


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_other_cpu_backends_are_refused(version):
    compat.check_vllm_version(Version(version))
    with pytest.raises(PrefixShareError, match=r"not supported .*on a CPU: install version 0\.32"):
        compat.check_vllm_version(Version(version), on_cpu=True)


def test_an_unsupported_version_is_an_error_only_for_who_chose_the_backend(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: Version("0.9.0"))
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    register.register()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "PREFIX_SHARE")
    with pytest.raises(PrefixShareError, match=r"vLLM 0\.9\.0 is not supported"):
        register.register()


def test_a_vllm_that_cannot_be_hooked_is_an_error_only_for_who_chose_the_backend(monkeypatch):
    def missing() -> None:
        raise ImportError("cannot import name 'BlockTables'")

    monkeypatch.setattr(hooks, "HOOKS", (hooks.Hook("vllm.some.thing", "why", "when", missing),))
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    register.register()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "PREFIX_SHARE")
    with pytest.raises(PrefixShareError, match=r"cannot hook vllm\.some\.thing: cannot import"):
        register.register()
