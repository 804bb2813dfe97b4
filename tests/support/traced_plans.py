"""Plans that are recorded in a trace, as an engine records them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.variables import set_variables
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.interface import Executor
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.vllm_plugin.observability import tracing
from vllm_prefixshare.vllm_plugin.step.first_step import TokenRows
from vllm_prefixshare.vllm_plugin.step.host_tables import PassedTable, RowTable
from vllm_prefixshare.vllm_plugin.step.planner import PlannedStep, StepBatch, StepPlanner

SHAPE = AttentionConfig(4, 2, 64, 16)
TABLE = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 0]], np.int32)
LENS = np.array([60, 52, 40], np.int32)
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    cache_config=SimpleNamespace(enable_prefix_caching=True),
)


class Group:
    """The planner of a KV-cache group, as an engine makes it.

    Args:
        executor: PyTorch's on a CPU if None.
    """

    def __init__(
        self, attention: AttentionConfig = SHAPE, executor: Executor | None = None, **options
    ) -> None:
        executor = executor or TorchExecutor(attention)
        query_len = options.pop("query_len", 1)
        window = attention.sliding_window
        self.planner = StepPlanner(executor, attention, CONFIG, query_len, window=window, **options)

    def step(
        self, table: np.ndarray, lens: np.ndarray, new: np.ndarray | None = None, **slots
    ) -> PlannedStep:
        """Plan a step.

        Args:
            new: ``[num_reqs]`` query tokens of each request, each a row of the plan; if None, each
                request has one.
            slots: arguments of ``PassedTable``, for a table that is not in the batch's order.
        """
        held = PassedTable(table, **slots) if slots else RowTable(table)
        counts = np.ones(len(lens), np.int32) if new is None else new
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        longest = int(counts.max(initial=0))
        batch = StepBatch(held, len(lens), int(starts[-1]), starts, longest, lens)
        return self.planner.plan(batch, None if new is None else TokenRows.of(starts, len(lens)))

    def update(self, table: np.ndarray, lens: np.ndarray, **slots) -> DecodePlan | None:
        """The plan of a step."""
        return self.step(table, lens, **slots).plan


def record_in(path: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record plans in ``path``, which share what can be shared."""
    trace = {} if path is None else {"TRACE": str(path)}
    set_variables(monkeypatch, SHARE="always", **trace)
    tracing.trace_to.cache_clear()
