"""The Hopper kernel's own source under Triton's interpreter, against attention in float64.

``gluon_interpreter`` says what that tests and what not. On a GPU see tests/gpu.
"""

import numpy as np
import pytest
import torch

from benchmarks.support.trees import Workload, tree
from tests.support.gluon_interpreter import launch_before, load_kernel
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.portable_kernel import tree_reference
from tests.support.reference_attention import reference_attention_and_lse
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.hopper import launch as hopper
from vllm_prefixshare.kernels.interface import Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks
from vllm_prefixshare.planning.planner import DecodePlanner

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel"),
    # rows without any token divide by zero and are then discarded, as on a GPU
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
DIM = 64
PLAIN = LayerExtras()
GROWTH = 20  # tokens by which every request outgrows its plan


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch, tmp_path):
    modules = "producer", "metadata", "wide_values", "kernel"
    kernel = load_kernel("vllm_prefixshare.kernels.hopper", tmp_path, modules)
    monkeypatch.setattr(hopper, "partial_attention", kernel)


def check(
    work: Workload,
    heads: tuple[int, int] = (4, 1),
    *,
    query_lens: list[int] | int = 1,
    workers: int = 4,
    lengths: list[int] | None = None,
    divider: str | None = None,
    extras: LayerExtras = PLAIN,
    window: int | None = None,
    token_tree: bool = False,
) -> torch.Tensor:
    """Plan and launch a workload; output and log-sum-exp are as exact as float16 allows.

    Args:
        query_lens: query tokens of each request, or of all.
        workers: times KV heads and tiles of rows, thread blocks.
        lengths: of the requests when the kernel runs; as planned if None.

    Returns:
        The output.
    """
    if isinstance(query_lens, int):
        query_lens = [query_lens] * work.num_reqs
    query_len, (q_heads, kv_heads), size = max(query_lens), heads, work.block_size
    names = {"soft_cap": extras.soft_cap, "sinks": extras.sinks is not None}
    features = tuple(name for name, there in names.items() if there)
    attention = AttentionConfig(
        q_heads, kv_heads, DIM, size, "float16", features=features, sliding_window=window
    )
    blocks = workers * kv_heads * -(-query_len * q_heads // kv_heads // 128)
    kernel = hopper.HopperKernel(attention, query_len, Gpu((9, 0), blocks, 227 << 10))
    config = planner_config(kernel.limits, attention, divider, check_plans=True)
    planner = DecodePlanner(config, analytic_cost(attention, "hopper"), size, q_heads // kv_heads)
    plan = planner.update(work.block_table, work.seq_lens, query_len).plan
    arrays = {name: torch.from_numpy(x.reshape(-1)) for name, x in kernel.layout(plan).items()}

    torch.manual_seed(0)
    cache = work.num_blocks, size, kv_heads, DIM
    k_cache, v_cache = (torch.randn(cache, dtype=torch.float16) for _ in range(2))
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = torch.randn(int(starts[-1]), q_heads, DIM, dtype=torch.float16)
    lens = work.seq_lens if lengths is None else np.array(lengths, np.int32)
    mask = None
    if token_tree:
        rng = np.random.default_rng(0)
        parents = [rng.integers(-1, i) for length in query_lens for i in range(length)]
        mask = ancestor_masks(np.array(parents, np.int32), starts)
    shape = max(1, plan.num_partials) * query_len, q_heads
    partial_out, partial_lse = torch.full((*shape, DIM), torch.nan), torch.full(shape, torch.nan)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    t = Tensors(
        q, k_cache, v_cache, *(torch.from_numpy(x) for x in (work.block_table, lens, starts)),
        None if mask is None else torch.from_numpy(mask), partial_out, partial_lse, out, lse,
        extras=extras,
    )  # fmt: skip
    launch_before.writes(q)
    kernel.launch(arrays, t, DIM**-0.5)
    merge_states(
        arrays["merge_indptr"], partial_out, partial_lse, out, t.query_start_loc, query_len, lse,
        extras.sinks,
    )  # fmt: skip
    if mask is not None:
        batch = PagedBatch(work.block_table, lens, t.query_start_loc, q, k_cache, v_cache)
        assert relative_error(out, tree_reference(batch, mask)) < 1e-3
        return out
    wanted, wanted_lse = reference_attention_and_lse(
        *(x.double() for x in (q, k_cache, v_cache)), t.block_table, t.seq_lens, t.query_start_loc,
        extras=extras, sliding_window=window,
    )  # fmt: skip
    seen = torch.from_numpy(np.repeat(lens > 0, query_lens))
    assert relative_error(out[seen], wanted[seen]) < 1e-3
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], rtol=0, atol=2e-3)
    assert (out[~seen] == 0).all() and lse[~seen].isneginf().all()
    return out


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
        ("1_600", 16, 1, 1, 3, [20], 4),
        # parts of blocks, also as the first KV tile of a worker, inside and at the begin of a block
        ("1,3_384,40", 64, 1, 1, 4, None, 4),
        ("1,3_256,70", 128, 1, 1, 5, None, 4),
        ("1_700", 96, 1, 2, 6, None, 4),
        # tiles of so many runs that each lane of a producer holds two, and eight
        ("1,6,30_40,32,24", 16, 1, 1, 1, None, 4),
        ("1,9,100_40,32,24", 16, 1, 1, 1, None, 1),
    ],
)
def test_the_hopper_kernel(spec, block_size, query_len, kv_heads, workers, lengths, group):
    heads = group * kv_heads, kv_heads
    work = tree(spec, block_size)
    check(work, heads, query_lens=query_len, workers=workers, lengths=lengths)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap(cap):
    """KV tiles that not all rows read, too. A small cap is reached: scores differ by more."""
    extras = LayerExtras(soft_cap=cap)
    check(tree("1,3_300,40", 16), lengths=[340, 339, 320], extras=extras)
    check(tree("1_300", 16), query_lens=3, workers=2, extras=extras)


def grown(spec: str, block_size: int = 16) -> tuple[Workload, list[int]]:
    """A workload, and the lengths to which its requests have grown since the plan."""
    work = tree(spec, block_size, spare=GROWTH)
    return work, (work.seq_lens + GROWTH).tolist()


@pytest.mark.parametrize(
    ("spec", "heads", "divider"),
    [
        ("1,4,16_128,64,30", (4, 1), "depth_first"),
        ("1,4,16_128,64,30", (4, 1), "deft_flatten"),
        ("1,4,16_128,64,30", (4, 1), "flashforge"),
        ("1,4,16_128,64,30", (4, 1), "per_request"),
        ("1,3,7_512,128,200", (3, 1), "depth_first"),  # 42 requests a tile, two rows unused
        ("1,4,100_64,16,20", (2, 2), "depth_first"),  # 128 requests a tile
        ("2,4,8_48,32,5", (16, 1), "flashforge"),
        ("9_70", (8, 2), "deft_flatten"),  # nothing shared
        ("1_33", (4, 1), "flashforge"),
    ],
)
def test_trees_of_many_shapes(spec, heads, divider):
    work, lengths = grown(spec)
    check(work, heads, workers=5, lengths=lengths, divider=divider)


@pytest.mark.parametrize("divider", ["depth_first", "flashforge"])
@pytest.mark.parametrize("heads", [(4, 1), (32, 1)])
def test_requests_without_a_token(heads, divider):
    """Shards of a rank: the last ones are empty, and later have their first tokens."""
    work = tree("1,3,9_64,32,30", 16, spare=GROWTH)
    work.seq_lens[-5:] = 0
    check(work, heads, workers=5, divider=divider)
    check(work, heads, workers=5, divider=divider, lengths=(work.seq_lens + GROWTH).tolist())


@pytest.mark.parametrize("block_size", [32, 48, 64, 128, 144, 256])
def test_other_block_sizes(block_size):
    work, lengths = grown(f"1,3,9_{2 * block_size},{block_size},50", block_size)
    check(work, workers=40, lengths=lengths)


@pytest.mark.parametrize(
    ("spec", "query_lens", "divider"),
    [
        ("1,6_64,40", [2, 1, 2, 2, 1, 2], "deft_flatten"),
        ("1,3_64,90", [20, 20, 7], "depth_first"),  # 80 rows: a request in both halves
        ("1,3_64,90", [33, 1, 30], "depth_first"),  # 132 rows: in two chunks
    ],
)
def test_several_queries(spec, query_lens, divider):
    work, lengths = grown(spec)
    check(work, query_lens=query_lens, workers=5, lengths=lengths, divider=divider)


@pytest.mark.parametrize("divider", ["deft_flatten", "per_request"])
@pytest.mark.parametrize("query_lens", [1, [2, 1, 2, 2, 1, 2]], ids=["one", "ragged"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_sinks(block_size, query_lens, divider):
    """Requests that one tile finishes and requests that are merged both get their sinks once."""
    extras = LayerExtras(sinks=torch.tensor([3.0, -2.0, 0.0, 6.0]), soft_cap=2.5)
    work, lengths = grown(f"1,6_{4 * block_size},40", block_size)
    check(
        work, (4, 2), query_lens=query_lens, workers=5, lengths=lengths, divider=divider,
        extras=extras,
    )  # fmt: skip


@pytest.mark.parametrize("query_lens", [1, [2, 1, 2, 2, 1, 2]], ids=["one", "ragged"])
@pytest.mark.parametrize(
    ("divider", "window"),
    [*(("depth_first", window) for window in (1, 16, 65)), ("flashforge", 50), ("flashforge", 100)],
)
def test_sliding_windows(divider, window, query_lens):
    work, lengths = grown("1,6_64,40")
    check(work, query_lens=query_lens, workers=5, lengths=lengths, divider=divider, window=window)


@pytest.mark.parametrize("query_lens", [[5, 3, 5], [70, 1, 66]])
def test_token_trees(query_lens):
    work, lengths = grown("1,3_64,90")
    check(work, query_lens=query_lens, workers=5, lengths=lengths, token_tree=True)
