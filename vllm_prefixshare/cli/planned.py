"""Plans that a command shows, made here or as an engine ran them, with estimated times."""

from dataclasses import dataclass, field, replace

import numpy as np

from vllm_prefixshare.cli.batches import NULL_BLOCK_ID, Batch, Recorded
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import Forest, PrefixShareError
from vllm_prefixshare.kernels.catalog import CATALOG, SHARED_MEMORY, Gpu, candidates
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.planning.costs.gpus import GPUS, MEASURED, NamedGpu, data_sheet
from vllm_prefixshare.planning.costs.lookup import GPU_KERNELS, KERNELS, cost_model
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.roofline import AnalyticCost
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.planning.sharing import shareable_forest
from vllm_prefixshare.planning.window import tokens_seen
from vllm_prefixshare.vllm_plugin.observability.tracing import TracedPlan

#: Microseconds of a layer in addition to its busiest work queue: launches, start and merging.
#: On an H200, in 28 published cells, 4 to 26 and 10 in the median; taken for both sides.
LAYER_US = 10.0
#: Time without sharing of a token that another request reads as well, over that of a token from
#: memory: 0.60 to 0.67 with FlashAttention-3 on an H200, where documents of 2k tokens and more are
#: read again from the L2 cache.
READ_AGAIN = 0.63
#: The same for MLA caches, where arithmetic decides: with it gains are 0.88 to 1.02 of the measured
#: ones on an H200, in 16 published cells with 8 to 32 heads.
LATENT_AGAIN = 0.85


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is shown, next to attention without sharing.

    default_divider: what the kernel takes if none is named.
    unshared_us, attention_us: estimated microseconds of a layer's attention, in a kernel without
        sharing and by the plan.
    as_run: whether an engine ran it.
    """

    divider: str
    default_divider: str
    made: TracedPlan
    unshared_us: float
    attention_us: float
    as_run: bool = False

    @property
    def title(self) -> str:
        """The divider, marked if it is the default."""
        return f"{self.divider} (default)" if self.divider == self.default_divider else self.divider

    @property
    def share_factor(self) -> float:
        """KV tokens without sharing over KV tokens that the plan reads."""
        return self.made.kv_tokens / max(1, self.made.kv_tokens_read)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer to plan for.

    config: limits of the kernel, and its default divider.
    cost_source: where ``cost`` comes from.
    query_len: maximum number of query tokens of a request.
    on_gpu: whether a GPU runs the plans.
    """

    attention: AttentionConfig
    config: PlannerConfig
    cost: CostModel
    cost_source: str
    query_len: int
    on_gpu: bool
    _planners: dict[str, DecodePlanner] = field(default_factory=dict, init=False)

    @classmethod
    def on(cls, name: str, attention: AttentionConfig) -> "Layer":
        """A layer with the kernel's limits and the costs that an engine would have on a GPU.

        Args:
            name: one of ``planning.costs.gpus.GPUS``.

        Raises:
            PrefixShareError: an unknown GPU, or a shape that no kernel serves.
        """
        gpu = gpu_named(name)
        kernel = candidates(attention, _catalogued(gpu), "auto", 1)[0]
        return cls.of_engine(attention, kernel, f"{gpu.device} x{gpu.multiprocessors}")

    @classmethod
    def of_engine(
        cls, attention: AttentionConfig, kernel: str, device: str, query_len: int = 1
    ) -> "Layer":
        """A layer that an engine plans for, on its device; arguments as in ``TracedEngine``.

        Raises:
            PrefixShareError: the kernel or the GPU is not known here.
        """
        name = device.rpartition(" x")[0]
        gpu = data_sheet(name)
        if kernel not in KERNELS or (kernel in GPU_KERNELS and gpu is None):
            raise PrefixShareError(
                f"the {kernel} kernel on {device} is not known here, so nothing can be planned for "
                "it: leave out --compare and --divider."
            )
        if gpu is None:
            from vllm_prefixshare.kernels.cpu.base import CpuExecutor

            config = CpuExecutor(attention).planner_config(null_block_id=NULL_BLOCK_ID)
        else:
            limits = CATALOG[kernel].limits(attention, query_len, _catalogued(gpu))
            config = planner_config(limits, attention, null_block_id=NULL_BLOCK_ID)
        cost = cost_model(attention, kernel, device_name=device)
        source = _cost_source(cost, name)
        return cls(attention, config, cost, source, query_len, on_gpu=gpu is not None)

    def plan(self, batch: Batch, divider: str | None = None) -> Planned:
        """Plan a batch with this divider, or the default one."""
        name = divider or self.config.divider
        planner = self._planner(name)
        table, lens, query_len = batch.block_table, batch.seq_lens, self.query_len
        update = planner.update(table, lens, query_len)
        made = TracedPlan(
            update.plan,
            table,
            lens,
            tokens_seen(lens, self.attention.sliding_window, query_len),
            update.plan.kv_tokens_read(lens),
            planner.merge_us(update.plan, query_len),
            self._planner(self.config.divider).unshared_us(lens, query_len),
            None if update.unshared is None else update.unshared.reason,
            update.seconds,
        )
        forest = forest_of(batch, self.attention, query_len)
        times = _attention_times(made, forest, self.attention, self.on_gpu)
        return Planned(name, self.config.divider, made, *times)

    def _planner(self, divider: str) -> DecodePlanner:
        if divider not in self._planners:
            planner = self._planners[divider] = DecodePlanner(
                replace(self.config, divider=divider),
                self.cost,
                self.attention.block_size,
                self.attention.gqa_group_size,
            )
            planner.warm_up()
        return self._planners[divider]


def as_run(recorded: Recorded, forest: Forest) -> Planned:
    """A plan as an engine ran it, by the engine's own prices.

    Args:
        forest: of its batch, see ``forest_of``.
    """
    engine, made = recorded.engine, recorded.made
    on_gpu = engine.kernel in GPU_KERNELS
    unshared_us, attention_us = _attention_times(made, forest, engine.attention, on_gpu)
    if made.unshared is not None and not on_gpu:
        attention_us = unshared_us  # vLLM's own kernel runs requests that share nothing
    return Planned(
        engine.divider, engine.default_divider, made, unshared_us, attention_us, as_run=True
    )


def forest_of(batch: Batch, attention: AttentionConfig, query_len: int = 1) -> Forest:
    """The blocks that requests of a batch may share in layers of this shape."""
    return shareable_forest(
        batch.block_table,
        batch.seq_lens,
        batch.block_size,
        query_len,
        NULL_BLOCK_ID,
        sliding_window=attention.sliding_window,
    )


def gpu_named(name: str) -> NamedGpu:
    """The GPU of this name in ``GPUS``, in any case.

    Raises:
        PrefixShareError: there is none.
    """
    gpu = GPUS.get(name.upper().replace(" ", ""))
    if gpu is None:
        raise PrefixShareError(f"GPU {name!r} is not known: use one of {', '.join(GPUS)}.")
    return gpu


def _catalogued(gpu: NamedGpu) -> Gpu:
    return Gpu(gpu.capability, gpu.multiprocessors, SHARED_MEMORY[gpu.capability] << 10)


def _cost_source(cost: CostModel, device: str) -> str:
    """Where the costs of a device come from."""
    if not isinstance(cost, AnalyticCost):
        return f"cost table measured on {device}"
    sheet = data_sheet(device)
    if sheet is None:
        return f"roofline of common hardware, not measured on {device}"
    if sheet is MEASURED:
        return f"roofline of {device}"
    return f"roofline of {device}, scaled from an H200 by data sheet, not measured"


def _attention_times(
    made: TracedPlan, forest: Forest, attention: AttentionConfig, on_gpu: bool
) -> tuple[float, float]:
    """Estimated microseconds of a layer's attention, without sharing and by the plan."""
    busiest_us = float(made.plan.worker_us.max())
    if not on_gpu:
        return made.unshared_us, busiest_us + made.merge_us
    # the time to read a batch request by request, over that of as many tokens from memory
    again = READ_AGAIN if attention.kv_lora_rank is None else LATENT_AGAIN
    readers = forest.node_reader_end - forest.node_reader_start
    shared_tokens = (forest.node_end - forest.node_start).astype(np.int64) @ (readers - 1)
    reading = 1 - (1 - again) * min(1.0, int(shared_tokens) / made.kv_tokens)
    planned_us = busiest_us if made.plan.shares else busiest_us * reading
    return LAYER_US + made.unshared_us * reading, LAYER_US + planned_us
