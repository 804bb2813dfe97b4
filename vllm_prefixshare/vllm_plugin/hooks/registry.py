"""The list of hooks, each with why it exists and until when, and how they are installed."""

import sys
from types import ModuleType

from vllm_prefixshare.vllm_plugin.hooks import (
    activation,
    beams,
    block_hashes,
    connectors,
    copies,
    detokenization,
    runners,
    selection,
    tokenization,
)
from vllm_prefixshare.vllm_plugin.hooks.imports import watch_imports
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Hook
from vllm_prefixshare.vllm_plugin.prompts.parts import deactivate

_DECLINE = (
    "vllm.platforms.interface:Platform.backend_for_layer",
    "vllm.platforms.interface:Platform.mla_class_chooser",
)

HOOKS = (
    Hook(
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum",
        "a backend needs an enum member, and a dynamic one does not survive pickling",
        "dynamic members pickle by name",
        selection.hook_backend_enum,
    ),
    Hook(
        "vllm.envs",
        "environment_variables",
        "vLLM warns of VLLM_* variables that it does not know",
        "plugins can declare their variables",
        selection.hook_environment,
        ("vllm.envs:PLUGIN_PREFIXES",),
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        f"vLLM no longer reads {selection.ENV_VAR}; wrong settings must be rejected before work "
        "starts",
        "vLLM reads it again and lets a backend check the whole configuration",
        selection.hook_engine_config,
    ),
    Hook(
        "vllm.platforms.cuda",
        "CudaPlatformBase.get_attn_backend_cls",
        "a layer that is not served keeps vLLM's own backend",
        "a backend can decline a layer",
        selection.hook_cuda_platform,
        _DECLINE,
    ),
    Hook(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        "the CPU platform ignores which backend was selected",
        "it honours the selection, and a backend can decline a layer",
        selection.hook_cpu_platform,
        (*_DECLINE, "vllm.platforms.cpu:_serves_cpus"),
    ),
    *runners.HOOKS,
    *activation.HOOKS,
    *tokenization.HOOKS,
    *detokenization.HOOKS,
    *block_hashes.HOOKS,
    *copies.HOOKS,
    *beams.HOOKS,
    *connectors.HOOKS,
)


def install_hooks() -> None:
    """Install ``HOOKS`` for the modules that are loaded, and the others when they are imported.
    May be called again: a hook in force is left alone.
    """
    for name in {hook.module for hook in HOOKS}:
        # vLLM loads plugins while it resolves its platform, which may happen during the import of
        # one of these modules; plugins are loaded again before an engine starts
        if name in sys.modules and not _is_importing(sys.modules[name]):
            _install(sys.modules[name])
    watch_imports({hook.module for hook in HOOKS}, _install)


def _is_importing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _install(module: ModuleType) -> None:
    for hook in HOOKS:
        if hook.module == module.__name__:
            try:
                hook.apply(module)
            except AttributeError:
                # This vLLM has no such name. Where the backend is chosen,
                # `compat.check_release` names it and rejects before the engine starts.
                for part in hook.parts:
                    deactivate(part, f"this vLLM has no {hook.target}")
