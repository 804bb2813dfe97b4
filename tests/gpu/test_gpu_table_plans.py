"""The plan chosen with a measured cost table, against the best plan found by timing every division
that a search can afford.
"""

import time
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.kernel.bench import TOLERANCE, make_case, reference, relative_error
from benchmarks.kernel.cost_tables import Profiled, measure
from benchmarks.papers.timing import layer_options
from benchmarks.support.trees import tree
from tests.support.exhaustive_plans import dealt, flattened_plans, node_plans, plan_with
from tests.support.gpu_layer import KERNELS
from tests.support.planning_cases import gpu_config
from tests.support.variables import set_variables
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.lookup import cost_model, gpu
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.planning.dividers.registry import DIVIDERS

LAYER = AttentionConfig(32, 8, 128, 16)
ROWS = LAYER.gqa_group_size
TREES = (
    "1,10_4096,416",
    "1,16_8192,1024",
    "1,32_122880,256",
    "1,64_32768,64",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_512,512,256",
    "4,16,64_2048,512,128",
    "8,128_1024,256",
    "256_1024",
)
LIMIT = 1.10
FINALISTS = 3


def on_gpu(test):
    """Mark a test that needs a GPU; without one it is skipped, with the reason."""
    there = torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="needs an NVIDIA GPU")(test))


@pytest.mark.parametrize("spec", ["1,4_512,64", "2,6_1024,300", "5_640", "1,2,8_256,384,16"])
def test_every_plan_of_the_search_is_right(spec):
    work, cost = tree(spec), analytic_cost(LAYER, "hopper")
    config = gpu_config(num_workers=3, max_tile_requests=4)
    found = dict(node_plans(work, cost, ROWS, config))
    if "depth_first" in DIVIDERS:
        found |= dict(flattened_plans(work, cost, ROWS, config))
    assert len(found) > 2
    for plan in found.values():
        assert plan.num_workers == 3
        invariants.check(plan, work.block_table, work.seq_lens)
    tiles = {plan.num_tiles for plan in found.values()}
    assert len(tiles) > 1


def test_work_lists_are_dealt_in_order():
    work, cost = tree("1,4_512,64"), analytic_cost(LAYER, "hopper")
    plan = plan_with(work, cost, ROWS, gpu_config(divider="fixed", num_workers=5))
    for workers in (1, 2, 3, 5, 8):
        other = dealt(plan, workers)
        assert other.num_workers == workers
        assert set(other.work_indptr) <= set(plan.work_indptr)
        invariants.check(other, work.block_table, work.seq_lens)


@dataclass(frozen=True)
class Measured:
    table: CostTable
    num_workers: int
    seconds: float


@pytest.fixture(scope="module")
def measured():
    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor

    num_workers = GpuExecutor(LAYER, "cuda").planner_config().num_workers
    began = time.perf_counter()
    table = measure(Profiled(LAYER, "auto"))
    return Measured(table, num_workers, time.perf_counter() - began)


@on_gpu
def test_a_table_is_measured_in_under_two_minutes(measured):
    assert measured.seconds < 120
    assert measured.table.fingerprint.device == gpu()


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_profile_measures_a_table_for_layers_with_an_fp8_cache_only(kernel, tmp_path, monkeypatch):
    set_variables(monkeypatch, CACHE=str(tmp_path))
    before = cost_model(LAYER, kernel)
    assert main(["profile", "--device=cuda", f"--kernel={kernel}", "--kv-cache-dtype=fp8"]) == 0
    found = cost_model(replace(LAYER, kv_dtype=FP8, query_dtype=FP8), kernel)
    assert isinstance(found, CostTable)
    assert (found.fingerprint.device, found.fingerprint.kv_dtype) == (gpu(), "8-bit")
    assert float(found.tile(64, 8192)) > float(found.tile(64, 64)) > 0
    after = cost_model(LAYER, kernel)
    assert float(after.tile(64, 8192)) == float(before.tile(64, 8192))


@on_gpu
def test_tiles_from_memory_are_as_fast_as_memory_and_those_from_cache_faster(measured):
    from benchmarks.support.machine_rates import measure_rates
    from vllm_prefixshare.profiling.gpu_timing import GpuTimer

    table, tokens = measured.table, 4096
    bandwidth = measure_rates(GpuTimer()).bytes_per_second
    blocks = measured.num_workers * LAYER.num_kv_heads
    num_bytes = blocks * tokens * 2 * LAYER.head_dim * 2  # keys and values of 16 bits
    reached = num_bytes / float(table.tile_us(64, tokens)) * 1e6
    print(f"\n64 rows, {tokens} tokens: {reached / 1e12:.2f} of {bandwidth / 1e12:.2f} TB/s")
    assert 0.4 * bandwidth < reached < 1.05 * bandwidth
    assert float(table.tile_l2_us(64, tokens)) < 0.95 * float(table.tile_us(64, tokens))


@on_gpu
@pytest.mark.parametrize("spec", TREES)
def test_the_chosen_plan_is_near_the_best_one_found(spec, measured):
    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
    from vllm_prefixshare.profiling.gpu_timing import GpuTimer, capture

    table, work = measured.table, tree(spec)
    case = make_case(work, (LAYER.num_qo_heads, LAYER.num_kv_heads), layer_options("cuda", 1))
    expected, out = reference(case), torch.empty_like(case.q)
    executor = GpuExecutor(LAYER, "cuda")
    config = executor.planner_config()
    plans = {"chosen": plan_with(work, table, ROWS, config)}
    plans |= dict(node_plans(work, table, ROWS, config))
    plans |= dict(flattened_plans(work, table, ROWS, config))
    for plan in plans.values():
        executor.reserve(plan, room=1.0)
    executor.prepare(plans["chosen"])
    graph, _ = capture(
        lambda: executor.run(
            case.q,
            case.k_cache,
            case.v_cache,
            case.block_table,
            case.seq_lens,
            out,
            case.sm_scale,
        )
    )
    timer = GpuTimer()

    def time_ms(label: str, repeats: int) -> float:
        executor.prepare(plans[label])
        out.fill_(torch.nan)
        ms = timer.time(graph.replay, repeats).median_ms
        assert relative_error(out, expected) < TOLERANCE[case.out_dtype], label
        return ms

    times = {label: time_ms(label, 5) for label in plans}
    finalists = sorted(times, key=times.__getitem__)[:FINALISTS]
    final = {label: time_ms(label, 30) for label in [*finalists, "chosen"]}
    best = min(final, key=final.__getitem__)
    print(
        f"\n{spec}: chosen {final['chosen']:.4f} ms, best of {len(plans)} {final[best]:.4f} ms "
        f"({best}), {final['chosen'] / final[best]:.3f}"
    )
    assert final["chosen"] <= LIMIT * final[best], f"{best}: {final}"
