"""Plans that a command shows: made here, or as an engine ran them."""

from dataclasses import dataclass, field, replace

from vllm_prefixshare.cli.attention_time import LAYER_US, plan_time, reading_time
from vllm_prefixshare.cli.batches import NULL_BLOCK_ID, Batch
from vllm_prefixshare.cli.gpus import cost_source, gpu_named, kernel_on
from vllm_prefixshare.cli.recorded_plans import Recorded
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import Forest, PrefixShareError
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.planning.costs.gpus import data_sheet
from vllm_prefixshare.planning.costs.lookup import GPU_KERNELS, KERNELS, cost_model
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.planning.sharing import shareable_forest
from vllm_prefixshare.planning.window import tokens_seen
from vllm_prefixshare.vllm_plugin.observability.tracing import TracedEngine


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is shown.

    default_divider: what the kernel takes if none is named.
    kv_tokens_read: KV tokens that it reads in a layer.
    attention_us: estimated microseconds of a layer's attention.
    unshared: why it shares nothing; None if it shares.
    seconds: time that making it took.
    as_run: whether an engine ran it.
    """

    divider: str
    default_divider: str
    plan: DecodePlan
    kv_tokens_read: int
    attention_us: float
    unshared: str | None
    seconds: float
    as_run: bool = False

    @property
    def title(self) -> str:
        """The divider, marked if it is the default."""
        return f"{self.divider} (default)" if self.divider == self.default_divider else self.divider


@dataclass(frozen=True, slots=True)
class Unshared:
    """A batch in a kernel without sharing: KV tokens that it reads in a layer, and the estimated
    microseconds of the layer's attention.
    """

    kv_tokens: int
    attention_us: float


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
    query_len: int = 1
    on_gpu: bool = True
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
        kernel, limits = kernel_on(gpu, None, attention)
        config = planner_config(limits, attention, null_block_id=NULL_BLOCK_ID)
        cost = cost_model(attention, kernel, device_name=f"{gpu.device} x{gpu.multiprocessors}")
        return cls(attention, config, cost, cost_source(cost, gpu.device))

    @classmethod
    def of_engine(cls, engine: TracedEngine) -> "Layer":
        """A layer that an engine planned for, on its device.

        Raises:
            PrefixShareError: the kernel or the GPU is not known here.
        """
        from vllm_prefixshare.kernels.cpu.base import CpuExecutor

        attention, name = engine.attention, engine.device.rpartition(" x")[0]
        gpu = data_sheet(name)
        if engine.kernel not in KERNELS or (is_on_gpu(engine) and gpu is None):
            raise PrefixShareError(
                f"the {engine.kernel} kernel on {engine.device} is not known here, so nothing can "
                "be planned for it: leave out --compare and --divider."
            )
        if gpu is None:
            config = CpuExecutor(attention).planner_config(null_block_id=NULL_BLOCK_ID)
        else:
            _, limits = kernel_on(gpu, engine.kernel, attention, engine.query_len)
            config = planner_config(limits, attention, null_block_id=NULL_BLOCK_ID)
        cost = cost_model(attention, engine.kernel, device_name=engine.device)
        return cls(
            *(attention, config, cost, cost_source(cost, name), engine.query_len),
            on_gpu=gpu is not None,
        )

    def forest(self, batch: Batch) -> Forest:
        """The blocks that requests of a batch may share."""
        return forest_of(batch, self.attention, self.query_len)

    def plan(self, batch: Batch, forest: Forest, divider: str | None = None) -> Planned:
        """Plan a batch with this divider, or the default one."""
        planner = self._planner(divider or self.config.divider)
        update = planner.update(batch.block_table, batch.seq_lens, self.query_len)
        merge_us = planner.merge_us(update.plan, self.query_len)
        reading = reading_time(forest, self._tokens_seen(batch), self.attention)
        return Planned(
            planner.config.divider,
            self.config.divider,
            update.plan,
            update.plan.kv_tokens_read(batch.seq_lens),
            _attention_us(update.plan, merge_us, reading, self.on_gpu),
            None if update.unshared is None else update.unshared.reason,
            update.seconds,
        )

    def without_sharing(self, batch: Batch, forest: Forest) -> Unshared:
        """The batch in a kernel without sharing."""
        us = self._planner(self.config.divider).unshared_us(batch.seq_lens, self.query_len)
        seen = self._tokens_seen(batch)
        return _unshared(seen, us, reading_time(forest, seen, self.attention), self.on_gpu)

    def _tokens_seen(self, batch: Batch) -> int:
        return tokens_seen(batch.seq_lens, self.attention.sliding_window, self.query_len)

    def _planner(self, divider: str) -> DecodePlanner:
        attention = self.attention
        if divider not in self._planners:
            planner = self._planners[divider] = DecodePlanner(
                replace(self.config, divider=divider),
                self.cost,
                attention.block_size,
                attention.gqa_group_size,
            )
            planner.warm_up()
        return self._planners[divider]


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


def as_run(recorded: Recorded, forest: Forest) -> tuple[Planned, Unshared]:
    """A plan as an engine ran it, and its batch without sharing, by the engine's own prices."""
    engine, made = recorded.engine, recorded.made
    on_gpu = is_on_gpu(engine)
    reading = reading_time(forest, made.kv_tokens, engine.attention)
    unshared = _unshared(made.kv_tokens, made.unshared_us, reading, on_gpu)
    us = _attention_us(made.plan, made.merge_us, reading, on_gpu)
    if made.unshared is not None and not on_gpu:
        us = unshared.attention_us  # vLLM's own kernel runs requests that share nothing
    planned = Planned(
        engine.divider,
        engine.default_divider,
        made.plan,
        made.kv_tokens_read,
        us,
        made.unshared,
        made.seconds,
        as_run=True,
    )
    return planned, unshared


def is_on_gpu(engine: TracedEngine) -> bool:
    """Whether the engine's kernel runs on a GPU."""
    return engine.kernel in GPU_KERNELS


def _attention_us(plan: DecodePlan, merge_us: float, reading: float, on_gpu: bool) -> float:
    return plan_time(plan, reading) if on_gpu else float(plan.worker_us.max()) + merge_us


def _unshared(kv_tokens: int, us: float, reading: float, on_gpu: bool) -> Unshared:
    """A batch without sharing; ``us`` as of ``DecodePlanner.unshared_us``."""
    return Unshared(kv_tokens, LAYER_US + us * reading if on_gpu else us)
