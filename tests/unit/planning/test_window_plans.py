"""Plans for layers with a sliding window: what is read, by whom, and through which row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning_cases import make_planner
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.window import first_in_window

SIZE = 4


def batch(document: int, lens: list[int], freed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Requests on one document of so many blocks. Blocks before a window of 16 tokens are gone:
    their ids are those of no block, or of other requests' blocks.
    """
    columns = -(-max(lens) // SIZE)
    table = 1000 + 100 * np.arange(len(lens))[:, None] + np.arange(columns)
    table[:, :document] = 1 + np.arange(document)
    if freed:
        for row, length in enumerate(lens):
            gone = max(length - 16, 0) // SIZE
            table[row, :gone] = 0 if row % 2 else 3
    return table.astype(np.int32), np.array(lens, np.int32)


def planned(table, lens, window=16, **options) -> DecodePlan:
    options = {"divider": "depth_first", "num_workers": 2, "null_block_id": 0, **options}
    planner = make_planner(SIZE, sliding_window=window, check_plans=True, **options)
    return planner.update(table, lens).plan


def runs_of_several(plan: DecodePlan) -> list[tuple[int, int, int]]:
    """Tokens and number of readers of the runs that several requests read."""
    readers = plan.run_reader_end - plan.run_reader_start
    runs = zip(plan.run_kv_start, plan.run_kv_end, readers, strict=True)
    return sorted((int(a), int(b), int(n)) for a, b, n in runs if n > 1)


def test_a_document_in_every_window_is_shared_from_the_first_window_on():
    # the windows begin at tokens 27, 29 and 31
    plan = planned(*batch(10, [43, 45, 47]), num_workers=1)
    assert runs_of_several(plan) == [(24, 40, 3)]
    assert plan.kv_tokens_read(plan.planned_seq_lens) == 16 + 3 + 5 + 7


def test_requests_that_are_shorter_than_the_window_share_all_of_it():
    plan = planned(*batch(3, [13, 14, 15]), num_workers=1)
    assert runs_of_several(plan) == [(0, 12, 3)]


def test_a_window_past_the_document_shares_nothing():
    plan = planned(*batch(10, [60, 61, 70]))
    assert runs_of_several(plan) == []
    assert plan.kv_tokens_read(plan.planned_seq_lens) <= 3 * 20


def test_windows_far_apart_are_read_apart():
    # 25 and 26, and 39, more than half a window later; all three see the document's last block
    plan = planned(*batch(10, [41, 42, 55]), num_workers=1)
    assert runs_of_several(plan) == [(24, 40, 2)]


def test_null_blocks_are_never_shared():
    table, lens = batch(10, [43, 45])
    table[:, 6:8] = 0
    plan = planned(table, lens, num_workers=1)
    assert all(start >= 32 for start, *_ in runs_of_several(plan))


def test_a_shared_run_is_read_through_the_row_whose_window_begins_first():
    # blocks of the others' rows before their windows may be gone
    table, lens = batch(10, [47, 43, 45])
    plan = planned(table, lens, num_workers=1)
    several = plan.run_reader_end - plan.run_reader_start > 1
    assert several.any() and (plan.run_row[several] == 1).all()


def test_a_plan_holds_while_windows_move():
    table, lens = batch(10, [43, 45, 47])
    planner = make_planner(SIZE, divider="depth_first", num_workers=2, sliding_window=16)
    table = np.pad(table, ((0, 0), (0, 4)), constant_values=7777)
    plan = planner.update(table, lens).plan
    assert planner.update(table, lens + 2).plan is plan
    invariants.check(plan, table, lens + 2, 16)
    assert planner.update(table, lens + 20).plan is not plan


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_plan_ends_when_it_reads_a_quarter_more_than_the_windows(num_workers):
    window = 128
    lens = np.full(8, 300, np.int32)  # in balance however long they grow
    table = 1 + np.arange(8 * 40, dtype=np.int32).reshape(8, 40)
    planner = make_planner(
        16, divider="depth_first", num_workers=num_workers, sliding_window=window
    )
    plan = planner.update(table, lens).plan
    assert planner.update(table, lens + window // 4).plan is plan
    read = plan.kv_tokens_read(lens + window // 4)
    assert read <= 1.25 * 8 * (window + 16), "a window begins inside a block"
    assert planner.update(table, lens + window // 4 + 1).plan is not plan


def test_invariants_find_a_window_that_is_not_read():
    table, lens = batch(10, [43, 45, 47], freed=False)
    plan = planned(table, lens, num_workers=1)
    with pytest.raises(invariants.InvariantError, match="read 0 times"):
        invariants.check(plan, table, lens, 24)
    other = table.copy()
    other[1, 9] = 5000
    with pytest.raises(invariants.InvariantError, match="do not hold the same blocks"):
        invariants.check(plan, other, lens, 16)


@given(st.data())
def test_any_batch_is_read_once(data):
    """Documents of documents, with what lies before each window gone."""
    window = data.draw(st.integers(1, 40))
    queries = data.draw(st.integers(1, 3))
    depth = data.draw(st.integers(1, 12))
    fork = data.draw(st.integers(0, depth))
    lens, rows = [], []
    for request in range(data.draw(st.integers(1, 9))):
        tail = data.draw(st.integers(queries, 50))
        branch = data.draw(st.integers(0, 1))
        length = depth * SIZE + tail
        ids = 1 + np.arange(-(-length // SIZE))
        ids[fork:] += 200 * branch
        ids[depth:] += 1000 * (1 + request)
        gone = int(first_in_window(np.array([length]), window, queries)[0]) // SIZE
        ids[:gone] = data.draw(st.sampled_from([0, 1, 5, 9999]))
        lens.append(length)
        rows.append(np.pad(ids, (0, 40 - len(ids))))
    table, lens = np.array(rows, np.int32), np.array(lens, np.int32)
    divider = data.draw(st.sampled_from(sorted(DIVIDERS)))
    share = data.draw(st.sampled_from(["always", "auto", "never"]))
    planner = make_planner(
        SIZE,
        divider=divider,
        share=share,
        num_workers=3,
        max_tile_requests=4,
        null_block_id=0,
        sliding_window=window,
        check_plans=True,
    )
    plan = planner.update(table, lens, queries).plan
    grown = lens + data.draw(st.integers(0, 3))
    invariants.check(plan, table, grown, window, queries)
