"""The host's copies of vLLM's block tables."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_prefixshare.vllm_plugin import register
from vllm_prefixshare.vllm_plugin.hooks.runners import hook_v1_dummy_batch
from vllm_prefixshare.vllm_plugin.hooks.wrapping import _MARK
from vllm_prefixshare.vllm_plugin.step import host_tables


class Layer:
    """A layer that reads block tables."""


LAYER = Layer()


@pytest.fixture(autouse=True)
def _installed():
    register.register()
    host_tables.HOST_TABLES.want(LAYER)


def v1_table():
    from vllm.v1.worker.block_table import BlockTable

    arguments = {
        "block_size": 16,
        "max_num_reqs": 4,
        "max_num_blocks_per_req": 8,
        "max_num_batched_tokens": 64,
        "pin_memory": False,
        "device": torch.device("cpu"),
        "kernel_block_size": 16,
        "cp_kv_cache_interleave_size": 1,
    }
    accepted = inspect.signature(BlockTable.__init__.__wrapped__).parameters
    return BlockTable(**{k: v for k, v in arguments.items() if k in accepted})


def test_the_v1_runners_table_is_found_by_any_first_rows_of_the_device_tensor():
    table = v1_table()
    table.add_row([7, 8, 9], 0)
    table.add_row([7, 8], 1)
    found = host_tables.HOST_TABLES.find(table.get_device_tensor(2))
    assert found is not None
    assert found.num_reqs(np.array([0, 1, 3, 3])) == 2
    assert found.rows(2) == (None, None)
    np.testing.assert_array_equal(found.block_table[:2, :3], [[7, 8, 9], [7, 8, 0]])
    table.move_row(0, 1)
    np.testing.assert_array_equal(found.block_table[1, :3], [7, 8, 9])


def test_a_dummy_batch_of_the_v1_runner_has_no_requests():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    table, starts = v1_table(), np.array([0, 1, 2, 2])
    table.add_row([7], 0)
    found = host_tables.HOST_TABLES.find(table.get_device_tensor(2))
    assert found is not None

    other = v1_table()  # of another engine in this process
    other.add_row([8], 0)
    of_other = host_tables.HOST_TABLES.find(other.get_device_tensor(2))

    class Runner:
        input_batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=[table]))

        def _dummy_run(self) -> int:
            assert of_other.num_reqs(starts) == 2
            return found.num_reqs(starts)

    hook_v1_dummy_batch(SimpleNamespace(GPUModelRunner=Runner))
    assert Runner()._dummy_run() == 0
    assert found.num_reqs(starts) == 2
    # what a vLLM with patches passes has no rows then
    assert host_tables.RowTable(found.block_table[:0]).num_reqs(starts) == 0
    hooked = not hasattr(CommonAttentionMetadata, "block_table_cpu")
    assert hasattr(GPUModelRunner._dummy_run, "__wrapped__")
    assert getattr(GPUModelRunner._dummy_run, _MARK, False) is hooked


def test_a_table_that_vllm_gave_up_is_forgotten():
    table = v1_table()
    device_tensor = table.get_device_tensor(1)
    assert host_tables.HOST_TABLES.find(device_tensor) is not None
    del table
    assert host_tables.HOST_TABLES.find(device_tensor) is None


def v2_tables(blocks_per_kv_block: int = 1):
    """A stand-in for the V2 runner's tables, which need a GPU: the fields that the copies read."""
    tables = SimpleNamespace(
        max_num_reqs=4,
        input_block_tables=[torch.zeros(4, 8, dtype=torch.int32) for _ in range(2)],
        blocks_per_kv_block=[blocks_per_kv_block, 1],
    )
    host_tables.HOST_TABLES.keep_v2_tables(tables)
    return tables


def ids_of(table: host_tables.HostTable, num_reqs: int) -> np.ndarray:
    return table.block_table[table.rows(num_reqs)[0]]


def test_the_v2_runners_tables_are_noted_slot_by_slot():
    tables = v2_tables()
    host_tables.note_block_ids(tables, 2, ([5, 6], [1]), overwrite=True)
    host_tables.note_block_ids(tables, 0, ([5, 9], [2]), overwrite=True)
    host_tables.note_block_ids(tables, 2, ([7], [3]), overwrite=False)
    host_tables.note_batch(tables, np.array([2, 0]))
    first, second = (host_tables.HOST_TABLES.find(t[:2]) for t in tables.input_block_tables)
    np.testing.assert_array_equal(ids_of(first, 2)[:, :3], [[5, 6, 7], [5, 9, 0]])
    np.testing.assert_array_equal(ids_of(second, 1)[:, :2], [[1, 3]])


def test_a_row_keeps_its_number_while_it_grows_and_loses_it_with_its_slot():
    tables = v2_tables()
    host_tables.note_block_ids(tables, 1, ([5], [5]), overwrite=True)
    host_tables.note_batch(tables, np.array([1]))
    table = host_tables.HOST_TABLES.find(tables.input_block_tables[0])
    before = table.rows(1)[1].copy()
    host_tables.note_block_ids(tables, 1, ([6], [6]), overwrite=False)
    np.testing.assert_array_equal(table.rows(1)[1], before)
    host_tables.note_block_ids(tables, 1, ([5], [5]), overwrite=True)
    assert table.rows(1)[1] != before


def test_a_dummy_batch_has_no_requests():
    tables = v2_tables()
    table = host_tables.HOST_TABLES.find(tables.input_block_tables[0])
    starts = np.array([0, 1, 2])
    assert table.num_reqs(starts) == 0
    host_tables.note_batch(tables, np.array([3]))
    assert table.num_reqs(starts) == 1
    host_tables.note_batch(tables, None)
    assert table.num_reqs(starts) == 0


def test_blocks_of_the_manager_are_split_as_the_kernel_sees_them():
    tables = v2_tables(blocks_per_kv_block=2)
    host_tables.note_block_ids(tables, 0, ([5, 1], [4]), overwrite=True)
    host_tables.note_batch(tables, np.array([0]))
    table = host_tables.HOST_TABLES.find(tables.input_block_tables[0])
    np.testing.assert_array_equal(ids_of(table, 1)[:, :4], [[10, 11, 2, 3]])


def test_a_table_whose_device_tensor_is_replaced_is_not_found_by_its_old_address():
    table = v1_table()
    address = table.block_table.gpu.data_ptr()
    table.block_table.gpu = table.block_table.cpu  # as the V1 runner of the CPU platform does
    assert host_tables.HOST_TABLES.find(SimpleNamespace(data_ptr=lambda: address)) is None


def test_nothing_is_kept_for_engines_without_our_layers(monkeypatch):
    found = host_tables.HostTables()
    monkeypatch.setattr(host_tables, "HOST_TABLES", found)
    layer = Layer()
    found.want(layer)
    assert found.find(v2_tables().input_block_tables[0]) is None, "given up with its engine"
    tables = v2_tables()
    assert found.find(tables.input_block_tables[0]) is not None
    del layer
    later = v2_tables()
    host_tables.note_block_ids(later, 0, ([5], [5]), overwrite=True)
    assert found.find(later.input_block_tables[0]) is None
    assert found.find(tables.input_block_tables[0]) is not None, "of the engine before"
