"""The arrays that kernels walk, compared with the plan, one tile at a time."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.support.trees import tree
from tests.support.paged_batches import paged_batch
from tests.support.plan_oracle import tile_rows, tile_runs
from tests.support.planning_cases import make_planner
from tests.support.portable_kernel import make_plan
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.common.layout import KvTiling, max_parts_of, walk_layout
from vllm_prefixshare.kernels.hopper.arrays import (
    NUM_RUNS,
    OUTPUT,
    PARTIAL,
    PLAIN_START,
    RESULTS,
)
from vllm_prefixshare.kernels.hopper.layout import PLAIN_RUNS, first_request, linked_layout
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.kernels.registry import make_kernel
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.plan import DecodePlan


def tile_in_plan(plan: DecodePlan, tile: int) -> tuple:
    slots = slice(*plan.tile_req_indptr[tile : tile + 2])
    runs = slice(*plan.tile_run_indptr[tile : tile + 2])
    of_slots = (plan.tile_req_indices, plan.partial_indices)
    of_runs = (
        plan.run_row,
        plan.run_kv_start,
        plan.run_kv_end,
        plan.run_reader_start,
        plan.run_reader_end,
    )
    return (
        list(zip(*(array[slots].tolist() for array in of_slots), strict=True)),
        list(zip(*(array[runs].tolist() for array in of_runs), strict=True)),
    )


MAX_SLOTS, MAX_RUNS = 40, 100


@pytest.mark.parametrize(
    ("block_size", "part"), [(16, 16), (32, 32), (48, 16), (64, 32), (128, 32), (544, 32)]
)
def test_large_blocks_are_read_and_cut_in_parts(block_size, part):
    attention = AttentionConfig(32, 8, 128, block_size)
    hopper, portable = (
        make_kernel(name, attention, 1, Gpu((9, 0), 132, 227 << 10))
        for name in ("hopper", "portable")
    )
    assert hopper.shape.piece == portable.tiling.unit == part
    assert planner_config(hopper.limits, attention).cut_size == part
    assert planner_config(portable.limits, attention).cut_size == part


def kind(run: tuple, half: int, rows: int) -> int:
    """0: both halves of a tile read the run, 1: the low one only, 2: the high one only."""
    _, _, _, first, last = run
    if rows > 64 or first < half < last:
        return 0
    return 1 if last <= half else 2


def turned(run: tuple, first: int, num_reqs: int) -> tuple:
    """A run of a tile when request ``first`` of the tile comes first."""
    *where, start, end = run
    if end - start < num_reqs:
        start, end = (start - first) % num_reqs, (end - first - 1) % num_reqs + 1
        assert start < end, "the readers of a run are neighbours"
    return *where, start, end


def linked_tile(layout: dict[str, np.ndarray], place: int) -> tuple:
    """Slots and runs of a tile, in the form of ``tile_in_plan``."""
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
    layout = linked_layout(plan, rows, MAX_SLOTS, MAX_RUNS)._asdict()
    assert {array.dtype for array in layout.values()} == {np.dtype(np.int32)}
    info = layout["tile_info"]
    idle = int((np.diff(plan.work_indptr) == 0).sum())
    assert len(info) == plan.num_tiles + idle
    free = np.arange(MAX_RUNS) >= info[:, 1:2]
    runs_of = ("run_row", "run_kv_start", "run_kv_end", "run_readers")
    assert not any(layout[name][free].any() for name in runs_of), "the kernel reads them too"
    places = []
    for worker in range(workers):
        place = worker
        for tile in range(*plan.work_indptr[worker : worker + 2]):
            places.append(place)
            slots, runs = linked_tile(layout, place)
            expected_slots, expected_runs = tile_in_plan(plan, tile)
            n, half = len(slots), int(info[place, 5])
            assert half in ((n + 1) // 2, n if n * rows <= 64 else 0)
            first = expected_slots.index(slots[0])
            assert slots == expected_slots[first:] + expected_slots[:first]
            expected_runs = [turned(run, first, n) for run in expected_runs]
            by_kind = sorted(expected_runs, key=lambda run: kind(run, half, rows))
            assert runs == by_kind, "stable"
            kinds = [kind(run, half, rows) for run in runs]
            assert info[place, 2:4].tolist() == [kinds.count(0), kinds.count(1)]
            results = {PARTIAL if partial >= 0 else OUTPUT for _, partial in slots}
            assert info[place, RESULTS] & (PARTIAL | OUTPUT) == sum(results)
            place = int(info[place, 4]) - 1
        if plan.work_indptr[worker] == plan.work_indptr[worker + 1]:
            assert info[place].tolist() == [0, 0, 0, 0, 0, 0, 0, 0], "an idle worker reads nothing"
        else:
            assert place == -1, "the last tile names no other"
    assert len(set(places)) == plan.num_tiles
    np.testing.assert_array_equal(layout["merge_indptr"], plan.merge_indptr)


def test_runs_of_both_halves_come_first_then_those_of_the_low_half():
    """Five requests, three of them in the low half; the expected order is written out."""
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
        run_reader_start=first,
        run_reader_end=last,
    )
    layout = linked_layout(one_tile, 8, 8, 8)._asdict()
    assert layout["run_kv_start"][0, :6].tolist() == [2, 5, 0, 3, 1, 4]
    assert layout["tile_info"][0, :6].tolist() == [5, 6, 2, 2, 0, 3]
    assert linked_layout(one_tile, 65, 8, 8).tile_info[0, :4].tolist() == [5, 6, 6, 0]


@pytest.mark.parametrize(
    ("runs", "half", "first"),
    [
        ([(0, 8), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], 4, 2),  # three and two
        ([(0, 8), *((i, i + 1) for i in range(8))], 4, 0),  # as much already
        ([(0, 8), (0, 3), (0, 1), (1, 2), (2, 3)], 4, 5),  # both halves read what the three share
        ([(0, 2), (0, 1), (1, 2), (2, 4), (2, 3), (3, 4)], 4, 2),  # a pair for each half
        ([(0, 3), (3, 5), (5, 8)], 4, 0),  # any turn cuts one of them
        ([(0, 1)], 1, 0),
        ([], 2, 0),
    ],
)
def test_the_request_that_comes_first(runs, half, first):
    starts, ends = np.array(runs, np.int32).reshape(-1, 2).T.copy()
    pieces = np.full(len(runs), 4)
    assert first_request(2 * half, half, starts, ends, pieces) == first


def test_private_parts_of_one_half_of_the_requests_are_read_by_both_halves():
    """Two workers share 32 requests: one reads the document and some of the private parts."""
    work = tree("1,32_2048,256")
    planner = make_planner(
        16, divider="depth_first", gqa=4, num_workers=2, max_tile_requests=32, max_tile_runs=64
    )
    plan = planner.update(work.block_table, work.seq_lens).plan
    info = linked_layout(plan, 4, 32, 64).tile_info
    for _, num_runs, wide, low, _, _, _, _ in info:
        assert wide <= 1 and abs(num_runs - wide - 2 * low) <= 1


@pytest.mark.parametrize(
    ("spec", "rows", "low"),
    [
        ("1,4_1024,64", 16, 4),  # both halves would read most of it
        ("1,2_288,32", 16, 2),  # three KV tiles instead of five
        ("1,4_256,1024", 16, 2),  # mostly private: each half reads its own
        ("1,8_1024,64", 16, 4),  # eight requests do not fit
    ],
)
def test_requests_are_in_one_half_where_that_saves_work(spec, rows, low):
    work = tree(spec)
    planner = make_planner(
        16, divider="depth_first", gqa=rows, num_workers=1, max_tile_requests=8, max_tile_runs=32
    )
    plan = planner.update(work.block_table, work.seq_lens).plan
    assert plan.num_tiles == 1
    assert linked_layout(plan, rows, 8, 32).tile_info[0, 5] == low


def test_a_plan_for_larger_tiles_is_refused():
    plan = make_plan(paged_batch(requests=9), "deft_flatten", workers=2)
    with pytest.raises(PrefixShareError, match=r"runs and the kernel takes 2.*max_tile_runs=2"):
        linked_layout(plan, 4, MAX_SLOTS, 2)
    with pytest.raises(PrefixShareError, match=r"requests and the kernel takes 1.*max_tile_req"):
        linked_layout(plan, 4, 1, MAX_RUNS)


def tokens_by_reader(
    plan: DecodePlan, tile: int, seq_lens: np.ndarray
) -> list[tuple[int, int, int]]:
    """(place among the tile's requests, batch row read from, position) of every token read."""
    rows = tile_rows(plan, tile)
    return sorted(
        (rows.index(reader), row, pos)
        for row, start, end, readers in tile_runs(plan, tile, seq_lens)
        for reader in readers
        for pos in range(start, end)
    )


Tokens = list[tuple[int, int, int]]


def tokens_in_layout(
    layout: dict[str, np.ndarray], place: int, seq_lens: np.ndarray, tiling: KvTiling
) -> tuple[Tokens, Tokens]:
    """Tokens that the kernel reads with ``seq_lens``, in the form of ``tokens_by_reader``: those of
    runs, and those of parts.
    """
    slots, num_reqs, run, last_run, part, packed, new, _ = layout["tile_info"][place].tolist()
    rows, ends = (layout[n][slots : slots + num_reqs] for n in ("slot_row", "slot_end"))
    growth = max(0, int((-(-(seq_lens[rows] - ends) // tiling.unit)).max()))
    of_runs, of_parts = [], []
    for r in range(run, last_run):
        row, start, end, readers = (
            int(layout[n][r]) for n in ("run_row", "run_start", "run_end", "run_readers")
        )
        assert start % tiling.unit == 0 and (end - start) % tiling.kv_tile == 0
        for reader in range(readers & 0xFFFF, readers >> 16):
            of_runs += [(reader, row, pos) for pos in range(start, end)]
    per_tile = tiling.kv_tile // tiling.unit
    listed = [(part + i, 0) for i in range(packed * per_tile)]
    opened = part + packed * per_tile
    listed += [(opened + i, grown) for grown in range(growth) for i in range(new * per_tile)]
    for i, grown in listed:
        row, pos, readers = (int(layout[n][i]) for n in ("part_row", "part_pos", "part_readers"))
        pos += grown * tiling.unit
        for reader in range(readers & 0xFFFF, readers >> 16):
            of_parts += [
                (reader, row, p) for p in range(pos, min(pos + tiling.unit, int(seq_lens[row])))
            ]
    return sorted(of_runs), sorted(of_parts)


@pytest.mark.parametrize("divider", DIVIDERS)
@pytest.mark.parametrize("kv_tile", [32, 64])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("grown", [0, 1, 40])
def test_every_token_is_read_once_and_queries_in_parts_only(divider, kv_tile, queries, grown):
    batch = paged_batch(requests=7, document_blocks=19, private_blocks=17, query_lens=queries)
    plan = make_plan(batch, divider)
    tiling = KvTiling.of(kv_tile, 16, queries)
    layout = walk_layout(plan, tiling)._asdict()
    lens = plan.planned_seq_lens
    longer = lens + grown * (np.arange(len(lens)) % 3 + 1).astype(np.int32)
    np.testing.assert_array_equal(layout["tile_info"][:, 0], plan.tile_req_indptr[:-1])
    for tile in range(plan.num_tiles):
        of_runs, of_parts = tokens_in_layout(layout, tile, longer, tiling)
        expected = tokens_by_reader(plan, tile, longer)
        assert sorted(of_runs + of_parts) == expected
        for reader, _, pos in of_runs:
            own = plan.tile_req_indices[plan.tile_req_indptr[tile] + reader]
            assert pos < lens[own] - (queries if queries > 1 else 0)
    assert layout["part_row"].size <= max_parts_of(tiling, plan.num_runs, plan.num_tiles)
    if divider == "per_request":
        assert layout["run_row"].size > 0


def test_short_runs_share_a_kv_tile():
    """Private parts of a block each, of four requests: one KV tile of 64 tokens."""
    batch = paged_batch(documents=1, requests=4, document_blocks=16, private_blocks=1)
    plan = make_plan(batch, "depth_first", workers=1)
    layout = walk_layout(plan, KvTiling.of(64, 16, 1))._asdict()
    assert plan.num_tiles == 1
    # the document is a run; two blocks that pairs share and four private ones fill two KV tiles
    assert layout["run_end"].tolist() == [256]
    assert layout["tile_info"][0, 2:7].tolist() == [0, 1, 0, 2, 1]


def test_an_empty_plan():
    batch = paged_batch()
    batch.block_table, batch.seq_lens = batch.block_table[:0], batch.seq_lens[:0]
    layout = walk_layout(make_plan(batch), KvTiling.of(64, 16, 1))._asdict()
    assert layout["work_indptr"].tolist() == [0] * 4
    assert layout["tile_info"].size == layout["part_row"].size == 0


@pytest.mark.parametrize("heads", [1, 4, 16])
@pytest.mark.parametrize(
    "spec", ["1,4,16_1024,64,30", "1,9_300,40", "1,2,8_64,200,128", "6_700", "1_5100"]
)
def test_a_first_kv_tile_is_copied_early_where_one_run_fills_it(spec, heads):
    batch, slots = tree(spec, 16), 2 * (64 // heads)
    planner = make_planner(16, divider="depth_first", num_workers=7, max_tile_requests=slots)
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    layout = linked_layout(plan, heads, slots, 256)
    for tile in np.flatnonzero(layout.tile_info[:7, NUM_RUNS]):
        start, end = layout.run_kv_start[tile, 0], layout.run_kv_end[tile, 0]
        end = batch.seq_lens[layout.run_row[tile, 0]] if end == -1 else end
        fills = layout.tile_info[tile, NUM_RUNS] <= PLAIN_RUNS and end - start >= 128
        assert bool(layout.tile_info[tile, RESULTS] & PLAIN_START) == fills
