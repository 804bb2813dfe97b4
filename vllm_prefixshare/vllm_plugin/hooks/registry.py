"""The list of hooks, each with why it exists and until when, and how they are installed."""

import sys
from types import ModuleType

from vllm_prefixshare.vllm_plugin.hooks import (
    activation,
    beams,
    block_hashes,
    block_tables,
    copies,
    detokenization,
    graphs,
    lifecycle,
    patched,
    selection,
    tokenization,
)
from vllm_prefixshare.vllm_plugin.hooks.imports import watch_imports
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Hook
from vllm_prefixshare.vllm_plugin.prompts.parts import deactivate

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
        patched.knows_our_variables,
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        f"vLLM no longer reads {selection.ENV_VAR}; wrong settings must be refused before work "
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
        patched.lets_backends_decline,
    ),
    Hook(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        "the CPU platform ignores which backend was selected",
        "it honours the selection, and a backend can decline a layer",
        selection.hook_cpu_platform,
        patched.lets_cpu_backends_be_selected,
    ),
    Hook(
        "vllm.v1.worker.block_table",
        "BlockTable.__init__",
        "metadata builders need the block ids on the host, and are given those of the device "
        "(V1 model runner)",
        "CommonAttentionMetadata carries the host's block table",
        block_tables.hook_v1_table,
        patched.carries_host_tables,
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        "a batch without requests looks like any other to metadata builders (V1 model runner)",
        "CommonAttentionMetadata says so",
        block_tables.hook_v1_dummy_batch,
        patched.carries_host_tables,
    ),
    Hook(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables",
        "the V2 model runner sends block ids to the device and keeps none (__init__, "
        "append_block_ids, get_dummy_block_tables)",
        "CommonAttentionMetadata carries the host's block table",
        block_tables.hook_v2_tables,
        patched.carries_host_tables,
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.prepare_attn",
        "metadata builders need the request slots of the batch (V2 model runner)",
        "CommonAttentionMetadata has req_idx in every supported release: from 0.30 on",
        block_tables.hook_v2_batch,
        patched.carries_host_tables,
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        "under batch invariance a prompt token must not run in a graph of decodes (V1 runner)",
        "a backend can say which batches its graphs serve",
        graphs.hook_v1_graph_choice,
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.gather_batch_req_state",
        "under batch invariance a prompt token must not run in a graph of decodes (V2 runner)",
        "a backend can say which batches its graphs serve",
        graphs.hook_v2_graph_choice,
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.wake_up",
        "sleep frees the memory that holds plans and the KV cache",
        "metadata builders are told of it, and the KV cache is zeroed",
        lifecycle.hook_wake_up,
        patched.tells_builders_of_wake_up,
    ),
    *activation.HOOKS,
    *tokenization.HOOKS,
    *detokenization.HOOKS,
    *block_hashes.HOOKS,
    *copies.HOOKS,
    *beams.HOOKS,
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
                if not hook.replaced(module):
                    hook.install(module)
            except AttributeError:
                # This vLLM has no such name. Where the backend is chosen,
                # `compat.check_release` names it and rejects before the engine starts.
                for part in hook.parts:
                    deactivate(part, f"this vLLM has no {hook.target}")
