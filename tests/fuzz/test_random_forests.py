"""Both GPU kernels on random forests under Triton's interpreter, against attention in float64."""

from collections import Counter

import pytest
import torch

from tests.support import decode_paths as paths
from tests.support import fuzz_scale as scale
from tests.support.gluon_interpreter import launch_before, load_kernel
from tests.support.random_forests import TOLERANCE, ForestCase, forest_cases, note, on_forests
from tests.support.triton_interpreter import bfloat16_in_the_interpreter  # noqa: F401
from vllm_prefixshare.kernels.hopper import launch as hopper

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the cases include overflow
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="test_random_forests_on_gpu.py has this on a GPU"
    ),
]
#: few workers, because the interpreter walks them one after the other
MULTIPROCESSORS = 3

HOPPER = forest_cases(
    heads=[(4, 1), (3, 1), (8, 2), (2, 2), (16, 1), (64, 1)],
    head_dims=[64],
    block_sizes=[16, 32, 64, 128],
    kv_tile=128,
    max_reqs=7,
    longest_tail=300,
)
PORTABLE = forest_cases(
    heads=[(4, 1), (3, 1), (8, 2), (2, 2), (16, 1)],
    head_dims=[64, 72, 80],
    block_sizes=[8, 16, 24, 32, 64],
    kv_tile=64,
    max_reqs=4,
    longest_tail=70,
)


@pytest.mark.parametrize(("kernel", "cases"), [("hopper", HOPPER), ("portable", PORTABLE)])
def test_a_kernel(kernel, cases, monkeypatch, tmp_path):
    modules = "producer", "metadata", "wide_values", "kernel"
    source = load_kernel("vllm_prefixshare.kernels.hopper", tmp_path, modules)
    monkeypatch.setattr(hopper, "partial_attention", source)
    # merging that overlaps is ordered by assembly
    monkeypatch.setattr(hopper.HopperKernel, "starts_merging", False)
    tried: Counter[str] = Counter()

    @on_forests(cases, scale.FORESTS)
    def one(case: ForestCase) -> None:
        executor = paths.executor(kernel, case.attention, case.query_len, 16, MULTIPROCESSORS)
        plan = case.plan(executor)
        q, k, v, spoiled = case.tensors()
        *tensors, starts = case.batch()
        executor.prepare(plan)
        outs = []
        for _ in range(2):
            partials = executor.workspace.partials
            for buffer in (partials.out, partials.lse):
                buffer.fill_(torch.nan)
            out = torch.full_like(q, torch.nan)
            scale_ = case.head_dim**-0.5
            if kernel == "hopper":
                launch_before.writes(q)
            with paths.as_on_a_gpu(MULTIPROCESSORS):
                executor.run(q, k, v, *tensors, out, scale_, query_start_loc=starts)
            outs.append(out)
        assert torch.equal(*(o.view(torch.int16) for o in outs)), "other bits at the second run"
        case.check(outs[0], case.expected(q, k, v), spoiled, TOLERANCE[case.dtype])
        note(tried, case, plan)

    one()
    scale.report(f"{kernel} kernel: {dict(tried)}")
    # depth_first reads short prefixes twice where that is cheaper: in most of these cases
    assert tried["shared"]
