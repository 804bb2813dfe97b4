"""The arrays that kernels walk, against the plan read one tile at a time."""

from dataclasses import replace

import numpy as np
import pytest

from tests.batches import paged_batch
from vllm_prefixshare.kernels.hopper.layout import linked_layout
from vllm_prefixshare.kernels.portable.layout import layout_by_size
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.records import PrefixShareError

from .portable import make_plan


def tile_of(layout: dict[str, np.ndarray], tile: int) -> tuple:
    """Slots and runs of a tile, each as a list of tuples."""
    slot, n, run, num_runs = layout["tile_info"][tile, :4].tolist()
    slots = [layout[name][slot : slot + n].tolist() for name in ("slot_row", "slot_partial")]
    readers = layout["run_readers"][run : run + num_runs]
    runs = [
        layout[name][run : run + num_runs].tolist()
        for name in ("run_row", "run_kv_start", "run_kv_end")
    ]
    both = (readers & 0xFFFF).tolist(), (readers >> 16).tolist()
    return list(zip(*slots, strict=True)), list(zip(*runs, *both, strict=True))


def tile_in_plan(plan: DecodePlan, tile: int) -> tuple:
    slots = slice(*plan.tile_req_indptr[tile : tile + 2])
    runs = slice(*plan.tile_run_indptr[tile : tile + 2])
    of_slots = (plan.tile_req_indices, plan.partial_indices)
    of_runs = (plan.run_row, plan.run_kv_start, plan.run_kv_end, plan.run_first, plan.run_last)
    return (
        list(zip(*(array[slots].tolist() for array in of_slots), strict=True)),
        list(zip(*(array[runs].tolist() for array in of_runs), strict=True)),
    )


MAX_SLOTS, MAX_RUNS = 40, 100


def kind(run: tuple, num_reqs: int, rows: int) -> int:
    """0: both halves of a tile read the run, 1: the low one only, 2: the high one only."""
    half, (_, _, _, first, last) = (num_reqs + 1) // 2, run
    if rows > 64 or first < half < last:
        return 0
    return 1 if last <= half else 2


def linked_tile(layout: dict[str, np.ndarray], place: int) -> tuple:
    """Slots and runs of a tile, as ``tile_of``."""
    n, num_runs = layout["tile_info"][place, :2].tolist()
    slots = [layout[name][place, :n].tolist() for name in ("slot_row", "slot_partial")]
    runs = [
        layout[name][place, :num_runs].tolist()
        for name in ("run_row", "run_kv_start", "run_kv_end")
    ]
    readers = layout["run_readers"][place, :num_runs]
    both = (readers & 0xFFFF).tolist(), (readers >> 16).tolist()
    return list(zip(*slots, strict=True)), list(zip(*runs, *both, strict=True))


@pytest.mark.parametrize("divider", DIVIDERS)
@pytest.mark.parametrize("workers", [1, 3, 50])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_every_worker_finds_its_tiles_from_its_own_place(divider, workers, rows):
    plan = make_plan(paged_batch(requests=9), divider, workers)
    layout = linked_layout(plan, rows, MAX_SLOTS, MAX_RUNS)
    assert {array.dtype for array in layout.values()} == {np.dtype(np.int32)}
    info = layout["tile_info"]
    idle = int((np.diff(plan.work_indptr) == 0).sum())
    assert len(info) == plan.num_tiles + idle
    places = []
    for worker in range(workers):
        place = worker
        for tile in range(*plan.work_indptr[worker : worker + 2]):
            places.append(place)
            slots, runs = linked_tile(layout, place)
            expected_slots, expected_runs = tile_in_plan(plan, tile)
            n = len(slots)
            assert slots == expected_slots
            assert runs == sorted(expected_runs, key=lambda run: kind(run, n, rows)), "stable"
            kinds = [kind(run, n, rows) for run in runs]
            assert info[place, 2:4].tolist() == [kinds.count(0), kinds.count(1)]
            leaves_partials = any(partial >= 0 for _, partial in slots)
            assert info[place, 5:].tolist() == [(n + 1) // 2, leaves_partials, 0]
            place = int(info[place, 4]) - 1
        if plan.work_indptr[worker] == plan.work_indptr[worker + 1]:
            assert info[place].tolist() == [0, 0, 0, 0, 0, 0, 0, 0], "an idle worker reads nothing"
        else:
            assert place == -1, "the last tile names no other"
    assert len(set(places)) == plan.num_tiles
    np.testing.assert_array_equal(layout["merge_indptr"], plan.merge_indptr)


def test_runs_of_both_halves_come_first_then_those_of_the_low_half():
    """Five requests, three of them in the low half; ``kind`` is not asked here."""
    runs = [(0, 0, 1), (0, 4, 5), (0, 2, 4), (0, 0, 3), (0, 3, 5), (0, 0, 5)]
    first, last = np.array([run[1:] for run in runs], np.int32).T.copy()
    start = np.arange(len(runs), dtype=np.int32)
    one_tile = replace(
        make_plan(paged_batch(), "deft_node"),
        work_indptr=np.array([0, 1], np.int32),
        tile_req_indptr=np.array([0, 5], np.int32),
        tile_req_indices=np.arange(5, dtype=np.int32),
        partial_indices=np.full(5, -1, np.int32),
        tile_run_indptr=np.array([0, len(runs)], np.int32),
        run_row=first,
        run_kv_start=start,
        run_kv_end=start,
        run_first=first,
        run_last=last,
    )
    layout = linked_layout(one_tile, 8, 8, 8)
    assert layout["run_kv_start"][0, :6].tolist() == [2, 5, 0, 3, 1, 4]
    assert layout["tile_info"][0, :6].tolist() == [5, 6, 2, 2, 0, 3]
    assert linked_layout(one_tile, 65, 8, 8)["tile_info"][0, :4].tolist() == [5, 6, 6, 0]


def test_a_plan_for_larger_tiles_is_refused():
    plan = make_plan(paged_batch(requests=9), "deft_flatten", workers=2)
    with pytest.raises(PrefixShareError, match=r"runs and the kernel takes 2.*max_tile_runs=2"):
        linked_layout(plan, 4, MAX_SLOTS, 2)
    with pytest.raises(PrefixShareError, match=r"requests and the kernel takes 1.*max_tile_req"):
        linked_layout(plan, 4, 1, MAX_RUNS)


@pytest.mark.parametrize("divider", ["flashforge", "deft_flatten", "per_request"])
def test_every_tile_goes_once_to_the_smallest_size_that_holds_it(divider):
    plan = make_plan(paged_batch(requests=9), divider)
    rows = 8
    layout = layout_by_size(plan, rows, [(16, 5), (32, 4), (64, 2)])
    assert "work_indptr" not in layout
    seen = []
    for size, smaller, workers in ((16, 0, 5), (32, 16, 4), (64, 32, 2)):
        indptr = layout[f"work_indptr_{size}"]
        assert len(indptr) == workers + 1 and np.all(np.diff(indptr) >= 0)
        for tile in range(indptr[0], indptr[-1]):
            need = int(layout["tile_info"][tile, 1]) * rows
            assert need > smaller and (need <= size or size == 64)
            seen.append(tile)
    assert seen == list(range(plan.num_tiles))
    ends = layout["tile_info"][:, 2] + layout["tile_info"][:, 3]
    assert layout["tile_info"][1:, 2].tolist() == ends[:-1].tolist(), "runs lie in tile order"
    given = sorted(map(repr, (tile_of(layout, t) for t in seen)))
    assert given == sorted(repr(tile_in_plan(plan, t)) for t in range(plan.num_tiles))


def test_an_empty_plan():
    batch = paged_batch()
    batch.block_table, batch.seq_lens = batch.block_table[:0], batch.seq_lens[:0]
    layout = layout_by_size(make_plan(batch), 4, [(16, 3), (128, 2)])
    assert layout["work_indptr_16"].tolist() == [0] * 4
    assert layout["work_indptr_128"].tolist() == [0] * 3
