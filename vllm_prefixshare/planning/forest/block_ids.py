"""The range of a block table's ids, found at memory speed: every step checks it."""

import numpy as np

from vllm_prefixshare.core import IntArray
from vllm_prefixshare.utils.numba_cache import compiled

_NONE = np.int32(np.iinfo(np.int32).max)


@compiled
def block_id_range(table: IntArray, seq_lens: IntArray, block_size: int) -> tuple[int, int]:
    """Lowest and highest block id in use; the first exceeds the second if none is in use.

    Args:
        table: ``[num_reqs, max_blocks]`` physical block ids.
        seq_lens: ``[num_reqs]`` tokens of each request, within the table.
    """
    lowest = _NONE
    highest = np.int32(-1)
    for row in range(len(seq_lens)):
        for column in range((seq_lens[row] + block_size - 1) // block_size):
            block = table[row, column]
            lowest = min(lowest, block)
            highest = max(highest, block)
    return lowest, highest
