"""A queue of waiting requests that starts requests with a common prefix one after the other, while
the prefix is cached. It replaces the scheduler's own queue.

A block hash covers the whole prefix up to its block, so a dictionary from hash to requests is a
trie. It holds four depths per doubling (``DEPTHS``) instead of every depth: shared lengths are
known to within a fifth, with some thirty entries per request instead of thousands.
"""

import bisect
import functools
import heapq
import itertools
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from vllm.v1.core.sched.request_queue import RequestQueue

#: Prefix lengths, in blocks, by which requests are compared.
DEPTHS = [1]
while DEPTHS[-1] < 1 << 20:
    DEPTHS.append(DEPTHS[-1] + max(1, DEPTHS[-1] // 4))

#: Maximum number of prefills per priority whose progress is followed.
MAX_FOLLOWED = 16

#: Maximum number of requests whose cached prefix is looked up to choose the next one.
MAX_LOOKUPS = 4

Request = Any  # vllm.v1.request.Request


def _in_prefill(request: Request) -> bool:
    """Whether a request that was taken has a part of its prompt to compute or to wait for."""
    return request.num_computed_tokens < request.num_prompt_tokens and not request.is_finished()


def num_shared_hashes(a: Request, b: Request) -> int:
    """Number of leading block hashes that two requests share; a hash covers all blocks before."""
    both = range(min(len(a.block_hashes), len(b.block_hashes)))
    return bisect.bisect(both, 0, key=lambda i: a.block_hashes[i] != b.block_hashes[i])


class _OvertakingTime:
    """Total seconds given to requests that overtook older ones.

    Requests taken in one step get the time until requests are taken in a later step. A request that
    the scheduler skips gets its time when it starts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_step = 0.0
        #: the last step with taken requests, when the first of them was taken, and whether one of
        #: them overtook another request
        self._step = -1
        self._began = 0.0
        self._overtakes = False
        self._not_started: weakref.WeakSet[Request] = weakref.WeakSet()

    def seconds(self) -> float:
        """The total. The oldest request lost at most its increase since that request came, and the
        other requests lost no more.
        """
        return self._until_step + (self._clock() - self._began if self._overtakes else 0.0)

    def take(self, request: Request, step: int, overtakes: bool) -> None:
        """Count a request that is taken in a step; ``step`` counts from 0."""
        if step != self._step:
            self._until_step = self.seconds()
            self._step = step
            self._began = self._clock()
            self._overtakes = False
        if overtakes:
            self._overtakes = True
            self._not_started.add(request)

    def start(self, request: Request, began: float) -> None:
        """Count a request that runs from the step on that began at this time."""
        if request in self._not_started:
            self._not_started.remove(request)
            if not self._overtakes:
                self._began = began
                self._overtakes = True


class _Waiting(NamedTuple):
    """A waiting request.

    hashes: of its first ``DEPTHS[i]`` blocks.
    seconds_before: ``_OvertakingTime.seconds`` when it came.
    """

    hashes: list[bytes]
    seconds_before: float


class _Prefill(NamedTuple):
    """A request whose prompt is computed. num_listed: how many of its hashes were listed."""

    request: Request
    hashes: list[bytes]
    num_listed: int


class _Level:
    """Waiting requests of one priority. ``add``, ``choose``, ``take`` and ``remove`` take time
    proportional to ``len(DEPTHS)``, however many requests wait; ``choose`` with ``hit`` also looks
    up ``MAX_LOOKUPS`` requests.
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
        self.overtaking = _OvertakingTime(clock)
        #: pre-empted or skipped requests that the scheduler put back; they go first, as in vLLM
        self._returned: deque[Request] = deque()
        self._waiting: OrderedDict[Request, _Waiting] = OrderedDict()  # by age
        #: hash -> waiting requests, by age
        self._by_hash: defaultdict[bytes, OrderedDict[Request, None]] = defaultdict(OrderedDict)
        #: for each depth: hashes of waiting requests that were cached when last checked, the most
        #: recently used last
        self._cached_hashes: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in DEPTHS]
        #: prefills by the last of their hashes, the most recent last
        self._prefills: dict[bytes, _Prefill] = {}
        self._followed_in = -1

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._waiting

    def add(self, request: Request) -> None:
        hashes = self._hashes(request)
        self._waiting[request] = _Waiting(hashes, self.overtaking.seconds())
        for key in hashes:
            self._by_hash[key][request] = None
        for cached_hashes, key in zip(self._cached_hashes, hashes, strict=False):
            if key not in cached_hashes:
                if not self._cached(key):
                    break
                cached_hashes[key] = None
                cached_hashes.move_to_end(key, last=False)

    def put_back(self, request: Request) -> None:
        self._returned.appendleft(request)

    def choose(self, step: int) -> Request:
        """The request to take next; there must be one. ``step`` counts from 0."""
        if self._returned:
            return self._returned[0]
        if step != self._followed_in:
            self._followed_in = step
            self._follow_prefills()
        oldest, waiting = next(iter(self._waiting.items()))
        if self.overtaking.seconds() - waiting.seconds_before >= self._bound:
            return oldest
        rejected: set[Request] = set()
        for cached_hashes in reversed(self._cached_hashes):
            num_passed = 0
            while num_passed < len(cached_hashes):
                key = next(itertools.islice(reversed(cached_hashes), num_passed, None))
                if not self._cached(key):
                    del cached_hashes[key]  # evicted, or not computed yet: listed again when it is
                    continue
                request = next(iter(self._by_hash[key]))
                if request not in rejected:
                    if self._may_overtake(request):
                        return request
                    rejected.add(request)
                    if len(rejected) == MAX_LOOKUPS:
                        return oldest
                num_passed += 1
        return oldest

    def _may_overtake(self, request: Request) -> bool:
        """Whether ``request`` finds as many cached tokens now as after all older requests.

        It does if its hit covers what it shares with each older request: none of them then adds a
        block to the cache that it could use, nor does it add one for them. Of the running requests
        those in prefill count. Of the waiting requests none counts with full attention alone,
        because ``request`` is the oldest with a cached hash. A group with windows or states caches
        few places of a prefix, such as the ends of prompts, and a request may need the place that
        an older one adds.
        """
        if request is next(iter(self._waiting)):
            return True
        for prefill in self._prefills.values():
            if _in_prefill(prefill.request):
                num_shared = num_shared_hashes(request, prefill.request)
                num_shared = num_shared // self._stride * self._stride
                if num_shared and not self._covers(request, num_shared):
                    return False
        if self._hit is None:
            return True
        for key in reversed(self._waiting[request].hashes):
            if next(iter(self._by_hash[key])) is not request:
                break
        else:
            return True  # no older request has its first block
        hashes = request.block_hashes
        end = self._hit(request)
        older = itertools.takewhile(lambda other: other is not request, self._by_hash[key])
        return end >= len(hashes) or all(
            len(other.block_hashes) <= end or other.block_hashes[end] != hashes[end]
            for other in older
        )

    def _covers(self, request: Request, num_hashes: int) -> bool:
        """Whether the first ``num_hashes`` block hashes of ``request`` are a hit."""
        if self._hit is None:
            return self._cached(request.block_hashes[num_hashes - 1])
        return self._hit(request) >= num_hashes

    def take(self, request: Request, step: int) -> None:
        """Remove ``request``, which is about to run: requests with its prefix should follow.
        ``step`` counts from 0.
        """
        if self._returned and self._returned[0] is request:
            # it may be skipped again, so the time of the requests that overtook goes on
            self._returned.popleft()
            self._list(self._hashes(request))
            return
        self.overtaking.take(request, step, request is not next(iter(self._waiting)))
        hashes = self._forget(request)
        if hashes:
            self._prefills.pop(hashes[-1], None)  # else it would keep its old place
            self._prefills[hashes[-1]] = _Prefill(request, hashes, 0)
            if len(self._prefills) > MAX_FOLLOWED:
                del self._prefills[next(iter(self._prefills))]
        self._list(hashes)

    def _follow_prefills(self) -> None:
        """List what requests taken in earlier steps have computed since."""
        for last, prefill in list(self._prefills.items()):
            request, hashes, begin = prefill
            end = len(hashes) if self._cached(last) else begin
            while end < len(hashes) and self._cached(hashes[end]):
                end += 1
            self._list(hashes, begin, end)
            if not request.is_finished() and (end < len(hashes) or _in_prefill(request)):
                self._prefills[last] = prefill._replace(num_listed=end)
            else:
                del self._prefills[last]

    def _list(self, hashes: list[bytes], begin: int = 0, end: int | None = None) -> None:
        """Note that requests with the hashes of these depths should follow."""
        for cached_hashes, key in zip(
            self._cached_hashes[begin:end], hashes[begin:end], strict=False
        ):
            if key in self._by_hash:
                cached_hashes[key] = None
                cached_hashes.move_to_end(key)

    def remove(self, requests: set[Request]) -> None:
        """Remove the requests in ``requests`` that wait here."""
        for request in requests & self._waiting.keys():
            self._forget(request)
        self._returned = deque(r for r in self._returned if r not in requests)

    def _forget(self, request: Request) -> list[bytes]:
        hashes = self._waiting.pop(request).hashes
        for cached_hashes, key in zip(self._cached_hashes, hashes, strict=False):
            requests = self._by_hash[key]
            del requests[request]
            if not requests:
                del self._by_hash[key]
                cached_hashes.pop(key, None)
        return hashes

    def _hashes(self, request: Request) -> list[bytes]:
        found = request.block_hashes
        end = bisect.bisect_right(DEPTHS, len(found) // self._stride)
        return [found[depth * self._stride - 1] for depth in DEPTHS[:end]]


class PrefixQueue(RequestQueue):
    """A queue whose next request is the one with the longest cached prefix, else the oldest. No
    request overtakes an older one whose blocks it could use.

    Requests that were put back go first, and a higher priority goes before everything else. Once a
    request has lost ``bound`` seconds to later ones of its priority, no later one overtakes it.

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
        self._priorities: list[int] = []  # a heap of the keys of _levels
        #: (request, its level) last peeked at, to be taken even if the cache has changed since
        self._peeked: tuple[Request, _Level] | None = None
        self._step = 0
        self._step_began = clock()

    def _level_of(self, request: Request) -> _Level:
        self._peeked = None
        priority = request.priority if self._by_priority else 0
        if priority not in self._levels:
            self._levels[priority] = self._new_level()
            heapq.heappush(self._priorities, priority)
        return self._levels[priority]

    def _choose(self) -> tuple[Request, _Level]:
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
        self._step += 1
        self._step_began = self._clock()

    def end_step(self, started: Iterable[Request]) -> None:
        """The requests in ``started`` run from this step on; other taken requests were skipped."""
        for request in started:
            self._level_of(request).overtaking.start(request, self._step_began)

    def add_request(self, request: Request) -> None:
        """Let ``request`` wait."""
        self._level_of(request).add(request)

    def peek_request(self) -> Request:
        """The next request, which stays."""
        self._peeked = self._choose()
        return self._peeked[0]

    def pop_request(self) -> Request:
        """Remove and return the next request."""
        request, level = self._peeked or self._choose()
        self._peeked = None
        level.take(request, self._step)
        return request

    def prepend_request(self, request: Request) -> None:
        """Put back ``request``, which goes first."""
        self._level_of(request).put_back(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put back each of ``requests`` in turn, so that the last one goes first."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove ``request`` if it waits here."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests in ``requests`` that wait here."""
        self._peeked = None
        removed = set(requests)
        for level in self._levels.values():
            level.remove(removed)

    def __bool__(self) -> bool:
        return any(len(level) for level in self._levels.values())

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        """Requests by priority, then returned ones, then by age; not the order in which they will
        be taken, which depends on the cache.
        """
        for priority in sorted(self._levels):
            yield from self._levels[priority]
