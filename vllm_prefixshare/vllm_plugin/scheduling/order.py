"""A queue of waiting requests: vLLM starts those that share a prefix together, while that prefix is
cached. It replaces vLLM's own queue; the scheduler stays as it is.

A block hash covers the whole prefix up to its block, so a dictionary from hash to requests is a
trie. It holds four depths for each doubling (``DEPTHS``) instead of every depth: the shared length
is known to within a fifth, with some thirty entries instead of thousands.
"""

import bisect
import functools
import heapq
import itertools
import math
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.observability.log import logger

#: Seconds that a request on a server may lose to later ones, unless the settings say otherwise.
SERVER_BOUND = 2.0

#: Prefix lengths, in blocks, by which requests are compared.
DEPTHS = [1]
while DEPTHS[-1] < 1 << 20:
    DEPTHS.append(DEPTHS[-1] + max(1, DEPTHS[-1] // 4))

#: Requests per level whose prefill is followed.
FOLLOWED = 16

#: Maximum number of requests whose cached prefix is looked up to choose the next one.
MAX_LOOKUPS = 4

Request = Any  # vllm.v1.request.Request


class _Waiting(NamedTuple):
    """A waiting request.

    hashes: of its first ``DEPTHS[i]`` blocks. given: ``_Level.given()`` when it came.
    """

    hashes: list[bytes]
    given: float


def _computes(request: Request) -> bool:
    """Whether a request that was taken still computes its prompt, or waits for a part of it."""
    return request.num_computed_tokens < request.num_prompt_tokens and not request.is_finished()


def _num_shared_blocks(a: Request, b: Request) -> int:
    """How many block hashes two requests have in common; a hash covers all blocks before it."""
    both = range(min(len(a.block_hashes), len(b.block_hashes)))
    return bisect.bisect(both, 0, key=lambda i: a.block_hashes[i] != b.block_hashes[i])


class _Level:
    """Waiting requests of one priority. All of ``add``, ``choose``, ``take`` and ``remove`` take
    time proportional to ``len(DEPTHS)``, however many requests wait; ``choose`` with ``hit`` looks
    up ``MAX_LOOKUPS`` requests, too.
    """

    def __init__(
        self,
        cached: Callable[[bytes], bool],
        bound: float,
        stride: int,
        clock: Callable[[], float],
        hit: Callable[[Request], int] | None,
    ) -> None:
        self._cached = cached
        self._hit = hit
        self._bound = bound
        self._stride = stride
        self._clock = clock
        #: requests that the scheduler put back, pre-empted or skipped; they go first, as in vLLM
        self._front: deque[Request] = deque()
        self._waiting: OrderedDict[Request, _Waiting] = OrderedDict()  # by age
        #: hash -> requests, by age
        self._sharing: defaultdict[bytes, OrderedDict[Request, None]] = defaultdict(OrderedDict)
        #: for each depth: hashes with waiting requests that were cached when last seen, the most
        #: recently used last
        self._warm: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in DEPTHS]
        #: requests that were taken and whose prompts are not computed yet, by the last of their
        #: hashes; with these hashes, and how many of them have been listed
        self._computing: dict[bytes, tuple[Request, list[bytes], int]] = {}
        self._followed_in = -1
        self._given = 0.0
        #: the last step in which requests were taken that had not been put back, when the first one
        #: was, and whether one of them overtook another request
        self._taken_in = -1
        self._taken_at = 0.0
        self._overtakes = False
        #: requests that overtook others and were skipped: put back, or kept by vLLM elsewhere
        self._late: weakref.WeakSet[Request] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._front) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        yield from self._front
        yield from self._waiting

    def add(self, request: Request) -> None:
        hashes = self._hashes(request)
        self._waiting[request] = _Waiting(hashes, self.given())
        for key in hashes:
            self._sharing[key][request] = None
        for warm, key in zip(self._warm, hashes, strict=False):
            if key not in warm:
                if not self._cached(key):
                    break
                warm[key] = None
                warm.move_to_end(key, last=False)

    def prepend(self, request: Request) -> None:
        self._front.appendleft(request)

    def given(self) -> float:
        """Total seconds given to requests that overtook others: each from when the first request of
        its step was taken until one of a later step was, those put back not counted; where it was
        skipped, again from the step in which it starts. The oldest request lost at most the
        increase since it came, and others no more.
        """
        return self._given + (self._clock() - self._taken_at if self._overtakes else 0.0)

    def choose(self, step: int) -> Request:
        """The request to take next; there must be one. ``step`` counts from 0."""
        if self._front:
            return self._front[0]
        if step != self._followed_in:
            self._followed_in = step
            self._follow()
        oldest, waiting = next(iter(self._waiting.items()))
        if self.given() - waiting.given >= self._bound:
            return oldest
        rejected: set[Request] = set()
        for warm in reversed(self._warm):
            passed = 0
            while passed < len(warm):
                key = next(itertools.islice(reversed(warm), passed, None))
                if not self._cached(key):
                    del warm[key]  # evicted, or not computed yet: listed again when it is
                    continue
                request = next(iter(self._sharing[key]))
                if request not in rejected:
                    if self._may_overtake(request):
                        return request
                    rejected.add(request)
                    if len(rejected) == MAX_LOOKUPS:
                        return oldest
                passed += 1
        return oldest

    def _may_overtake(self, request: Request) -> bool:
        """Whether ``request`` finds as many cached tokens now as after all older requests.

        It does if its hit covers what it shares with each of them: they add no blocks to the cache
        that it could use, nor it any for them. Of those that run, the ones that still compute their
        prompts count. Of those that wait, with full attention alone none counts, for ``request`` is
        the oldest with a cached hash. A group with windows or states caches few places of a prefix,
        such as the ends of prompts, and a request may need the place that an older one adds.
        """
        if request is next(iter(self._waiting)):
            return True
        for other, _, _ in self._computing.values():
            if _computes(other):
                shared = _num_shared_blocks(request, other) // self._stride * self._stride
                if shared and not self._covers(request, shared):
                    return False
        if self._hit is None:
            return True
        for key in reversed(self._waiting[request].hashes):
            if next(iter(self._sharing[key])) is not request:
                break
        else:
            return True  # no older request has its first block
        hashes = request.block_hashes
        end = self._hit(request)
        older = itertools.takewhile(lambda other: other is not request, self._sharing[key])
        return end >= len(hashes) or all(
            len(other.block_hashes) <= end or other.block_hashes[end] != hashes[end]
            for other in older
        )

    def _covers(self, request: Request, num_blocks: int) -> bool:
        """Whether the first ``num_blocks`` blocks of ``request`` are a hit."""
        if self._hit is None:
            return self._cached(request.block_hashes[num_blocks - 1])
        return self._hit(request) >= num_blocks

    def take(self, request: Request, step: int) -> None:
        """Remove ``request``, which is about to run: requests with its prefix should follow.
        ``step`` counts from 0.
        """
        if self._front and self._front[0] is request:
            # it may be skipped once more: lost time goes on
            self._front.popleft()
            hashes = self._hashes(request)
        else:
            if step != self._taken_in:
                self._given = self.given()
                self._taken_in, self._taken_at = step, self._clock()
                self._overtakes = False
            if request is not next(iter(self._waiting)):
                self._overtakes = True
                self._late.add(request)
            hashes = self._forget(request)
            if hashes:
                self._computing.pop(hashes[-1], None)  # else it would keep its old place
                self._computing[hashes[-1]] = request, hashes, 0
                if len(self._computing) > FOLLOWED:
                    del self._computing[next(iter(self._computing))]
        self._list(hashes, 0, len(hashes))

    def start(self, request: Request, began: float) -> None:
        """Note that ``request`` runs, from the step on that began then."""
        if request in self._late:
            self._late.remove(request)
            if not self._overtakes:
                self._taken_at, self._overtakes = began, True

    def _follow(self) -> None:
        """List what requests taken in earlier steps have computed since."""
        for last, (request, hashes, listed) in list(self._computing.items()):
            end = len(hashes) if self._cached(last) else listed
            while end < len(hashes) and self._cached(hashes[end]):
                end += 1
            self._list(hashes, listed, end)
            if not request.is_finished() and (end < len(hashes) or _computes(request)):
                self._computing[last] = request, hashes, end
            else:
                del self._computing[last]

    def _list(self, hashes: list[bytes], begin: int, end: int) -> None:
        """Note that requests with the hashes of these depths should follow."""
        for depth in range(begin, end):
            if (key := hashes[depth]) in self._sharing:
                self._warm[depth][key] = None
                self._warm[depth].move_to_end(key)

    def remove(self, requests: set[Request]) -> None:
        """Remove those of ``requests`` that wait here."""
        for request in requests & self._waiting.keys():
            self._forget(request)
        self._front = deque(r for r in self._front if r not in requests)

    def _forget(self, request: Request) -> list[bytes]:
        hashes = self._waiting.pop(request).hashes
        for warm, key in zip(self._warm, hashes, strict=False):
            sharing = self._sharing[key]
            del sharing[request]
            if not sharing:
                del self._sharing[key]
                warm.pop(key, None)
        return hashes

    def _hashes(self, request: Request) -> list[bytes]:
        found, stride = request.block_hashes, self._stride
        end = bisect.bisect_right(DEPTHS, len(found) // stride)
        return [found[depth * stride - 1] for depth in DEPTHS[:end]]


class PrefixQueue(RequestQueue):
    """A queue whose next request is the one with the longest cached prefix, else the oldest. No
    request overtakes an older one whose blocks it could use.

    Requests that were put back go first. Priorities come before all this. Once a request has lost
    the bound to later ones of its priority, no more of these are chosen before it.

    Args:
        cached: whether the block with this hash is in the KV cache.
        bound: seconds, infinity for none.
        by_priority: whether ``Request.priority`` counts; smaller values go first.
        stride: block hashes for each block that ``cached`` knows.
        clock: seconds of a monotonic clock.
        hit: how many of a request's block hashes the KV cache has for all groups; None if it has a
            request's prefix wherever ``cached`` has its last block.
    """

    def __init__(
        self,
        cached: Callable[[bytes], bool],
        bound: float,
        by_priority: bool = False,
        stride: int = 1,
        clock: Callable[[], float] = time.monotonic,
        hit: Callable[[Request], int] | None = None,
    ) -> None:
        self._clock = clock
        self._new_level = functools.partial(_Level, cached, bound, stride, clock, hit)
        self._by_priority = by_priority
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # a heap of the keys above
        #: (request, its level) last peeked at, to be taken even if the cache has changed since
        self._seen: tuple[Request, _Level] | None = None
        self._step, self._began = 0, clock()

    def _level_of(self, request: Request) -> _Level:
        self._seen = None
        priority = request.priority if self._by_priority else 0
        if priority not in self._levels:
            self._levels[priority] = self._new_level()
            heapq.heappush(self._priorities, priority)
        return self._levels[priority]

    def _look(self) -> tuple[Request, _Level]:
        while self._priorities:
            level = self._levels[self._priorities[0]]
            if len(level):
                return level.choose(self._step), level
            if not self._by_priority:
                break
            del self._levels[heapq.heappop(self._priorities)]
        raise IndexError("no request is waiting")

    def begin_step(self) -> None:
        """Requests taken from now on start in another step: only time between steps is lost."""
        self._step, self._began = self._step + 1, self._clock()

    def end_step(self, started: Iterable[Request]) -> None:
        """The requests in ``started`` run from this step on. The others taken were skipped."""
        for request in started:
            self._level_of(request).start(request, self._began)

    def add_request(self, request: Request) -> None:
        """Let ``request`` wait."""
        self._level_of(request).add(request)

    def peek_request(self) -> Request:
        """The next request, which stays."""
        self._seen = self._look()
        return self._seen[0]

    def pop_request(self) -> Request:
        """Remove and return the next request."""
        request, level = self._seen or self._look()
        self._seen = None
        level.take(request, self._step)
        return request

    def prepend_request(self, request: Request) -> None:
        """Put back ``request``, which goes first."""
        self._level_of(request).prepend(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put back each of ``requests`` in turn, so that the last one goes first."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove ``request`` if it waits here."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of ``requests`` that wait here."""
        self._seen = None
        gone = set(requests)
        for level in self._levels.values():
            level.remove(gone)

    def __bool__(self) -> bool:
        return any(len(level) for level in self._levels.values())

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        """Requests by priority, then those put back, then by age. The order in which they will be
        taken is not known in advance.
        """
        for priority in sorted(self._levels):
            yield from self._levels[priority]


def order_requests(config: Any, offline: bool) -> None:
    """Let the scheduler of a finished ``VllmConfig`` order its requests, if the settings say so.

    Args:
        offline: whether it serves ``vllm.LLM``.

    Raises:
        PrefixShareError: ``prefix`` is asked for, and the engine has no prefix cache or a
            scheduler that is none of vLLM's own.
    """
    wish = settings().order
    if wish == "off" or (wish == "auto" and not offline):
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
    if wish == "prefix":
        raise PrefixShareError(
            f"VLLM_PREFIXSHARE_ORDER=prefix needs {missing}, or set the variable to off."
        )


class _PrefixOrder:
    """Gives a vLLM scheduler a ``PrefixQueue`` for its waiting requests.

    bound: of the queue, in seconds, unless the settings name one.
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
            most = request.num_tokens - 1  # vLLM computes the last token in any case
            found = manager.coordinator.find_longest_cache_hit(request.block_hashes, most)
            tokens: int = found[1]
            return tokens // pool.hash_block_size

        dense = all(isinstance(spec, FullAttentionSpec) for spec in groups)
        wished = settings().order_bound
        scheduler.waiting = PrefixQueue(
            cached,
            self.bound if wished is None else wished,
            by_priority=scheduler.policy == SchedulingPolicy.PRIORITY,
            stride=max(1, groups[group_id].block_size // pool.hash_block_size),
            hit=None if dense else hit,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: start requests and choose the tokens of a step."""
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
    """The same for asynchronous scheduling."""


class OfflinePrefixOrderScheduler(PrefixOrderScheduler):
    """The same for ``vllm.LLM``: later requests may overtake without bound."""

    bound = math.inf


class OfflinePrefixOrderAsyncScheduler(PrefixOrderAsyncScheduler):
    """The same for ``vllm.LLM``: later requests may overtake without bound."""

    bound = math.inf


#: vLLM's scheduler -> what takes its place on a server, and offline
_SCHEDULERS: dict[type, tuple[type, type]] = {
    Scheduler: (PrefixOrderScheduler, OfflinePrefixOrderScheduler),
    AsyncScheduler: (PrefixOrderAsyncScheduler, OfflinePrefixOrderAsyncScheduler),
}
