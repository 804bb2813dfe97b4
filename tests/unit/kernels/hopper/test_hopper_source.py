"""The Hopper kernel's own source under Triton's interpreter, against attention in float64.

``gluon_interpreter`` says what that tests and what not. On a GPU see tests/gpu.
"""

import numpy as np
import pytest
import torch

from benchmarks.support.trees import tree
from tests.support.gluon_interpreter import launch_before, load_kernel
from tests.support.paged_batches import relative_error
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.hopper import launch as hopper
from vllm_prefixshare.kernels.interface import Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.kernels.reference import reference_attention_and_lse
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.planner import DecodePlanner

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel"),
    # rows without any token divide by zero and are then discarded, as on a GPU
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
DIM = 64
PLAIN = LayerExtras()


@pytest.fixture
def interpreted(monkeypatch, tmp_path):
    modules = "producer", "metadata", "wide_values", "kernel"
    kernel = load_kernel("vllm_prefixshare.kernels.hopper", tmp_path, modules)
    monkeypatch.setattr(hopper, "partial_attention", kernel)


@pytest.mark.parametrize(
    ("spec", "block_size", "query_len", "kv_heads", "workers", "lengths", "group"),
    [
        ("1,3_300,40", 16, 1, 1, 4, None, 4),  # both halves
        ("1_700", 16, 40, 1, 2, None, 4),  # several tiles of rows
        ("1_600", 16, 1, 1, 3, None, 4),  # partial results
        ("1_600", 16, 1, 3, 3, None, 4),  # a pair of workers and one more, each with three heads
        ("1_300", 16, 40, 2, 3, None, 4),  # the same with several tiles of rows
        # shorter than planned: what is copied before the lengths are known is not read
        ("6_300", 16, 1, 1, 8, [1, 100, 127, 128, 129, 299], 4),
        ("6_300", 16, 1, 1, 8, [40] * 6, 4),
        ("1_600", 16, 1, 1, 3, [150], 4),
        # parts of blocks, also as the first KV tile of a worker, inside and at the begin of a block
        ("1,3_384,40", 64, 1, 1, 4, None, 4),
        ("1,3_256,70", 128, 1, 1, 5, None, 4),
        ("1_700", 96, 1, 2, 6, None, 4),
        # tiles of so many runs that each lane of a producer holds two, and eight
        ("1,6,30_40,32,24", 16, 1, 1, 1, None, 4),
        ("1,9,100_40,32,24", 16, 1, 1, 1, None, 1),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_hopper_kernel(spec, block_size, query_len, kv_heads, workers, lengths, group):
    check(tree(spec, block_size), query_len, kv_heads, workers, lengths, group)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap(cap):
    """KV tiles that not all rows read, too. A small cap is reached: scores differ by more."""
    extras = LayerExtras(soft_cap=cap)
    check(tree("1,3_300,40", 16), 1, 1, 4, [340, 339, 320], 4, extras)
    check(tree("1_300", 16), 3, 1, 2, None, 4, extras)


def check(work, query_len, kv_heads, workers, lengths, group, extras=PLAIN):
    """Plan and launch a workload; the output is as exact as float16 allows."""
    block_size = work.block_size
    heads = group * kv_heads
    features = ("soft_cap",) if extras.soft_cap else ()
    attention = AttentionConfig(heads, kv_heads, DIM, block_size, "float16", features=features)
    blocks = workers * kv_heads * -(-query_len * group // 128)
    kernel = hopper.HopperKernel(attention, query_len, Gpu((9, 0), blocks, 227 << 10))
    config = planner_config(kernel.limits, attention)
    cost = analytic_cost(attention, "hopper")
    plan = (
        DecodePlanner(config, cost, block_size, group)
        .update(work.block_table, work.seq_lens, query_len)
        .plan
    )
    arrays = {name: torch.from_numpy(x.reshape(-1)) for name, x in kernel.layout(plan).items()}
    torch.manual_seed(0)
    cache = work.num_blocks, block_size, kv_heads, DIM
    k_cache, v_cache = (torch.randn(cache, dtype=torch.float16) for _ in range(2))
    q = torch.randn(work.num_reqs * query_len, heads, DIM, dtype=torch.float16)
    lens = work.seq_lens if lengths is None else np.array(lengths, np.int32)
    starts = torch.arange(work.num_reqs + 1, dtype=torch.int32) * query_len
    shape = max(1, plan.num_partials) * query_len, heads
    partial_out, partial_lse = torch.full((*shape, DIM), torch.nan), torch.full(shape, torch.nan)
    out = torch.full_like(q, torch.nan)
    t = Tensors(
        q, k_cache, v_cache, torch.from_numpy(work.block_table), torch.from_numpy(lens), starts,
        None, partial_out, partial_lse, out, extras=extras,
    )  # fmt: skip
    launch_before.writes(q)
    kernel.launch(arrays, t, DIM**-0.5)
    merge_states(arrays["merge_indptr"], partial_out, partial_lse, out, starts, query_len)
    wanted, _ = reference_attention_and_lse(
        q.double(),
        k_cache.double(),
        v_cache.double(),
        t.block_table,
        t.seq_lens,
        starts,
        extras=extras,
    )
    assert relative_error(out, wanted) < 1e-3
