"""Small paged batches with shared prefixes, for tests of the executors."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class PagedBatch:
    """A batch on the host (block_table, seq_lens, query_start_loc) with random queries and caches.
    Tokens beyond a request's length hold NaN, so that reading one spoils the result.
    """

    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def paged_batch(
    *,
    seed: int = 0,
    documents: int = 2,
    requests: int = 4,
    document_blocks: int = 5,
    private_blocks: int = 3,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    query_lens: int | None = 1,
) -> PagedBatch:
    """Build ``documents`` trees of ``requests`` requests each; pairs share a second level.
    ``query_lens`` None draws 1 to 4 queries for each request.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_reqs = documents * requests
    width = document_blocks + 1 + private_blocks + 2
    num_blocks = 1 + documents * (document_blocks + requests) + num_reqs * (private_blocks + 2)
    ids = iter((rng.permutation(num_blocks - 1) + 1).tolist())
    table = np.zeros((num_reqs, width), np.int32)
    lens = np.zeros(num_reqs, np.int32)
    counts = rng.integers(1, 5, num_reqs) if query_lens is None else np.full(num_reqs, query_lens)
    for d in range(documents):
        root = [next(ids) for _ in range(document_blocks)]
        for pair in range(-(-requests // 2)):
            middle = [next(ids)]
            for r in range(
                d * requests + 2 * pair, min((d + 1) * requests, d * requests + 2 * pair + 2)
            ):
                own = [next(ids) for _ in range(int(rng.integers(1, private_blocks + 1)))]
                row = root + middle + own
                table[r, : len(row)] = row
                lens[r] = len(row) * block_size - int(rng.integers(0, block_size - 4))
    shape = (num_blocks, block_size, heads[1], head_dim)
    k_cache, v_cache = (torch.randn(shape).to(dtype) for _ in range(2))
    for row, length in zip(table, lens, strict=True):
        last = row[(length - 1) // block_size]
        for cache in (k_cache, v_cache):
            cache[last, (length - 1) % block_size + 1 :] = torch.nan
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = torch.randn(int(starts[-1]), heads[0], head_dim).to(dtype)
    return PagedBatch(table, lens, starts, q, k_cache, v_cache)
