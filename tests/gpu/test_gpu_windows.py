"""Sliding windows on a GPU at full size, against attention in float64.

Blocks that no query sees are gone from the block table, as vLLM's V2 runner leaves them.
"""

from itertools import product

import numpy as np
import pytest
import torch

from benchmarks.support.trees import tree
from tests.gpu.test_gpu_extras import check, extras_of, prepared
from tests.support.gpu_layer import DEVICE, KERNELS, ON_GPU, Layer, at_boundaries, poison
from vllm_prefixshare import LayerExtras
from vllm_prefixshare.planning.window import first_in_window
from vllm_prefixshare.profiling.gpu_timing import capture

pytestmark = ON_GPU
SPECS = ["1,8,64_1024,200,128", "1,40_2000,77", "1,4,16_64,32,1", "5_17", "3_4096"]


def without_passed_blocks(layer: Layer, window: int) -> None:
    """Put the null block in place of each block that no query of its request sees."""
    work = layer.work
    gone = first_in_window(layer.seq_lens.cpu().numpy(), window, max(layer.counts))
    gone = gone // work.block_size
    columns = np.arange(work.block_table.shape[1])
    work.block_table[:] = np.where(columns < gone[:, None], 0, work.block_table)
    layer.block_table.copy_(torch.from_numpy(work.block_table))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("counts", [[1], [1, 4, 2, 3]], ids=["one", "ragged"])
@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize(("block_size", "layout"), [(16, "NHD"), (48, "HND")])
def test_matches_float64(kernel, counts, window, block_size, layout):
    for spec in SPECS:
        layer = Layer.repeating(tree(spec, block_size), counts, layout=layout)
        without_passed_blocks(layer, window)
        wrapper = layer.planned(kernel, max_query_len=max(counts), sliding_window=window)
        poison(wrapper._executor)
        check(layer, *wrapper.run(**layer.tensors, return_lse=True), window=window)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 528])
def test_every_length_at_a_boundary(kernel, block_size, layout, queries):
    """Windows that end at, one token before and one token after the ends of blocks, too."""
    for window in (1, block_size, 3 * block_size - 1, 3 * block_size, 3 * block_size + 1):
        work = at_boundaries(block_size, queries)
        layer = Layer(work, (16, 4), counts=[queries] * work.num_reqs, layout=layout)
        without_passed_blocks(layer, window)
        wrapper = layer.planned(kernel, divider="deft_node", sliding_window=window)
        poison(wrapper._executor)
        check(layer, *wrapper.run(**layer.tensors, return_lse=True), window=window)


@pytest.mark.parametrize(
    ("kernel", "heads", "head_dim"),
    [(k, *s) for k, s in product(KERNELS, [((64, 8), 64), ((32, 8), 128), ((8, 4), 256)])],
)
def test_other_shapes_with_sinks(kernel, heads, head_dim):
    extras = LayerExtras(sinks=torch.linspace(-2, 6, heads[0], device=DEVICE))
    layer = Layer(tree("1,64_2000,150"), heads, head_dim)
    without_passed_blocks(layer, 512)
    wrapper = layer.planned(kernel, features=["sinks"], sliding_window=512)
    out, lse = wrapper.run(**layer.tensors, extras=extras, return_lse=True)
    assert wrapper.stats().share_factor > 1.5
    check(layer, out, lse, extras, 512)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["soft_cap", "fp8", "fp8, sinks, soft_cap"])
@pytest.mark.parametrize("counts", [[1], [1, 4, 2, 3]], ids=["one", "ragged"])
@pytest.mark.parametrize(("block_size", "window"), [(16, 100), (48, 1024), (528, 1024)])
def test_with_other_features(kernel, name, counts, block_size, window):
    """As in Gemma 2, whose windows have a soft cap, and with an fp8 KV cache."""
    options, extras = extras_of(name)
    for spec in SPECS:
        layer = prepared(Layer.repeating(tree(spec, block_size), counts), options)
        without_passed_blocks(layer, window)
        options = {**options, "max_query_len": max(counts), "sliding_window": window}
        wrapper = layer.planned(kernel, **options)
        poison(wrapper._executor)
        check(layer, *wrapper.run(**layer.tensors, extras=extras, return_lse=True), extras, window)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_follows_windows_that_move(kernel):
    work = tree("1,64_2000,100", spare=40)
    layer = Layer(work, (16, 4))
    without_passed_blocks(layer, 1024)
    wrapper = layer.planned(kernel, sliding_window=1024)
    plan = wrapper.last_plan
    out = torch.empty_like(layer.q)
    lse = torch.empty(layer.q.shape[:2], device=DEVICE)
    executor = wrapper._executor

    def run() -> None:
        executor.run(*layer.tensors.values(), out, wrapper.sm_scale, lse=lse)

    run()  # compiles
    graph, _ = capture(run)
    for _ in range(3):
        layer.seq_lens += 13
        without_passed_blocks(layer, 1024)
        graph.replay()
        check(layer, out, lse, window=1024)
    lens = layer.seq_lens.cpu().numpy()
    assert plan.shared_rows.size == 64 and (lens > plan.planned_seq_lens).all()
