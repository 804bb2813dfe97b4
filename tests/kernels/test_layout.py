"""The arrays that kernels walk, against the plan read one tile at a time."""

import numpy as np
import pytest

from tests.batches import paged_batch
from vllm_prefixshare.executors.layout import device_layout, layout_by_size
from vllm_prefixshare.planning.dividers import DIVIDERS
from vllm_prefixshare.planning.plan import DecodePlan

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


def half(run: tuple, rows: int) -> int:
    """0: both halves of a tile of 128 rows read the run, 1: the low one, 2: the high one."""
    low, high = run[3] * rows < 64, run[4] * rows > 64
    return 0 if low and high else 1 if low else 2


@pytest.mark.parametrize("divider", DIVIDERS)
@pytest.mark.parametrize("rows", [1, 7, 16, 200])
def test_a_tile_keeps_its_content_and_sorts_its_runs_by_half(divider, rows):
    plan = make_plan(paged_batch(requests=9), divider)
    layout = device_layout(plan, rows)
    assert {array.dtype for array in layout.values()} == {np.dtype(np.int32)}
    for tile in range(plan.num_tiles):
        slots, runs = tile_of(layout, tile)
        expected_slots, expected_runs = tile_in_plan(plan, tile)
        assert slots == expected_slots
        assert runs == sorted(expected_runs, key=lambda run: half(run, rows)), "stable"
        kinds = [half(run, rows) for run in runs]
        assert layout["tile_info"][tile, 4:].tolist() == [kinds.count(0), kinds.count(1), 0, 0]
    np.testing.assert_array_equal(layout["work_indptr"], plan.work_indptr)
    np.testing.assert_array_equal(layout["merge_indptr"], plan.merge_indptr)


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
    whole = device_layout(plan, rows)
    assert given == sorted(repr(tile_of(whole, t)) for t in range(plan.num_tiles))


def test_an_empty_plan():
    batch = paged_batch()
    batch.block_table, batch.seq_lens = batch.block_table[:0], batch.seq_lens[:0]
    layout = layout_by_size(make_plan(batch), 4, [(16, 3), (128, 2)])
    assert layout["work_indptr_16"].tolist() == [0] * 4
    assert layout["work_indptr_128"].tolist() == [0] * 3
