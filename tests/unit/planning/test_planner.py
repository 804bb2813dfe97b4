"""The planner over the life of a batch: when it plans, and that each plan is right for the current
batch; ``tests/fuzz/test_engine_histories.py`` has any history of an engine.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_oracle import assert_reads_once, distinct_tokens, filled_blocks
from tests.support.planning_cases import (
    COSTS,
    NULL_BLOCK,
    Batch,
    LinearCost,
    batches,
    document_qa,
    gpu_config,
    make_batch,
    make_planner,
    quick,
)
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.planning.unshared import (
    NO_COMMON_PREFIX,
    NO_GAIN,
    ONE_REQUEST,
    PLAN_TOO_LARGE,
    PLANNING_FAILED,
    SHARING_OFF,
)

BLOCK_SIZE = 4


def update(planner: DecodePlanner, batch: Batch, query_len: int = 1) -> DecodePlan:
    """The plan for ``batch``, checked by the oracle and by the invariants."""
    plan = planner.update(batch.block_table, batch.seq_lens, query_len).plan
    assert_reads_once(plan, batch.block_table, batch.seq_lens)
    invariants.check(plan, batch.block_table, batch.seq_lens)
    return plan


def assert_shares_all(plan: DecodePlan, batch: Batch, query_len: int = 1) -> None:
    """The plan reads once what could be shared when it was made. A shared block that held one of
    a reader's queries then is not worth a new plan once the queries have left it.
    """
    filled = filled_blocks(
        batch.block_table, plan.planned_seq_lens, batch.block_size, query_len, NULL_BLOCK
    )
    least = distinct_tokens(filled, batch.seq_lens, batch.block_size)
    assert plan.kv_tokens_read(batch.seq_lens) == least


def sharing_planner(block_size: int = BLOCK_SIZE, **config: object) -> DecodePlanner:
    """A planner that reads every shared block once, so that a missed chance to share shows."""
    return make_planner(block_size, **{"divider": "deft_node", **config})


@quick(80)
@given(batches(), st.sampled_from(sorted(DIVIDERS)), st.integers(1, 7), st.data())
def test_growth_alone_keeps_the_plan_of_one_worker(batch, divider, query_len, data):
    planner = make_planner(batch.block_size, divider=divider)
    first = update(planner, batch, query_len)
    n = len(batch.seq_lens)
    for _ in range(8):
        batch = batch.grown(data.draw(st.lists(st.integers(0, query_len), min_size=n, max_size=n)))
        assert update(planner, batch, query_len) is first


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
def test_steady_decoding_never_plans_again(divider):
    planner = make_planner(16, divider=divider)
    batch = document_qa(2, 4, document_blocks=8, tail=3)
    first = update(planner, batch)
    for _ in range(70):
        batch = batch.grown([1] * 8)
        assert update(planner, batch) is first
    assert planner.counters.plans == 1
    assert planner.counters.updates == 71
    assert planner.counters.plan_seconds > 0


def test_steady_decoding_with_several_workers_plans_again_only_out_of_balance():
    planner = make_planner(16, num_workers=8)
    batch = document_qa(1, 4, document_blocks=32, tail=160)
    first = update(planner, batch)
    for _ in range(64):
        batch = batch.grown([1] * 4)
        assert update(planner, batch) is first


def busiest_us(plan: DecodePlan, seq_lens: np.ndarray, per_token: float) -> float:
    """Microseconds of the busiest worker where a token that is read takes ``per_token``."""
    grown = plan.run_lengths(seq_lens) - plan.run_lengths(plan.planned_seq_lens)
    tiles = np.repeat(np.arange(plan.num_tiles), np.diff(plan.tile_run_indptr))
    workers = np.repeat(np.arange(plan.num_workers), np.diff(plan.work_indptr))
    more = np.bincount(workers[tiles], per_token * grown, plan.num_workers)
    return float((plan.worker_us + more).max())


@pytest.mark.parametrize(
    ("documents", "readers", "document_blocks", "tail"),
    [(1, 1, 0, 8192), (8, 1, 0, 4096), (1, 64, 2048, 16), (1, 8, 1024, 64), (1, 16, 64, 40)],
)
def test_the_tokens_that_come_after_a_plan_do_not_pile_up_on_one_worker(
    documents, readers, document_blocks, tail
):
    per_token = 1 / 64
    options = {"cost": LinearCost(2.0, per_token), "num_workers": 16, "max_tile_requests": 32}
    options["divider"] = "depth_first"
    planner = make_planner(**options)
    batch = document_qa(documents, readers, document_blocks, tail)
    n = len(batch.seq_lens)
    last, since, ratios = None, 0, []
    for _ in range(512 // 8):
        plan = planner.update(batch.block_table, batch.seq_lens).plan
        since = 0 if plan is not last else since + 8
        last = plan
        best = make_planner(**options).update(batch.block_table, batch.seq_lens).plan
        if since > 16:
            ratios.append(
                busiest_us(plan, batch.seq_lens, per_token)
                / busiest_us(best, batch.seq_lens, per_token)
            )
        batch = batch.grown([8] * n)
    assert 2 <= planner.counters.plans <= 512 // 16
    assert max(ratios, default=1.0) < 1.2


@quick(60)
@given(batches(), st.integers(2, 20), st.integers(1, 4))
def test_a_plan_that_holds_after_many_steps_is_balanced(batch, workers, query_len):
    per_token = 0.5
    planner = make_planner(
        batch.block_size, LinearCost(1.0, per_token), num_workers=workers, divider="depth_first"
    )
    plan = planner.update(batch.block_table, batch.seq_lens, query_len).plan
    n = len(batch.seq_lens)
    for steps in (16, 17, 24, 40, 80, 200):
        tokens = steps * query_len
        grown = batch.grown([tokens] * n)
        holds = planner.holds(grown.block_table, grown.seq_lens, query_len)
        if steps <= 16 or not n:
            assert holds
            continue
        spread = busiest_us(plan, batch.seq_lens, per_token) + tokens * n * per_token / workers
        busiest = busiest_us(plan, grown.seq_lens, per_token)
        assert holds == (busiest <= 1.05 * spread * (1 + 1e-9))


@pytest.mark.parametrize(
    ("prefixes", "tails", "query_len"),
    [
        ([[], [5, 6]], [2, 8], 8),  # a request shorter than the maximum number of queries
        ([[5, 6], [5, 6], []], [3, 4, 0], 1),  # graph padding: a row without tokens
    ],
)
def test_a_row_of_few_tokens_is_planned_once(prefixes, tails, query_len):
    planner = make_planner(16)
    batch = make_batch(prefixes, tails, 16)
    first = update(planner, batch, query_len)
    assert update(planner, batch, query_len) is first
    assert planner.counters.plans == 1


def test_the_caller_may_reuse_its_arrays():
    planner = sharing_planner()
    batch = make_batch([[1, 2], [1, 2]], [3, 3], BLOCK_SIZE)
    first = update(planner, batch)
    batch.block_table[1, :2] = [7, 8]
    second = update(planner, batch)
    assert second is not first
    assert_shares_all(second, batch)
    batch.seq_lens[:] += 1
    assert first.planned_seq_lens.tolist() == [11, 11]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_any_integer_type_and_a_wider_table_will_do(dtype):
    planner = sharing_planner()
    batch = make_batch([[1, 2, 3], [1, 2, 3], [4]], [3, 3, 3], BLOCK_SIZE)
    wide = Batch(
        np.pad(batch.block_table, ((0, 0), (0, 50))).astype(dtype),
        batch.seq_lens.astype(dtype),
        BLOCK_SIZE,
    )
    first = update(planner, wide)
    assert_shares_all(first, wide)
    assert update(planner, wide.grown([1, 1, 1])) is first
    moved = wide.taken([2, 1, 0])
    assert_shares_all(update(planner, moved), moved)


def test_a_batch_may_become_empty_and_full_again():
    planner = sharing_planner(num_workers=4)
    batch = make_batch([[1, 2], [1, 2]], [3, 3], BLOCK_SIZE)
    for _ in range(2):
        assert_shares_all(update(planner, batch), batch)
        empty = batch.taken([])
        plan = update(planner, empty)
        assert (plan.num_reqs, plan.num_tiles, plan.num_partials) == (0, 0, 0)
        assert plan.work_indptr.tolist() == [0] * 5
        assert update(planner, empty) is plan


def test_a_planner_may_start_with_an_empty_batch():
    for width in (0, 5):
        plan = make_planner().update(np.zeros((0, width), np.int32), np.zeros(0, np.int32)).plan
        assert plan.num_tiles == 0


@pytest.mark.parametrize("left", [[], [1, 2]], ids=["short prompt", "common system prompt"])
def test_a_request_that_takes_the_row_of_one_that_left_shares_at_once(left):
    """The number of requests is unchanged, and the known blocks of the row are still its first
    blocks.
    """
    planner = sharing_planner()
    document = [1, 2, 3, 4, 5, 6]
    update(planner, make_batch([left, document], [2, 3], BLOCK_SIZE))
    batch = make_batch([document, document], [2, 3], BLOCK_SIZE)
    plan = update(planner, batch)
    assert_shares_all(plan, batch)
    assert plan.shared_rows.tolist() == [0, 1]


@quick(60)
@given(batches(), st.integers(1, 20))
def test_queries_and_the_block_that_they_fill_stay_private(batch, query_len):
    planner = sharing_planner(batch.block_size)
    plan = update(planner, batch, query_len)
    assert_shares_all(plan, batch, query_len)
    shared = plan.run_reader_end - plan.run_reader_start > 1
    for run in np.flatnonzero(shared).tolist():
        assert plan.run_kv_end[run] <= batch.seq_lens[plan.run_row[run]] - query_len


def test_another_query_len_makes_another_plan():
    planner = sharing_planner()
    batch = make_batch([[1, 2], [1, 2]], [1, 1], BLOCK_SIZE)
    assert update(planner, batch, 1).kv_tokens_read(batch.seq_lens) == 8 + 1 + 1
    assert update(planner, batch, 4).kv_tokens_read(batch.seq_lens) == 4 + 5 + 5
    assert update(planner, batch, 1).kv_tokens_read(batch.seq_lens) == 8 + 1 + 1


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
def test_a_rejected_draft_never_leaves_a_plan_that_reads_past_the_end(divider):
    """Row 0 proposed three tokens, kept none, and now proposes one; row 1 still has four."""
    planner = make_planner(16, divider=divider, num_workers=16, kv_chunk_size=16)
    for length in range(29, 70):
        for shorter in (1, 2):
            batch = make_batch([[], []], [length, length], 16)
            update(planner, batch, query_len=4)
            batch.seq_lens[0] -= shorter
            update(planner, batch, query_len=4)


@pytest.mark.parametrize("null", [0, 3])
def test_the_null_block_is_never_shared(null):
    planner = make_planner(BLOCK_SIZE, divider="deft_node", null_block_id=null)
    table = np.array([[5, null, 6, 7, null], [5, null, 6, 8, null], [null] * 5], np.int32)
    plan = update(planner, Batch(table, np.array([14, 14, 14], np.int32), BLOCK_SIZE))
    assert plan.kv_tokens_read(np.array([14, 14, 14])) == 4 + 10 + 10 + 14


def test_without_a_null_block_every_id_may_be_shared():
    planner = make_planner(BLOCK_SIZE, divider="deft_node", null_block_id=None)
    table = np.array([[0, 1, 2], [0, 1, 3]], np.int32)
    plan = update(planner, Batch(table, np.array([9, 9], np.int32), BLOCK_SIZE))
    assert plan.kv_tokens_read(np.array([9, 9])) == 8 + 1 + 1


@pytest.mark.parametrize("cost", ["h200", "cpu", "paper"])
def test_auto_shares_a_long_document(cost):
    batch = document_qa(1, 16, document_blocks=500, tail=20)
    plan = update(make_planner(16, share="auto", cost=COSTS[cost]), batch)
    assert plan.shared_rows.tolist() == list(range(16))
    assert plan.kv_tokens_read(batch.seq_lens) < batch.seq_lens.sum() / 4


@pytest.mark.parametrize("grouping", [False, True])
@pytest.mark.parametrize(("launch", "merge", "shares"), [(1, 0, 2), (50, 0, 0), (1, 100, 0)])
def test_auto_refuses_to_share_where_tiles_or_merging_cost_more_than_reading(
    grouping, launch, merge, shares
):
    batch = document_qa(1, 2, document_blocks=1, tail=200)
    cost = LinearCost(launch=launch, merge_per_row=merge, unshared_launch=1.0)
    planner = make_planner(16, share="auto", cost=cost, grouping=grouping)
    assert len(update(planner, batch).shared_rows) == shares


def test_auto_decides_for_each_tree():
    long, short = list(range(1, 101)), [500]
    prefixes = [long, short, long, short, long, [600]]
    batch = make_batch(prefixes, [10] * 5 + [9000], 16)
    cost = LinearCost(launch=50.0, merge_per_row=5.0, unshared_launch=1.0)
    plan = update(make_planner(16, share="auto", cost=cost, grouping=False), batch)
    assert plan.shared_rows.tolist() == [0, 2, 4]


@quick(60)
@given(batches(), st.sampled_from(sorted(COSTS)), st.booleans())
def test_auto_shares_all_of_a_tree_or_nothing_of_it(batch, cost, grouping):
    planner = make_planner(
        batch.block_size, divider="deft_node", share="auto", cost=COSTS[cost], grouping=grouping
    )
    plan = update(planner, batch)
    filled = filled_blocks(batch.block_table, batch.seq_lens, batch.block_size)
    for first in {ids[0] for ids in filled if ids}:
        rows = [row for row, ids in enumerate(filled) if ids[:1] == [first]]
        if len(rows) > 1:
            assert len(set(rows) & set(plan.shared_rows.tolist())) in (0, len(rows))


@pytest.mark.parametrize(
    ("num_workers", "factor", "grown", "same"),
    [
        (8, 1.5, [40, 0], True),
        (8, 1.5, [400, 0], False),
        (8, 10.0, [400, 0], True),
        (1, 1.5, [5000, 0], True),
    ],
)
def test_growth_out_of_balance_asks_for_a_plan(num_workers, factor, grown, same):
    planner = make_planner(16, num_workers=num_workers, rebalance_factor=factor)
    batch = make_batch([[], []], [100, 100], 16)
    first = update(planner, batch)
    assert (update(planner, batch.grown(grown)) is first) == same


def test_a_private_part_out_of_balance_asks_for_a_plan_however_long_the_prefix():
    """Each private part becomes ten times as long as planned, each request 1.2 times."""
    planner = make_planner(16, num_workers=8, rebalance_factor=1.5)
    batch = document_qa(1, 4, document_blocks=256, tail=100)
    first = update(planner, batch)
    later = batch.grown([900, 900, 900, 900])
    assert update(planner, later) is not first


def test_auto_shares_documents_and_not_single_blocks_under_depth_first():
    prefixes = [list(range(1, 101))] * 8 + [[500]] * 2
    batch = make_batch(prefixes, [10] * 8 + [20_000] * 2, 16)
    free = LinearCost(launch=100.0, unshared_launch=1.0)
    settings = {"share": "auto", "divider": "depth_first", "max_tile_requests": 4}
    plan = update(make_planner(16, cost=free, **settings), batch)
    assert plan.shared_rows.tolist() == list(range(8))
    plan = update(make_planner(16, cost=COSTS["h200"], **settings), batch)
    assert set(plan.shared_rows.tolist()) >= set(range(8))


def test_a_table_and_lengths_of_different_batches_are_refused():
    planner = make_planner()
    batch = make_batch([[1], [1]], [3, 3], 16)
    with pytest.raises(PrefixShareError, match=r"block_table has 2 rows and seq_lens 1 entries"):
        planner.update(batch.block_table, batch.seq_lens[:1])


def test_lengths_beyond_the_table_share_no_more_than_it_has():
    planner = sharing_planner()
    table = np.array([[1, 2], [1, 2]], np.int32)
    plan = planner.update(table, np.array([1000, 1000], np.int32)).plan
    assert plan.run_kv_end[plan.run_reader_end - plan.run_reader_start > 1].tolist() == [
        2 * BLOCK_SIZE
    ]
    assert planner.update(table, np.array([1000, 1000], np.int32)).plan.num_reqs == 2


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
def test_warming_up_makes_no_plan(divider):
    planner = make_planner(16, divider=divider)
    planner.warm_up()
    assert planner.counters.plans == planner.counters.updates == 0


@pytest.mark.parametrize("width", [1, 63, 64, 65, 300])
def test_any_block_that_changes_is_seen(width):
    planner = sharing_planner(1)
    table = np.arange(3 * width, dtype=np.int32).reshape(3, width) + 1
    lens = np.full(3, width, np.int32)
    first = planner.update(table, lens).plan
    for row in range(3):
        for column in {0, width // 2, width - 1}:
            other = table.copy()
            other[row, column] = 9999
            assert not planner.holds(other, lens)
    assert planner.update(table, lens).plan is first


@pytest.mark.parametrize(
    ("prefixes", "config", "reason"),
    [
        ([[1, 2], [1, 2]], {}, None),
        ([[1, 2], [3, 4]], {}, NO_COMMON_PREFIX),
        ([[1, 2]], {}, ONE_REQUEST),
        ([[1, 2], [1, 2]], {"share": "never"}, SHARING_OFF),
        ([[1, 2]], {"share": "never"}, SHARING_OFF),
        ([[1, 2], [1, 2]], {"divider": "per_request"}, SHARING_OFF),
        ([[1, 2], [1, 2]], {"max_tiles": 0}, PLAN_TOO_LARGE),
        ([[1, 2], [1, 2]], {"fails": True}, PLANNING_FAILED),
    ],
)
def test_a_plan_without_sharing_has_its_reason(prefixes, config, reason):
    fails = config.pop("fails", False)
    planner = sharing_planner(**config)
    if fails:
        planner._on_failure = print
        planner.divider = replace(planner.divider, divide=None)
    batch = make_batch(prefixes, [3] * len(prefixes), BLOCK_SIZE)
    made = planner.update(batch.block_table, batch.seq_lens)
    assert made.plan.shares == (reason is None)
    assert (made.unshared and made.unshared.reason) == reason
    if not fails:  # a failed plan is not cached
        assert planner.update(batch.block_table, batch.seq_lens).unshared is None, "not a new plan"


@pytest.mark.parametrize("divider", ["deft_node", "flashforge"])
def test_a_plan_that_is_not_worth_sharing_has_the_expected_gain(divider):
    # separately two tiles of 1 + 11 us; shared one of 1 + 8 us and two of 1 + 3 us, and merging
    cost = LinearCost(merge_per_row=5.0)
    planner = sharing_planner(divider=divider, share="auto", cost=cost, grouping=False)
    batch = make_batch([[1, 2], [1, 2]], [3, 3], BLOCK_SIZE)
    unshared = planner.update(batch.block_table, batch.seq_lens).unshared
    assert unshared.reason == NO_GAIN
    shared = 9 + 2 * 4 + 5 * 4 * (2 + 1 + 1)
    assert unshared.expected_gain == pytest.approx((24 - shared) / 24)


@pytest.mark.parametrize("divider", sorted(DIVIDERS))
def test_plans_are_the_same_for_the_same_history(divider):
    batch = document_qa(3, 5, document_blocks=9, tail=30)
    a, b = (update(make_planner(16, num_workers=7, divider=divider), batch) for _ in range(2))
    for name in DecodePlan.__slots__:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def test_checking_plans_calls_the_invariants(monkeypatch):
    calls = []
    monkeypatch.setattr(invariants, "check", lambda *args: calls.append(args))
    batch = document_qa(1, 2, document_blocks=2, tail=3)
    for check_plans in (False, True):
        config = gpu_config(check_plans=check_plans)
        planner = DecodePlanner(config, COSTS["h200"], 16, 4)
        planner.update(batch.block_table, batch.seq_lens)
        assert len(calls) == check_plans


@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("query_len", [1, 3])
def test_time_without_sharing_is_the_busiest_worker_of_a_plan_that_shares_nothing(
    sliding_window, query_len
):
    """Whatever the divider, and not the mean over the workers, which 3 requests do not fill."""
    batch = document_qa(documents=1, readers=3, document_blocks=70, tail=40)
    options = {"num_workers": 16, "sliding_window": sliding_window}
    never = make_planner(**options, divider="depth_first", share="never")
    plan = never.update(batch.block_table, batch.seq_lens, query_len).plan
    assert not plan.shares
    for divider in ("depth_first", "deft_node"):
        us = make_planner(**options, divider=divider).unshared_us(batch.seq_lens, query_len)
        assert us == pytest.approx(plan.worker_us.max())
