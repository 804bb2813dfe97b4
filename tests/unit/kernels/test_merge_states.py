"""Merge states against a softmax over the logarithms in float64."""

import pytest
import torch

from tests.support.portable_kernel import DEVICE
from vllm_prefixshare import merge_states as merge_in_torch
from vllm_prefixshare.kernels.merge_states import merge_stacked, merge_states

INDPTR = [0, 0, 3, 12, 12, 14]  # partial results of five requests


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize(
    ("heads", "head_dim", "queries", "dtype"),
    [
        (9, 80, [1] * 5, torch.float16),
        (16, 128, [3] * 5, torch.bfloat16),
        (9, 80, [1, 3, 2, 0, 2], torch.bfloat16),
        (420, 64, [1] * 5, torch.float16),  # enough for the wide programs of large batches
    ],
    ids=str,
)
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
def test_matches_float64(heads, head_dim, queries, dtype, with_lse):
    torch.manual_seed(0)
    query_len = max(queries)
    partial_out = torch.randn(14 * query_len, heads, head_dim)
    partial_lse = torch.randn(14 * query_len, heads) * 5
    partial_lse[5 * query_len :: 7] = -torch.inf  # a query that saw no token there
    partial_out[5 * query_len :: 7] = 0
    if with_lse:
        partial_lse[12 * query_len :] = -torch.inf  # the last request saw no token
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    ragged = len(set(queries)) > 1
    out = torch.full((starts[-1], heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
    # entries behind the batch repeat the last entry, as in a captured CUDA graph
    merge_states(
        torch.tensor([*INDPTR, 14, 14], dtype=torch.int32, device=DEVICE),
        partial_out.to(DEVICE),
        partial_lse.to(DEVICE),
        out,
        torch.tensor([*starts, starts[-1]], dtype=torch.int32, device=DEVICE) if ragged else None,
        query_len,
        lse if with_lse else None,
    )
    out, lse = out.cpu(), lse.cpu()
    for request, count in enumerate(queries):
        first, last = INDPTR[request : request + 2]
        for query in range(count):
            token = starts[request] + query
            if first == last:
                assert out[token].isnan().all() and lse[token].isnan().all(), "left alone"
                continue
            rows = slice(first * query_len + query, last * query_len, query_len)
            logarithms = partial_lse[rows].double()
            if with_lse:
                expected = logarithms.logsumexp(0).float()
                torch.testing.assert_close(lse[token], expected, rtol=1e-6, atol=1e-6)
            if logarithms.isinf().all():
                continue
            weights = logarithms.softmax(0)[..., None]
            expected = (weights * partial_out[rows].double()).sum(0)
            assert (out[token] - expected).norm() / expected.norm() < torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(6, 80), (32, 128)])
def test_matches_float64_for_whole_states(dtype, heads, head_dim):
    """States lie apart from each other, as in messages gathered from ranks. One query sees nothing
    in one state, and its output there is not a number; another sees nothing at all.
    """
    torch.manual_seed(0)
    outs = torch.randn(3, 5, 2 * heads, head_dim).to(dtype)[:, :, :heads].contiguous()
    spread = torch.randn(3, outs[0].numel() + 24).to(dtype)
    outs = spread[:, :-24].copy_(outs.flatten(1)).unflatten(1, outs.shape[1:])
    lses = torch.randn(3, 5, heads) * 5
    lses[1, 2] = lses[:, 4] = -torch.inf
    outs[1, 2] = outs[:, 4] = torch.nan
    assert not outs.is_contiguous() and outs[0].is_contiguous()
    out, lse = (x.cpu() for x in merge_stacked(outs.to(DEVICE), lses.to(DEVICE)))
    assert out.dtype == dtype and (out[4] == 0).all() and lse[4].isneginf().all()
    weights = torch.softmax(lses[:, :4].double(), 0)[..., None]
    expected = (weights * outs[:, :4].double().nan_to_num()).sum(0)
    assert (out[:4] - expected).norm() / expected.norm() < torch.finfo(dtype).eps * 4
    torch.testing.assert_close(lse, merge_in_torch(outs, lses)[1], rtol=1e-6, atol=1e-6)
    turned = outs.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(merge_stacked(turned.to(DEVICE), lses.to(DEVICE))[0].cpu(), out)
