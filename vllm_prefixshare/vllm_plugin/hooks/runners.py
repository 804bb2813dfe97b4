"""Hooks on vLLM's model runners and workers: block ids stay on the host, where plans are made;
under batch invariance no step with prompt tokens replays a FULL graph of decodes; steps that warm
up are not counted; plans and KV cache are renewed after sleep.
"""

import sys
from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import (
    Function,
    Hook,
    after,
    before,
    extend,
    wrap,
)

#: Loaded only in workers whose configuration chose the backend.
_PLANNING = "vllm_prefixshare.vllm_plugin.step.gpu_builder"


def hook_v1_table(module: ModuleType) -> None:
    """Keep the V1 runner's own copy of a block table where ``host_tables`` finds it."""
    from vllm_prefixshare.vllm_plugin.step.host_tables import HOST_TABLES

    wrap(module.BlockTable, "__init__", after(HOST_TABLES.keep_v1_table))


def hook_v1_dummy_batch(module: ModuleType) -> None:
    """Note when the V1 runner runs a batch without requests."""
    from vllm_prefixshare.vllm_plugin.step import host_tables

    def wrapper(original: Function) -> Function:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with host_tables.dummy_batch(self):
                return original(self, *args, **kwargs)

        return run

    wrap(module.GPUModelRunner, "_dummy_run", wrapper)


def hook_v2_tables(module: ModuleType) -> None:
    """Note the block ids that the V2 runner sends to the device."""
    from vllm_prefixshare.vllm_plugin.step import host_tables

    def get_dummy_block_tables(self: Any, num_reqs: int) -> None:
        host_tables.note_batch(self, None)

    tables = module.BlockTables
    wrap(tables, "__init__", after(host_tables.HOST_TABLES.keep_v2_tables))
    wrap(tables, "append_block_ids", before(host_tables.note_block_ids))
    wrap(tables, "get_dummy_block_tables", before(get_dummy_block_tables))


def hook_v2_batch(module: ModuleType) -> None:
    """Note the request slots of each batch that the V2 runner prepares."""
    from vllm_prefixshare.vllm_plugin.step import host_tables

    def prepare_attn(self: Any, input_batch: Any) -> None:
        host_tables.note_batch(self.block_tables, input_batch.idx_mapping_np)

    wrap(module.GPUModelRunner, "prepare_attn", before(prepare_attn))


def _is_invariant() -> bool:
    """Whether the backend serves a layer of this process under batch invariance."""
    planning = sys.modules.get(_PLANNING)
    return planning is not None and planning.is_invariant()


def hook_v1_graph_choice(module: ModuleType) -> None:
    """V1 model runner: under batch invariance a batch with prompt tokens is not uniform. vLLM
    replays a FULL graph of decodes where each request has one token, even a prompt's, which in
    another batch belongs to a longer part of its prompt.
    """

    def wrapper(original: Function) -> Function:
        def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
            # given for dummy batches only
            if kwargs.get("force_uniform_decode") is None and _is_invariant():
                batch, n = self.input_batch, kwargs["num_reqs"]
                if (batch.num_computed_tokens_cpu[:n] < batch.num_prompt_tokens[:n]).any():
                    kwargs["force_uniform_decode"] = False
            return original(self, *args, **kwargs)

        return choose

    wrap(module.GPUModelRunner, "_determine_batch_execution_and_padding", wrapper)


def hook_v2_graph_choice(module: ModuleType) -> None:
    """V2 model runner: the same."""

    def wrapper(original: Function) -> Function:
        def gather_batch_req_state(self: Any, *args: Any, **kwargs: Any) -> Any:
            state, tokens_each = original(self, *args, **kwargs)
            if state is not None and state.has_prefill and _is_invariant():
                tokens_each = None
            return state, tokens_each

        return gather_batch_req_state

    wrap(module.GPUModelRunner, "gather_batch_req_state", wrapper)


def hook_warm_up(module: ModuleType) -> None:
    """Count no steps while a worker warms up."""
    from vllm_prefixshare.vllm_plugin.observability.stats import warming_up

    if extend(module, "warm_up_contexts", warming_up):
        return

    def wrapper(original: Function) -> Function:
        def compile_or_warm_up_model(self: Any) -> Any:
            with warming_up():
                return original(self)

        return compile_or_warm_up_model

    wrap(module.Worker, "compile_or_warm_up_model", wrapper)


def hook_wake_up(module: ModuleType) -> None:
    """Make a new plan and clean the KV cache after a worker has woken up."""

    def wrapper(original: Function) -> Function:
        def wake_up(self: Any, tags: list[str] | None = None) -> Any:
            result = original(self, tags)
            planning = sys.modules.get(_PLANNING)
            if planning is not None and (tags is None or "kv_cache" in tags):
                planning.after_wake_up()
            return result

        return wake_up

    wrap(module.Worker, "wake_up", wrapper)


_UNTIL_TABLES = "CommonAttentionMetadata carries the host's block table"
_TABLES = ("vllm.v1.attention.backend:CommonAttentionMetadata.block_table_cpu",)
_WHY_GRAPHS = "under batch invariance a prompt token must not run in a graph of decodes"
_UNTIL_GRAPHS = "a backend can say which batches its graphs serve"
_GRAPHS = ("vllm.v1.attention.backend:AttentionMetadataBuilder.decode_graphs_take_prefills",)

HOOKS = (
    Hook(
        "vllm.v1.worker.block_table",
        "BlockTable.__init__",
        "metadata builders need the block ids on the host, and are given those of the device "
        "(V1 model runner)",
        _UNTIL_TABLES,
        hook_v1_table,
        _TABLES,
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        "a batch without requests looks like any other to metadata builders (V1 model runner)",
        "CommonAttentionMetadata says so",
        hook_v1_dummy_batch,
        _TABLES,
    ),
    Hook(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables",
        "the V2 model runner sends block ids to the device and keeps none (__init__, "
        "append_block_ids, get_dummy_block_tables)",
        _UNTIL_TABLES,
        hook_v2_tables,
        _TABLES,
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.prepare_attn",
        "metadata builders need the request slots of the batch (V2 model runner)",
        "CommonAttentionMetadata has req_idx in every supported release: from 0.30 on",
        hook_v2_batch,
        _TABLES,
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        f"{_WHY_GRAPHS} (V1 runner)",
        _UNTIL_GRAPHS,
        hook_v1_graph_choice,
        _GRAPHS,
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.gather_batch_req_state",
        f"{_WHY_GRAPHS} (V2 runner)",
        _UNTIL_GRAPHS,
        hook_v2_graph_choice,
        _GRAPHS,
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        "the V2 model runner warms up with made-up requests, which look like any other",
        "CommonAttentionMetadata marks them",
        hook_warm_up,
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.wake_up",
        "sleep frees the memory that holds plans and the KV cache",
        "metadata builders are told of it, and the KV cache is zeroed",
        hook_wake_up,
        ("vllm.v1.attention.backend:AttentionMetadataBuilder.after_wake_up",),
    ),
)
