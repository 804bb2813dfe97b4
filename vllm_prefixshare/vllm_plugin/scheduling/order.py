"""vLLM's schedulers with their waiting requests in prefix order, and which engine gets them."""

import math
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.observability.log import logger
from vllm_prefixshare.vllm_plugin.scheduling.external_prefixes import hold_followers
from vllm_prefixshare.vllm_plugin.scheduling.prefix_queue import PrefixQueue

#: Seconds that a request on a server may lose to later ones, unless the settings name a bound.
SERVER_BOUND = 2.0


def order_requests(config: Any, offline: bool) -> None:
    """Give a finished ``VllmConfig`` a scheduler in prefix order, if the settings ask for it.

    Args:
        offline: whether the engine serves ``vllm.LLM``.

    Raises:
        PrefixShareError: the settings ask for ``prefix``, and the engine has no prefix cache or a
            custom scheduler.
    """
    order = settings().order
    if order == "off" or (order == "auto" and not offline):
        if settings().order_bound is not None:
            logger().warning_once(
                "VLLM_PREFIXSHARE_ORDER_BOUND has no effect: waiting requests are not ordered "
                "here, unless VLLM_PREFIXSHARE_ORDER=prefix."
            )
        return
    base = config.scheduler_config.get_scheduler_cls()
    if not config.cache_config.enable_prefix_caching:
        missing = "the prefix cache: switch prefix caching on"
    elif base not in _SCHEDULERS:
        missing = "one of vLLM's own schedulers: leave scheduler_cls unset"
    else:
        config.scheduler_config.scheduler_cls = _SCHEDULERS[base][offline]
        return
    if order == "prefix":
        raise PrefixShareError(
            f"VLLM_PREFIXSHARE_ORDER=prefix needs {missing}, or set the variable to off."
        )


class _PrefixOrder:
    """Gives a vLLM scheduler a ``PrefixQueue`` for its waiting requests.

    bound: seconds, as in ``PrefixQueue``, unless the settings name a bound.
    """

    bound = SERVER_BOUND

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        groups = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        if not groups:  # a model without attention
            return
        # groups of other kinds do not cache blocks that have left their window
        full = (i for i, spec in enumerate(groups) if isinstance(spec, FullAttentionSpec))
        group_id = next(full, 0)

        def cached(block_hash: bytes) -> bool:
            return pool.get_cached_block(block_hash, [group_id]) is not None

        def hit(request: Request) -> int:
            max_tokens = request.num_tokens - 1  # vLLM computes the last token in any case
            find = manager.coordinator.find_longest_cache_hit
            num_tokens: int = find(request.block_hashes, max_tokens)[1]
            return num_tokens // pool.hash_block_size

        full_attention_only = all(isinstance(spec, FullAttentionSpec) for spec in groups)
        bound = settings().order_bound
        scheduler.waiting = PrefixQueue(
            cached,
            self.bound if bound is None else bound,
            by_priority=scheduler.policy == SchedulingPolicy.PRIORITY,
            stride=max(1, groups[group_id].block_size // pool.hash_block_size),
            hit=None if full_attention_only else hit,
        )
        if scheduler.connector is not None:
            hold_followers(scheduler.connector, pool.hash_block_size)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As in vLLM; tells the queue when a step begins and which requests it starts."""
        scheduler: Any = self
        parent: Any = super()
        queue = scheduler.waiting
        if not isinstance(queue, PrefixQueue):
            return parent.schedule(*args, **kwargs)
        queue.begin_step()
        step = parent.schedule(*args, **kwargs)
        queue.end_step(scheduler.requests[new.req_id] for new in step.scheduled_new_reqs)
        return step


# Module-level classes instead of closures: a configuration is pickled for the engine core's
# process, and vLLM checks the type of what it copies.


class PrefixOrderScheduler(_PrefixOrder, Scheduler):
    """vLLM's scheduler with waiting requests in prefix order."""


class PrefixOrderAsyncScheduler(_PrefixOrder, AsyncScheduler):
    """vLLM's asynchronous scheduler with waiting requests in prefix order."""


class OfflinePrefixOrderScheduler(PrefixOrderScheduler):
    """For ``vllm.LLM``: later requests may overtake without bound."""

    bound = math.inf


class OfflinePrefixOrderAsyncScheduler(PrefixOrderAsyncScheduler):
    """For ``vllm.LLM``: later requests may overtake without bound."""

    bound = math.inf


#: vLLM's scheduler -> its replacement on a server, and offline
_SCHEDULERS: dict[type, tuple[type, type]] = {
    Scheduler: (PrefixOrderScheduler, OfflinePrefixOrderScheduler),
    AsyncScheduler: (PrefixOrderAsyncScheduler, OfflinePrefixOrderAsyncScheduler),
}
