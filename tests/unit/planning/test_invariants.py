"""``invariants.check`` refuses every way in which a plan can be wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.planning_cases import NULL_BLOCK, Batch, make_batch, make_planner
from vllm_prefixshare.core import OPEN_END
from vllm_prefixshare.planning.invariants import InvariantError, check
from vllm_prefixshare.planning.plan import DecodePlan

BLOCK_SIZE = 4
RUN_ARRAYS = ("run_row", "run_kv_start", "run_kv_end", "run_reader_start", "run_reader_end")
Mutation = Callable[[DecodePlan], Iterator[DecodePlan]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def batch() -> Batch:
    """Two trees, the first of three levels, and three requests alone, one with a single block."""
    prefixes = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [1, 2, 7]]
    prefixes += [[8, 9, 10], [8, 9, 10], [11], [12, 13], []]
    return make_batch(prefixes, [9, 3, 6, 1, 2, 12, 30, 4, 2], BLOCK_SIZE)


def plan_by(divider: str) -> DecodePlan:
    b = batch()
    planner = make_planner(
        BLOCK_SIZE, divider=divider, num_workers=5, grouping=False, num_splits=2, kv_chunk_size=8
    )
    return planner.update(b.block_table, b.seq_lens).plan


def changed(plan: DecodePlan, name: str, index: int, value: int) -> DecodePlan:
    array = getattr(plan, name).copy()
    array[index] = value
    return replace(plan, **{name: array})


def shifted(plan: DecodePlan, name: str, by: int, where: np.ndarray) -> Iterator[DecodePlan]:
    for index in np.flatnonzero(where).tolist():
        yield changed(plan, name, index, int(getattr(plan, name)[index]) + by)


def tile_of_run(plan: DecodePlan, run: int) -> int:
    return int(np.searchsorted(plan.tile_run_indptr, run, "right")) - 1


def readers(plan: DecodePlan, run: int) -> list[int]:
    low = int(plan.tile_req_indptr[tile_of_run(plan, run)])
    first, last = low + int(plan.run_reader_start[run]), low + int(plan.run_reader_end[run])
    return plan.tile_req_indices[first:last].tolist()


def closed(plan: DecodePlan) -> np.ndarray:
    return plan.run_kv_end != OPEN_END


def everywhere(plan: DecodePlan) -> np.ndarray:
    return np.ones(plan.num_runs, bool)


@mutation
def a_run_is_missing(plan):
    for run in range(plan.num_runs):
        indptr = plan.tile_run_indptr.copy()
        indptr[tile_of_run(plan, run) + 1 :] -= 1
        arrays = {name: np.delete(getattr(plan, name), run) for name in RUN_ARRAYS}
        yield replace(plan, tile_run_indptr=indptr, **arrays)


@mutation
def a_run_is_there_twice(plan):
    for run in range(plan.num_runs):
        indptr = plan.tile_run_indptr.copy()
        indptr[tile_of_run(plan, run) + 1 :] += 1
        arrays = {
            name: np.insert(getattr(plan, name), run, getattr(plan, name)[run])
            for name in RUN_ARRAYS
        }
        yield replace(plan, tile_run_indptr=indptr, **arrays)


@mutation
def a_run_starts_a_token_late(plan):
    yield from shifted(plan, "run_kv_start", 1, everywhere(plan))


@mutation
def a_run_starts_a_block_late(plan):
    yield from shifted(plan, "run_kv_start", BLOCK_SIZE, everywhere(plan))


@mutation
def a_run_starts_a_block_early(plan):
    yield from shifted(plan, "run_kv_start", -BLOCK_SIZE, everywhere(plan))


@mutation
def a_run_starts_beyond_every_request(plan):
    yield from shifted(plan, "run_kv_start", 10_000, everywhere(plan))


@mutation
def a_run_ends_a_token_late(plan):
    yield from shifted(plan, "run_kv_end", 1, closed(plan))


@mutation
def a_run_ends_a_block_late(plan):
    yield from shifted(plan, "run_kv_end", BLOCK_SIZE, closed(plan))


@mutation
def a_run_ends_a_block_early(plan):
    yield from shifted(plan, "run_kv_end", -BLOCK_SIZE, closed(plan))


@mutation
def a_private_run_in_the_middle_is_open(plan):
    for run in np.flatnonzero(closed(plan)).tolist():
        if len(readers(plan, run)) == 1:
            yield changed(plan, "run_kv_end", run, OPEN_END)


@mutation
def a_shared_run_is_open(plan):
    for run in np.flatnonzero(closed(plan)).tolist():
        if len(readers(plan, run)) > 1:
            yield changed(plan, "run_kv_end", run, OPEN_END)


@mutation
def the_last_run_is_closed_at_todays_length(plan):
    for run in np.flatnonzero(~closed(plan)).tolist():
        yield changed(plan, "run_kv_end", run, int(batch().seq_lens[plan.run_row[run]]))


@mutation
def an_empty_open_run_waits_for_growth(plan):
    for run in np.flatnonzero(~closed(plan)).tolist():
        row = int(plan.run_row[run])
        indptr = plan.tile_run_indptr.copy()
        indptr[tile_of_run(plan, run) + 1 :] += 1
        extra = {name: int(getattr(plan, name)[run]) for name in RUN_ARRAYS}
        extra["run_kv_start"] = int(batch().seq_lens[row])
        arrays = {name: np.insert(getattr(plan, name), run, extra[name]) for name in RUN_ARRAYS}
        yield replace(plan, tile_run_indptr=indptr, **arrays)


@mutation
def the_representative_row_does_not_read(plan):
    for run in range(plan.num_runs):
        for row in range(plan.num_reqs):
            if row not in readers(plan, run):
                yield changed(plan, "run_row", run, row)


@mutation
def the_representative_row_is_outside_the_batch(plan):
    for run in range(plan.num_runs):
        yield changed(plan, "run_row", run, plan.num_reqs)
        yield changed(plan, "run_row", run, -1)


@mutation
def a_reader_is_forgotten(plan):
    for run in range(plan.num_runs):
        yield changed(plan, "run_reader_end", run, int(plan.run_reader_end[run]) - 1)
        yield changed(plan, "run_reader_start", run, int(plan.run_reader_start[run]) + 1)


@mutation
def a_run_has_a_reader_too_many(plan):
    for run in range(plan.num_runs):
        yield changed(plan, "run_reader_end", run, int(plan.run_reader_end[run]) + 1)
        yield changed(plan, "run_reader_start", run, int(plan.run_reader_start[run]) - 1)


@mutation
def a_tile_holds_another_request(plan):
    for index, row in enumerate(plan.tile_req_indices.tolist()):
        for other in range(plan.num_reqs):
            if other != row:
                yield changed(plan, "tile_req_indices", index, other)


@mutation
def a_tile_holds_a_row_outside_the_batch(plan):
    for index in range(len(plan.tile_req_indices)):
        yield changed(plan, "tile_req_indices", index, plan.num_reqs)
        yield changed(plan, "tile_req_indices", index, -1)


@mutation
def two_requests_swap_partial_slots(plan):
    slots, rows = plan.partial_indices, plan.tile_req_indices
    for i in range(len(slots)):
        for j in range(i):
            if rows[i] != rows[j] and slots[i] != slots[j]:
                swapped = slots.copy()
                swapped[[i, j]] = slots[[j, i]]
                yield replace(plan, partial_indices=swapped)


@mutation
def two_tiles_write_one_partial_slot(plan):
    slots = plan.partial_indices
    for i in np.flatnonzero(slots >= 0).tolist():
        for j in np.flatnonzero(slots >= 0).tolist():
            if i != j:
                yield changed(plan, "partial_indices", i, int(slots[j]))


@mutation
def a_request_of_several_tiles_is_written_directly(plan):
    for i in np.flatnonzero(plan.partial_indices >= 0).tolist():
        yield changed(plan, "partial_indices", i, -1)


@mutation
def a_request_of_one_tile_is_written_as_a_partial(plan):
    for i in np.flatnonzero(plan.partial_indices < 0).tolist():
        yield changed(plan, "partial_indices", i, 0)


@mutation
def a_partial_slot_is_outside_the_buffer(plan):
    for i in np.flatnonzero(plan.partial_indices >= 0).tolist():
        yield changed(plan, "partial_indices", i, plan.num_partials)


@mutation
def a_merge_range_is_shifted(plan):
    indptr = plan.merge_indptr
    for i in range(len(indptr)):
        for by in (-1, 1):
            yield changed(plan, "merge_indptr", i, int(indptr[i]) + by)


@mutation
def a_request_has_no_merge_range(plan):
    yield replace(plan, merge_indptr=plan.merge_indptr[:-1])


@mutation
def a_worker_stops_before_the_last_tile(plan):
    yield changed(plan, "work_indptr", -1, plan.num_tiles - 1)


@mutation
def a_worker_starts_after_the_first_tile(plan):
    yield changed(plan, "work_indptr", 0, 1)


@mutation
def the_ranges_of_workers_cross(plan):
    yield changed(plan, "work_indptr", 1, plan.num_tiles + 1)


@mutation
def a_tile_takes_the_first_run_of_the_next(plan):
    yield from shifted(
        plan, "tile_run_indptr", 1, np.arange(plan.num_tiles + 1) % plan.num_tiles > 0
    )


@mutation
def a_tile_takes_the_first_request_of_the_next(plan):
    yield from shifted(
        plan, "tile_req_indptr", 1, np.arange(plan.num_tiles + 1) % plan.num_tiles > 0
    )


@pytest.mark.parametrize("divider", ["fixed", "deft_flatten"])
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_corrupted_plan_is_refused(name, divider):
    b, plan = batch(), plan_by(divider)
    check(plan, b.block_table, b.seq_lens)
    bad = list(MUTATIONS[name](plan))
    assert bad, "the plan has no such place"
    for plan in bad:
        with pytest.raises(InvariantError):
            check(plan, b.block_table, b.seq_lens)


@pytest.mark.parametrize("divider", ["fixed", "deft_flatten"])
def test_a_shared_block_that_one_reader_does_not_hold_is_refused(divider):
    b, plan = batch(), plan_by(divider)
    for row, column in [(0, 0), (1, 1), (3, 2), (5, 0)]:
        table = b.block_table.copy()
        table[row, column] = 99
        with pytest.raises(InvariantError, match="same blocks"):
            check(plan, table, b.seq_lens)


@pytest.mark.parametrize("block_size", [3, 48])
def test_blocks_of_any_size_may_be_shared(block_size):
    """A run of blocks 1 and 2. With blocks of 48 tokens, 48 | 144 (bitwise or) is no multiple of
    48.
    """
    b = make_batch([[1, 2, 3]] * 2, [5, 7], block_size)
    planner = make_planner(block_size, divider="fixed", num_splits=3, num_workers=3, grouping=False)
    plan = planner.update(b.block_table, b.seq_lens).plan
    check(plan, b.block_table, b.seq_lens)
    shared = np.flatnonzero(plan.run_reader_end - plan.run_reader_start > 1)
    assert len(shared) == 3
    for run in shared.tolist():
        for name in ("run_kv_start", "run_kv_end"):
            bad = changed(plan, name, run, int(getattr(plan, name)[run]) + 1)
            with pytest.raises(InvariantError):
                check(bad, b.block_table, b.seq_lens)


def test_a_private_block_may_be_any_block():
    b, plan = batch(), plan_by("fixed")
    table = b.block_table.copy()
    table[6, 0] = 99
    check(plan, table, b.seq_lens)


def test_a_batch_of_another_size_is_refused():
    b, plan = batch(), plan_by("fixed")
    for rows in (slice(0, 8), [*range(9), 8]):
        with pytest.raises(InvariantError, match="differ"):
            check(plan, b.block_table[rows], b.seq_lens[rows])


def test_a_request_shorter_than_its_closed_runs_is_refused():
    b, plan = batch(), plan_by("fixed")
    for row in np.flatnonzero(b.seq_lens > 2 * BLOCK_SIZE).tolist():
        lens = b.seq_lens.copy()
        lens[row] = 3
        with pytest.raises(InvariantError):
            check(plan, b.block_table, lens)


def test_growth_needs_no_new_plan():
    b, plan = batch(), plan_by("fixed")
    later = b.grown([0, 1, 2, 3, 50, 4, 100, 7, 9])
    assert later.block_table[0, 0] != NULL_BLOCK
    check(plan, later.block_table, later.seq_lens)


def test_the_message_names_the_token_and_the_request():
    b, plan = batch(), plan_by("fixed")
    row = 6
    (run,) = np.flatnonzero((plan.run_kv_end == OPEN_END) & (plan.run_row == row)).tolist()
    bad = changed(plan, "run_kv_start", run, int(plan.run_kv_start[run]) + 1)
    with pytest.raises(InvariantError, match=f"token {plan.run_kv_start[run]} of request {row}"):
        check(bad, b.block_table, b.seq_lens)
