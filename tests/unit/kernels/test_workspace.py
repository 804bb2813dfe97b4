"""The GPU executor's workspace: what is copied, what stays, and that reserved room suffices."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks.support.trees import tree
from tests.support.faults import failing_at
from tests.support.planning_cases import COSTS, NULL_BLOCK, gpu_config
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import PieceLimits, PrefixShareError
from vllm_prefixshare.kernels import gpu_executor as gpu
from vllm_prefixshare.kernels.catalog import SHARED_MEMORY, Gpu
from vllm_prefixshare.kernels.hopper.launch import HopperKernel
from vllm_prefixshare.kernels.interface import Capacity, HostBatch, Kernel
from vllm_prefixshare.kernels.mla_hopper.launch import LatentHopperKernel
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.kernels.registry import Choice
from vllm_prefixshare.kernels.workspace import GAP, RING, DeviceArrays, PartialResults
from vllm_prefixshare.planning.costs.gpus import GPUS
from vllm_prefixshare.planning.costs.lookup import cost_model
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner

CPU = torch.device("cpu")
H100 = Gpu((9, 0), 132, 227 << 10)


def loaded(arrays: DeviceArrays) -> dict[str, list[int]]:
    return {name: a.tolist() for name, a in arrays.arrays.items()}


def config_for(kernel: Kernel, **options: object) -> PlannerConfig:
    """A configuration with the kernel's limits, which shares all that it can."""
    return gpu_config(
        **{
            "share": "always",
            "num_workers": kernel.limits.num_workers,
            "max_tile_requests": kernel.limits.max_tile_requests,
            "max_tile_runs": kernel.limits.max_tile_runs,
            "spread": kernel.limits.geometry.spread,
            **options,
        }
    )


def assert_room(capacity: Capacity, kernel: Kernel, plan: DecodePlan) -> None:
    assert plan.fits(capacity.max_tiles, capacity.max_runs, capacity.max_partials)
    layout = kernel.layout(plan)
    assert {name for name, a in layout.items() if a.size > capacity.sizes[name]} == set()


def test_arrays_that_lie_close_or_far_apart_arrive():
    arrays = DeviceArrays(CPU)
    arrays.reserve({"a": 4, "b": 3 * GAP, "c": 5})
    for n in range(2 * RING):  # every buffer of the ring, twice
        a, c = np.arange(n, n + 3, dtype=np.int32), np.full(5, -n, np.int32)
        b = np.arange(n * 7, dtype=np.int32)
        arrays.load({"a": a, "b": b, "c": c})
        for name, value in (("a", a), ("b", b), ("c", c)):
            assert arrays.arrays[name][: len(value)].tolist() == value.tolist()


def test_arrays_made_in_inference_mode_are_loaded_outside_too():
    arrays = DeviceArrays(CPU)
    with torch.inference_mode():
        arrays.reserve({"a": 4})
    arrays.load({"a": np.arange(4, dtype=np.int32)})
    assert loaded(arrays)["a"][:4] == [0, 1, 2, 3]


def test_an_indptr_stays_level_past_its_end():
    arrays = DeviceArrays(CPU)
    arrays.reserve({"merge_indptr": 9, "query_start_loc": 9, "rows": 9})
    long = np.arange(9, dtype=np.int32)
    arrays.load({"merge_indptr": long, "query_start_loc": long, "rows": long})
    short = np.array([0, 2], np.int32)
    arrays.load({"merge_indptr": short, "query_start_loc": short, "rows": short})
    found = loaded(arrays)
    for name in ("merge_indptr", "query_start_loc"):
        assert found[name][0] == 0
        assert set(found[name][1:]) == {2}


@contextmanager
def memory_runs_out(monkeypatch, name: str, failing: int) -> Iterator[None]:
    """Let the call of ``torch.name`` with this number, counted from 1, find no memory."""
    fault = torch.OutOfMemoryError("planted")
    with monkeypatch.context() as patch:
        patch.setattr(torch, name, failing_at(getattr(torch, name), failing, error=fault))
        yield


@pytest.mark.parametrize("failing", range(1, RING + 2))
def test_arrays_are_right_after_memory_ran_out(monkeypatch, failing):
    arrays = DeviceArrays(CPU)
    arrays.load({"a": np.full(8, 1, np.int32), "b": np.full(600, 2, np.int32)})
    before = loaded(arrays)
    with memory_runs_out(monkeypatch, "zeros", failing), pytest.raises(torch.OutOfMemoryError):
        arrays.load({"a": np.full(99, 3, np.int32), "b": np.full(8, 4, np.int32)})
    assert loaded(arrays) == before
    arrays.reserve({"a": 500, "b": 800})  # what was in force still is
    assert {name: held[: len(before[name])] for name, held in loaded(arrays).items()} == before
    for n in (8, 99):  # with and without another buffer
        arrays.load({"a": np.full(n, 5, np.int32), "b": np.full(8, 6, np.int32)})
        assert arrays.arrays["a"][:n].tolist() == [5] * n
        assert arrays.arrays["b"][:8].tolist() == [6] * 8


@pytest.mark.parametrize("failing", [1, 2])
def test_partial_results_have_room_after_memory_ran_out(monkeypatch, failing):
    partials = PartialResults(CPU, (4, 64), query_len=2)
    with memory_runs_out(monkeypatch, "empty", failing), pytest.raises(torch.OutOfMemoryError):
        partials.reserve(8)
    partials.reserve(8)
    assert min(len(partials.out), len(partials.lse)) >= 16


def test_captured_arrays_and_partial_results_do_not_grow():
    arrays = DeviceArrays(CPU)
    arrays.reserve({"rows": 4})
    arrays.captured = True
    room = len(arrays.arrays["rows"])
    arrays.load({"rows": np.zeros(room, np.int32)})
    with pytest.raises(PrefixShareError, match=r"rows of .* exceed the workspace"):
        arrays.reserve({"rows": room + 1})
    partials = PartialResults(CPU, (4, 64), query_len=2)
    partials.reserve(3)
    assert partials.out.shape[1:] == (4, 64) and len(partials.lse) >= 6
    partials.captured = True
    with pytest.raises(PrefixShareError, match="partial results exceed"):
        partials.reserve(len(partials.lse))


@pytest.mark.parametrize("exceeded", ["plan", "queries"])
def test_a_refused_plan_leaves_the_last_one_with_its_queries(monkeypatch, exceeded):
    attention = AttentionConfig(4, 2, 64, 16, "float16")
    choice = Choice(PortableKernel(attention, 4, H100), None)
    monkeypatch.setattr(gpu, "choose_kernel", lambda *_: choice)
    executor = gpu.GpuExecutor(attention, CPU, query_len=4)
    cost = analytic_cost(attention, executor.name)
    planner = DecodePlanner(executor.planner_config(), cost, 16, attention.gqa_group_size)

    def prepare(num_reqs: int) -> None:
        table = np.arange(1, 12 * num_reqs + 1, dtype=np.int32).reshape(num_reqs, 12)
        lens = np.full(num_reqs, 100, np.int32)
        starts = 4 * np.arange(num_reqs + 1, dtype=np.int32)
        executor.prepare(planner.update(table, lens, 4).plan, HostBatch(table, lens, starts))

    prepare(2)
    workspace = executor.workspace
    room = workspace.plan if exceeded == "queries" else workspace.queries
    room.reserve(dict.fromkeys(room.arrays, 4000))
    workspace.partials.reserve(400)
    before = loaded(workspace.plan), loaded(workspace.queries)
    workspace.plan.captured = workspace.queries.captured = workspace.partials.captured = True
    with pytest.raises(PrefixShareError, match="exceed the workspace that a CUDA graph"):
        prepare(60)
    assert (loaded(workspace.plan), loaded(workspace.queries)) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_partial_results_are_float32_whatever_the_default(dtype):
    # vLLM makes layers while torch's default dtype is the model's
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        partials = PartialResults(CPU, (4, 64), query_len=1)
        dtypes = [partials.out.dtype, partials.lse.dtype]
        partials.reserve(3)
    finally:
        torch.set_default_dtype(before)
    assert {*dtypes, partials.out.dtype, partials.lse.dtype} == {torch.float32}


@pytest.mark.parametrize("kernel", [HopperKernel, PortableKernel])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (16, 1), (64, 8)], ids=str)
@pytest.mark.parametrize("divider", ["depth_first", "flashforge", "deft_flatten", "per_request"])
def test_reserved_room_holds_every_plan_that_keeps_its_limits(kernel, heads, divider):
    attention = AttentionConfig(*heads, 128, 16)
    k = kernel(attention, 1, H100)
    capacity = k.capacity(64)
    limits = {name: getattr(capacity, name) for name in ("max_tiles", "max_runs", "max_partials")}
    for spec in ("1,64_2048,64", "1,4,16,64_256,128,64,32", "64_512", "1,2_4096,64"):
        work = tree(spec)
        config = config_for(k, divider=divider, null_block_id=NULL_BLOCK, **limits)
        planner = DecodePlanner(config, COSTS["h200"], 16, attention.gqa_group_size)
        plan = planner.update(work.block_table, work.seq_lens).plan
        assert_room(capacity, k, plan)


@pytest.mark.parametrize(
    ("gpu", "heads", "head_dim"),
    [
        ("A100", (32, 8), 128),
        ("A100", (16, 1), 128),
        ("L40S", (8, 1), 128),
        ("L40S", (16, 2), 256),
        ("RTX5090", (8, 1), 128),
        ("B200", (16, 1), 128),
    ],
    ids=str,
)
def test_reserved_room_holds_plans_that_are_spread(gpu, heads, head_dim):
    """Batches as large as the room is for; a cut of a spread window divides two runs."""
    sheet = GPUS[gpu]
    shared = SHARED_MEMORY[sheet.capability] << 10
    attention = AttentionConfig(*heads, head_dim, 16)
    k = PortableKernel(attention, 1, Gpu(sheet.capability, sheet.multiprocessors, shared))
    cost = cost_model(attention, k.name, device_name=f"{sheet.device} x{sheet.multiprocessors}")
    config = config_for(k, divider="depth_first", spread=True)
    spread = 0
    for num_reqs in (8, 16, 64, 128):
        capacity = k.capacity(num_reqs)
        for document, private in product((4096, 32768, 131072), (100, 500, 2000)):
            work = tree(f"1,{num_reqs}_{document},{private}")
            plans = [
                DecodePlanner(c, cost, 16, attention.gqa_group_size)
                .update(work.block_table, work.seq_lens)
                .plan
                for c in (config, replace(config, geometry=config.geometry._replace(spread=False)))
            ]
            spread += plans[0].run_row.size > plans[1].run_row.size
            assert_room(capacity, k, plans[0])
    assert spread > 2


@pytest.mark.parametrize("kernel", [HopperKernel, PortableKernel])
@pytest.mark.parametrize(
    ("heads", "query_len", "num_reqs"), [((8, 1), 4, 64), ((8, 1), 8, 32), ((32, 2), 1, 64)]
)
def test_reserved_room_holds_plans_with_more_workers_than_requests(
    kernel, heads, query_len, num_reqs
):
    """A long prefix is cut into two tiles for each worker."""
    attention = AttentionConfig(*heads, 128, 16)
    k = kernel(attention, query_len, H100)
    cost = cost_model(attention, k.name, device_name="NVIDIA H200 x132")
    config = config_for(k, divider="depth_first")
    capacity = k.capacity(num_reqs)
    most = 0
    for private in (100, 500, 2000, 8000):
        work = tree(f"1,{num_reqs}_131072,{private}")
        planner = DecodePlanner(config, cost, 16, attention.gqa_group_size)
        plan = planner.update(work.block_table, work.seq_lens, query_len).plan
        most = max(most, plan.num_tiles)
        assert_room(capacity, k, plan)
    assert most > k.limits.num_workers + num_reqs or kernel is PortableKernel


@pytest.mark.parametrize("kernel", [HopperKernel, PortableKernel])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (64, 1)], ids=str)
def test_reserved_room_holds_every_plan_of_fixed_pieces(kernel, heads):
    """Plans of a KV cache that holds each batch and no more."""
    attention = AttentionConfig(*heads, 128, 16)
    k = kernel(attention, 1, H100)
    for spec in ("1,64_2048,64", "1,4,16,64_256,128,64,32", "64_1500", "1,2_4096,64", "8,64_600,9"):
        work = tree(spec)
        pieces = PieceLimits(-(-int(work.seq_lens.max()) // 512), work.num_blocks * 16 // 512)
        capacity = k.capacity(64, pieces)
        config = config_for(k, divider="batch_invariant", spread=False, null_block_id=NULL_BLOCK)
        planner = DecodePlanner(config, COSTS["h200"], 16, attention.gqa_group_size)
        plan = planner.update(work.block_table, work.seq_lens).plan
        assert_room(capacity, k, plan)


@pytest.mark.parametrize(
    ("kernel", "divider", "share", "asked"),
    [
        (HopperKernel, None, "auto", "always"),  # depth first makes this decision itself
        (HopperKernel, None, "never", "never"),
        (HopperKernel, "flashforge", "auto", "auto"),
        (HopperKernel, "batch_invariant", "auto", "always"),  # room is made for shared pieces
        (PortableKernel, None, "auto", "always"),
        (PortableKernel, "flashforge", "auto", "auto"),
    ],
)
def test_the_planner_is_asked_once_whether_sharing_pays(monkeypatch, kernel, divider, share, asked):
    choice = Choice(kernel(AttentionConfig(32, 8, 128, 16), 1, H100), None)
    monkeypatch.setattr(gpu, "choose_kernel", lambda *_: choice)
    executor = gpu.GpuExecutor(AttentionConfig(32, 8, 128, 16), CPU)
    assert executor.planner_config(divider, share).share == asked


@pytest.mark.parametrize(
    "attention",
    [AttentionConfig(4, 1, 576, 64, kv_lora_rank=512), AttentionConfig(4, 1, 128, 64)],
)
def test_token_trees_over_latents_are_refused(monkeypatch, attention):
    is_latent = attention.kv_lora_rank is not None
    kernel = (LatentHopperKernel if is_latent else PortableKernel)(attention, 2, H100)
    monkeypatch.setattr(gpu, "choose_kernel", lambda *_: Choice(kernel, None))
    monkeypatch.setattr(type(kernel), "launch", lambda *_: None)
    monkeypatch.setattr(gpu, "merge_states", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    executor = gpu.GpuExecutor(attention, CPU, query_len=2)
    assert executor.takes_token_trees != is_latent
    work = tree("1,2_64,64", 64)
    planner = DecodePlanner(executor.planner_config(), analytic_cost(attention, "hopper"), 64, 4)
    executor.prepare(planner.update(work.block_table, work.seq_lens, 2).plan)
    q = torch.zeros(4, 4, attention.head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(1, 64, 1, attention.head_dim, dtype=torch.bfloat16)
    tensors = q, cache, cache[..., : attention.v_head_dim]
    lists = torch.from_numpy(work.block_table), torch.from_numpy(work.seq_lens)
    out = torch.empty(4, 4, attention.v_head_dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    masks = torch.zeros(4, 1, dtype=torch.int32)
    executor.run(*tensors, *lists, out, 1.0, starts)
    if is_latent:
        with pytest.raises(PrefixShareError, match="neither sliding_window nor kv_lora_rank"):
            executor.run(*tensors, *lists, out, 1.0, starts, masks)
    else:
        executor.run(*tensors, *lists, out, 1.0, starts, masks)


@pytest.mark.parametrize("spec", ["32_256", "1,8_8192,64"])
def test_merging_is_launched_where_it_is_needed_and_before_and_in_a_capture(monkeypatch, spec):
    attention = AttentionConfig(32, 8, 128, 16)
    kernel = PortableKernel(attention, 1, H100)
    launched: list[str] = []
    monkeypatch.setattr(PortableKernel, "launch", lambda *_: launched.append("attention"))
    monkeypatch.setattr(gpu, "merge_states", lambda *_, **__: launched.append("merging"))
    monkeypatch.setattr(gpu, "choose_kernel", lambda *_: Choice(kernel, None))
    executor = gpu.GpuExecutor(attention, CPU)
    work = tree(spec)
    planner = DecodePlanner(executor.planner_config(), analytic_cost(attention, "hopper"), 16, 4)
    plan = planner.update(work.block_table, work.seq_lens).plan
    assert (plan.num_partials > 0) == (spec != "32_256")
    q = torch.zeros(work.num_reqs, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16)
    table, lens = torch.from_numpy(work.block_table), torch.from_numpy(work.seq_lens)

    def layer(capturing: bool) -> list[str]:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        launched.clear()
        executor.run(q, cache, cache, table, lens, torch.empty_like(q), 1.0)
        return launched

    both = ["attention", "merging"]
    usual = both if plan.num_partials else ["attention"]
    executor.prepare(plan)
    assert layer(False) == both, "the first launch of a plan"
    assert layer(False) == usual
    assert layer(True) == both, "a graph serves other plans, too"
    assert layer(False) == usual
