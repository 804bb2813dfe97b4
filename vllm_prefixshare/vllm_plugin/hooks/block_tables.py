"""Hooks that keep the block ids of a batch on the host, where plans are made."""

from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, after, before, wrap


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
