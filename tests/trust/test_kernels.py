"""Both GPU kernels on random forests, against attention in float64: the portable kernel under
Triton's interpreter, the Hopper kernel by the emulator of its walk.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.kernels.conftest import bfloat16_in_the_interpreter  # noqa: F401
from tests.kernels.hopper_emulator import emulate
from tests.planning.strategies import LinearCost, quick
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.costs.roofline import analytic_cost
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.kernels.reference import reference_attention
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner

from . import paths, scale
from .forests import ForestCase, forest_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the cases include overflow
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this at full size"),
]
#: rounding the attention weights and the result, for one query token
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
#: few workers, because the interpreter walks them one after the other
MULTIPROCESSORS = 3


def attention_of(case: ForestCase) -> AttentionConfig:
    dtype = str(case.dtype).removeprefix("torch.")
    return AttentionConfig(*case.heads, case.head_dim, case.block_size, dtype)


def plan_for(path: str, case: ForestCase) -> tuple[DecodePlan, GpuExecutor]:
    attention = attention_of(case)
    executor = paths.executor(path, attention, case.query_len, 16, MULTIPROCESSORS)
    cost = {
        "estimate": analytic_cost(attention, "triton"),
        "bytes": LinearCost(launch=0.001),
        "launch": LinearCost(launch=100.0, per_row_token=0.01, unshared_launch=100.0),
    }[case.cost]
    config = executor.planner_config(None, "always", null_block_id=0)
    arguments = config, cost, case.block_size, attention.gqa_group_size
    table = case.block_table()
    plan, again = (
        DecodePlanner(*arguments).update(table, case.planned_lens, case.query_len, slack=case.slack)
        for _ in range(2)
    )
    for name in DecodePlan.__slots__:
        np.testing.assert_array_equal(getattr(plan, name), getattr(again, name))
    invariants.check(plan, table, case.true_lens)
    return plan, executor


def expected_output(case: ForestCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Attention in float64 from blocks that a request holds; other blocks must not matter."""
    table, lens, starts = (
        torch.from_numpy(x) for x in (case.block_table(), case.true_lens, case.query_start_loc)
    )
    return reference_attention(q.double(), k.double(), v.double(), table, lens, starts)


def assert_close(
    case: ForestCase, out: torch.Tensor, expected: torch.Tensor, spoiled: int, tolerance: float
) -> None:
    """Compare per query token and head, so that one wrong row cannot hide."""
    starts = case.query_start_loc
    compared = torch.ones(len(out), dtype=torch.bool)
    if spoiled >= 0:
        compared[starts[spoiled] : starts[spoiled + 1]] = False
    out, expected = out.double()[compared], expected[compared]
    assert torch.isfinite(out).all()
    scale_ = expected.norm(dim=-1).clamp_min(1e-30)
    error = ((out - expected).norm(dim=-1) / scale_).max() if len(out) else torch.tensor(0.0)
    assert float(error) < tolerance, float(error)


HOPPER = forest_cases(
    heads=[(4, 1), (3, 1), (8, 2), (2, 2), (16, 1), (64, 1)],
    head_dims=[64],
    block_sizes=[16, 32, 64, 128],
    kv_tile=128,
    most_reqs=7,
    longest_tail=300,
)
PORTABLE = forest_cases(
    heads=[(4, 1), (3, 1), (8, 2), (2, 2), (16, 1)],
    head_dims=[64, 72, 80],
    block_sizes=[8, 16, 24, 32],
    kv_tile=64,
    most_reqs=4,
    longest_tail=70,
)


def test_the_walk_of_the_hopper_kernel():
    tried: Counter[str] = Counter()

    @quick(scale.FORESTS)
    @given(HOPPER)
    def one(case: ForestCase) -> None:
        plan, executor = plan_for("hopper", case)
        q, k, v, spoiled = case.tensors()
        kernel = executor._kernel
        out, _ = emulate(
            kernel.layout(plan),
            kernel.num_workers,
            *(t.double().numpy() for t in (q, k, v)),
            case.block_table(),
            case.true_lens,
            case.query_start_loc,
            case.query_len,
            kernel.max_tile_runs,
            kernel.shape.kv_tile,
        )
        if case.values == "overflow":
            spoiled = -1  # float64 does not overflow
        assert_close(case, torch.from_numpy(out), expected_output(case, q, k, v), spoiled, 1e-9)
        note(tried, case, plan)

    one()
    scale.report(f"hopper walk: {dict(tried)}")
    assert tried["shared"] > tried["forests"] / 4


def test_the_portable_kernel():
    tried: Counter[str] = Counter()

    @quick(scale.FORESTS)
    @given(PORTABLE)
    def one(case: ForestCase) -> None:
        plan, executor = plan_for("portable", case)
        q, k, v, spoiled = case.tensors()
        tensors = [torch.from_numpy(x) for x in (case.block_table(), case.true_lens)]
        starts = torch.from_numpy(case.query_start_loc)
        executor.prepare(plan)
        outs = []
        for _ in range(2):
            partials = executor.workspace.partials
            for buffer in (partials.out, partials.lse):
                buffer.fill_(torch.nan)
            out = torch.full_like(q, torch.nan)
            scale_ = case.head_dim**-0.5
            with paths.as_on_a_gpu(MULTIPROCESSORS):
                executor.run(q, k, v, *tensors, out, scale_, query_start_loc=starts)
            outs.append(out)
        assert torch.equal(*(o.view(torch.int16) for o in outs)), "other bits at the second run"
        assert_close(case, outs[0], expected_output(case, q, k, v), spoiled, TOLERANCE[case.dtype])
        note(tried, case, plan)

    one()
    scale.report(f"portable kernel: {dict(tried)}")
    # depth_first reads short prefixes twice where that is cheaper: in most of these cases
    assert tried["shared"] > tried["forests"] / 8


def note(tried: Counter[str], case: ForestCase, plan: DecodePlan) -> None:
    tried["forests"] += 1
    tried["shared"] += bool(len(plan.shared_rows))
    tried["merged"] += plan.num_partials > 0
    tried[case.values] += 1
