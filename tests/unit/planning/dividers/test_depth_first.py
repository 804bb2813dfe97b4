"""The depth-first divider: limits and balance of windows and cuts, on forests of every shape."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.trees import Workload, forest, tree
from tests.support.plan_oracle import tile_rows, tile_runs
from tests.support.planning_cases import COSTS, LinearCost, make_planner, quick
from vllm_prefixshare.core import OPEN_END
from vllm_prefixshare.kernels.geometry import GPU
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.dividers.kv_list import ends_of_windows, list_runs, window_ends
from vllm_prefixshare.planning.dividers.prices import tile_us
from vllm_prefixshare.planning.forest.prefix_tree import forest_from_blocks
from vllm_prefixshare.planning.plan import DecodePlan

COST = COSTS["h200"]
KV_TILE = GPU.kv_tile
NOT_KEPT = GPU.uncached_lockstep_gain
OVERHEAD = TileRates.of(COST, GPU).overhead
ROWS_PER_REQUEST = 4


def plan_of(work: Workload, **config: object) -> DecodePlan:
    settings = {"num_workers": 16, "max_tile_requests": 32, "divider": "depth_first", **config}
    planner = make_planner(work.block_size, gqa=ROWS_PER_REQUEST, **settings)
    plan = planner.update(work.block_table, work.seq_lens).plan
    invariants.check(plan, work.block_table, work.seq_lens)
    return plan


def loads(plan: DecodePlan) -> np.ndarray:
    return np.array([plan.tile_cost[a:b].sum() for a, b in pairwise(plan.work_indptr)])


@st.composite
def forests(draw: st.DrawFn) -> Workload:
    """Chains, forests and requests alone; private lengths from 1 to 100,000 tokens."""
    inner = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(inner)]
    tokens = draw(st.lists(st.integers(0, 9000), min_size=inner, max_size=inner))
    length = st.one_of(st.integers(1, 300), st.integers(1, 100_000))
    lengths = draw(st.lists(length, min_size=1, max_size=40))
    parents += [draw(st.integers(-1, inner - 1)) for _ in lengths]
    childless = set(range(inner)) - set(parents)
    parents += sorted(childless)
    return forest("any", parents, tokens + lengths + [5] * len(childless))


LIMITS = {
    "num_workers": st.sampled_from([1, 2, 7, 16, 132]),
    "max_tile_requests": st.sampled_from([1, 2, 8, 32]),
    "max_tile_runs": st.sampled_from([1, 3, 63, 1 << 30]),
    "spread": st.booleans(),
}


@quick(200)
@given(forests(), st.fixed_dictionaries(LIMITS))
def test_every_plan_is_right_and_within_its_limits(work, limits):
    plan = plan_of(work, **limits)
    assert plan.num_workers == limits["num_workers"]
    assert np.diff(plan.tile_req_indptr).max() <= limits["max_tile_requests"]
    assert np.diff(plan.tile_run_indptr).max() <= limits["max_tile_runs"]


@quick(200)
@given(forests(), st.fixed_dictionaries({**LIMITS, "max_tile_runs": st.just(1 << 30)}))
def test_the_latest_worker_is_near_the_mean(work, limits):
    """The excess over the mean is less than twice the least work that is worth its own tile: such
    work is not cut. Even cuts may end later, by as much as reading in step counts, and the tile of
    a short request may come on top: one token next to 64,465 on 33 workers.
    """
    load = loads(plan_of(work, **limits))
    mean = (1 + 2 * NOT_KEPT) * load.mean()
    assert load.max() <= 1.05 * mean + 5 * OVERHEAD
    if load.mean() > 40 * OVERHEAD:
        assert load.max() <= 1.1 * mean


@pytest.mark.parametrize(
    "spec",
    [
        "1,10_4096,416",
        "1,32_122880,256",
        "1,64_32768,64",
        "1,256_256,32",
        "1,1024_2048,32",
        "1,2,64_1024,256,256",
        "1,8,512_512,512,256",
        "8,128_1024,256",
        "256_1024",
        "1_100000",
        "1,4,16,64,1024_1024,512,512,256,128",
    ],
)
@pytest.mark.parametrize("num_workers", [1, 16, 33])
def test_little_is_wasted_where_there_is_enough_work(spec, num_workers):
    """The finish, compared with all runs read at full speed and one overhead per tile."""
    work = tree(spec)
    plan = plan_of(work, num_workers=num_workers)
    rates = TileRates.of(COST, GPU)
    distinct = sum((n.end - n.start) * work.block_size for n in work.nodes)
    read = int(plan.kv_tokens_read(work.seq_lens))
    least = (distinct * rates.memory[0] + (read - distinct) * rates.cached[0]) / num_workers
    overheads = plan.num_tiles * OVERHEAD / num_workers
    # allow half as much again where 128 rows are bound by arithmetic, not by memory
    assert least + overheads - 1e-9 <= loads(plan).max() + rates.memory[0] * KV_TILE
    assert loads(plan).max() <= 1.35 * (least + overheads) + OVERHEAD
    assert plan.num_tiles <= num_workers + -(-work.num_reqs // 8)


@quick(100)
@given(forests(), st.fixed_dictionaries(LIMITS))
def test_the_requests_of_a_tile_are_neighbours(work, limits):
    filled = ((work.seq_lens - 1) // work.block_size).astype(np.int32)
    order = forest_from_blocks(work.block_table, filled, work.block_size, 0).request_rows
    position = np.argsort(order)
    plan = plan_of(work, **limits)
    for tile in range(plan.num_tiles):
        assert np.all(np.diff(position[tile_rows(plan, tile)]) == 1)


@pytest.mark.parametrize("spec", ["1,64_32768,128", "1,32_16384,256", "1,4,64_8192,256,150"])
def test_spread_pieces_share_out_what_all_read_and_what_one_reads(spec):
    work = tree(spec)
    spread = {"num_workers": 32, "max_tile_requests": 16, "spread": True}
    plan = plan_of(work, **spread)
    assert plan.num_tiles == 32 and np.all(np.diff(plan.tile_req_indptr) == 16)
    of_all, of_some = [], []
    for tile in range(plan.num_tiles):
        lengths = [
            (stop - start, len(r)) for _, start, stop, r in tile_runs(plan, tile, work.seq_lens)
        ]
        of_all.append(sum(n for n, readers in lengths if readers == 16))
        of_some.append(sum(n for n, readers in lengths if readers < 16))
    for found in (of_all, of_some):
        assert max(found) - min(found) <= 2 * KV_TILE
        assert min(found) >= KV_TILE
    apart = plan_of(work, **{**spread, "spread": False})
    assert plan.tile_cost.sum() == pytest.approx(apart.tile_cost.sum(), rel=0.05)


def test_spread_tiles_cost_what_they_read_and_are_cut_at_kv_tiles():
    work = tree("1,64_32016,128")
    plan = plan_of(work, num_workers=32, max_tile_requests=16, spread=True)
    rates = TileRates.of(COST, GPU)
    filled = ((work.seq_lens - 1) // work.block_size).astype(np.int32)
    batch = forest_from_blocks(work.block_table, filled, work.block_size, 0)
    even, _ = window_ends(batch, 16, rates)
    limits = ROWS_PER_REQUEST, GPU.half_rows, work.block_size
    runs = list_runs(batch, work.seq_lens, even, *limits, rates)
    lengths = plan.run_lengths(work.seq_lens)
    for tile in range(plan.num_tiles):
        first, last = plan.tile_run_indptr[tile : tile + 2]
        assert plan.run_kv_start[first] % KV_TILE == 0
        # the last run is an open one, or a part of one; the first is the document
        reading = lengths[first] * runs.rate[0] + lengths[first + 1 : last].sum() * runs.rate[-1]
        cost = tile_us(rates.lines, reading) + rates.partial_write
        assert plan.tile_cost[tile] == pytest.approx(cost, rel=1e-3)


@pytest.mark.parametrize("max_tile_runs", [3, 16, 17, 63])
def test_spread_tiles_have_no_more_runs_than_they_may(max_tile_runs):
    work = tree("1,64_32768,128")
    limits = {"num_workers": 32, "max_tile_requests": 16, "max_tile_runs": max_tile_runs}
    plan, apart = (plan_of(work, **limits, spread=spread) for spread in (True, False))
    assert np.diff(plan.tile_run_indptr).max() <= max_tile_runs
    same = np.array_equal(plan.run_kv_start, apart.run_kv_start)
    assert same == (max_tile_runs < 17), "a window has 17 runs, and is spread if a tile takes all"


@pytest.mark.parametrize(
    "spec",
    [
        "1,256_2048,256",  # private parts of a window are longer than what it shares
        "1,64_32768,16",  # less than two KV tiles of them for a piece
        "1,64_32768,48",
        "2,32_1000,400",  # windows of two trees
        "1_100000",
        "64_2048",
    ],
)
def test_what_is_not_spread_is_divided_as_before(spec):
    found = [plan_of(tree(spec), spread=spread) for spread in (False, True)]
    for name in ("tile_req_indices", "run_row", "run_kv_start", "run_kv_end", "work_indptr"):
        assert np.array_equal(*(getattr(plan, name) for plan in found))


def test_windows_below_one_node_read_it_in_step():
    """Two windows of 32 under one prefix, 8 workers each: both are cut at the same places."""
    plan = plan_of(tree("1,64_32768,64"))
    assert plan.num_tiles == 16 and np.all(np.diff(plan.work_indptr) == 1)
    shared = plan.run_reader_end - plan.run_reader_start > 1
    pieces: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for start, end, row in zip(
        plan.run_kv_start[shared], plan.run_kv_end[shared], plan.run_row[shared], strict=True
    ):
        pieces[bool(row >= 32)].append((int(start), int(end)))
    assert sorted(pieces[False]) == sorted(pieces[True])
    assert len(pieces[False]) >= 8


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("1,20_4096,64", [10, 10]),
        ("1,50_4096,64", [11, 13, 13, 13]),
        ("1,32_4096,64", [16, 16]),
        ("3,30_4096,64", [10, 10, 10]),
    ],
)
def test_windows_are_as_even_as_they_can_be(spec, sizes):
    assert sorted(windows_of(tree(spec), 16)) == sizes


def test_windows_are_not_even_where_that_reads_more():
    """Groups of 16 and 4: two windows of 10 would read the first group's tokens twice."""
    work = forest("groups", [-1, -1] + [0] * 16 + [1] * 4, [4096, 4096] + [64] * 20)
    assert sorted(windows_of(work, 16)) == [4, 16]


def windows_of(work: Workload, size: int) -> list[int]:
    """Requests of each window."""
    filled = ((work.seq_lens - 1) // 16).astype(np.int32)
    f = forest_from_blocks(work.block_table, filled, 16, 0)
    rates = TileRates.of(COST, GPU)
    even, _ = window_ends(f, size, rates)
    runs = list_runs(f, work.seq_lens, even, ROWS_PER_REQUEST, GPU.half_rows, 16, rates)
    ends = ends_of_windows(runs)
    begins = runs.reader_start[np.append(0, ends[:-1])]
    return np.diff(np.append(begins, work.num_reqs)).tolist()


@pytest.mark.parametrize(("document", "window", "tiles"), [(1408, 16, 1), (32768, 14, 2)])
def test_windows_are_alike_where_a_cache_does_not_keep_the_document(document, window, tiles):
    """Three windows for 16 workers. Two of 16 requests and one of 8 can be cut so that no worker
    has two tiles, but then each window reads the document at another time.
    """
    plan = plan_of(tree(f"1,40_{document},400"), max_tile_requests=16)
    assert np.diff(plan.tile_req_indptr).max() == window
    assert set(np.diff(plan.work_indptr).tolist()) == {tiles}


def test_both_ways_to_end_windows_are_tried():
    """Seven windows and 33 workers: six of 20 requests and one of 8 take five and three workers;
    windows of 18 and 19 would leave two workers idle.
    """
    work = tree("1,128_3000,128", block_size=544)
    plan = plan_of(work, num_workers=33, max_tile_requests=20)
    assert np.diff(plan.tile_req_indptr).max() == 20
    assert set(np.diff(plan.work_indptr).tolist()) == {1}


def test_merging_few_rows_costs_no_less_than_so_much():
    """Few rows wait for memory as long as many. At 0.14 us, which four rows take by the cost table,
    the request would be cut for all workers.
    """
    assert plan_of(tree("1_65536"), num_workers=132).num_tiles == 66


def test_merging_many_rows_costs_no_more_than_so_much():
    """Rows are merged side by side. At 6.4 us for 64 of them the request would not be cut."""
    cost = LinearCost(5.0, 0.03, merge_per_row=0.1)
    work, limits = tree("1_4096"), {"num_workers": 132, "max_tile_requests": 1}
    planners = [make_planner(16, cost, n, divider="depth_first", **limits) for n in (6, 64)]
    few, many = (p.update(work.block_table, work.seq_lens).plan.num_tiles for p in planners)
    assert few == many > 16


def test_neighbouring_windows_are_read_at_the_same_time():
    """Twice as many windows as workers: the first half runs first, then the second half."""
    plan = plan_of(tree("1,16,32,64,128,1024_256,128,64,32,32,32"), max_tile_runs=64)
    assert np.all(np.diff(plan.work_indptr) == 2)
    first_rows = plan.tile_req_indices[plan.tile_req_indptr[:-1]]
    assert first_rows[::2].tolist() == list(range(0, 512, 32))
    assert sorted(first_rows[1::2].tolist()) == list(range(512, 1024, 32))


def test_a_run_that_both_halves_read_costs_arithmetic_and_others_memory():
    """The requests of a window are split between the halves: 3 + 3 here."""
    rates = TileRates.of(COST, GPU)
    work = forest("halves", [-1, 0, 0, 1, 1, 1, 2, 2, 2], [4096, 2048, 1024] + [64] * 6)
    filled = ((work.seq_lens - 1) // 16).astype(np.int32)
    f = forest_from_blocks(work.block_table, filled, 16, 0)

    def rates_of(window: int, rows_per_request: int) -> dict[tuple[int, int], float]:
        even, _ = window_ends(f, window, rates)
        limits = rows_per_request, GPU.half_rows, 16
        runs = list_runs(f, work.seq_lens.astype(np.int32), even, *limits, rates)
        spans = zip(runs.reader_start.tolist(), runs.reader_end.tolist(), strict=True)
        return dict(zip(spans, runs.rate.tolist(), strict=True))

    both, half = rates.memory[1], max(rates.cached[0] / 2, rates.memory[0])
    found = rates_of(6, 4)
    assert found[0, 6] == pytest.approx(both)
    assert found[0, 3] == found[3, 6] == found[5, 6] == pytest.approx(half)
    wide = rates_of(1, 128)  # a single request in both halves
    assert wide[5, 6] > rates.cached[1] and rates_of(1, 4)[5, 6] < wide[5, 6]
    # two windows: each reads the root, which is read from memory once
    assert rates_of(3, 4)[0, 3] == pytest.approx(
        np.average([(rates.cached[1] + rates.memory[1]) / 2, rates.memory[1]], weights=[4096, 2048])
    )


@quick(100)
@given(forests(), st.fixed_dictionaries(LIMITS))
def test_runs_of_the_same_readers_that_follow_each_other_are_one(work, limits):
    plan = plan_of(work, **limits)
    for tile in range(plan.num_tiles):
        for (_, _, stop, readers), (_, start, _, others) in pairwise(
            tile_runs(plan, tile, work.seq_lens)
        ):
            assert readers != others or stop != start


def test_a_chain_above_a_window_is_one_run():
    work = forest("chain", [-1, 0, 1, 2, 2, 1, 0], [160, 320, 480, 32, 32, 32, 32])
    plan = plan_of(work, num_workers=1, max_tile_requests=2)
    runs = [tile_runs(plan, tile, work.seq_lens) for tile in range(plan.num_tiles)]
    spans = [(start, stop, len(readers)) for found in runs for _, start, stop, readers in found]
    assert (0, 960, 2) in spans


@pytest.mark.parametrize("length", [16 * 40, 16 * 400, 16 * 4000])
def test_one_request_is_cut_for_all_workers_that_it_is_worth(length):
    work = forest("one", [-1], [length])
    plan = plan_of(work)
    worth = length * TileRates.of(COST, GPU).memory[0] / OVERHEAD
    assert min(16, worth / 2) <= plan.num_tiles <= max(1, worth)
    lengths = plan.run_lengths(work.seq_lens)
    assert lengths.max() <= lengths.mean() + KV_TILE


@pytest.mark.parametrize(("query_cut_size", "num_tiles"), [(0, 8), (KV_TILE, 6)])
def test_a_token_tree_is_divided_although_it_has_many_rows(query_cut_size, num_tiles):
    """Its tokens are merged side by side: 64 of them take hardly longer than one."""
    work = tree("1_1300")
    planner = make_planner(
        work.block_size,
        gqa=ROWS_PER_REQUEST,
        num_workers=8,
        max_tile_requests=1,
        divider="depth_first",
        query_cut_size=query_cut_size,
    )
    plan = planner.update(work.block_table, work.seq_lens, 64).plan
    assert plan.num_tiles == num_tiles
    if query_cut_size:
        *others, last = plan.run_lengths(work.seq_lens).tolist()
        assert others == [256] * 5 and last == 20


def test_a_piece_shorter_than_a_tiles_overhead_is_not_cut_off():
    for length in range(100, 3000, 37):
        plan = plan_of(forest("one", [-1], [length]))
        if plan.num_tiles > 1:
            assert plan.tile_cost.min() >= 1.9 * OVERHEAD


def test_equal_requests_that_share_nothing_are_written_directly():
    plan = plan_of(tree("256_1024"))
    assert plan.num_partials == 0
    assert np.all(np.diff(plan.work_indptr) > 0)
    assert loads(plan).max() <= 1.02 * loads(plan).mean()


def test_requests_that_share_nothing_are_cut_for_balance_alone():
    plan = plan_of(forest("one long", [-1] * 64, [65536] + [512] * 63))
    assert plan.num_tiles > plan.num_workers  # one worker ends a window and begins another
    assert loads(plan).max() <= 1.01 * loads(plan).mean()


def test_a_short_prefix_is_read_again_rather_than_merged():
    plan = plan_of(tree("1,256_256,32"))
    assert plan.num_partials == 0
    assert plan.num_tiles == 16


def test_windows_end_where_trees_do():
    """Ten documents of 24 readers each, in windows of up to 32: no document spans two windows."""
    work = tree("10,240_8192,64")
    plan = plan_of(work, num_workers=10)
    assert plan.num_tiles == 10
    assert plan.kv_tokens_read(work.seq_lens) == sum((n.end - n.start) * 16 for n in work.nodes)


def test_long_runs_are_cut_at_whole_kv_tiles():
    plan = plan_of(tree("1,32_122880,256"))
    ends = plan.run_kv_end[(plan.run_reader_end - plan.run_reader_start > 1)]
    assert np.all(ends % KV_TILE == 0)


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_cuts_fall_on_block_borders_of_any_size(block_size):
    plan = plan_of(tree("1,7_5000,3000", block_size))
    closed = plan.run_kv_end[plan.run_kv_end != OPEN_END]
    assert len(closed) > 7
    assert np.all(closed % block_size == 0)
    assert np.all(plan.run_kv_start % block_size == 0)
