"""The Hopper kernel's walk over the device arrays, emulated: every token of every request is read
once.
"""

import numpy as np
import pytest
import torch

from benchmarks.support.trees import tree
from tests.support.hopper_emulator import emulate, kv_tiles
from tests.support.planning_cases import document_qa, gpu_config, make_planner
from vllm_prefixshare.config import AttentionConfig, part_size
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras
from vllm_prefixshare.kernels.hopper.arrays import NUM_RUNS, PLAIN_START, RESULTS
from vllm_prefixshare.kernels.hopper.layout import PLAIN_RUNS, linked_layout
from vllm_prefixshare.kernels.reference import reference_attention_and_lse
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks
from vllm_prefixshare.planning.planner import DecodePlanner

GROWTH = 20  # tokens by which every request outgrows its plan


def walk(
    spec: str,
    divider: str,
    heads: tuple[int, int] = (4, 1),
    *,
    block_size: int = 16,
    query_lens: list[int] | None = None,
    workers: int = 5,
    token_tree: bool = False,
    extras: LayerExtras = PLAIN,
    empty: int = 0,
    growth: int = GROWTH,
    window: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output of the emulated kernel and of the reference, for a tree that has grown since it was
    planned, when the last ``empty`` requests had no token. The log-sum-exp of each head follows the
    ``head_dim`` numbers of the head.
    """
    batch = tree(spec, block_size, spare=GROWTH)
    batch.seq_lens[len(batch.seq_lens) - empty :] = 0
    n, (q_heads, kv_heads), head_dim = len(batch.seq_lens), heads, 64
    query_lens = query_lens or [1] * n
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    query_len = max(query_lens)
    rows = query_len * q_heads // kv_heads
    slots = max(1, 2 * (64 // rows))
    runs = max(32, 1 << (2 * slots - 1).bit_length())
    config = gpu_config(
        divider=divider,
        share="always",
        num_workers=workers,
        max_tile_requests=slots,
        max_tile_runs=runs,
        cut_size=part_size(block_size),
        sliding_window=window,
        check_plans=True,
    )
    cost = analytic_cost(AttentionConfig(q_heads, kv_heads, head_dim, block_size), "hopper")
    planner = DecodePlanner(config, cost, block_size, q_heads // kv_heads)
    plan = planner.update(batch.block_table, batch.seq_lens, query_len).plan

    rng = np.random.default_rng(0)
    shape = (batch.num_blocks, block_size, kv_heads, head_dim)
    k, v = (rng.standard_normal(shape) for _ in range(2))
    q = rng.standard_normal((int(starts[-1]), q_heads, head_dim))
    mask = None
    if token_tree:
        parents = [rng.integers(-1, i) for length in query_lens for i in range(length)]
        mask = ancestor_masks(np.array(parents, np.int32), starts)
    seq_lens = batch.seq_lens + growth
    layout = linked_layout(plan, rows, slots, runs)._asdict()
    result = emulate(
        layout, workers, q, k, v, batch.block_table, seq_lens, starts, query_len, runs,
        tree_mask=mask,
        sinks=None if extras.sinks is None else extras.sinks.numpy(),
        soft_cap=extras.soft_cap,
        scales=None if extras.k_scale is None else tuple(x.numpy() for x in extras[3:]),
        window=window,
    )  # fmt: skip
    if mask is None:
        expected = reference_attention_and_lse(
            *(torch.from_numpy(x) for x in (q, k, v, batch.block_table, seq_lens, starts)),
            extras=extras,
            sliding_window=window,
        )
    else:
        expected = tree_attention(q, k, v, batch.block_table, seq_lens, starts, mask)
    out, wanted = (np.concatenate([o, lse[..., None]], -1) for o, lse in (result, expected))
    return out, wanted


def tree_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: np.ndarray,
    seq_lens: np.ndarray,
    starts: np.ndarray,
    mask: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention and log-sum-exp of query tokens that see the context and their masks' tokens."""
    out, lse = np.empty_like(q), np.empty(q.shape[:2])
    group = q.shape[1] // k.shape[2]
    for r, n in enumerate(seq_lens.tolist()):
        ids = table[r, : -(-n // k.shape[1])]
        keys = k[ids].reshape(-1, *k.shape[2:])[:n].repeat(group, axis=1)
        values = v[ids].reshape(-1, *v.shape[2:])[:n].repeat(group, axis=1)
        context = n - (starts[r + 1] - starts[r])
        for token in range(starts[r], starts[r + 1]):
            own = [int(mask[token, j // 32]) >> (j % 32) & 1 for j in range(n - context)]
            seen = np.array([True] * context + [bool(x) for x in own])
            scores = np.einsum("hd,khd->hk", q[token], keys) * q.shape[2] ** -0.5
            largest = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - largest) * seen
            lse[token] = (largest + np.log(p.sum(axis=1, keepdims=True)))[:, 0]
            out[token] = np.einsum("hk,khd->hd", p / p.sum(axis=1, keepdims=True), values)
    return out, lse


@pytest.mark.parametrize("divider", ["depth_first", "deft_flatten", "flashforge", "per_request"])
@pytest.mark.parametrize(
    ("spec", "heads"),
    [
        ("1,4,16_128,64,30", (4, 1)),
        ("1,3,7_512,128,200", (3, 1)),  # 42 requests a tile, two rows unused
        ("1,4,100_64,16,20", (2, 2)),  # 128 requests a tile
        ("2,4,8_48,32,5", (16, 1)),
        ("9_70", (8, 2)),  # nothing shared
        ("1_33", (4, 1)),
    ],
)
def test_every_token_is_read_once(spec: str, heads: tuple[int, int], divider: str) -> None:
    np.testing.assert_allclose(*walk(spec, divider, heads), rtol=0, atol=1e-12)


@pytest.mark.parametrize("divider", ["depth_first", "flashforge"])
@pytest.mark.parametrize("heads", [(4, 1), (32, 1)])
def test_requests_without_a_token(heads: tuple[int, int], divider: str) -> None:
    # shards of a rank: the last ones are empty, and later have their first tokens
    grown, wanted = walk("1,3,9_64,32,30", divider, heads, empty=5)
    np.testing.assert_allclose(grown, wanted, rtol=0, atol=1e-12)
    out, expected = walk("1,3,9_64,32,30", divider, heads, empty=5, growth=0)
    np.testing.assert_allclose(out[:-5], expected[:-5], rtol=0, atol=1e-12)
    assert (out[-5:, :, :-1] == 0).all() and np.isneginf(out[-5:, :, -1]).all()


def test_a_tile_whose_tokens_are_gone_still_ends():
    # two workers share a request of 5100 tokens, of which 20 are left
    planner = make_planner(16, divider="depth_first", num_workers=2)
    batch = document_qa(1, 1, document_blocks=318, tail=12)
    layout = linked_layout(
        planner.update(batch.block_table, batch.seq_lens).plan, 4, 32, 64
    )._asdict()
    lens, starts = np.array([20], np.int32), np.array([0, 1], np.int32)
    tiles = [
        kv_tiles(layout, tile, 0, batch.block_table, lens, starts, 4, 16, 128, 64)
        for tile in range(2)
    ]
    # the second worker copies a KV tile before it knows the length
    assert [len(t) for t in tiles] == [20, 2]
    assert not any(slot.tokens for kv in tiles[1] for slot in kv)


@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize("spec", ["1,4,16_1024,64,30", "1,9_300,40", "1,2,8_64,200,128", "6_700"])
def test_what_is_copied_early_is_the_first_kv_tile(spec, heads):
    batch, slots = tree(spec, 16), 2 * (64 // heads)
    planner = make_planner(16, divider="depth_first", num_workers=7, max_tile_requests=slots)
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    layout = linked_layout(plan, heads, slots, 256)._asdict()
    starts = np.arange(batch.num_reqs + 1, dtype=np.int32)
    for tile in range(7):
        if not layout["tile_info"][tile, NUM_RUNS]:
            continue
        first = kv_tiles(
            layout, tile, 0, batch.block_table, batch.seq_lens, starts, heads, 16, 128, 256
        )[0]
        assert any(slot.tokens for slot in first), "copied early, and not read"
        begin = layout["run_kv_start"][tile, 0]
        in_order = [slot.start for slot in first] == list(range(begin, begin + 128, 16))
        one_row = {(slot.first, slot.last) for slot in first}
        early = bool(layout["tile_info"][tile, RESULTS] & PLAIN_START)
        few = layout["tile_info"][tile, NUM_RUNS] <= PLAIN_RUNS
        assert early == (few and in_order and len(one_row) == 1)


@pytest.mark.parametrize("block_size", [32, 48, 64, 128, 144, 256])
def test_other_block_sizes(block_size: int) -> None:
    out, expected = walk(f"1,3,9_{2 * block_size},{block_size},50", "depth_first", (4, 1),
                         block_size=block_size, workers=40)  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("divider", ["depth_first", "deft_flatten"])
@pytest.mark.parametrize(
    ("spec", "query_lens"),
    [
        ("1,6_64,40", [2, 1, 2, 2, 1, 2]),
        ("1,3_64,90", [20, 20, 7]),  # 80 rows: a request in both halves
        ("1,3_64,90", [33, 1, 30]),  # 132 rows: in two chunks
    ],
)
def test_several_queries(spec: str, query_lens: list[int], divider: str) -> None:
    np.testing.assert_allclose(*walk(spec, divider, query_lens=query_lens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("divider", ["deft_flatten", "per_request"])
@pytest.mark.parametrize("query_lens", [None, [2, 1, 2, 2, 1, 2]], ids=["one", "ragged"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_layers_with_extras(block_size, query_lens, divider) -> None:
    """Requests that one tile finishes and requests that are merged both get their sinks once."""
    extras = LayerExtras(
        sinks=torch.tensor([3.0, -2.0, 0.0, 6.0], dtype=torch.float64),
        soft_cap=2.5,
        q_scale=torch.tensor([0.7, 1.2], dtype=torch.float64),
        k_scale=torch.tensor([1.3, 0.9], dtype=torch.float64),
        v_scale=torch.tensor([0.5, 2.0], dtype=torch.float64),
    )
    out, expected = walk(
        f"1,6_{4 * block_size},40", divider, (4, 2), block_size=block_size, query_lens=query_lens,
        extras=extras,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("query_lens", [None, [2, 1, 2, 2, 1, 2]], ids=["one", "ragged"])
@pytest.mark.parametrize("window", [1, 16, 50, 65, 100])
@pytest.mark.parametrize("divider", ["depth_first", "flashforge"])
def test_sliding_windows(divider: str, window: int, query_lens: list[int] | None) -> None:
    out, expected = walk("1,6_64,40", divider, query_lens=query_lens, window=window)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("query_lens", [[5, 3, 5], [70, 1, 66]])
def test_token_trees(query_lens: list[int]) -> None:
    out, expected = walk("1,3_64,90", "depth_first", query_lens=query_lens, token_tree=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
