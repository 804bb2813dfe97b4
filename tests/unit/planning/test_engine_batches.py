"""What an engine adds to planning: rows in slots, ids of the requests in them, lengths that may
turn out shorter, and buffers that are reserved in advance.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_oracle import assert_reads_once
from tests.support.planning_cases import batches, document_qa, make_planner, quick
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.planner import PLAN_TOO_LARGE


def in_slots(table: np.ndarray, spare: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The same rows in a larger table in another order, and their row numbers there."""
    rng = np.random.default_rng(len(table))
    slots = rng.permutation(len(table) + spare)[: len(table)]
    large = rng.integers(1, 9, (len(table) + spare, table.shape[1] + 2)).astype(np.int32)
    large[slots, : table.shape[1]] = table
    return large, slots


@quick(100)
@given(batches(), st.sampled_from(sorted(DIVIDERS)))
def test_rows_in_slots_give_the_plan_of_rows_in_order(batch, divider):
    table, slots = in_slots(batch.block_table)
    plan = (
        make_planner(batch.block_size, divider=divider)
        .update(table, batch.seq_lens, table_rows=slots, row_ids=slots + 100)
        .plan
    )
    expected = (
        make_planner(batch.block_size, divider=divider)
        .update(batch.block_table, batch.seq_lens)
        .plan
    )
    for name in ("work_indptr", "tile_req_indices", "run_row", "run_kv_start", "run_kv_end"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name))


def test_row_ids_stand_for_the_table():
    batch = document_qa(2, 4, document_blocks=8, tail=3)
    table, slots = in_slots(batch.block_table)
    planner = make_planner(16)
    ids = np.arange(8) + 40
    first = planner.update(table, batch.seq_lens, table_rows=slots, row_ids=ids).plan
    assert planner.update(table, batch.seq_lens + 5, table_rows=slots, row_ids=ids).plan is first
    ids[3] = 99  # another request in the same slot
    assert (
        planner.update(table, batch.seq_lens + 5, table_rows=slots, row_ids=ids).plan is not first
    )
    assert planner.counters.plans == 2


def test_rows_without_ids_are_compared_again():
    batch = document_qa(2, 4, document_blocks=8, tail=3)
    planner = make_planner(16)
    ids = np.arange(8)
    first = planner.update(batch.block_table, batch.seq_lens, table_rows=ids, row_ids=ids).plan
    second = planner.update(batch.block_table, batch.seq_lens).plan
    assert second is not first
    assert planner.update(batch.block_table, batch.seq_lens).plan is second


def test_a_forgotten_plan_is_made_again():
    batch = document_qa(1, 3, document_blocks=4, tail=3)
    planner = make_planner(16)
    for row_ids in (None, np.arange(3)):
        first = planner.update(batch.block_table, batch.seq_lens, row_ids=row_ids).plan
        planner.forget()
        assert planner.update(batch.block_table, batch.seq_lens, row_ids=row_ids).plan is not first


@pytest.mark.parametrize("with_ids", [False, True])
def test_batches_that_take_turns_have_a_plan_each(with_ids):
    # batches as the stages of a pipeline see them; the third is one more than the planner keeps
    whole = document_qa(3, 4, document_blocks=8, tail=3)
    planner = make_planner(16, kept_plans=2)

    def plan(part: int, grown: int = 0) -> object:
        rows = slice(4 * part, 4 * part + 4)
        ids = np.arange(12)[rows] if with_ids else None
        return planner.update(
            whole.block_table[rows], whole.seq_lens[rows] + grown, row_ids=ids
        ).plan

    first, second = plan(0), plan(1)
    assert first is not second
    assert [plan(0, 1), plan(1, 1), plan(1, 2), plan(0, 2)] == [first, second, second, first]
    assert planner.counters.plans == 2
    third = plan(2)
    assert plan(0, 3) is first, "the least recently used plan is dropped"
    assert plan(2, 1) is third
    assert plan(1, 3) is not second


def test_arguments_of_unequal_lengths_are_refused():
    batch = document_qa(1, 3, document_blocks=4, tail=3)
    planner = make_planner(16)
    with pytest.raises(PrefixShareError, match="row_ids has 2 entries and seq_lens 3"):
        planner.update(batch.block_table, batch.seq_lens, row_ids=np.arange(2))
    with pytest.raises(PrefixShareError, match="pass one of each for every request"):
        planner.update(batch.block_table, batch.seq_lens, table_rows=np.arange(4))


@quick(100)
@given(batches(), st.integers(1, 9), st.integers(1, 12), st.sampled_from(sorted(DIVIDERS)))
def test_a_plan_allows_for_lengths_that_are_shorter_by_the_slack(batch, query_len, slack, divider):
    planner = make_planner(batch.block_size, divider=divider, num_workers=4)
    plan = planner.update(batch.block_table, batch.seq_lens, query_len, slack=slack).plan
    for shorter in (0, slack // 2, slack):
        true = np.maximum(batch.seq_lens - shorter, 1).astype(np.int32)
        assert_reads_once(plan, batch.block_table, true)


@quick(100)
@given(batches(), st.sampled_from(sorted(DIVIDERS)), st.integers(0, 6))
def test_a_plan_that_exceeds_its_room_becomes_one_tile_for_each_request(batch, divider, partials):
    num_reqs = len(batch.seq_lens)
    planner = make_planner(batch.block_size, divider=divider, num_workers=4)
    wanted = planner.update(batch.block_table, batch.seq_lens).plan
    limits = {"max_tiles": num_reqs, "max_runs": num_reqs, "max_partials": partials}
    planner = make_planner(batch.block_size, divider=divider, num_workers=4)
    planner.config = replace(planner.config, **limits)
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    assert plan.fits(**limits)
    invariants.check(plan, batch.block_table, batch.seq_lens)
    assert_reads_once(plan, batch.block_table, batch.seq_lens)
    if wanted.fits(**limits):
        assert planner.counters.fallbacks[PLAN_TOO_LARGE] == 0
    else:
        assert planner.counters.fallbacks[PLAN_TOO_LARGE] == 1
        assert plan.num_tiles == num_reqs
        assert plan.num_partials == 0
