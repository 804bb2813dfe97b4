"""The cost table's interpolation beside times measured at other shapes (FlashForge, table 2)."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.experiment import Figures
from benchmarks.papers.timing import machine
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.planning.costs.lookup import cost_model
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable, Grid
from vllm_prefixshare.profiling.gpu_table import ROWS, TileBench, measure_gpu
from vllm_prefixshare.profiling.gpu_table import TOKENS as TABLE_TOKENS
from vllm_prefixshare.profiling.gpu_timing import capture

#: requests of a tile, of four query rows each; those that a kernel has no room for are left out
REQUESTS = (1, 2, 5, 10, 16, 20, 32)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
REPEATS = 9


def errors(kernel: str) -> Figures:
    """Measured and interpolated microseconds over the grid, on the GPU that is here."""
    attention = AttentionConfig(32, 8, 128, 16)
    timer, _ = machine("cuda")

    def make(shape: AttentionConfig) -> GpuExecutor:
        return GpuExecutor(shape, "cuda", kernel=kernel)

    def microseconds(call) -> float:
        return timer.time(capture(call)[0].replay, REPEATS).median_ms * 1e3

    table = cost_model(attention, kernel)
    source = "shipped, or measured on this machine before"
    if not isinstance(table, CostTable):
        table = measure_gpu(attention, make, microseconds)
        source = "measured now"
    bench = TileBench(attention, make, microseconds, TOKENS)
    requests = [n for n in REQUESTS if n <= bench.requests[-1]]
    measured = np.array([[bench.tile(n, tokens, False) for tokens in TOKENS] for n in requests])
    query_rows = np.array(requests) * bench.attention.gqa_group_size
    estimated = table.tile(query_rows[:, None], np.array(TOKENS))
    return compared(source, query_rows, measured, estimated)


def toy_errors() -> Figures:
    """As ``errors`` without a GPU: what the table interpolates is an estimate at the table's
    shapes, and what is measured is the same estimate at the others.
    """
    attention = AttentionConfig(32, 8, 128, 16)
    cost = analytic_cost(attention, "hopper")
    rows, tokens = np.array(ROWS, np.float64), np.array(TABLE_TOKENS, np.float64)
    table = Grid(rows, tokens, cost.tile(rows[:, None], tokens))
    query_rows = np.array(REQUESTS) * attention.gqa_group_size
    grid = query_rows[:, None], np.array(TOKENS)
    return compared("of an estimate", query_rows, cost.tile(*grid), table(*grid))


def compared(source: str, query_rows: NDArray, measured: NDArray, estimated: NDArray) -> Figures:
    error = np.abs(estimated - measured) / measured
    return {
        "table": source,
        "rows": query_rows.tolist(),
        "tokens": list(TOKENS),
        "measured_us": measured.round(2).tolist(),
        "estimated_us": estimated.round(2).tolist(),
        "median": float(np.median(error)),
        "largest": float(error.max()),
    }
