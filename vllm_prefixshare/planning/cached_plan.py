"""The batch that a plan was made for, and whether the plan still holds for another one."""

import numpy as np

from vllm_prefixshare.compiled import compiled
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import FloatArray, IntArray
from vllm_prefixshare.tree.prefix_tree import first_difference


class CachedPlan:
    """A plan with what the next batches are compared with: block ids, or numbers that stand
    for each request's.

    Attributes:
        plan: None until something is remembered.
    """

    def __init__(self, block_size: int) -> None:
        self.plan: DecodePlan | None = None
        self._block_size = block_size
        self._query_len = 1
        self._row_ids: IntArray | None = None
        self._block_ids = np.zeros((0, 0), np.int32)  # of the plan's requests, and room for more
        self._longest = np.zeros(0)  # tokens of each request up to which the plan is balanced

    def remember(
        self,
        plan: DecodePlan,
        longest: FloatArray,
        query_len: int,
        block_table: IntArray,
        row_ids: IntArray | None,
    ) -> None:
        """Args: see ``DecodePlanner.update``. longest: ``[num_reqs]`` tokens up to which the
        plan is balanced. The block table is read only where no row ids stand for it."""
        self.plan, self._longest, self._query_len = plan, longest, query_len
        self._row_ids = None if row_ids is None else row_ids.copy()
        if row_ids is not None:
            return
        used = np.minimum(-(-plan.planned_seq_lens // self._block_size), block_table.shape[1])
        num_rows, width = len(used), int(used.max(initial=0))
        if num_rows > self._block_ids.shape[0] or width > self._block_ids.shape[1]:
            # with room to grow, because memory that is new to the process is dear to touch
            self._block_ids = np.empty((num_rows + num_rows // 4, width + width // 4), np.int32)
        _copy_rows(block_table, used, self._block_ids)

    def forget(self) -> None:
        self.plan = self._row_ids = None

    def holds(
        self,
        block_table: IntArray,
        seq_lens: IntArray,
        query_len: int,
        row_ids: IntArray | None = None,
    ) -> bool:
        """Whether the plan is right, and balanced enough, for this batch."""
        plan = self.plan
        if plan is None or query_len != self._query_len or len(seq_lens) != plan.num_reqs:
            return False
        if row_ids is not None and self._row_ids is not None:
            planned = plan.planned_seq_lens
            return bool(_rows_hold(row_ids, self._row_ids, seq_lens, planned, self._longest))
        if row_ids is not self._row_ids:  # the other of the two was kept
            return False
        return bool(
            _blocks_hold(
                np.ascontiguousarray(block_table, np.int32),
                np.ascontiguousarray(seq_lens, np.int32),
                self._block_ids,
                plan.planned_seq_lens,
                self._longest,
                self._block_size,
            )
        )


@compiled
def _blocks_hold(
    table: IntArray,
    seq_lens: IntArray,
    known: IntArray,
    planned: IntArray,
    longest: FloatArray,
    block_size: int,
) -> bool:
    """Whether each request has at least its planned tokens, in the blocks that are known of
    it, and no more than ``longest``."""
    for row in range(len(seq_lens)):
        # fewer: it was rolled back, maybe into blocks that are read to their end
        if not planned[row] <= seq_lens[row] <= longest[row]:
            return False
        used = (planned[row] + block_size - 1) // block_size
        if used > table.shape[1] or first_difference(table[row], known[row], 0, used) < used:
            return False
    return True


@compiled
def _rows_hold(
    row_ids: IntArray,
    known: IntArray,
    seq_lens: IntArray,
    planned: IntArray,
    longest: FloatArray,
) -> bool:
    for row in range(len(row_ids)):
        if row_ids[row] != known[row] or not planned[row] <= seq_lens[row] <= longest[row]:
            return False
    return True


@compiled
def _copy_rows(table: IntArray, lengths: IntArray, out: IntArray) -> None:
    for row in range(len(lengths)):
        out[row, : lengths[row]] = table[row, : lengths[row]]
