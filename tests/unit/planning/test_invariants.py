"""``invariants.check`` refuses every way in which a plan can be wrong."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from tests.support.planning_cases import NULL_BLOCK, Batch, make_batch, make_planner
from vllm_prefixshare.core import OPEN_END, IntArray
from vllm_prefixshare.planning.invariants import InvariantError, check
from vllm_prefixshare.planning.plan import DecodePlan

BLOCK_SIZE = 4
RUN_ARRAYS = ("run_row", "run_kv_start", "run_kv_end", "run_reader_start", "run_reader_end")


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


def assigned(
    plan: DecodePlan, name: str, values: IntArray | int, where: np.ndarray | bool = True
) -> Iterator[DecodePlan]:
    """The plan with one entry of an array changed to its value, for each entry in ``where``."""
    array = getattr(plan, name)
    values, where = np.broadcast_to(values, array.shape), np.broadcast_to(where, array.shape)
    for index in np.flatnonzero(where).tolist():
        yield changed(plan, name, index, int(values[index]))


def shifted(
    plan: DecodePlan, name: str, by: int, where: np.ndarray | bool = True
) -> Iterator[DecodePlan]:
    return assigned(plan, name, getattr(plan, name) + by, where)


def tile_of_run(plan: DecodePlan, run: int) -> int:
    return int(np.searchsorted(plan.tile_run_indptr, run, "right")) - 1


def readers(plan: DecodePlan, run: int) -> list[int]:
    low = int(plan.tile_req_indptr[tile_of_run(plan, run)])
    first, last = low + int(plan.run_reader_start[run]), low + int(plan.run_reader_end[run])
    return plan.tile_req_indices[first:last].tolist()


def closed(plan: DecodePlan) -> np.ndarray:
    return plan.run_kv_end != OPEN_END


def num_readers(plan: DecodePlan) -> np.ndarray:
    return plan.run_reader_end - plan.run_reader_start


def inner(plan: DecodePlan) -> np.ndarray:
    """The entries of an indptr of tiles without the first and the last."""
    return np.arange(plan.num_tiles + 1) % plan.num_tiles > 0


def a_run_is_missing(plan: DecodePlan) -> Iterator[DecodePlan]:
    for run in range(plan.num_runs):
        indptr = plan.tile_run_indptr.copy()
        indptr[tile_of_run(plan, run) + 1 :] -= 1
        arrays = {name: np.delete(getattr(plan, name), run) for name in RUN_ARRAYS}
        yield replace(plan, tile_run_indptr=indptr, **arrays)


def a_run_is_there_twice(plan: DecodePlan) -> Iterator[DecodePlan]:
    for run in range(plan.num_runs):
        indptr = plan.tile_run_indptr.copy()
        indptr[tile_of_run(plan, run) + 1 :] += 1
        arrays = {
            name: np.insert(getattr(plan, name), run, getattr(plan, name)[run])
            for name in RUN_ARRAYS
        }
        yield replace(plan, tile_run_indptr=indptr, **arrays)


def an_empty_open_run_waits_for_growth(plan: DecodePlan) -> Iterator[DecodePlan]:
    for run in np.flatnonzero(~closed(plan)).tolist():
        row = int(plan.run_row[run])
        indptr = plan.tile_run_indptr.copy()
        indptr[tile_of_run(plan, run) + 1 :] += 1
        extra = {name: int(getattr(plan, name)[run]) for name in RUN_ARRAYS}
        extra["run_kv_start"] = int(batch().seq_lens[row])
        arrays = {name: np.insert(getattr(plan, name), run, extra[name]) for name in RUN_ARRAYS}
        yield replace(plan, tile_run_indptr=indptr, **arrays)


def the_representative_row_does_not_read(plan: DecodePlan) -> Iterator[DecodePlan]:
    for run in range(plan.num_runs):
        for row in range(plan.num_reqs):
            if row not in readers(plan, run):
                yield changed(plan, "run_row", run, row)


def a_tile_holds_another_request(plan: DecodePlan) -> Iterator[DecodePlan]:
    for index, row in enumerate(plan.tile_req_indices.tolist()):
        for other in range(plan.num_reqs):
            if other != row:
                yield changed(plan, "tile_req_indices", index, other)


def two_requests_swap_partial_slots(plan: DecodePlan) -> Iterator[DecodePlan]:
    slots, rows = plan.partial_indices, plan.tile_req_indices
    for i in range(len(slots)):
        for j in range(i):
            if rows[i] != rows[j] and slots[i] != slots[j]:
                swapped = slots.copy()
                swapped[[i, j]] = slots[[j, i]]
                yield replace(plan, partial_indices=swapped)


def two_tiles_write_one_partial_slot(plan: DecodePlan) -> Iterator[DecodePlan]:
    slots = plan.partial_indices
    for i in np.flatnonzero(slots >= 0).tolist():
        for j in np.flatnonzero(slots >= 0).tolist():
            if i != j:
                yield changed(plan, "partial_indices", i, int(slots[j]))


MUTATIONS: dict[str, Callable[[DecodePlan], Iterable[DecodePlan]]] = {
    "a run is missing": a_run_is_missing,
    "a run is there twice": a_run_is_there_twice,
    "a run starts a token late": lambda p: shifted(p, "run_kv_start", 1),
    "a run starts a block late": lambda p: shifted(p, "run_kv_start", BLOCK_SIZE),
    "a run starts a block early": lambda p: shifted(p, "run_kv_start", -BLOCK_SIZE),
    "a run starts beyond every request": lambda p: shifted(p, "run_kv_start", 10_000),
    "a run ends a token late": lambda p: shifted(p, "run_kv_end", 1, closed(p)),
    "a run ends a block late": lambda p: shifted(p, "run_kv_end", BLOCK_SIZE, closed(p)),
    "a run ends a block early": lambda p: shifted(p, "run_kv_end", -BLOCK_SIZE, closed(p)),
    "a private run in the middle is open": lambda p: assigned(
        p, "run_kv_end", OPEN_END, closed(p) & (num_readers(p) == 1)
    ),
    "a shared run is open": lambda p: assigned(
        p, "run_kv_end", OPEN_END, closed(p) & (num_readers(p) > 1)
    ),
    "the last run is closed at today's length": lambda p: assigned(
        p, "run_kv_end", batch().seq_lens[p.run_row], ~closed(p)
    ),
    "an empty open run waits for growth": an_empty_open_run_waits_for_growth,
    "the representative row does not read": the_representative_row_does_not_read,
    "the representative row is outside the batch": lambda p: chain(
        assigned(p, "run_row", p.num_reqs), assigned(p, "run_row", -1)
    ),
    "a reader is forgotten": lambda p: chain(
        shifted(p, "run_reader_end", -1), shifted(p, "run_reader_start", 1)
    ),
    "a run has a reader too many": lambda p: chain(
        shifted(p, "run_reader_end", 1), shifted(p, "run_reader_start", -1)
    ),
    "a tile holds another request": a_tile_holds_another_request,
    "a tile holds a row outside the batch": lambda p: chain(
        assigned(p, "tile_req_indices", p.num_reqs), assigned(p, "tile_req_indices", -1)
    ),
    "two requests swap partial slots": two_requests_swap_partial_slots,
    "two tiles write one partial slot": two_tiles_write_one_partial_slot,
    "a request of several tiles is written directly": lambda p: assigned(
        p, "partial_indices", -1, p.partial_indices >= 0
    ),
    "a request of one tile is written as a partial": lambda p: assigned(
        p, "partial_indices", 0, p.partial_indices < 0
    ),
    "a partial slot is outside the buffer": lambda p: assigned(
        p, "partial_indices", p.num_partials, p.partial_indices >= 0
    ),
    "a merge range is shifted": lambda p: chain(
        shifted(p, "merge_indptr", -1), shifted(p, "merge_indptr", 1)
    ),
    "a request has no merge range": lambda p: [replace(p, merge_indptr=p.merge_indptr[:-1])],
    "a worker stops before the last tile": lambda p: [
        changed(p, "work_indptr", -1, p.num_tiles - 1)
    ],
    "a worker starts after the first tile": lambda p: [changed(p, "work_indptr", 0, 1)],
    "the ranges of workers cross": lambda p: [changed(p, "work_indptr", 1, p.num_tiles + 1)],
    "a tile takes the first run of the next": lambda p: shifted(p, "tile_run_indptr", 1, inner(p)),
    "a tile takes the first request of the next": lambda p: shifted(
        p, "tile_req_indptr", 1, inner(p)
    ),
}


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
