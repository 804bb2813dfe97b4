"""The planner of one KV-cache group, made from the settings of the process."""

from functools import partial
from typing import Any

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.interface import Executor
from vllm_prefixshare.planning.costs.lookup import cost_model
from vllm_prefixshare.planning.costs.roofline import AnalyticCost
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.planning.unshared import NO_COMMON_PREFIX, SHARING_OFF
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin import invariance
from vllm_prefixshare.vllm_plugin.observability import metrics
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.observability.stats import (
    NO_COST_TABLE,
    PREFIX_CACHING_OFF,
    STATS,
)
from vllm_prefixshare.vllm_plugin.observability.tracing import trace_to

NULL_BLOCK_ID = 0  # pads vLLM's block tables; never holds a request's tokens


def planner_for(
    executor: Executor, attention: AttentionConfig, vllm_config: Any, invariant: bool = False
) -> DecodePlanner:
    """A planner for ``executor``.

    Args:
        invariant: plan as batch invariance needs.

    Raises:
        PrefixShareError: a cost table that was named does not fit.
    """
    chosen = settings()
    cost = cost_model(attention, executor.name, logger().info_once)
    share = chosen.share
    causes = {}
    if not vllm_config.cache_config.enable_prefix_caching:
        causes[NO_COMMON_PREFIX] = PREFIX_CACHING_OFF
    if share == "auto" and not executor.trusts_estimates and isinstance(cost, AnalyticCost):
        share = "never"
        causes[SHARING_OFF] = NO_COST_TABLE
    STATS.note_engine(executor.name, causes)
    logger().info_once("PREFIX_SHARE decodes with the %s kernel.", executor.name)
    pieces = {"kv_chunk_size": invariance.piece_tokens(vllm_config)} if invariant else {}
    config = executor.planner_config(
        invariance.DIVIDER if invariant else chosen.divider,
        share,
        null_block_id=NULL_BLOCK_ID,
        # with n pipeline stages, n batches take turns
        kept_plans=vllm_config.parallel_config.pipeline_parallel_size,
        check_plans=chosen.check_plans,
        **pieces,
    )
    # vLLM remembers the backends that the first engine of this process chose, and asks no more.
    metrics.start_in_worker(vllm_config)
    trace = None if chosen.trace is None else trace_to(chosen.trace)
    return DecodePlanner(
        config,
        cost,
        attention.block_size,
        attention.gqa_group_size,
        on_failure=logger().warning,
        on_plan=None if trace is None else partial(trace.record, config.divider),
    )
