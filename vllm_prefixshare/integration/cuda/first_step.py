"""The first step after a prefix hit: requests with a few new tokens on a context that they share.

vLLM calls such a step prefill, and FLASH_ATTN reads the context once for each request. Here each
new token becomes a row of the plan, as if it were a request that ends with this token. The tokens'
keys and values are in the cache when attention runs, so this is their causal order, and the plan
shares the context among the tokens of all requests as it does among decodes. Such a step is in no
CUDA graph, so its block table and lengths may be tensors of its own.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_prefixshare.records import IntArray

#: most new tokens of a request; with more, arithmetic takes as long as reading for each request
MOST_NEW_TOKENS = 16
#: most new tokens of a step
MOST_ROWS = 1024
#: fewest tokens of a context that is worth a plan
LEAST_CONTEXT = 1024


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

    def on_device(self, common: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Block table and lengths of the rows; made on the device, so that nothing waits.

        Args:
            common: a ``CommonAttentionMetadata``.
        """
        num_tokens = len(self.requests)
        starts = common.query_start_loc[: self.num_reqs + 1]
        requests = torch.repeat_interleave(starts.diff(), output_size=num_tokens)
        at = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
        later = starts[1:][requests] - 1 - at
        return common.block_table_tensor[requests], common.seq_lens[requests] - later


def token_rows(
    query_start_loc: IntArray,
    seq_lens: IntArray,
    block_table: IntArray,
    table_rows: IntArray,
    block_size: int,
) -> TokenRows | None:
    """The tokens of the requests up to the first one with many new tokens; None if too few of
    those with several new tokens share their context.

    Args:
        query_start_loc: ``[num_reqs + 1]`` query tokens of each request.
        seq_lens: ``[num_reqs]`` tokens of each request, the new ones included.
        block_table: ``[rows, max_blocks]``. table_rows: ``[num_reqs]`` row of each request.
    """
    new = np.diff(query_start_loc)
    num = np.searchsorted(query_start_loc, MOST_ROWS, "right") - 1
    many = np.flatnonzero(new > MOST_NEW_TOKENS)
    new = new[: min(num, len(new), *many[:1])]
    several = np.flatnonzero(new > 1)
    contexts = seq_lens[several] - new[several]
    if not len(several) or contexts.max() < LEAST_CONTEXT:
        return None
    # who has the block in the middle of a context has the first half of it
    columns, column_of = np.unique(contexts // block_size // 2, return_inverse=True)
    ids = block_table[table_rows[: len(new), None], columns]
    readers = (ids[:, column_of] == ids[several, column_of]).sum(0)
    if 2 * np.count_nonzero(readers > 1) < len(several):
        return None
    requests = np.repeat(np.arange(len(new)), new)
    return TokenRows(requests, query_start_loc[requests + 1] - 1 - np.arange(len(requests)))
