"""The operator on a GPU at full size, through both kernels, against attention in float64."""

import numpy as np
import pytest
import torch

from benchmarks.support.trees import tree
from benchmarks.support.workload_sets import workload_set
from tests.support.gpu_layer import (
    BF16,
    DEVICE,
    FP16,
    KERNELS,
    ON_GPU,
    TOLERANCE,
    Layer,
    check_in_a_graph,
    newest_slots,
    poison,
    random_trees,
)
from vllm_prefixshare import PrefixShareError, merge_states
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.aot.compilation import load_cache_write
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.profiling.gpu_timing import capture

pytestmark = [*ON_GPU, pytest.mark.parametrize("kernel", KERNELS)]


# ---- one query for each request -----------------------------------------------------------


@pytest.mark.parametrize("name", ["anchors", "flashforge", "grpo", "unshared", "batches"])
def test_every_set_of_workloads(kernel, name):
    for work in workload_set(name, quick=name == "flashforge"):
        layer = Layer(work)
        layer.check(layer.run(layer.planned(kernel)))


@pytest.mark.parametrize("divider", DIVIDERS)
def test_the_plans_of_every_divider(kernel, divider):
    layer = Layer(tree("4,16,120_1024,256,100"))
    wrapper = layer.planned(kernel, divider=divider)
    assert wrapper.last_plan.num_partials > 0 or divider == "per_request"
    layer.check(layer.run(wrapper))


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((16, 16), 128, BF16),
        ((24, 8), 128, FP16),
        ((64, 8), 128, BF16),
        ((16, 1), 128, FP16),
        ((32, 8), 64, FP16),
        ((32, 8), 80, BF16),
        ((8, 8), 96, FP16),
        ((24, 8), 96, BF16),
        ((16, 2), 256, BF16),
        ((16, 16), 64, BF16),
    ],
    ids=str,
)
def test_every_head_shape_and_dtype(kernel, heads, head_dim, dtype):
    layer = Layer(tree("1,8,64_1024,200,128"), heads, head_dim, dtype)
    layer.check(layer.run(layer.planned(kernel)))


@pytest.mark.parametrize(
    ("block_size", "layout", "head_dim"),
    [
        (16, "HND", 128),
        (16, "NHD interleaved", 80),
        (16, "HND interleaved", 80),
        (32, "NHD interleaved", 128),
        (64, "HND", 128),
        (64, "HND interleaved", 256),
        (128, "NHD", 128),
        (128, "HND interleaved", 64),
        (48, "NHD", 128),
        (128, "HND", 256),
        (528, "NHD interleaved", 256),
        (1072, "HND", 256),
    ],
)
def test_block_sizes_and_cache_strides(kernel, block_size, layout, head_dim):
    layer = Layer(
        tree("1,8,64_1024,200,150", block_size), (16, 4), head_dim=head_dim, layout=layout
    )
    layer.check(layer.run(layer.planned(kernel)))


def test_a_plan_serves_sequences_that_grow(kernel):
    work = tree("1,8,64_1024,256,250", spare=32)
    layer = Layer(work)
    wrapper = layer.planned(kernel)
    plan = wrapper.last_plan
    for _ in range(2):
        layer.seq_lens += 10  # into the block after the next
        layer.check(layer.run(wrapper))
    assert wrapper.plan(work.block_table, work.seq_lens + 20) is plan


def test_a_worker_ends_whose_first_kv_tile_is_gone(kernel):
    if kernel == "portable":
        pytest.skip("copies nothing before it knows the lengths, and reads long runs as planned")
    layer = Layer(tree("6_700"))
    # one tile for each request: pieces that end before a sequence's end are read whole
    wrapper = layer.planned(kernel, divider="deft_node")
    assert wrapper.last_plan.num_partials == 0
    for lengths in ([1, 100, 127, 128, 129, 699], [40] * 6):
        layer.seq_lens.copy_(torch.tensor(lengths))
        layer.check(layer.run(wrapper))


def test_the_same_plan_gives_the_same_bits(kernel):
    layer = Layer(tree("1,64_16384,40"))
    wrapper = layer.planned(kernel)
    out = layer.run(wrapper)
    assert wrapper.last_plan.num_partials > 0
    assert torch.equal(layer.run(wrapper), out)
    assert torch.equal(layer.run(layer.planned(kernel)), out)


def test_an_empty_batch_writes_nothing(kernel):
    layer = Layer(tree("1,4_64,32"))
    wrapper = layer.wrapper(kernel)
    wrapper.plan(layer.work.block_table[:0], layer.work.seq_lens[:0])
    for name in ("q", "block_table", "seq_lens"):
        setattr(layer, name, getattr(layer, name)[:0])
    assert layer.run(wrapper).shape == layer.q.shape


@pytest.mark.parametrize("interleave", [1, 16])
def test_interleaved_shards_merge_to_the_whole(kernel, interleave):
    # as two ranks of decode context parallelism hold them; of the last three some are empty
    size, block_size = 2, 16
    config = AttentionConfig(32, 1, 128, block_size, "float16")
    work = tree("1,8,64_2048,200,90", size * block_size)
    lens = work.seq_lens.copy()
    lens[-3:] = 1, interleave, interleave + 1
    whole = Layer(work, (32, 1), dtype=FP16)
    whole.seq_lens = torch.tensor(lens, device=DEVICE)
    positions = np.arange(lens.max())
    parts = []
    for rank in range(size):
        owned = positions // interleave % size == rank
        held = np.array([owned[:n].sum() for n in lens], np.int32)
        own = np.flatnonzero(owned[: size * block_size])
        caches = (cache[:, own].contiguous() for cache in (whole.k_cache, whole.v_cache))
        executor = GpuExecutor(config, DEVICE, kernel=kernel)
        planner = DecodePlanner(
            executor.planner_config(), analytic_cost(config, "hopper"), block_size, 32
        )
        executor.prepare(planner.update(work.block_table, held).plan)
        poison(executor)
        assert (held == 0).sum() == (0, 2)[rank]
        out = torch.full_like(whole.q, torch.nan)
        lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
        tables = whole.block_table, torch.tensor(held, device=DEVICE)
        executor.run(whole.q, *caches, *tables, out, 128**-0.5, lse=lse)
        assert out.isfinite().all() and (out[held == 0] == 0).all()
        assert lse.isneginf().all(1).cpu().tolist() == (held == 0).tolist()
        parts.append((out, lse))
    merged, _ = merge_states(*zip(*parts, strict=True))
    for request in (0, len(lens) // 2, *range(len(lens) - 3, len(lens))):
        expected = whole.expected(request)
        error = float((merged[request].double() - expected).norm() / expected.norm())
        assert error < 2 * TOLERANCE[FP16], f"request {request}"


# ---- several queries for each request -----------------------------------------------------

BATCH = "1,4,16_1024,256,160"


@pytest.mark.parametrize(
    ("counts", "heads"),
    [
        ([4] * 16, (32, 8)),
        ([4] * 16, (24, 8)),
        ([40] * 16, (32, 8)),
        ([1, 4, 2, 3] * 4, (32, 8)),
        ([1, 40, 17, 2] * 4, (32, 8)),
        ([1] * 15 + [70], (8, 8)),
    ],
    ids=["4", "4, groups of 3", "40", "ragged to 4", "ragged to 40", "one of 70"],
)
def test_several_queries_see_each_other_in_causal_order(kernel, counts, heads):
    layer = Layer(tree(BATCH), heads, counts=counts)
    layer.check(layer.run(layer.planned(kernel)))


@pytest.mark.parametrize("tokens", [70, 130])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8)], ids=str)
def test_token_trees_wider_than_a_word(kernel, tokens, heads):
    counts = [tokens, 1, tokens - 7, 33] * 4
    layer = Layer(tree(BATCH), heads, counts=counts, parents=random_trees(counts))
    wrapper = layer.planned(kernel)
    out = layer.run(wrapper)
    layer.check(out)
    wrapper.plan(layer.work.block_table, layer.work.seq_lens, layer.starts)
    causal = layer.run(wrapper)
    assert (causal - out).norm() > 0.02 * out.norm(), "the tree must matter"
    layer.parents = None
    layer.check(causal)


def test_a_tree_of_one_query_is_that_query(kernel):
    layer = Layer(tree(BATCH))
    out = layer.run(layer.planned(kernel))
    layer.parents = np.full(layer.work.num_reqs, -1, np.int32)
    assert torch.equal(layer.run(layer.planned(kernel)), out)


# ---- CUDA graphs --------------------------------------------------------------------------


def test_one_captured_graph_serves_every_plan_and_smaller_batches(kernel):
    specs = (
        "64_1408",
        "1,8,64_1024,256,128",
        "1,64_40,700",
        "2,4,8,16,32,64_512,16,128,16,64,48",
        "1,40_1024,90",
        "7_333",
    )
    works = [tree(spec, seed=i) for i, spec in enumerate(specs)]
    layer = Layer(works[0])  # the batch with the largest cache and the widest table
    assert all(w.num_blocks <= works[0].num_blocks for w in works)
    config = AttentionConfig(32, 8, 128, 16)
    executor = GpuExecutor(config, DEVICE, kernel=kernel)
    plans = [
        (work, DecodePlanner(executor.planner_config(name), analytic_cost(config, "hopper"), 16, 4))
        for work in works
        for name in DIVIDERS
    ]
    plans = [
        (work, planner.update(work.block_table, work.seq_lens).plan) for work, planner in plans
    ]
    for _, plan in plans:
        executor.reserve(plan, room=1.0)
    executor.prepare(plans[0][1])
    out = torch.empty_like(layer.q)
    graph, _ = capture(lambda: executor.run(**layer.tensors, out=out, sm_scale=128**-0.5))
    for work, plan in plans:
        now = layer.holding(work)
        executor.prepare(plan)
        poison(executor)
        out.fill_(torch.nan)
        graph.replay()
        now.check(out[: work.num_reqs])
        assert out[work.num_reqs :].isnan().all(), "rows past the batch must not be written"


def test_a_graph_attends_to_what_the_launch_before_writes(kernel):
    # the kernels for Hopper are launched while it still runs
    layer = Layer(tree("1,40_512,33"))
    wrapper = layer.planned(kernel)
    write = load_cache_write(AttentionConfig(32, 8, 128, 16), torch.device(DEVICE))
    caches, slots = (layer.k_cache, layer.v_cache), newest_slots(layer.block_table, layer.seq_lens)
    tokens = torch.randn(20, 2, 40, 8, 128, device=DEVICE).to(BF16)
    queries = torch.randn(20, *layer.q.shape, device=DEVICE).to(BF16)

    def layers(in_order) -> torch.Tensor:
        """One after the other in the same tensors, the queries written before or after the KV."""
        outs = []
        for i, token in enumerate(tokens):
            for step in ("queries", "KV") if i % 2 else ("KV", "queries"):
                if step == "KV":
                    assert write.write(*token, *caches, slots)
                else:
                    layer.q.copy_(queries[i])
                in_order()
            outs.append(wrapper.run(**layer.tensors))
            in_order()
        return torch.stack(outs)

    check_in_a_graph(layers)


def test_one_captured_graph_serves_other_queries_and_token_trees(kernel):
    layer = Layer(tree(BATCH), counts=[6] * 16, parents=random_trees([6] * 16))
    wrapper = layer.planned(kernel)
    wrapper._executor.reserve(wrapper.last_plan)
    wrapper._executor.prepare(wrapper.last_plan)
    out = torch.empty_like(layer.q)
    graph, _ = capture(lambda: wrapper.run(**layer.tensors, out=out))
    for counts in ([6] * 16, [1, 6, 3, 2] * 4, [2] * 16):
        now = layer.holding(layer.work, counts, random_trees(counts))
        wrapper.plan(now.work.block_table, now.work.seq_lens, now.starts, now.parents)
        poison(wrapper._executor)
        out.fill_(torch.nan)
        graph.replay()
        now.check(out[: sum(counts)])


def test_a_captured_workspace_refuses_to_grow_and_stays_as_it_is(kernel):
    small, large = Layer(tree("1,8_512,64")), tree("4,16,512_1024,256,64")
    wrapper = small.planned(kernel)
    plan = wrapper.last_plan
    out = torch.empty_like(small.q)
    graph, _ = capture(lambda: wrapper.run(**small.tensors, out=out))
    for _ in range(2):
        with pytest.raises(PrefixShareError, match=r"a CUDA graph has captured: call reserve\(\)"):
            wrapper.plan(large.block_table, large.seq_lens)
    assert wrapper.last_plan is plan
    poison(wrapper._executor)
    out.fill_(torch.nan)
    graph.replay()
    small.check(out)
    wrapper.plan(small.work.block_table, small.work.seq_lens)
    small.check(small.run(wrapper))
