"""Every divider covers every batch exactly, for as long as the plan is used, and keeps the promises
of its paper.
"""

from collections import Counter
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_oracle import (
    assert_reads_once,
    attend,
    attend_dense,
    distinct_tokens,
    filled_blocks,
    tile_rows,
    tile_runs,
    tile_tokens,
)
from tests.support.planning_cases import (
    COSTS,
    Batch,
    LinearCost,
    batches,
    document_qa,
    make_batch,
    make_planner,
    quick,
)
from vllm_prefixshare.core import OPEN_END, PieceLimits, PrefixShareError
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.dividers.registry import DIVIDERS, get_divider
from vllm_prefixshare.planning.plan import DecodePlan

SHARING = (
    "depth_first",
    "flashforge",
    "fasttree",
    "deft_node",
    "deft_node_chunk",
    "deft_flatten",
    "deft_flatten_chunk",
    "fixed",
    "batch_invariant",
)
NODE_BY_NODE = ("flashforge", "deft_node", "deft_node_chunk", "deft_flatten", "fixed")


@st.composite
def settings_of(draw: st.DrawFn) -> dict:
    """Any planner settings, without the divider."""
    return {
        "cost": draw(st.sampled_from(sorted(COSTS)).map(COSTS.get)),
        "gqa": draw(st.sampled_from([1, 4, 7])),
        "share": draw(st.sampled_from(["always", "always", "auto", "never"])),
        "num_workers": draw(st.integers(1, 40)),
        "max_tile_requests": draw(st.sampled_from([1, 2, 3, 8, 1 << 30])),
        "max_tile_runs": draw(st.sampled_from([1, 2, 5, 1 << 30])),
        "grouping": draw(st.booleans()),
        "num_splits": draw(st.integers(1, 9)),
        "kv_chunk_size": draw(st.integers(1, 200)),
    }


def plan_of(batch: Batch, **config: object) -> DecodePlan:
    planner = make_planner(batch.block_size, **config)
    return planner.update(batch.block_table, batch.seq_lens).plan


def pieces(plan: DecodePlan, batch: Batch) -> dict[frozenset, list[int]]:
    """Planned tokens of each tile, by the tile's set of requests."""
    found: dict[frozenset, list[int]] = {}
    for tile in range(plan.num_tiles):
        tokens = tile_tokens(plan, tile, batch.seq_lens)
        found.setdefault(frozenset(tile_rows(plan, tile)), []).append(tokens)
    return found


def tile_blocks(plan: DecodePlan, batch: Batch, tile: int) -> int:
    runs = tile_runs(plan, tile, batch.seq_lens)
    return sum(ceil((stop - start) / batch.block_size) for _, start, stop, _ in runs)


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(70)
@given(batches(), settings_of(), st.data())
def test_every_token_is_read_once_now_and_after_any_growth(divider, batch, config, data):
    plan = plan_of(batch, divider=divider, **config)
    assert_reads_once(plan, batch.block_table, batch.seq_lens)
    invariants.check(plan, batch.block_table, batch.seq_lens)

    growth = st.integers(0, 5 * batch.block_size)
    n = len(batch.seq_lens)
    later = batch.grown(data.draw(st.lists(growth, min_size=n, max_size=n)))
    assert_reads_once(plan, later.block_table, later.seq_lens)
    invariants.check(plan, later.block_table, later.seq_lens)


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(25)
@given(batches(), settings_of(), st.integers(0, 2**31))
def test_running_the_plan_gives_the_attention_of_each_request_alone(divider, batch, config, seed):
    plan = plan_of(batch, divider=divider, **config)
    later = batch.grown([1] * len(batch.seq_lens))
    rng = np.random.default_rng(seed)
    slots = (int(later.block_table.max()) + 1) * batch.block_size
    k, v = rng.normal(size=slots), rng.normal(size=slots)
    got = attend(plan, later.block_table, later.seq_lens, k, v)
    expected = attend_dense(later.block_table, later.seq_lens, batch.block_size, k, v)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(30)
@given(batches(), settings_of())
def test_plan_arrays_are_what_their_docstring_says(divider, batch, config):
    plan = plan_of(batch, divider=divider, **config)
    for name in DecodePlan.__slots__:
        value = getattr(plan, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == (np.float64 if name == "tile_cost" else np.int32), name
    assert plan.num_workers == config["num_workers"]
    assert len(plan.tile_cost) == plan.num_tiles == plan.work_indptr[-1]
    assert np.all(plan.tile_cost > 0)
    assert np.all(np.isfinite(plan.tile_cost))
    if divider == "batch_invariant":
        assert np.all(plan.planned_seq_lens <= batch.seq_lens)
    else:
        assert plan.planned_seq_lens.tolist() == batch.seq_lens.tolist()
    last_runs = plan.run_row[plan.run_kv_end == OPEN_END]
    assert sorted(last_runs.tolist()) == list(range(plan.num_reqs))
    if divider != "depth_first":
        for low, high in pairwise(plan.work_indptr):
            assert np.all(np.diff(plan.tile_cost[low:high]) <= 0), "longest first within a worker"
    read = sum(tile_tokens(plan, t, batch.seq_lens) for t in range(plan.num_tiles))
    assert plan.kv_tokens_read(batch.seq_lens) == read


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(30)
@given(batches(), settings_of())
def test_shared_rows_are_the_rows_that_read_some_kv_with_another(divider, batch, config):
    plan = plan_of(batch, divider=divider, **config)
    together = [
        readers
        for tile in range(plan.num_tiles)
        for *_, readers in tile_runs(plan, tile, batch.seq_lens)
        if len(readers) > 1
    ]
    assert plan.shared_rows.tolist() == sorted(set().union(*together))


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(40)
@given(batches(), settings_of(), st.integers(1, 4), st.integers(1, 4))
def test_no_tile_holds_more_requests_or_runs_than_allowed(divider, batch, config, limit, runs):
    config |= {"max_tile_requests": limit, "max_tile_runs": runs}
    plan = plan_of(batch, divider=divider, **config)
    for tile in range(plan.num_tiles):
        assert 1 <= len(tile_rows(plan, tile)) <= limit
    assert 1 <= np.diff(plan.tile_run_indptr).min() <= np.diff(plan.tile_run_indptr).max() <= runs


@pytest.mark.parametrize("divider", NODE_BY_NODE)
@quick(50)
@given(batches(), st.integers(1, 40), st.sampled_from(sorted(COSTS)))
def test_sharing_dividers_read_each_distinct_token_once(divider, batch, num_workers, cost):
    plan = plan_of(
        batch, divider=divider, num_workers=num_workers, cost=COSTS[cost], grouping=False
    )
    filled = filled_blocks(batch.block_table, batch.seq_lens, batch.block_size)
    distinct = distinct_tokens(filled, batch.seq_lens, batch.block_size)
    assert plan.kv_tokens_read(batch.seq_lens) == distinct


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(30)
@given(batches(), settings_of())
def test_nothing_shares_when_sharing_is_off_or_requests_are_read_alone(divider, batch, config):
    share = config["share"] if divider == "per_request" else "never"
    plan = plan_of(batch, divider=divider, **{**config, "share": share})
    assert divider != "per_request" or np.all(np.diff(plan.tile_req_indptr) == 1)
    runs = [run for t in range(plan.num_tiles) for run in tile_runs(plan, t, batch.seq_lens)]
    assert all(len(readers) == 1 for *_, readers in runs)
    assert plan.kv_tokens_read(batch.seq_lens) == batch.seq_lens.sum()


def test_per_request_splits_a_long_request_to_fill_the_workers():
    batch = document_qa(1, 1, document_blocks=64, tail=1)
    plan = plan_of(batch, divider="per_request", num_workers=8)
    assert np.all(np.diff(plan.work_indptr) == 1)


@quick(60)
@given(batches(), st.integers(1, 40))
def test_deft_node_has_one_tile_per_node_and_private_part(batch, num_workers):
    plan = plan_of(batch, divider="deft_node", num_workers=num_workers)
    assert all(len(p) == 1 for p in pieces(plan, batch).values())
    assert np.all(np.diff(plan.tile_run_indptr) == 1)


@quick(60)
@given(batches(), st.integers(1, 200), st.integers(1, 40))
def test_deft_node_chunk_bounds_the_chunks(batch, chunk, num_workers):
    config = {"divider": "deft_node_chunk", "kv_chunk_size": chunk, "num_workers": num_workers}
    plan = plan_of(batch, **config)
    bound = ceil(chunk / batch.block_size) * batch.block_size
    for found in pieces(plan, batch).values():
        assert max(found) <= bound
        assert len(found) == ceil(sum(found) / bound), "more pieces than the bound asks for"


@quick(60)
@given(batches(), st.integers(1, 9), st.integers(1, 40))
def test_fixed_cuts_every_group_into_so_many_pieces_equal_but_the_last(batch, splits, workers):
    config = {"divider": "fixed", "grouping": False, "num_splits": splits, "num_workers": workers}
    plan = plan_of(batch, **config)
    for found in pieces(plan, batch).values():
        assert len(found) <= splits
        assert len(set(sorted(found)[1:])) <= 1
        if sum(found) % (splits * batch.block_size) == 0:
            assert found == [sum(found) // splits] * splits


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
@quick(30)
@given(batches(), settings_of())
def test_cuts_fall_on_block_borders(divider, batch, config):
    plan = plan_of(batch, divider=divider, **config)
    assert np.all(plan.run_kv_start % batch.block_size == 0)
    closed = plan.run_kv_end[plan.run_kv_end != OPEN_END]
    assert np.all(closed % batch.block_size == 0)


@quick(80)
@given(batches(), st.integers(1, 40))
def test_deft_flatten_tiles_are_equal_but_the_last(batch, num_workers):
    plan = plan_of(batch, divider="deft_flatten", num_workers=num_workers)
    sizes = Counter(tile_blocks(plan, batch, t) for t in range(plan.num_tiles))
    largest = max(sizes)
    rest = [n for n in sizes.elements() if n < largest]
    assert len(rest) <= 1, f"tiles of {sorted(sizes.elements())} blocks"
    assert plan.num_tiles <= num_workers


@quick(60)
@given(batches(), st.integers(1, 40), st.integers(1, 4))
def test_deft_flatten_tiles_are_equal_but_the_last_of_each_window(batch, num_workers, limit):
    config = {"divider": "deft_flatten", "num_workers": num_workers, "max_tile_requests": limit}
    plan = plan_of(batch, **config)
    sizes = [tile_blocks(plan, batch, t) for t in range(plan.num_tiles)]
    windows = 2 * ceil(len(batch.seq_lens) / limit)  # two windows in a row exceed a tile
    assert sum(n < max(sizes) for n in sizes) <= windows


@quick(80)
@given(batches(), st.integers(1, 200), st.integers(1, 4))
def test_deft_flatten_chunk_bounds_the_chunks_whatever_the_workers(batch, chunk, limit):
    config = {"divider": "deft_flatten_chunk", "kv_chunk_size": chunk, "max_tile_requests": limit}
    plans = [plan_of(batch, num_workers=n, **config) for n in (1, 7)]
    sizes = [[tile_blocks(p, batch, t) for t in range(p.num_tiles)] for p in plans]
    assert sorted(sizes[0]) == sorted(sizes[1])
    bound = ceil(chunk / batch.block_size)
    assert max(sizes[0]) <= bound
    windows = 2 * ceil(len(batch.seq_lens) / limit)  # two windows in a row exceed a tile
    assert sum(n < bound for n in sizes[0]) <= windows


def test_deft_flatten_crosses_node_borders():
    batch = document_qa(2, 3, document_blocks=4, tail=5)
    plan = plan_of(batch, divider="deft_flatten", num_workers=3)
    assert plan.num_tiles == 3
    assert np.all(np.diff(plan.tile_run_indptr) > 1)


@quick(60)
@given(batches(), st.integers(1, 40), st.sampled_from(sorted(COSTS)))
def test_fasttree_splits_what_is_longer_than_an_even_share(batch, num_workers, cost):
    config = {"divider": "fasttree", "num_workers": num_workers, "cost": COSTS[cost]}
    plan = plan_of(batch, **config)
    sizes = [tile_tokens(plan, t, batch.seq_lens) for t in range(plan.num_tiles)]
    share = ceil(sum(sizes) / num_workers)
    assert max(sizes) < share + batch.block_size


@quick(80)
@given(batches(), st.integers(1, 40), st.sampled_from(sorted(COSTS)), st.sampled_from([1, 4]))
def test_flashforge_splits_within_equation_5(batch, num_workers, name, gqa):
    cost = COSTS[name]
    config = {"num_workers": num_workers, "cost": cost, "gqa": gqa, "grouping": False}
    plan = plan_of(batch, divider="flashforge", **config)
    groups = pieces(plan, batch)
    whole = {
        requests: float(cost.tile(len(requests) * gqa, sum(found)))
        for requests, found in groups.items()
    }
    lower_bound = sum(whole.values()) / num_workers  # equation 4 before any division
    for requests, found in groups.items():
        assert len(found) <= ceil(whole[requests] / lower_bound * (1 - 1e-9))


@quick(40)
@given(batches(), st.sampled_from(sorted(COSTS)), st.booleans())
def test_flashforge_leaves_groups_whole_for_one_worker(batch, cost, grouping):
    plan = plan_of(batch, divider="flashforge", cost=COSTS[cost], grouping=grouping)
    assert all(len(found) == 1 for found in pieces(plan, batch).values())


def test_flashforge_splits_the_document_and_not_the_questions():
    """The document question answering case of FlashForge, section 5.1."""
    batch = document_qa(1, 16, document_blocks=640, tail=48)
    plan = plan_of(batch, divider="flashforge", num_workers=16)
    groups = pieces(plan, batch)
    everyone = frozenset(range(16))
    assert len(groups.pop(everyone)) >= 8
    assert all(found == [48] for found in groups.values())


def test_flashforge_splits_by_cost_and_not_by_tokens():
    """Two groups with the same tokens, one with eight times the query rows."""
    batch = make_batch([list(range(1, 41))] * 8 + [list(range(50, 90))], [1] * 9, 16)
    cost = LinearCost(launch=0.1, per_token=0.0, per_row_token=1.0)
    groups = pieces(plan_of(batch, divider="flashforge", num_workers=8, cost=cost), batch)
    assert len(groups[frozenset(range(8))]) >= 6
    assert len(groups[frozenset([8])]) == 1


@quick(80)
@given(batches(), settings_of())
def test_batch_invariant_cuts_every_request_at_the_same_places_and_merges_in_their_order(
    batch, config
):
    plan = plan_of(batch, divider="batch_invariant", **config)
    piece = -(-config["kv_chunk_size"] // batch.block_size) * batch.block_size
    assert plan.num_runs == plan.num_tiles, "a tile is one piece"
    states: dict[int, list[tuple[int, int]]] = {row: [] for row in range(plan.num_reqs)}
    for tile in range(plan.num_tiles):
        slots = slice(*plan.tile_req_indptr[tile : tile + 2])
        partials = plan.partial_indices[slots].tolist()
        start, end = int(plan.run_kv_start[tile]), int(plan.run_kv_end[tile])
        assert start % piece == 0 and end in (OPEN_END, start + piece)
        for row, partial in zip(plan.tile_req_indices[slots].tolist(), partials, strict=True):
            states[row].append((partial, start))
    for row, found in states.items():
        places = [start for _, start in sorted(found)]
        assert places == list(range(0, int(batch.seq_lens[row]), piece))


@quick(80)
@given(batches(), settings_of(), st.sampled_from([1, 2, 3, 32]))
def test_plans_of_batch_invariant_keep_to_the_limits_that_room_is_made_for(batch, config, most):
    config = {**config, "share": "always", "max_tile_requests": most}
    plan = plan_of(batch, divider="batch_invariant", **config)
    piece = -(-config["kv_chunk_size"] // batch.block_size) * batch.block_size
    # as in an engine a block follows one prefix
    used = -(-batch.seq_lens // batch.block_size)
    rows = [row[:n].tolist() for row, n in zip(batch.block_table, used, strict=True)]
    blocks = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    max_pieces = -(-int(batch.seq_lens.max()) // piece)
    limits = PieceLimits(max_pieces, len(blocks) * batch.block_size // piece)
    assert plan.num_runs == plan.num_tiles <= limits.max_tiles(plan.num_reqs, most)
    assert plan.num_partials <= plan.num_reqs * limits.per_request


def test_batch_invariant_plans_again_where_a_request_reaches_its_next_piece():
    batch = document_qa(1, 3, document_blocks=8, tail=5)
    planner = make_planner(divider="batch_invariant", kv_chunk_size=64, num_workers=4)
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    assert len(plan.shared_rows) == 3
    for grown, same in ((1, True), (59, True), (60, False)):
        later = batch.grown([0, grown, 0])
        assert (planner.update(later.block_table, later.seq_lens).plan is plan) == same


def test_an_unknown_divider_is_refused_and_the_known_ones_are_named():
    with pytest.raises(PrefixShareError) as error:
        get_divider("fastforge")
    assert "'fastforge'" in str(error.value)
    assert all(name in str(error.value) for name in DIVIDERS)


def test_every_divider_of_the_design_is_registered():
    assert set(DIVIDERS) == {*SHARING, "per_request"}
    assert all(get_divider(name) is DIVIDERS[name] for name in DIVIDERS)
