"""Rows of query tokens against NumPy."""

import numpy as np
import pytest
import torch

from tests.support.portable_kernel import DEVICE
from vllm_prefixshare.kernels.token_rows import fill_token_rows

BLOCK_SIZE = 16


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    "counts",
    [[1], [1, 1, 1], [7, 1, 30], [3] * 300, [0, 2, 0, 1]],
    ids=["one", "decodes", "mixed", "many", "empty"],
)
def test_each_query_token_has_its_requests_blocks_and_its_own_length(counts, padding):
    rng = np.random.default_rng(len(counts))
    num_reqs, columns = len(counts), 40
    table = rng.integers(1, 1000, (num_reqs, columns), np.int32)
    lens = np.array(counts, np.int32) + rng.integers(0, 500, num_reqs, np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    # the graph's requests past the batch have no tokens
    padded = np.concatenate([starts, np.full(padding, starts[-1], np.int32)])
    num_tokens = int(starts[-1])
    row_table = torch.full((num_tokens + padding, columns), -1, dtype=torch.int32, device=DEVICE)
    row_lens = torch.full((num_tokens + padding,), -1, dtype=torch.int32, device=DEVICE)
    device_table = np.concatenate([table, np.zeros((padding, columns), np.int32)])
    device_lens = np.concatenate([lens, np.zeros(padding, np.int32)])
    batch = (torch.from_numpy(x).to(DEVICE) for x in (device_table, device_lens, padded))
    fill_token_rows(*batch, row_table, row_lens, BLOCK_SIZE)
    row = 0
    for request, count in enumerate(counts):
        for later in reversed(range(count)):
            length = lens[request] - later
            used = -(-length // BLOCK_SIZE)
            assert row_lens[row] == length
            assert row_table[row, :used].tolist() == table[request, :used].tolist()
            assert (row_table[row, used:] == -1).all()
            row += 1
    assert not row_lens[num_tokens:].any() and (row_table[num_tokens:] == -1).all()
