"""Small paged batches with shared prefixes, for tests of the executors."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.support.reference_attention import reference_attention_and_lse
from vllm_prefixshare import PrefixShareDecodeWrapper
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras
from vllm_prefixshare.planning.window import first_in_window


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

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of ``PrefixShareDecodeWrapper.run`` without ``out``."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    def wrapper(self, **options: Any) -> PrefixShareDecodeWrapper:
        """A wrapper for the layer; its type is the one of the queries by default."""
        return PrefixShareDecodeWrapper(
            num_qo_heads=self.q.shape[1],
            num_kv_heads=self.k_cache.shape[2],
            head_dim=self.q.shape[2],
            block_size=self.k_cache.shape[1],
            **{"dtype": self.q.dtype, **options},
        )

    def run(self, wrapper: PrefixShareDecodeWrapper) -> torch.Tensor:
        """The output of a wrapper that plans the batch; rows that were not written are NaN."""
        wrapper.plan(self.block_table, self.seq_lens, self.query_start_loc)
        return wrapper.run(*self.arguments, torch.full_like(self.q, torch.nan))

    def expected(
        self, extras: LayerExtras = PLAIN, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp in float64; options as for ``reference_attention_and_lse``."""
        tables = map(torch.from_numpy, (self.block_table, self.seq_lens, self.query_start_loc))
        on_host = (x.cpu() if isinstance(x, torch.Tensor) else x for x in extras)
        return reference_attention_and_lse(
            self.q, self.k_cache, self.v_cache, *tables, extras=LayerExtras(*on_host), **options
        )

    def as_type(self, queries: torch.dtype, cache: torch.dtype) -> "PagedBatch":
        """The same numbers in other types."""
        k, v = self.k_cache.to(cache), self.v_cache.to(cache)
        return replace(self, q=self.q.to(queries), k_cache=k, v_cache=v)

    def with_queries(self, counts: list[int]) -> "PagedBatch":
        """The same requests with ``counts[i]`` query tokens of request ``i``."""
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        q = torch.randn(sum(counts), *self.q.shape[1:]).to(self.q.dtype)
        return replace(self, q=q, query_start_loc=starts)

    def rows(self, rows: slice | list[int]) -> "PagedBatch":
        """Some requests of a batch with one query token each, in this order."""
        lens = self.seq_lens[rows]
        starts = np.arange(len(lens) + 1, dtype=np.int32)
        tables = {"block_table": self.block_table[rows], "seq_lens": lens}
        return replace(self, q=self.q[rows], query_start_loc=starts, **tables)

    def without_passed_blocks(self, window: int) -> "PagedBatch":
        """The batch with a null block in place of each block that no query of its request sees."""
        size, queries = self.k_cache.shape[1], int(np.diff(self.query_start_loc).max())
        gone = first_in_window(self.seq_lens, window, queries) // size
        columns = np.arange(self.block_table.shape[1])
        table = np.where(columns < gone[:, None], 0, self.block_table)
        return replace(self, block_table=table)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error over the query tokens, so that one wrong row cannot hide."""
    difference = (out.double() - expected).flatten(1).norm(dim=1)
    return float((difference / expected.flatten(1).norm(dim=1)).max())


def total_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error over all query tokens."""
    return float((out.double() - expected).norm() / expected.norm())


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


def batch_at_boundaries(
    queries: int = 1,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedBatch:
    """Requests on one document of two blocks, which end at, one token before and one token after
    the ends of blocks: within the document, at its end, in the block that a pair shares and in
    their own. One has its queries only.
    """
    torch.manual_seed(0)
    ends = block_size * np.array([1, 2, 3, 4])
    lens = np.unique(np.append(ends[:, None] + [-1, 0, 1], queries)).astype(np.int32)
    lens = lens[lens >= queries]
    n = len(lens)
    blocks = iter((torch.randperm(2 + -(-n // 2) + 2 * n) + 1).tolist())
    document = [next(blocks) for _ in range(2)]
    pairs = [next(blocks) for _ in range(-(-n // 2))]
    rows = [[*document, pairs[i // 2], next(blocks), next(blocks)] for i in range(n)]
    table = np.array(rows, np.int32)
    shape = (1 + int(table.max()), block_size, heads[1], head_dim)
    caches = [torch.randn(shape).to(dtype) for _ in range(2)]
    written = np.zeros(shape[:2], bool)
    for row, length in zip(table, lens, strict=True):
        for column, block in enumerate(row):
            written[block, : max(0, length - column * block_size)] = True
    for cache in caches:
        cache[~torch.from_numpy(written)] = torch.nan
    starts = (queries * np.arange(n + 1)).astype(np.int32)
    q = torch.randn(n * queries, heads[0], head_dim).to(dtype)
    return PagedBatch(table, lens, starts, q, *caches)


def as_hnd(batch: PagedBatch) -> PagedBatch:
    """The batch with its heads before its tokens in memory; same shapes."""
    caches = batch.k_cache, batch.v_cache
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches)
    return replace(batch, k_cache=k, v_cache=v)
