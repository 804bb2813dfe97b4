"""The first step after a prefix hit: requests with a few new tokens on a context that they share.

vLLM calls such a step prefill, and FLASH_ATTN reads the context once for each request. Here each
new token becomes a row of the plan, as if it were a request that ends with this token: it sees the
tokens up to itself, as causal order asks, because the keys and values of all new tokens are in the
cache when attention runs. The plan shares the context among the tokens of all requests as it does
among decodes. ``DeviceRows`` has the block table and the lengths of these rows.

The limits come from the measurement in ``docs/performance.md``.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray
from vllm_prefixshare.kernels.token_rows import fill_token_rows

#: kernels that were measured to gain
KERNELS = ("hopper",)
#: maximum number of query rows of a request on a KV head. FlashAttention-3 multiplies 128 rows of
#: each request, used or not; with 64 of them used, the gain is 1.1 to 1.3.
MAX_QUERY_ROWS = 48
#: Query rows on a KV head for which FLASH_ATTN reads the context once.
STOCK_TILE_ROWS = 128
#: minimum of numbers (tokens, times KV heads, times head_dim, K and V) that FLASH_ATTN would read:
#: with fewer, what is saved is less than the 0.1 ms that our launches take longer on the host
MIN_NUMBERS = 1 << 29
#: maximum number of new tokens of a step, its decodes included
MAX_ROWS = 2048


class TokenRows(NamedTuple):
    """The query tokens of the first requests of a batch, each a row of a plan.

    requests: ``[num_tokens]`` request of each token.
    later: ``[num_tokens]`` query tokens of the request that come after it.
    """

    requests: IntArray
    later: IntArray

    @property
    def num_reqs(self) -> int:
        """Requests whose tokens they are."""
        return int(self.requests[-1]) + 1

    @classmethod
    def of(cls, query_start_loc: IntArray, num_reqs: int) -> "TokenRows":
        """The tokens of the first ``num_reqs`` requests.

        Args:
            query_start_loc: ``[at least num_reqs + 1]`` query tokens of each request.
        """
        new = np.diff(query_start_loc[: num_reqs + 1])
        requests = np.repeat(np.arange(num_reqs), new)
        later = query_start_loc[requests + 1] - 1 - np.arange(len(requests))
        return cls(requests, later)

    def kv_tokens_stock(self, seq_lens: IntArray, gqa_group_size: int) -> int:
        """KV tokens that FLASH_ATTN reads for these tokens, a tile of a request's rows at a time.

        Args:
            seq_lens: ``[num_tokens]`` KV tokens that each token sees.
        """
        per_tile = max(1, STOCK_TILE_ROWS // gqa_group_size)
        return int(seq_lens[self.later % per_tile == 0].sum())


class DeviceRows:
    """Block table and lengths of a plan's rows on the device, one for each query token.

    They are filled by the first layer that attends in a step, so that a CUDA graph captures the
    launch and each replay fills them from the batch of its step.

    Args:
        common: the ``CommonAttentionMetadata`` of the step.
        table: int32 ``[num_rows, columns]``.
        lens: int32 ``[num_rows]``.
    """

    def __init__(
        self, common: Any, table: torch.Tensor, lens: torch.Tensor, block_size: int
    ) -> None:
        self.table = table
        self.lens = lens
        self._batch = common.block_table_tensor, common.seq_lens, common.query_start_loc
        self._block_size = block_size
        self._filled_in: bool | None = None

    @classmethod
    def allocate(cls, common: Any, num_rows: int, block_size: int) -> "DeviceRows":
        """Rows for one step outside of CUDA graphs."""
        columns = -(-common.max_seq_len // block_size)
        device = common.seq_lens.device
        table = torch.empty((num_rows, columns), dtype=torch.int32, device=device)
        return cls(common, table, table.new_empty(num_rows), block_size)

    def fill(self) -> None:
        """Fill the rows, once, and once more within a capture: a graph must hold the launch, and
        vLLM may capture a batch that it has run before.
        """
        capturing = self.table.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing != self._filled_in:
            fill_token_rows(*self._batch, self.table, self.lens, self._block_size)
            self._filled_in = capturing


class FirstStep(NamedTuple):
    """Which requests of a step are planned with its decodes.

    max_new_tokens: of a request.
    min_context: tokens before the new ones, of all requests with several.
    """

    max_new_tokens: int
    min_context: int
    block_size: int

    @classmethod
    def of(cls, attention: AttentionConfig) -> "FirstStep":
        """The limits for a layer."""
        numbers = 2 * attention.num_kv_heads * attention.head_dim
        max_new_tokens = MAX_QUERY_ROWS // attention.gqa_group_size
        return cls(max_new_tokens, MIN_NUMBERS // numbers, attention.block_size)

    def rows(
        self,
        query_start_loc: IntArray,
        max_seq_lens: IntArray,
        block_table: IntArray,
        table_rows: IntArray,
    ) -> TokenRows | None:
        """The tokens of the requests before the first one with too many. None if those with several
        would gain too little: their contexts are short, or half of them share less than a quarter.

        Args:
            query_start_loc: ``[num_reqs + 1]`` query tokens of each request.
            max_seq_lens: ``[num_reqs]`` tokens of each request, the new ones included.
            block_table: ``[rows, max_blocks]``. table_rows: ``[num_reqs]`` row of each request.
        """
        new = np.diff(query_start_loc)
        fitting = int(np.searchsorted(query_start_loc, MAX_ROWS, "right")) - 1
        many = np.flatnonzero(new > self.max_new_tokens)
        new = new[: min(fitting, *many[:1], len(new))]
        several = np.flatnonzero(new > 1)
        contexts = max_seq_lens[several] - new[several]
        if not len(several) or contexts.sum() < self.min_context:
            return None
        # Who has a block of a context has all before it. The block looked at is the last one in the
        # context's first half whose column is a power of two, so that there are few columns.
        exponents = np.frexp(contexts // self.block_size // 2)[1]
        columns, column_of = np.unique((1 << exponents) >> 1, return_inverse=True)
        ids = block_table[table_rows[: len(new), None], columns]
        readers = (ids[:, column_of] == ids[several, column_of]).sum(0)
        if 2 * np.count_nonzero(readers > 1) < len(several):
            return None
        return TokenRows.of(query_start_loc, len(new))
