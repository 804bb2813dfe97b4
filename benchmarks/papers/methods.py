"""Ways to plan a layer's attention, as peers that can be timed and as plans whose bytes can be
counted without a GPU.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.papers.merging import Serially, merge_on_gpu
from benchmarks.papers.padding import PaddingCost
from benchmarks.peers import Case, Launch, Options, UnavailableError
from benchmarks.planner.bench import H200
from benchmarks.support.trees import Workload
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.catalog import candidates
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.kernels.interface import HostBatch, Kernel
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.kernels.registry import choose_kernel, make_kernel
from vllm_prefixshare.planning.costs.lookup import cost_model
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks
from vllm_prefixshare.planning.planner import DecodePlanner

#: the GPU whose plans are counted where there is none
PLANNED_GPU = "NVIDIA H200 x132"
#: workers of a CPU's plans, so that there is something to divide
CPU_WORKERS = 16


@dataclass(frozen=True)
class Method:
    """One way to plan.

    kernel: "auto", "hopper" or "portable". divider: None for the kernel's own. cost: "table" for
    the measured table that fits, or the estimate where there is none; "estimate"; "padding" for
    FastTree's coefficient model.
    options: further fields of ``PlannerConfig``. serial: partial results are merged by a launch for
    each request, one after the other, instead of one launch for all.
    """

    title: str
    kernel: str = "auto"
    divider: str | None = None
    share: str = "always"
    cost: str = "table"
    serial: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def on(self, kernel: str) -> "Method":
        """The same on a named kernel."""
        return replace(self, kernel=kernel, title=f"{self.title}, {kernel}")


#: what both kernels of this project do by default
OURS = Method("ours")
PORTABLE = Method("portable", "portable")
#: no prefix is shared, long requests are split: flash-decoding in the same kernel
FLASH_DECODING = Method("flash-decoding", divider="per_request", share="never")
#: neither tree nor division
NEITHER = Method("no tree, undivided", divider="deft_node", share="never")
FLASHFORGE = Method("FlashForge's divider", "portable", "flashforge", options={"grouping": False})
FASTTREE = Method("FastTree's divider", "portable", "fasttree", cost="padding")
DEFT_NODE = Method("DeFT-Node", "portable", "deft_node")
DEFT_NODE_CHUNK = Method(
    "DeFT-Node-Chunk", "portable", "deft_node_chunk", options={"kv_chunk_size": 128}
)
DEFT_FLATTEN = Method("DeFT-Flatten", "portable", "deft_flatten")
#: whose bytes are counted from plans, and by the GPU
COUNTED = (OURS, FLASH_DECODING, FLASHFORGE, FASTTREE, DEFT_NODE_CHUNK)
#: further ones that the GPU counts
OF_TOKEN_TREES = (PORTABLE, DEFT_NODE, DEFT_FLATTEN)


def layer_of(w: Workload, heads: tuple[int, int], dtype: str = "bfloat16") -> AttentionConfig:
    """The attention layer, of head_dim 128, that a workload is run on."""
    return AttentionConfig(*heads, 128, w.block_size, dtype)


@cache
def h200_kernel(name: str, attention: AttentionConfig, query_len: int) -> Kernel:
    """A kernel with the limits and workers that it has on an H200."""
    return make_kernel(candidates(attention, H200, name, query_len)[0], attention, query_len, H200)


def costs(method: Method, attention: AttentionConfig, kernel: str, device: str | None) -> CostModel:
    """The cost model that a method plans with."""
    if method.cost == "padding":
        return PaddingCost(attention.head_dim)
    if method.cost == "estimate" or kernel == "torch":
        return analytic_cost(attention, kernel)
    return cost_model(attention, kernel, device_name=device)


def planner_of(method: Method, w: Workload, heads: tuple[int, int]) -> tuple[DecodePlanner, int]:
    """The planner that an H200 would have for steps of a workload, and how many thread blocks walk
    each run of a plan: one for each tile of a request's query rows.
    """
    attention = layer_of(w, heads)
    kernel = h200_kernel(method.kernel, attention, w.query_len)
    config = planner_config(
        kernel.limits, attention, method.divider, method.share, **method.options
    )
    cost = costs(method, attention, kernel.name, PLANNED_GPU)
    return DecodePlanner(config, cost, w.block_size, attention.gqa_group_size), kernel.row_tiles


class Planned:
    """A peer of ``benchmarks.kernel``: this project's kernel under the plan of a method."""

    serves = ("queries", "token trees")

    def __init__(self, method: Method, options: Options) -> None:
        self.method, self.device = method, options.device

    def prepare(self, case: Case) -> list[Launch]:
        w, method = case.workload, self.method
        dtype = str(case.out_dtype).removeprefix("torch.")
        attention = AttentionConfig(
            case.num_qo_heads, case.num_kv_heads, case.head_dim, w.block_size, dtype
        )
        cuda = case.q.is_cuda
        if cuda:
            executor = GpuExecutor(
                attention, self.device, kernel=method.kernel, query_len=w.query_len
            )
            name = executor.name
        elif w.query_parents is not None:
            raise UnavailableError("token trees need a GPU")
        else:
            executor, name = TorchExecutor(attention, CPU_WORKERS), "torch"
        planner = DecodePlanner(
            executor.planner_config(method.divider, method.share, **method.options),
            costs(method, attention, name, None),
            w.block_size,
            attention.gqa_group_size,
        )
        plan = planner.update(w.block_table, w.seq_lens, w.query_len).plan
        starts = case.query_start_loc().cpu().numpy()
        mask = None
        if w.query_parents is not None:
            mask = ancestor_masks(np.tile(w.query_parents, w.num_reqs), starts)
        executor.prepare(plan, HostBatch(w.block_table, w.seq_lens, starts, mask))
        tables = (case.block_table, case.seq_lens) if cuda else (w.block_table, w.seq_lens)
        out = torch.empty_like(case.q)
        run, merging = executor.run, ""
        if method.serial:
            if w.query_len > 1:
                raise UnavailableError("one query a request only")
            if cuda:
                # the executor's own, because choices are kept
                chosen = choose_kernel(attention, executor.device, method.kernel, w.query_len)
                serially = Serially(chosen.kernel, merge_on_gpu, executor.workspace, plan)
            else:
                serially = Serially.on_cpu(plan, attention)
            run, tables = serially.run, (case.block_table, case.seq_lens)
            merging = f" merged by {len(serially.requests)} launches"

        def call() -> torch.Tensor:
            return run(case.q, case.k_cache, case.v_cache, *tables, out, case.sm_scale)

        read = plan.kv_tokens_read(w.seq_lens) / w.kv_tokens
        note = (
            f"{name}, {plan.num_tiles} tiles, {plan.num_partials} partials{merging}, "
            f"KV read {read:.2f}x, plan {planner.counters.plan_seconds * 1e3:.2f} ms"
        )
        return [Launch(call, note, graph=cuda)]
