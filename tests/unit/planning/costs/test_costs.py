"""Measured and estimated costs: interpolation, files, fingerprints."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.padding import PaddingCost
from tests.support.planning_cases import (
    LLAMA,
    LinearCost,
    fingerprint,
    flashforge_table,
    gpu_config,
    quick,
)
from vllm_prefixshare.config import DTYPES, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.geometry import GPU
from vllm_prefixshare.planning.costs.rates import TileRates
from vllm_prefixshare.planning.costs.roofline import AnalyticCost, analytic_cost
from vllm_prefixshare.planning.costs.table import FORMAT, CostTable, Fingerprint, Grid
from vllm_prefixshare.planning.planner import DecodePlanner


@st.composite
def grids(draw: st.DrawFn, rising: bool = False) -> Grid:
    """Any grid; ``rising``: the cost grows with every row and token, as launches and reads do."""

    def axis() -> np.ndarray:
        steps = draw(st.lists(st.integers(1, 500), min_size=2, max_size=5))
        return np.cumsum(steps).astype(float)

    rows, kv_len = axis(), axis()
    size = len(rows) * len(kv_len)
    values = draw(st.lists(st.integers(1, 4000), min_size=size, max_size=size))
    microseconds = np.array(values, float).reshape(len(rows), len(kv_len)) / 8
    if rising:
        microseconds = microseconds.cumsum(axis=0).cumsum(axis=1)
    return Grid(rows, kv_len, microseconds)


def saved(tmp_path, **changes: object):
    """Save a table whose JSON differs from a good one by ``changes``."""
    path = tmp_path / "table.json"
    flashforge_table().save(path)
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))
    return path


@quick(100)
@given(grids())
def test_interpolation_is_exact_at_grid_points(grid):
    got = grid(grid.rows[:, None], grid.kv_len[None, :])
    np.testing.assert_allclose(got, grid.microseconds, rtol=1e-12)


@quick(100)
@given(grids(), st.data())
def test_between_grid_points_a_cost_lies_between_its_four_neighbours(grid, data):
    i = data.draw(st.integers(0, len(grid.rows) - 2))
    j = data.draw(st.integers(0, len(grid.kv_len) - 2))
    x, y = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    rows = grid.rows[i] * (1 - x) + grid.rows[i + 1] * x
    kv_len = grid.kv_len[j] * (1 - y) + grid.kv_len[j + 1] * y
    around = grid.microseconds[i : i + 2, j : j + 2]
    assert around.min() - 1e-9 <= grid(rows, kv_len) <= around.max() + 1e-9


def test_halfway_is_the_mean():
    grid = Grid(np.array([1.0, 3]), np.array([10.0, 20]), np.array([[2.0, 4], [6, 12]]))
    assert grid(1, 15) == pytest.approx(3)
    assert grid(2, 10) == pytest.approx(4)
    assert grid(2, 15) == pytest.approx(6)


@quick(100)
@given(grids(rising=True), st.data())
def test_a_rising_table_gives_rising_costs_up_to_its_last_entry(grid, data):
    def within(axis: np.ndarray) -> list[float]:
        below = st.floats(0, float(axis[-1]))
        return sorted([data.draw(below), data.draw(below)])

    rows, more_rows = within(grid.rows)
    kv_len, more_kv = within(grid.kv_len)
    assert grid(more_rows, kv_len) >= grid(rows, kv_len) - 1e-9
    assert grid(rows, more_kv) >= grid(rows, kv_len) - 1e-9


@quick(60)
@given(grids(rising=True), st.floats(0, 1e5), st.integers(0, 4))
def test_beyond_the_last_entry_the_last_slope_goes_on(grid, beyond, row):
    i = min(row, len(grid.rows) - 1)
    us, kv_len = grid.microseconds, grid.kv_len
    slope = (us[i, -1] - us[i, -2]) / (kv_len[-1] - kv_len[-2])
    expected = us[i, -1] + slope * beyond
    assert grid(grid.rows[i], kv_len[-1] + beyond) == pytest.approx(expected)
    j = min(row, len(kv_len) - 1)
    slope = (us[-1, j] - us[-2, j]) / (grid.rows[-1] - grid.rows[-2])
    expected = us[-1, j] + slope * beyond
    assert grid(grid.rows[-1] + beyond, kv_len[j]) == pytest.approx(expected)


@quick(60)
@given(grids(), st.floats(0, 1), st.floats(0, 1))
def test_below_the_first_entry_the_first_value_holds(grid, x, y):
    low_rows, low_kv = grid.rows[0] * x, grid.kv_len[0] * y
    np.testing.assert_allclose(grid(low_rows, grid.kv_len), grid.microseconds[0])
    np.testing.assert_allclose(grid(grid.rows, low_kv), grid.microseconds[:, 0])


@quick(60)
@given(grids(), st.floats(0, 1e7), st.floats(0, 1e7))
def test_a_cost_is_positive_wherever_it_is_asked(grid, rows, kv_len):
    assert grid(rows, kv_len) > 0


@quick(30)
@given(grids())
def test_arguments_broadcast(grid):
    rows, kv_len = np.array([[1], [7], [90]]), np.array([3, 300])
    got = grid(rows, kv_len)
    assert got.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            assert got[i, j] == grid(rows[i, 0], kv_len[j])


@pytest.mark.parametrize(
    ("rows", "kv_len", "microseconds", "sentence"),
    [
        ([1, 2], [1, 2], [[1, 2]], r"must be \[2, 2\], got \[1, 2\]"),
        ([1, 2], [1, 2, 3], [[1, 2], [3, 4]], r"must be \[2, 3\], got \[2, 2\]"),
        ([1], [1, 2], [[1, 2]], "rows must ascend"),
        ([1, 2], [1], [[1], [2]], "kv_len must ascend"),
        ([2, 1], [1, 2], [[1, 2], [3, 4]], "rows must ascend"),
        ([1, 2], [1, 1], [[1, 2], [3, 4]], "kv_len must ascend"),
        ([1, np.nan], [1, 2], [[1, 2], [3, 4]], "rows must ascend"),
        ([1, 2], [1, np.inf], [[1, 1], [1, 1]], "kv_len"),
        ([1, 2], [1, 2], [[1, 2], [3, 0]], "positive and finite"),
        ([1, 2], [1, 2], [[1, 2], [3, -4]], "positive and finite"),
        ([1, 2], [1, 2], [[1, 2], [3, np.nan]], "positive and finite"),
        ([1, 2], [1, 2], [[1, 2], [3, np.inf]], "positive and finite"),
    ],
)
def test_a_senseless_grid_is_refused_with_the_reason(rows, kv_len, microseconds, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        Grid(*(np.array(x, float) for x in (rows, kv_len, microseconds)))


@quick(40)
@given(grids(), st.none() | grids(), st.none() | grids(), st.floats(0, 100))
def test_a_table_survives_its_file(tmp_path_factory, tile, unshared, cached, merge_us):
    path = tmp_path_factory.mktemp("tables") / "new" / "folder" / "table.json"
    table = CostTable(fingerprint(), tile, merge_us, unshared, cached)
    table.save(path)
    back = CostTable.load(path, expected=fingerprint())
    assert back.fingerprint == table.fingerprint
    assert back.merge_us == table.merge_us
    assert (back.unshared_us is None) == (unshared is None)
    rows, kv_len = np.array([[1], [50], [999]]), np.array([1, 100, 5000])
    for call in ("tile", "unshared"):
        got, expected = getattr(back, call)(rows, kv_len), getattr(table, call)(rows, kv_len)
        np.testing.assert_allclose(got, expected)
    for readers in (1, 3, 1000):
        np.testing.assert_allclose(
            back.tile(rows, kv_len, readers), table.tile(rows, kv_len, readers)
        )
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_saving_again_replaces_the_file(tmp_path):
    path = tmp_path / "table.json"
    flashforge_table().save(path)
    replace(flashforge_table(), merge_us=2.0).save(path)
    assert CostTable.load(path).merge_us == 2.0


def test_without_a_grid_of_its_own_an_unshared_request_costs_what_its_tile_does():
    table = flashforge_table()
    assert table.unshared(5, 3000) == table.tile(5, 3000)
    own = replace(
        table, unshared_us=Grid(*(np.array(x, float) for x in ([1, 2], [1, 2], [[7, 7], [7, 7]])))
    )
    assert own.unshared(5, 3000) == pytest.approx(7)
    assert own.tile(5, 3000) == table.tile(5, 3000)


@quick(60)
@given(grids(), grids(), st.integers(1, 200), st.integers(1, 9000), st.integers(1, 100))
def test_kv_that_others_read_too_costs_between_memory_and_cache(tile, cached, rows, kv, readers):
    """The sum of one read from memory and the other reads from the cache is spread over all
    readers.
    """
    table = CostTable(fingerprint(), tile, 1.0, tile_l2_us=cached)
    first, rest = float(tile(rows, kv)), float(cached(rows, kv))
    assert table.tile(rows, kv) == pytest.approx(first)
    everyone = first + (readers - 1) * rest
    assert readers * table.tile(rows, kv, readers) == pytest.approx(everyone)


def test_without_a_grid_for_the_cache_other_readers_change_nothing():
    table = flashforge_table()
    assert table.tile(5, 3000, 7) == table.tile(5, 3000)


def test_the_estimate_for_a_gpu_is_near_what_an_h200_measures():
    """Microseconds for 64 tokens of one KV head, head_dim 128, all multiprocessors busy."""
    rates = TileRates.of(analytic_cost(LLAMA, "hopper"), GPU)
    np.testing.assert_allclose(64 * rates.memory, [1.04, 1.04], rtol=0.05)
    np.testing.assert_allclose(64 * rates.cached, [0.68, 0.90], rtol=0.05)
    assert rates.overhead == pytest.approx(2.5, rel=0.1)


@quick(60)
@given(st.floats(0.1, 100), st.floats(0.001, 1), st.floats(0, 0.1), st.floats(0, 10))
def test_rates_of_a_linear_cost_model_are_its_own(launch, per_token, per_row_token, merge):
    rates = TileRates.of(LinearCost(launch, per_token, per_row_token, merge), GPU)
    expected = per_token + per_row_token * np.array([64, 128])
    np.testing.assert_allclose(rates.memory, expected, rtol=1e-6)
    np.testing.assert_allclose(rates.cached, expected, rtol=1e-6)
    assert rates.overhead == pytest.approx(launch, rel=1e-3)
    assert rates.merge == pytest.approx(merge)


@quick(60)
@given(grids(), grids())
def test_rates_are_positive_whatever_was_measured(tile, cached):
    rates = TileRates.of(CostTable(fingerprint(), tile, 0.0, tile_l2_us=cached), GPU)
    assert rates.overhead > 0
    assert np.all(rates.memory > 0)
    assert np.all(rates.cached > 0)


@quick(30)
@given(st.integers(1, 1000))
def test_merging_costs_the_same_for_each_row(rows):
    table = flashforge_table()
    assert table.merge(rows) == pytest.approx(rows * table.merge(1))


DIFFERENT = {
    "device": "NVIDIA A100",
    "num_kv_heads": 4,
    "gqa_group_size": 8,
    "head_dim": 64,
    "dtype": "float16",
    "kv_dtype": "fp8_e4m3",
    "block_size": 32,
    "kernel": "v2",
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_table_of_other_conditions_is_refused_by_the_name_of_the_difference(tmp_path, field):
    path = saved(tmp_path)
    want = fingerprint(**{field: DIFFERENT[field]})
    with pytest.raises(PrefixShareError) as error:
        CostTable.load(path, expected=want)
    difference = f"{field} {getattr(fingerprint(), field)!r} instead of {DIFFERENT[field]!r}"
    assert str(error.value).startswith(f"{path} was measured for {difference}: ")
    assert "vllm-prefixshare profile" in str(error.value)


def test_every_difference_is_named(tmp_path):
    with pytest.raises(PrefixShareError) as error:
        CostTable.load(saved(tmp_path), expected=fingerprint(head_dim=64, kernel="v2"))
    assert "head_dim 128 instead of 64" in str(error.value)
    assert "kernel 'v1' instead of 'v2'" in str(error.value)


def test_any_table_loads_where_nothing_is_expected_of_it(tmp_path):
    assert CostTable.load(saved(tmp_path)).fingerprint == fingerprint()


CORRUPT = {
    "empty": "",
    "not JSON": "{",
    "not text": b"\xff\xfe\x00",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "an empty object": "{}",
    "a string": '"table"',
    "deep": "[" * 100_000,
    "a long number": "1" * 5000,
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_file_that_is_no_cost_table_is_refused(tmp_path, name):
    path = tmp_path / "table.json"
    content = CORRUPT[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PrefixShareError, match=r"not a usable cost table.*profile") as error:
        CostTable.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(PrefixShareError, match="not a usable cost table"):
            CostTable.load(path)


GRID = {"rows": [1, 2], "kv_len": [1, 2], "microseconds": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": {}},
        {"fingerprint": None},
        {"fingerprint": {**asdict(fingerprint()), "colour": "red"}},
        {"tile": None},
        {"tile": "fast"},
        {"tile": {}},
        {"tile": {**GRID, "rows": [2, 1]}},
        {"tile": {**GRID, "rows": 1}},
        {"tile": {**GRID, "rows": [[1, 2], [3, 4]]}},
        {"tile": {**GRID, "rows": ["a", "b"]}},
        {"tile": {**GRID, "kv_len": [1, float("inf")]}},
        {"tile": {**GRID, "microseconds": [[1, 2], [3]]}},
        {"tile": {**GRID, "microseconds": [[1, 2], [3, None]]}},
        {"unshared": {**GRID, "microseconds": [[1, 2], [3, -4]]}},
        {"tile_l2": {**GRID, "microseconds": [[1, 2], [3, -4]]}},
        {"merge_us": None},
        {"merge_us": "much"},
        {"merge_us": -1.0},
        {"merge_us": float("nan")},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_a_table_with_a_damaged_part_is_refused(tmp_path, changes):
    with pytest.raises(PrefixShareError, match="not a usable cost table"):
        CostTable.load(saved(tmp_path, **changes))


@pytest.mark.parametrize("other", [0, 1, FORMAT + 1, None])
def test_a_table_of_another_format_is_refused(tmp_path, other):
    with pytest.raises(PrefixShareError, match=rf"not a usable cost table.*{FORMAT}"):
        CostTable.load(saved(tmp_path, format=other))


@pytest.mark.parametrize("part", ["format", "fingerprint", "tile", "tile_l2", "merge_us"])
def test_a_table_without_one_of_its_parts_is_refused(tmp_path, part):
    path = saved(tmp_path)
    data = json.loads(path.read_text())
    del data[part]
    path.write_text(json.dumps(data))
    with pytest.raises(PrefixShareError, match=part):
        CostTable.load(path)


def test_a_fingerprint_describes_the_attention_it_is_made_of():
    got = Fingerprint.of(LLAMA, device="NVIDIA H200", kernel="v1")
    assert got == Fingerprint("NVIDIA H200", 8, 4, 128, "bfloat16", "bfloat16", 16, "v1")


def test_file_names_are_plain_and_differ_where_fingerprints_do():
    prints = [fingerprint(), *(fingerprint(**{k: v}) for k, v in DIFFERENT.items())]
    names = [p.file_name() for p in prints]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.endswith(".json")
        assert all(c.isalnum() or c in "-._" for c in name)


@pytest.mark.parametrize("executor", ["torch", "native", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES)
@quick(40)
@given(st.integers(1, 300), st.integers(1, 100_000), st.integers(0, 200), st.integers(0, 10_000))
def test_estimates_are_positive_and_rise_with_rows_and_tokens(
    executor, dtype, rows, kv_len, more_rows, more_kv
):
    cost = analytic_cost(replace(LLAMA, dtype=dtype), executor)
    for call in (cost.tile, cost.unshared):
        assert 0 < call(rows, kv_len) < np.inf
        assert call(rows + more_rows, kv_len) >= call(rows, kv_len)
        assert call(rows, kv_len + more_kv) >= call(rows, kv_len)
    assert cost.merge(rows) > 0
    assert cost.merge(rows + more_rows) >= cost.merge(rows)


@pytest.mark.parametrize("executor", ["torch", "native", "hopper"])
def test_an_estimate_charges_the_launch_however_short_the_tile(executor):
    cost = analytic_cost(LLAMA, executor)
    assert isinstance(cost, AnalyticCost)
    assert cost.tile(1, 1) >= cost.roofline.launch_us
    assert cost.tile(4, 20_000) > 2 * cost.tile(4, 16)


@pytest.mark.parametrize("executor", ["torch", "native", "hopper"])
def test_an_estimate_prefers_reading_a_long_prefix_once(executor):
    cost = analytic_cost(LLAMA, executor)
    readers, rows = 16, LLAMA.gqa_group_size
    together = cost.tile(readers * rows, 8192) + cost.merge(readers * rows)
    assert together < readers * cost.unshared(rows, 8192)


def test_arithmetic_has_another_price_with_an_8_bit_cache():
    """A tile of 128 rows, whose KV other tiles read as well, costs its arithmetic."""
    half, quantised = (
        analytic_cost(a, "hopper") for a in (LLAMA, replace(LLAMA, kv_dtype="float8_e4m3fn"))
    )
    launch, factor = half.roofline.launch_us, half.roofline.quantised_flops
    us, quantised_us = (cost.tile(128, 8192, 1 << 20) - launch for cost in (half, quantised))
    assert factor > 1
    assert us == pytest.approx(factor * quantised_us, rel=1e-3)


def test_a_wider_dtype_costs_no_less():
    half, single = (
        analytic_cost(AttentionConfig(32, 8, 128, 16, dtype), "hopper")
        for dtype in ("bfloat16", "float32")
    )
    assert single.tile(4, 4096) >= half.tile(4, 4096)


@quick(100)
@given(*[st.integers(1, 300)] * 4)
def test_fasttrees_decisions_are_those_of_its_equations(left, own, above, below):
    """Equations 3 to 11: ``own`` of the queries read ``below`` tokens after ``above``."""
    model = PaddingCost(128, tile_rows=16, tile_tokens=32)

    def pad(tile, size):
        return tile - ((size - 1) % tile + 1)

    def padding(queries, length):
        along_queries = pad(16, queries) * length * 128 if queries else 0
        return 0.66 * along_queries + 0.33 * queries * pad(32, min(length, 32)) * 128

    split_kv = padding(left + own, above) + padding(own, below) + 0.1 * own * 128
    split_q = padding(left, above) + padding(own, above + below)
    ours_kv = model.tile(left + own, above) + model.tile(own, below) + model.merge(own)
    ours_q = model.tile(left, above) + model.tile(own, above + below)
    assert (ours_kv - ours_q) * 1.2e6 == pytest.approx(split_kv - split_q, abs=1e-3)
    assert model.unshared(own, below) == model.tile(own, below)


@pytest.mark.parametrize("price", [np.inf, np.nan])
@pytest.mark.parametrize("field", ["launch", "per_token", "merge_per_row"])
def test_prices_that_are_no_finite_numbers_are_refused(field, price):
    cost = replace(LinearCost(1.0, 0.1), **{field: price})
    with np.errstate(invalid="ignore"), pytest.raises(PrefixShareError, match="must be finite"):
        DecodePlanner(gpu_config(), cost, 16, 4)
