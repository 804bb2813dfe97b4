"""Which tokens of a request a rank holds under decode context parallelism."""

from typing import Any, NamedTuple

import numpy as np

from vllm_prefixshare.core import IntArray


class Interleaved(NamedTuple):
    """Which tokens of a request a rank holds.

    size, rank: of the group.
    interleave: tokens that follow each other on one rank (``cp_kv_cache_interleave_size``).
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    @classmethod
    def of(cls, config: Any) -> "Interleaved":
        """The tokens of this process, by its ``VllmConfig``."""
        parallel = config.parallel_config
        size = parallel.decode_context_parallel_size
        if size == 1:
            return WHOLE
        from vllm.distributed.parallel_state import get_dcp_group

        return cls(size, get_dcp_group().rank_in_group, parallel.cp_kv_cache_interleave_size)

    def local_seq_lens(self, seq_lens: IntArray) -> IntArray:
        """Tokens that the rank holds of requests with ``seq_lens`` tokens; may be 0."""
        if self.size == 1:
            return seq_lens
        rounds, rest = np.divmod(seq_lens, self.size * self.interleave)
        last = np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        return (rounds * self.interleave + last).astype(np.int32)


#: All tokens, where one rank holds them.
WHOLE = Interleaved()
