"""The hooks on vLLM: each is in force and installed once, and the backend survives pickling."""

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from packaging.version import Version
from vllm import envs, platforms
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.attention import AttentionConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends import registry as vllm_backends
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests.support.processes import run_python
from tests.support.variables import set_variables
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.settings import PROMPT_PARTS, VARIABLES
from vllm_prefixshare.vllm_plugin import (
    COMPOSITE_BACKEND,
    CPU_BACKEND,
    FP8_MLA_BACKEND,
    MLA_BACKEND,
    compat,
    register,
    signatures,
)
from vllm_prefixshare.vllm_plugin.eligibility import fallback
from vllm_prefixshare.vllm_plugin.eligibility.fallback import declines
from vllm_prefixshare.vllm_plugin.eligibility.layer import LayerSpec
from vllm_prefixshare.vllm_plugin.eligibility.platform import CPU
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal
from vllm_prefixshare.vllm_plugin.hooks import registry, selection
from vllm_prefixshare.vllm_plugin.observability import stats
from vllm_prefixshare.vllm_plugin.prompts import parts


@pytest.fixture(autouse=True)
def _installed():
    register.register()


@pytest.fixture
def on_cpu(monkeypatch):
    """The wheel of a release finds no GPU here: this process is given a CPU's platform."""
    from vllm.platforms.cpu import CpuPlatform

    if current_platform.is_cpu():
        return
    monkeypatch.setattr(current_platform, "device_type", "cpu")  # for modules that hold it
    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())


@pytest.mark.parametrize("hook", registry.HOOKS, ids=lambda h: h.name)
def test_every_hook_names_a_real_target_and_why(hook):
    assert hook.why
    assert hook.until
    if hook.module == "vllm.platforms.cuda":  # imports CUDA's libraries: its source is parsed
        owner, method = hook.name.split(".")
        source = Path(importlib.util.find_spec(hook.module).origin).read_text()
        assert f"class {owner}(" in source
        assert f"def {method}(" in source
    else:
        value = importlib.import_module(hook.module)
        for name in hook.name.split("."):
            value = getattr(value, name)


#: hooks whose target is not among the signatures, and why
NOT_SIGNATURES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker.get_current_attn_backends": (
        "without it NIXL pairs instances with equal backends only"
    ),
    "vllm.envs.environment_variables": "without it vLLM warns of a variable",
    "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls": "one release has a CPU backend",
}


@pytest.mark.parametrize("hook", [h for h in registry.HOOKS if h.parts], ids=lambda h: h.target)
def test_a_part_whose_target_moved_is_left_to_vllm(hook, monkeypatch, caplog):
    monkeypatch.setattr(parts, "_active", frozenset(PROMPT_PARTS))
    monkeypatch.setattr(parts, "_unavailable", set())
    monkeypatch.setattr(parts, "_reported", set())
    with caplog.at_level(logging.INFO):
        registry._install(ModuleType(hook.module))  # without any of its names
    for part in PROMPT_PARTS:
        assert parts.is_enabled(part) == (part not in _parts_of(hook.module))
    assert hook.target in caplog.text


def _parts_of(module):
    return {part for hook in registry.HOOKS if hook.module == module for part in hook.parts}


@pytest.mark.parametrize("hook", [h for h in registry.HOOKS if not h.parts], ids=lambda h: h.target)
def test_a_hook_target_that_moved_would_be_found(hook):
    known = {*signatures.PARAMETERS, *signatures.MEMBERS}
    known |= {
        f"{cls}.{member}" for cls, members in signatures.MEMBERS.items() for member in members
    }
    assert (hook.target in known) != (hook.target in NOT_SIGNATURES)


def test_hooks_are_installed_once():
    from vllm.platforms.cpu import CpuPlatform

    before = EngineArgs.create_engine_config, CpuPlatform.get_attn_backend_cls
    registry.install_hooks()
    assert (EngineArgs.create_engine_config, CpuPlatform.get_attn_backend_cls) == before
    for function in before:
        assert hasattr(function, "__wrapped__")
        assert not hasattr(function.__wrapped__, "__wrapped__")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, object]:
    """What a program finds that imports a hooked module before it loads plugins, with two installs
    of the plugin: in a container with a wheel, and a checkout in front of it. vLLM finds the entry
    points of both, and Python imports one package.
    """
    folder = tmp_path_factory.mktemp("installs")
    installed = importlib.metadata.distribution("vllm_prefixshare")
    second = folder / "vllm_prefixshare-9.dist-info"
    second.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (second / name).write_text(installed.read_text(name))
    # the import resolves the platform, and that loads plugins while the module is half imported
    code = """
import importlib.metadata, json, sys
import vllm.v1.serial_utils as module
from vllm.plugins import load_general_plugins
from vllm.engine.arg_utils import EngineArgs
load_general_plugins()
from vllm_prefixshare.vllm_plugin.prompts import parts
once = EngineArgs.create_engine_config.__wrapped__
later = {"vllm.v1.worker.gpu_worker", "vllm_prefixshare.wrapper"} & sys.modules.keys()
from vllm.v1.worker.block_table import BlockTable
group = importlib.metadata.entry_points(group="vllm.general_plugins")
print(json.dumps({
    "installs": len([e for e in group if e.name == "prefix_share"]),
    "hooked twice": hasattr(once, "__wrapped__"),
    "hooked": hasattr(module.MsgpackEncoder.encode, "__wrapped__"),
    "unavailable": list(parts._unavailable),
    "imported": sorted(later),
    "hooked when imported": hasattr(BlockTable.__init__, "__wrapped__"),
}))
"""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return json.loads(run_python(code, PYTHONPATH=path).stdout.splitlines()[-1])


def test_two_installs_of_the_plugin_are_one(loaded):
    assert loaded["installs"] >= 1, "importlib.metadata may list one distribution of a name"
    assert not loaded["hooked twice"]


def test_a_program_may_import_a_hooked_module_before_plugins_are_loaded(loaded):
    assert loaded["hooked"]
    assert loaded["unavailable"] == []


def test_hooks_wait_for_their_modules(loaded):
    assert loaded["imported"] == []
    assert loaded["hooked when imported"]


def test_the_backend_member_unpickles_where_no_plugin_was_loaded():
    data = pickle.dumps(AttentionConfig(backend=selection.backend_member()))
    code = (
        "import pickle, sys; member = pickle.loads(bytes.fromhex(sys.argv[1])).backend;"
        "print(member.name, member.get_class().get_name())"
    )
    assert run_python(code, data.hex()).stdout.split()[-2:] == ["PREFIX_SHARE", "PREFIX_SHARE"]


def engine_args(**given: object) -> SimpleNamespace:
    defaults = {"attention_backend": None, "attention_config": SimpleNamespace(backend=None)}
    return SimpleNamespace(**{**defaults, **given})


@pytest.mark.parametrize(
    ("variable", "is_ours"),
    [
        ("prefix_share", True),
        ("FLASH_ATTN", False),  # other backends are left to vLLM
        ("FLASH_ATTN_VLLM_V1", False),  # one of an old release
    ],
)
def test_the_environment_variable_chooses_our_backend(monkeypatch, variable, is_ours):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", variable)
    args = engine_args()
    selection.choose_from_environment(args)
    assert args.attention_backend is (selection.backend_member() if is_ours else None)


def test_a_misspelt_name_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "PREFIXSHARE")
    with pytest.raises(PrefixShareError, match="'PREFIXSHARE' is not an attention backend"):
        selection.choose_from_environment(engine_args())


def test_a_named_kernel_is_refused_before_weights_are_loaded(monkeypatch):
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda *_: False)
    monkeypatch.setattr(platform, "is_device_capability", lambda *_: False)
    set_variables(monkeypatch, KERNEL="hopper")
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=None))
    with pytest.raises(PrefixShareError, match=r"KERNEL=hopper needs .* 9\.0: set it to auto"):
        selection._check_engine_config(config, frozenset(), offline=False)
    monkeypatch.setattr(platform, "is_device_capability", lambda *_: True)

    def without_gluon(name):
        raise ImportError(f"{name} needs another Gluon")

    monkeypatch.setattr("vllm_prefixshare.kernels.registry.import_module", without_gluon)
    with pytest.raises(PrefixShareError, match=r"hopper cannot be used \(.* Gluon\): set it to"):
        selection._check_engine_config(config, frozenset(), offline=False)


def test_arguments_without_the_fields_of_a_choice_choose_nothing(monkeypatch):
    assert not selection._chosen_by(SimpleNamespace())
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "PREFIX_SHARE")
    args = SimpleNamespace()
    selection.choose_from_environment(args)
    assert selection._chosen_by(args), "then the release is checked, and the field named"


def layer(**changes: object) -> AttentionSelectorConfig:
    given = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 128}
    return AttentionSelectorConfig(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_size": 48}, "head_dim 48"),
        ({"head_size": 512}, "head_dim 512"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of type fp8"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"has_sliding_window": True}, "a sliding window"),
        ({"has_sink": True}, "attention sinks"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"dtype": torch.float64}, "dtype float64"),
    ],
)
def test_layers_that_cannot_be_served_are_named(changes, reason):
    assert refusal(LayerSpec.of_selector(layer(**changes)), CPU) == reason


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (None, {"has_sink": True}),
        (None, {"kv_cache_dtype": "fp8"}),
        (None, {"kv_cache_dtype": "fp8_e4m3"}),
        ("head_dim", {"head_size": 512}),
    ],
)
def test_some_layers_are_served_on_gpus_only(monkeypatch, name, changes):
    parent = flash_attn.FlashAttentionBackend
    for ability in ("supports_sink", "supports_kv_cache_dtype"):
        monkeypatch.setattr(parent, ability, lambda *args: True)
    if name is not None:  # no engine on a GPU has run it
        assert declines(layer(**changes), on_gpu=True) is not None
        set_variables(monkeypatch, EXPERIMENTAL=name)
    assert declines(layer(**changes), on_gpu=True) is None
    assert declines(layer(**changes), on_gpu=False) is not None, "a CPU"
    other = {"kv_cache_dtype": "fp8_e5m2", "head_size": 520, "attn_type": "encoder_only"}
    for field, value in other.items():
        assert declines(layer(**{field: value}), on_gpu=True) is not None
    for ability in ("supports_sink", "supports_kv_cache_dtype"):
        monkeypatch.setattr(parent, ability, lambda *args: False)
    if name is None:  # vLLM would refuse the whole engine
        assert declines(layer(**changes), on_gpu=True) is not None


@pytest.fixture
def _mla_served(monkeypatch):
    """As on a Hopper GPU."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.ops import flashmla

    monkeypatch.setattr(fa_utils, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (True, None))


MLA = {"use_mla": True, "head_size": 576}


@pytest.mark.usefixtures("_mla_served")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_size": 320}, "head_dim 320"),
        ({"use_sparse": True}, "sparse attention"),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"kv_cache_dtype": "fp8_e4m3"}, None),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "a KV cache of type fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "a KV cache of type fp8_e5m2"),
        ({"kv_cache_dtype": "fp8", "use_sparse": True}, "sparse attention"),
        ({"kv_cache_dtype": "fp8", "use_batch_invariant": True}, "batch invariance"),
        ({"kv_cache_dtype": "fp8", "dtype": torch.float16}, "dtype float16"),
        ({"dtype": torch.float16}, None),
        ({"dtype": torch.float32}, "dtype float32"),
    ],
)
def test_mla_layers_that_cannot_be_served_are_named(changes, reason):
    found = declines(layer(**{**MLA, **changes}), on_gpu=True)
    assert found == reason


@pytest.mark.usefixtures("_mla_served")
def test_fp8_latents_are_served_where_flash_mla_takes_them_only(monkeypatch):
    from vllm.v1.attention.ops import flashmla

    quantised = layer(**MLA, kv_cache_dtype="fp8")
    assert declines(quantised, on_gpu=True) is None
    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (False, "no build"))
    assert declines(quantised, on_gpu=True) == "a KV cache of type fp8"


@pytest.fixture
def mla_platform():
    """A CUDA platform under our hook, whose own backend for MLA is ``own``; ``asked`` has the
    backends that it was asked for.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class Platform:
        own = AttentionBackendEnum.FLASH_ATTN_MLA
        asked: ClassVar[list[object]] = []

        @classmethod
        def get_attn_backend_cls(cls, selected, config, num_heads=None):
            cls.asked.append(selected)
            return cls.own.get_path()

    selection.hook_cuda_platform(SimpleNamespace(CudaPlatformBase=Platform))
    return Platform


@pytest.mark.usefixtures("_mla_served")
def test_an_mla_layer_extends_the_backend_that_vllm_would_take(mla_platform):
    chosen = selection.backend_member()
    mla = mla_platform.get_attn_backend_cls(chosen, layer(**MLA), num_heads=16)
    assert mla == MLA_BACKEND and mla_platform.asked == [None]
    backends = type(mla_platform.own)
    mla_platform.own = backends.FLASHMLA
    for cache in ("fp8", "fp8_e4m3"):
        quantised = layer(**MLA, kv_cache_dtype=cache)
        assert mla_platform.get_attn_backend_cls(chosen, quantised) == FP8_MLA_BACKEND


@pytest.mark.usefixtures("_mla_served")
@pytest.mark.parametrize(
    ("cache", "name", "cls"),
    [
        ("auto", "FLASHMLA", "FlashMLABackend"),
        ("bfloat16", "TRITON_MLA", "TritonMLABackend"),
        # vLLM takes it where --block-size is no multiple of 64
        ("fp8", "TRITON_MLA", "TritonMLABackend"),
        ("fp8", "FLASH_ATTN_MLA", "FlashAttnMLABackend"),
    ],
)
def test_an_mla_layer_of_another_backend_keeps_it(mla_platform, cache, name, cls):
    parent = mla_platform.own = type(mla_platform.own)[name]
    reason = f"multi-head latent attention in {cls}"
    before = dict(stats.STATS.fallbacks)
    other = layer(**MLA, kv_cache_dtype=cache)
    own = mla_platform.get_attn_backend_cls(selection.backend_member(), other)
    assert own == parent.get_path()
    assert stats.STATS.fallbacks[reason] == before.get(reason, 0) + 1


@pytest.mark.parametrize(
    ("hopper", "changes", "reason"),
    [
        (False, {}, "multi-head latent attention"),
        # a vLLM without FlashMLA's compiled library
        (True, {"kv_cache_dtype": "fp8"}, "a KV cache of type fp8"),
        (True, {"use_batch_invariant": True}, "batch invariance"),
    ],
)
def test_mla_that_is_not_served_gets_the_backend_that_vllm_would_take(
    monkeypatch, mla_platform, hopper, changes, reason
):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_supports_mla", lambda: hopper)
    said = []
    log = SimpleNamespace(warning_once=lambda *args: said.append(args))
    monkeypatch.setattr(fallback, "logger", lambda: log)
    chosen = selection.backend_member()
    own = mla_platform.get_attn_backend_cls(chosen, layer(**MLA, **changes), num_heads=16)
    assert own == mla_platform.own.get_path() and mla_platform.asked == [None]
    assert [args[1] for args in said] == [reason]


@pytest.mark.parametrize("has_composite", [True, False])
def test_layers_with_image_masks_get_the_composite_where_vllm_has_one(monkeypatch, has_composite):
    monkeypatch.setattr(compat, "can_combine_backends", lambda: has_composite)
    asked: list[tuple[str | None, bool]] = []

    class Platform:
        @classmethod
        def get_attn_backend_cls(cls, selected, config, num_heads=None):
            asked.append((getattr(selected, "name", None), config.use_mm_prefix))
            return "vllm's own"

    selection.hook_cuda_platform(SimpleNamespace(CudaPlatformBase=Platform))
    found = Platform.get_attn_backend_cls(
        selection.backend_member(), layer(use_mm_prefix=True), num_heads=9
    )
    if has_composite:  # vLLM has checked the causal child
        assert found == COMPOSITE_BACKEND and asked == [("PREFIX_SHARE", False)]
    else:
        assert found == "vllm's own" and asked == [(None, True)]


def test_refused_layers_keep_the_stock_backend_unless_strict(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    ours = CpuPlatform.get_attn_backend_cls(selection.backend_member(), layer(), 9)
    assert ours == CPU_BACKEND
    other = CpuPlatform.get_attn_backend_cls(selection.backend_member(), layer(head_size=48), 9)
    assert other.endswith("CPUAttentionBackend")
    set_variables(monkeypatch, STRICT="1")
    with pytest.raises(PrefixShareError, match="head_dim 48"):
        CpuPlatform.get_attn_backend_cls(selection.backend_member(), layer(head_size=48), 9)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("per_kind", "chosen"),
    [
        ({"full_attention": "CPU_ATTN"}, "CPU_ATTN"),
        ({"sliding_window": "CPU_ATTN"}, "PREFIX_SHARE"),
        ({"full_attention": "PREFIX_SHARE"}, "PREFIX_SHARE"),
    ],
)
def test_a_kind_of_layers_with_a_backend_of_its_own_has_that_one(per_kind, chosen):
    own = {kind: vllm_backends.AttentionBackendEnum[name] for kind, name in per_kind.items()}
    config = VllmConfig(
        attention_config={"backend": selection.backend_member(), "backend_per_kind": own}
    )
    with set_current_vllm_config(config):
        assert selector.get_attn_backend(64, torch.bfloat16, "auto").get_name() == chosen


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_batch_invariance_is_left_to_the_stock_backend(monkeypatch, invariant):
    """As vLLM chooses a layer's backend where VLLM_BATCH_INVARIANT is set."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    config = VllmConfig(attention_config={"backend": selection.backend_member()})
    fallbacks = dict(stats.STATS.fallbacks)
    with set_current_vllm_config(config):
        chosen = selector.get_attn_backend(64, torch.bfloat16, "auto")
    assert chosen.get_name() == ("CPU_ATTN" if invariant == "1" else "PREFIX_SHARE")
    told = stats.STATS.fallbacks.get("batch invariance", 0) > fallbacks.get("batch invariance", 0)
    assert told == (invariant == "1")


def test_vllm_knows_our_variables_and_compiles_the_same_whatever_they_say(monkeypatch):
    factors = []
    for value in ("one", "two"):
        for name in VARIABLES:
            monkeypatch.setenv(name, value)
        factors.append(envs.compile_factors())
    assert set(VARIABLES) <= set(factors[0])
    assert factors[0] == factors[1]


def test_other_backends_do_not_pass_through_ours():
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.get_attn_backend_cls(None, layer(), 9).endswith("CPUAttentionBackend")


@pytest.fixture
def _judge_anew():
    compat.check_release.cache_clear()
    yield
    compat.check_release.cache_clear()


@pytest.mark.usefixtures("_judge_anew")
@pytest.mark.parametrize("version", ["0.9.0", "0.25.1", "0.28.0"])
def test_releases_that_are_too_old_are_refused(version):
    with pytest.raises(PrefixShareError, match=f"vLLM {version} is not supported.*install"):
        compat.check_release(Version(version))


@pytest.mark.usefixtures("_judge_anew")
@pytest.mark.parametrize("version", ["0.29.0", "0.31.0", "0.33.0", "0.34.0"])
def test_other_cpu_backends_are_refused(version):
    compat.check_release(Version(version))
    with pytest.raises(PrefixShareError, match=r"not supported .*on a CPU: install version 0\.32"):
        compat.check_release(Version(version), on_cpu=True)


@pytest.mark.usefixtures("_judge_anew")
@pytest.mark.parametrize(("version", "warnings"), [("0.33.0", 0), ("0.34.0", 1), ("1.0.0", 1)])
def test_a_newer_release_with_known_signatures_is_warned_of_once(version, warnings, monkeypatch):
    said = []
    log = SimpleNamespace(warning=lambda *args: said.append(args))
    monkeypatch.setattr(compat, "logger", lambda: log)
    for _ in range(2):
        compat.check_release(Version(version))
    assert len(said) == warnings


@pytest.mark.usefixtures("_judge_anew")
@pytest.mark.parametrize(
    ("file", "old", "new", "symbol"),
    [
        (
            "v1/worker/gpu/block_table.py",
            "def append_block_ids(",
            "def extend_block_ids(",
            "vllm.v1.worker.gpu.block_table.BlockTables.append_block_ids (not found)",
        ),
        (
            "v1/worker/gpu_worker.py",
            "def wake_up(self, tags:",
            "def wake_up(self, names:",
            "vllm.v1.worker.gpu_worker.Worker.wake_up (its parameters are self, names)",
        ),
        (
            "v1/attention/backend.py",
            "    seq_lens_cpu_upper_bound:",
            "    seq_lens_cpu_bound:",
            "CommonAttentionMetadata.seq_lens_cpu_upper_bound (not found)",
        ),
    ],
)
def test_a_hook_target_that_moved_is_named(file, old, new, symbol, tmp_path, monkeypatch):
    installed = signatures.package_folder()
    for name in (*signatures.PARAMETERS, *signatures.MEMBERS):
        # a function or a class of a module, or a method of a class
        paths = [Path(*name.split(".")[1:-n]).with_suffix(".py") for n in (1, 2)]
        path = next(path for path in paths if (installed / path).is_file())
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((installed / path).read_text())
    assert signatures.moved(tmp_path) is None
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    monkeypatch.setattr(signatures, "package_folder", lambda: tmp_path)
    with pytest.raises(PrefixShareError) as refused:
        compat.check_release(Version("0.34.0"))
    assert symbol in str(refused.value)


def test_a_vllm_without_a_hook_target_says_nothing_to_those_who_did_not_choose(monkeypatch, caplog):
    module = ModuleType(registry.HOOKS[0].module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with caplog.at_level(logging.DEBUG):
        register.register()
    assert not caplog.records


def test_registering_imports_nothing_of_vllm():
    code = """
import sys
from vllm_prefixshare.vllm_plugin.register import register
register()
heavy = {"torch", "numba", "triton", "vllm"} & sys.modules.keys()
assert not heavy, heavy
"""
    run_python(code)


@pytest.mark.parametrize(
    "program",
    [
        "/usr/bin/vllm",
        "/lib/vllm/entrypoints/cli/main.py",
        "/lib/vllm/entrypoints/openai/api_server.py",
    ],
)
def test_in_a_program_of_vllm_a_refusal_is_one_line_and_status_2(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "serve"])
    with pytest.raises(SystemExit) as ended, selection.reporting_errors():
        raise PrefixShareError("vLLM 0.9.0 is not supported.")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "vllm: error: vLLM 0.9.0 is not supported.\n"


@pytest.mark.parametrize("program", ["/home/vllm/train.py", "-c", ""])
def test_in_a_program_of_the_user_a_refusal_is_an_exception(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program])
    with (
        pytest.raises(PrefixShareError, match="is not supported"),
        selection.reporting_errors(),
    ):
        raise PrefixShareError("vLLM 0.9.0 is not supported.")
    assert capsys.readouterr().err == ""
