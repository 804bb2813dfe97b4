"""Block table and length of each query token, as if it were a request that ends with it.

A plan has one row for each query token where requests have several new tokens. This launch makes
the rows on the device from the batch, and depends on the shapes of its arguments only, so a CUDA
graph may capture it.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

import torch
import triton
import triton.language as tl

from vllm_prefixshare.kernels.aot.dispatch import launch

#: block ids that a program copies
COLUMNS = 1024


def fill_token_rows(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    row_table: torch.Tensor,
    row_lens: torch.Tensor,
    block_size: int,
) -> None:
    """Fill ``row_table`` and ``row_lens`` for the query tokens of a batch.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``, rows contiguous.
        seq_lens: int32 ``[num_reqs]`` tokens of each request, its query tokens included.
        query_start_loc: int32 ``[num_reqs + 1]``; requests of a padded batch have no tokens.
        row_table: int32 ``[num_rows, columns]``, written: the blocks that row ``i``, the query
            token ``i``, may read. Columns past its length keep what they have.
        row_lens: int32 ``[num_rows]``, written: tokens up to the query token, itself included; 0
            for rows past the last query token.
    """
    num_rows, columns = row_table.shape
    launch(
        _token_rows, (num_rows, triton.cdiv(columns, COLUMNS)),
        block_table, seq_lens, query_start_loc, row_table, row_lens,
        len(query_start_loc) - 1, columns, block_table.stride(0), row_table.stride(0),
        BLOCK_SIZE=block_size, REQUESTS=256, COLUMNS=COLUMNS, num_warps=4,
    )


# not specialised: one binary serves every batch
@triton.jit(do_not_specialize=["block_table", "seq_lens", "query_start_loc", "row_table",
                               "row_lens", "num_reqs", "columns", "stride_table", "stride_row"])
def _token_rows(block_table, seq_lens, query_start_loc, row_table, row_lens, num_reqs, columns,
                stride_table, stride_row,
                BLOCK_SIZE: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: row, group of columns."""
    row = tl.program_id(0)
    request = 0  # those that end before this token
    for start in range(0, num_reqs, REQUESTS):
        at = start + tl.arange(0, REQUESTS)
        ends = tl.load(query_start_loc + 1 + at, mask=at < num_reqs, other=2147483647)
        request += tl.sum((ends <= row).to(tl.int32))
    length = 0
    if request < num_reqs:
        later = tl.load(query_start_loc + request + 1) - 1 - row
        length = tl.load(seq_lens + request) - later
    first = tl.program_id(1) * COLUMNS
    if first == 0:
        tl.store(row_lens + row, length)
    used = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    if first < used:
        column = first + tl.arange(0, COLUMNS)
        there = column < tl.minimum(used, columns)
        ids = tl.load(block_table + request * stride_table.to(tl.int64) + column, mask=there)
        tl.store(row_table + row.to(tl.int64) * stride_row + column, ids, mask=there)
