"""Both kernels on a GPU on random forests with adversarial values, against attention in float64 on
the CPU. FUZZ_FORESTS has the number for each kernel, FUZZ_SEED chooses others: their shapes,
too, so that each of several processes compiles a few.
"""

from collections import Counter
from random import Random

import pytest
import torch

from tests.support import fuzz_scale as scale
from tests.support.gpu_layer import DEVICE, KERNELS, ON_GPU, poison
from tests.support.random_forests import TOLERANCE, ForestCase, forest_cases, note, on_forests
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.profiling.gpu_timing import capture

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the cases include overflow
    pytest.mark.parametrize("kernel", KERNELS),
]
HEADS = [(32, 8), (4, 1), (3, 1), (8, 2), (4, 4), (16, 1), (64, 1), (14, 2)]
#: head_dim, block size: a KV tile has whole blocks, or a block whole KV tiles
SHAPES = [(64, 16), (64, 64), (80, 32), (96, 16), (128, 16), (128, 32), (128, 128), (256, 16)]
MAX_REQS, LONGEST_TAIL, LONGEST_PIECE = 20, 520, 1024
PLANS = 200


def some_forests(kernel: str):
    """Forests of two shapes of heads, and one of blocks, for this process."""
    random = Random(scale.SEED)
    head_dim, block_size = random.choice(SHAPES)
    return forest_cases(
        heads=random.sample(HEADS, 2),
        head_dims=[head_dim],
        block_sizes=[block_size],
        kv_tile=128 if kernel == "hopper" and head_dim <= 128 else 64,
        max_reqs=MAX_REQS,
        longest_tail=LONGEST_TAIL,
        longest_piece=LONGEST_PIECE,
    )


def test_random_forests(kernel):
    tried: Counter[str] = Counter()
    executors: dict[tuple[AttentionConfig, int], GpuExecutor] = {}

    @on_forests(some_forests(kernel), scale.FORESTS)
    def one(case: ForestCase) -> None:
        of = case.attention, case.query_len
        if of not in executors:
            executors[of] = GpuExecutor(of[0], DEVICE, kernel=kernel, query_len=of[1])
        executor = executors[of]
        plan = case.plan(executor)
        q, k, v, spoiled = case.tensors()
        on_gpu = [t.to(DEVICE) for t in (q, k, v, *case.batch())]
        executor.prepare(plan)
        outs = []
        for _ in range(2):
            poison(executor)
            out = torch.full_like(on_gpu[0], torch.nan)
            executor.run(*on_gpu[:5], out, case.head_dim**-0.5, query_start_loc=on_gpu[5])
            outs.append(out.cpu())
        assert torch.equal(*(o.view(torch.int16) for o in outs)), "other bits at the second run"
        case.check(outs[0], case.expected(q, k, v), spoiled, TOLERANCE[case.dtype])
        note(tried, case, plan)

    try:
        one()
    finally:
        scale.report(f"{kernel} kernel, seed {scale.SEED}: {dict(tried)}")
    assert tried["forests"] >= scale.FORESTS and tried["shared"]


@pytest.mark.parametrize("query_len", [1, 4])
def test_one_captured_graph_under_200_plans(kernel, query_len):
    tried: Counter[str] = Counter()
    attention = AttentionConfig(32, 8, 128, 16)
    executor = GpuExecutor(attention, DEVICE, kernel=kernel, query_len=query_len)
    executor.reserve_for(MAX_REQS)
    max_blocks = 3 * (LONGEST_PIECE // 16) + MAX_REQS * (LONGEST_TAIL // 16 + 12)
    cache = max_blocks, 16, 8, 128

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    held = (
        zeros(MAX_REQS * query_len, 32, 128, dtype=torch.bfloat16),
        *(zeros(*cache, dtype=torch.bfloat16) for _ in range(2)),
        zeros(MAX_REQS, max_blocks),
        zeros(MAX_REQS),
        zeros(MAX_REQS + 1),
    )
    out = torch.zeros_like(held[0])
    graphs: list[torch.cuda.CUDAGraph] = []
    layers = forest_cases(
        heads=[(32, 8)],
        head_dims=[128],
        block_sizes=[16],
        kv_tile=128,
        max_reqs=MAX_REQS,
        longest_tail=LONGEST_TAIL,
        longest_piece=LONGEST_PIECE,
        dtypes=(torch.bfloat16,),
        query_lens=tuple(range(1, query_len + 1)),
    )

    @on_forests(layers, PLANS)
    def one(case: ForestCase) -> None:
        plan = case.plan(executor)
        q, k, v, spoiled = case.tensors()
        for there, new in zip(held, (q, k, v, *case.batch()), strict=True):
            there.zero_()[tuple(map(slice, new.shape))] = new.to(DEVICE)
        held[5][len(case.prefixes) :] = len(q)
        executor.prepare(plan)
        if not graphs:
            graph, _ = capture(
                lambda: executor.run(
                    *held[:5], out, 128**-0.5, query_start_loc=held[5] if query_len > 1 else None
                )
            )
            graphs.append(graph)
        poison(executor)
        out.fill_(torch.nan)
        graphs[0].replay()
        found = out.cpu()
        case.check(found[: len(q)], case.expected(q, k, v), spoiled, TOLERANCE[case.dtype])
        assert found[len(q) :].isnan().all(), "rows past the batch must not be written"
        note(tried, case, plan)

    one()
    scale.report(f"{kernel} kernel, {query_len} queries, one captured graph: {dict(tried)}")
    assert tried["forests"] >= PLANS and len(graphs) == 1
