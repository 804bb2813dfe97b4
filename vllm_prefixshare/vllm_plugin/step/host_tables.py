"""Copies of vLLM's block tables on the host. vLLM gives its metadata builders the device tables.

A builder finds the copy by the address of the device tensor. The V1 model runner has a copy of its
own, in the order of the batch. The V2 runner has none: the hooks note, by request slot, the block
ids that it sends to the device, and the slots of the batch that it prepares.

A vLLM with ``patches/`` passes the copy in the metadata, and the hooks note nothing.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from vllm_prefixshare.core import IntArray
from vllm_prefixshare.vllm_plugin import compat


class HostTable(Protocol):
    """Block ids of one KV-cache group.

    block_table: int32 ``[rows, max_blocks]``.
    """

    block_table: IntArray

    def num_reqs(self, query_start_loc: IntArray) -> int:
        """Requests in the batch in preparation; padding has no queries. 0 in a dummy batch.

        Args:
            query_start_loc: ``[rows + 1]`` of the batch, padded.
        """
        ...

    def rows(self, num_reqs: int) -> tuple[IntArray | None, IntArray | None]:
        """``table_rows`` and ``row_ids`` of the first requests of the batch, as
        ``DecodePlanner.update`` takes them. None: the rows of the table are in the order of the
        batch, and the planner compares them to find what changed.
        """
        ...


class RowTable:
    """The V1 runner's own copy, in the order of the batch.

    in_dummy_batch: whether the runner runs a batch without requests, whose rows may have the block
        ids of past requests: to warm up, to capture a graph, or next to other ranks of data
        parallelism. A vLLM with ``patches/`` passes no rows then.
    """

    def __init__(self, block_table: IntArray) -> None:
        self.block_table = block_table
        self.in_dummy_batch = False

    def num_reqs(self, query_start_loc: IntArray) -> int:
        """As ``HostTable.num_reqs``."""
        if self.in_dummy_batch or not len(self.block_table):
            return 0
        return int(np.count_nonzero(query_start_loc[1:] > query_start_loc[:-1]))

    def rows(self, num_reqs: int) -> tuple[None, None]:
        """As ``HostTable.rows``: the planner compares the rows itself."""
        return None, None


class Slots:
    """The request slots of the V2 runner, and those that make up the batch.

    batch: ``[num_reqs]`` slot of each row; None in a dummy batch.
    ids: ``[max_num_reqs]`` int64, a new number whenever a request takes the slot.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.batch: IntArray | None = None
        self.ids = np.zeros(max_num_reqs, np.int64)
        self._numbers = itertools.count(1)

    def take(self, slot: int) -> None:
        """Give the slot a new number: another request has it now."""
        self.ids[slot] = next(self._numbers)


class SlotTable:
    """Block ids of one KV-cache group of the V2 runner, by slot.

    Args:
        blocks_per_id: kernel blocks in each block of the KV-cache manager.
    """

    def __init__(self, slots: Slots, shape: tuple[int, int], blocks_per_id: int) -> None:
        self._slots = slots
        self.block_table = np.zeros(shape, np.int32)
        self._used = np.zeros(shape[0], np.int64)
        self._parts = np.arange(blocks_per_id, dtype=np.int32)

    def append(self, slot: int, ids: list[int], overwrite: bool) -> None:
        """Write the block ids of a slot, after those that it has or over them."""
        blocks: Any = ids
        if len(self._parts) > 1:
            blocks = np.add.outer(np.array(ids, np.int32) * len(self._parts), self._parts).ravel()
        start = 0 if overwrite else self._used[slot]
        self.block_table[slot, start : start + len(blocks)] = blocks
        self._used[slot] = start + len(blocks)

    def num_reqs(self, query_start_loc: IntArray) -> int:
        """As ``HostTable.num_reqs``."""
        return 0 if self._slots.batch is None else len(self._slots.batch)

    def rows(self, num_reqs: int) -> tuple[IntArray, IntArray]:
        """As ``HostTable.rows``."""
        assert self._slots.batch is not None
        rows = self._slots.batch[:num_reqs]
        return rows, self._slots.ids[rows]


class PassedTable:
    """The V2 runner's own copy, which a vLLM with ``patches/`` passes in the metadata.

    Args:
        block_table: int32 ``[max_num_reqs, max_blocks]``; no rows in a dummy batch.
        req_idx: ``[num_reqs]`` row of each request.
        req_serials: ``[num_reqs]`` number of each request, as ``Slots.ids``.
    """

    def __init__(self, block_table: IntArray, req_idx: IntArray, req_serials: IntArray) -> None:
        self.block_table = block_table
        self._req_idx = req_idx
        self._req_serials = req_serials

    def num_reqs(self, query_start_loc: IntArray) -> int:
        """As ``HostTable.num_reqs``."""
        return len(self._req_idx) if len(self.block_table) else 0

    def rows(self, num_reqs: int) -> tuple[IntArray, IntArray]:
        """As ``HostTable.rows``."""
        return self._req_idx[:num_reqs], self._req_serials[:num_reqs]


class HostTables:
    """Finds the host's copies of the block tables of this process's engines.

    vLLM's own table objects hold the copies, so a copy lives as long as its engine's table. Layers,
    metadata builders and model runners of an engine have no object in common that both a hook and
    a builder reach, so a builder finds the copy by the address of the device tensor.
    """

    def __init__(self) -> None:
        self._by_address: weakref.WeakValueDictionary[int, HostTable] = (
            weakref.WeakValueDictionary()
        )
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()

    def want(self, layer: Any) -> None:
        """Note the block ids of the V2 runner as long as this layer lives. That runner creates its
        block tables after the layers.
        """
        self._readers.add(layer)

    def table_of(self, common: Any) -> HostTable | None:
        """The host's copy of the block table in a ``CommonAttentionMetadata``, or None."""
        if not hasattr(common, "block_table_cpu"):
            return self.find(common.block_table_tensor)
        if common.block_table_cpu is None:
            return None
        if common.req_idx is None:
            return RowTable(common.block_table_cpu)
        return PassedTable(common.block_table_cpu, common.req_idx, common.req_serials)

    def find(self, device_table: Any) -> HostTable | None:
        """The host's copy of a block table, given (the first rows of) the one on the device."""
        return self._by_address.get(device_table.data_ptr())

    def keep_v1_table(self, block_table: Any) -> None:
        """Called after ``vllm.v1.worker.block_table.BlockTable.__init__``."""
        buffer = block_table.block_table
        copy = block_table.prefixshare_copy = RowTable(buffer.np)
        self._keep(buffer.gpu, copy)

    def keep_v2_tables(self, tables: Any) -> None:
        """Called after ``vllm.v1.worker.gpu.block_table.BlockTables.__init__``."""
        copies: list[SlotTable] = []
        tables.prefixshare_copies = copies
        slots = tables.prefixshare_slots = Slots(tables.max_num_reqs)
        if not self._readers:
            return
        parts = compat.kernel_blocks_per_id(tables)
        for device_table, blocks_per_id in zip(tables.input_block_tables, parts, strict=True):
            copy = SlotTable(slots, tuple(device_table.shape), blocks_per_id)
            copies.append(copy)
            self._keep(device_table, copy)

    def _keep(self, device_table: Any, copy: HostTable) -> None:
        address = device_table.data_ptr()
        self._by_address[address] = copy
        # the V1 runner of the CPU platform replaces its device tensors, whose memory is used again
        weakref.finalize(device_table, self._by_address.pop, address, None).atexit = False


#: The block tables of this process.
HOST_TABLES = HostTables()


@contextmanager
def dummy_batch(runner: Any) -> Iterator[None]:
    """While this V1 runner runs a batch without requests."""
    copies = [table.prefixshare_copy for table in runner.input_batch.block_table.block_tables]
    for copy in copies:
        copy.in_dummy_batch = True
    try:
        yield
    finally:
        for copy in copies:
            copy.in_dummy_batch = False


def note_block_ids(
    tables: Any, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
) -> None:
    """Called with the arguments of ``BlockTables.append_block_ids`` of the V2 runner."""
    if overwrite:
        tables.prefixshare_slots.take(req_index)
    for copy, ids in zip(tables.prefixshare_copies, new_block_ids, strict=False):
        copy.append(req_index, ids, overwrite)


def note_batch(tables: Any, slots: IntArray | None) -> None:
    """Called when the V2 runner prepares a batch, with the slot of each row; None for a dummy
    batch.
    """
    tables.prefixshare_slots.batch = slots
