"""The default ways of decoding with this package in vLLM: kernel, divider and limits, as the
vllm_plugin combines them. Planning for a GPU needs no GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch

from tests.support.planning_cases import gpu_config
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import PieceLimits
from vllm_prefixshare.kernels import gpu_executor
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.kernels.registry import Choice, make_kernel
from vllm_prefixshare.planning.costs.lookup import cost_model

PATHS = ("hopper", "portable", "cpu")
CPU = torch.device("cpu")
H200 = "NVIDIA H200 x132"


@contextmanager
def as_on_a_gpu(multiprocessors: int) -> Iterator[None]:
    """Make the executor find a GPU like an H200, with this number of multiprocessors."""
    gpu = Gpu((9, 0), multiprocessors, 227 << 10)

    def choose(
        attention: AttentionConfig, device: torch.device, kernel: str, query_len: int
    ) -> Choice:
        return Choice(make_kernel(kernel, attention, query_len, gpu), None)

    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(gpu_executor, "choose_kernel", choose),
    ):
        yield


@cache
def executor(
    path: str,
    attention: AttentionConfig,
    query_len: int,
    num_reqs: int,
    multiprocessors: int = 132,
    pieces: PieceLimits | None = None,
) -> GpuExecutor:
    """The GPU executor with its workspace in host memory, as after graphs were captured."""
    with as_on_a_gpu(multiprocessors):
        found = GpuExecutor(attention, CPU, kernel=path, query_len=query_len)
    found.reserve_for(num_reqs, pieces)
    found.workspace.plan.captured = True
    found.workspace.partials.captured = True
    return found


def planner_config(
    path: str,
    attention: AttentionConfig,
    query_len: int,
    num_reqs: int,
    multiprocessors: int = 132,
    pieces: PieceLimits | None = None,
    **options: object,
) -> PlannerConfig:
    """The configuration that ``vllm_plugin`` makes where no variable is set.

    Args:
        pieces: with the divider ``batch_invariant``, as VLLM_BATCH_INVARIANT=1 has it.
    """
    options["null_block_id"] = 0
    if path == "cpu":
        return gpu_config(divider="flashforge", share="auto", **options)
    found = executor(path, attention, query_len, num_reqs, multiprocessors, pieces)
    divider = None if pieces is None else "batch_invariant"
    return found.planner_config(divider, "auto", **options)


def default_cost(path: str, attention: AttentionConfig) -> object:
    """The result of ``costs.lookup``: a shipped table on an H200, an estimate on a CPU."""
    return cost_model(attention, "torch" if path == "cpu" else path, device_name=H200)
