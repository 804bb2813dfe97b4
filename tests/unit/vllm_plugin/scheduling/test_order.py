"""The order of waiting requests: the queue alone under arrivals of all kinds, and inside the
schedulers of vLLM, whose files differ from release to release.
"""

import functools
import itertools
import math
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.utils import replace
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.dummy_model import write_llama_8b
from tests.support.variables import set_variables
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.scheduling.order import (
    OfflinePrefixOrderAsyncScheduler,
    OfflinePrefixOrderScheduler,
    PrefixOrderAsyncScheduler,
    PrefixOrderScheduler,
    order_requests,
)
from vllm_prefixshare.vllm_plugin.scheduling.prefix_queue import DEPTHS, MAX_FOLLOWED, PrefixQueue

BLOCK = 16


class Waiting:
    """A request as the queue reads it. path: names of its blocks, from the first on."""

    def __init__(self, *path: Any, priority: int = 0) -> None:
        self.block_hashes = [repr(path[: i + 1]).encode() for i in range(len(path))]
        self.priority = priority
        self.num_prompt_tokens, self.num_computed_tokens = len(path), 0

    def is_finished(self) -> bool:
        return False


class Cache(set[bytes]):
    """Hashes of cached blocks, and a queue that reads them. now: the queue's clock, in seconds."""

    def __init__(self, bound: float = math.inf, **options: Any) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = PrefixQueue(self.__contains__, bound, clock=lambda: self.now, **options)

    def take(self, same_step: bool = False) -> Any:
        if not same_step:
            self.queue.begin_step()
        request = self.queue.pop_request()
        self.update(request.block_hashes)
        return request


def fill(cache: Cache, *requests: Waiting) -> None:
    for request in requests:
        cache.queue.add_request(request)


def test_requests_on_one_document_follow_each_other_oldest_first():
    cache = Cache()
    a1, b1, a2, c1, b2, a3 = (Waiting(name, i) for i, name in enumerate("abacba"))
    fill(cache, a1, b1, a2, c1, b2, a3)
    assert [cache.take() for _ in range(6)] == [a1, a2, a3, b1, b2, c1]


def test_the_longest_cached_prefix_goes_first():
    cache = Cache()
    cache.update(Waiting("system", "long", "longer").block_hashes)
    other, short, long = Waiting("other"), Waiting("system", 1), Waiting("system", "long", 2)
    fill(cache, other, short, long)
    assert [cache.take() for _ in range(3)] == [long, short, other]


def test_a_prefix_that_was_evicted_has_no_precedence():
    cache = Cache()
    a1, b1, a2 = Waiting("a", 1), Waiting("b", 2), Waiting("a", 3)
    fill(cache, a1, b1, a2)
    assert cache.take() is a1
    cache.clear()
    assert cache.queue.pop_request() is b1


@pytest.mark.parametrize("early", [True, False])
def test_what_a_prefill_has_computed_counts_at_once(early):
    """Others come before it starts or during it, and a step looks at them while it has computed a
    part of what all share.
    """
    cache = Cache()
    system = "one", "two", "three"
    a1, b1, a2 = (Waiting(*system, *path) for path in ("aa1", "bb1", "aa2"))
    fill(cache, a1)
    if early:
        fill(cache, b1, a2)
    cache.queue.begin_step()
    assert cache.queue.pop_request() is a1
    cache.update(a1.block_hashes[:2])
    if not early:
        fill(cache, b1, a2)
    for computed, chosen in ((2, b1), (4, b1), (5, a2)):  # a2 shares 5 blocks, b1 has 3 of them
        cache.update(a1.block_hashes[:computed])
        cache.queue.begin_step()
        assert cache.queue.peek_request() is chosen
    assert [cache.take() for _ in range(2)] == [a2, b1]


def test_only_some_prefills_are_followed():
    cache = Cache()
    fill(cache, *(Waiting(i) for i in range(2 * MAX_FOLLOWED)))
    for _ in range(2 * MAX_FOLLOWED):
        cache.queue.begin_step()
        cache.queue.pop_request()  # and is not computed
    (level,) = cache.queue._levels.values()
    assert len(level._prefills) == MAX_FOLLOWED


def test_a_document_whose_requests_keep_starting_stays_followed():
    cache = Cache()
    a1, a2, a3 = (Waiting("a") for _ in range(3))
    *others, last, old = (Waiting(i) for i in range(MAX_FOLLOWED + 1))
    fill(cache, a1, *others, a2, last, old, a3)
    for _ in range(MAX_FOLLOWED + 2):
        cache.queue.begin_step()
        assert cache.queue.pop_request() is not old  # and is not computed
    cache.update(a1.block_hashes)
    assert cache.take() is a3


def test_what_was_seen_is_taken_although_the_cache_changed():
    cache = Cache()
    a, b = Waiting("a"), Waiting("b")
    fill(cache, a, b)
    assert cache.queue.peek_request() is a
    cache.update(b.block_hashes)
    assert cache.queue.pop_request() is a


def test_requests_put_back_go_first_the_last_one_foremost():
    cache = Cache()
    a1, a2, b, c = Waiting("a", 1), Waiting("a", 2), Waiting("b"), Waiting("c")
    fill(cache, a1, a2)
    cache.take()
    cache.queue.prepend_requests([b, c])
    assert [cache.take() for _ in range(3)] == [c, b, a2]


def test_priorities_stand_above_the_order():
    cache = Cache(by_priority=True)
    low1, low2 = (Waiting("a", i, priority=1) for i in range(2))
    high = Waiting("b", priority=0)
    fill(cache, low1, low2)
    assert cache.take() is low1
    fill(cache, high)
    assert list(cache.queue) == [high, low2]
    assert [cache.take(), cache.take()] == [high, low2]


def test_a_step_begins_without_a_look_at_every_priority():
    """The scheduler begins one every few milliseconds."""
    cache, calls = Cache(by_priority=True), []
    fill(cache, *(Waiting("a", priority=i) for i in range(100)))
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name))
    try:
        cache.queue.begin_step()
    finally:
        sys.setprofile(before)
    assert calls.count("begin_step") == 2, "its call and its return"


def test_removed_requests_are_gone_and_strangers_are_ignored():
    cache = Cache()
    a, b, c, back = Waiting("a"), Waiting("a", 1), Waiting("c"), Waiting("d")
    fill(cache, a, b, c)
    cache.queue.prepend_request(back)
    cache.queue.remove_requests([a, back, Waiting("a")])
    cache.queue.remove_request(c)
    assert len(cache.queue) == 1 and cache.queue
    assert cache.take() is b
    assert not cache.queue
    with pytest.raises(IndexError, match="no request is waiting"):
        cache.queue.peek_request()


def test_depths_lie_close_enough():
    assert DEPTHS[:8] == list(range(1, 9))
    assert all(b - a <= max(1, a // 4) for a, b in itertools.pairwise(DEPTHS))


def test_a_stride_reads_the_last_hash_of_each_block():
    cache = Cache(stride=2)
    first, same, other = Waiting("a", "b", 1, 2), Waiting("a", "b", 3, 4), Waiting("a", "c", 5, 6)
    fill(cache, first, other, same)
    assert [cache.take() for _ in range(3)] == [first, same, other]


#: Few documents and many requests, so that most requests that are taken overtake another one.
ADD = st.tuples(
    st.just("add"),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.sampled_from([0, 0, 0, 1]),
)
#: A step: how many requests it takes, and how long it is.
TAKE = st.tuples(
    st.just("take"), st.sampled_from([1, 1, 2, 4]), st.sampled_from([0.0, 0.125, 0.5, 3.0])
)
#: The same, but the request that the step comes upon first is skipped, and put back at its end; as
#: many new ones were skipped before.
SKIP = st.tuples(
    st.just("skip"), st.sampled_from([0, 1, 2]), st.sampled_from([0.125, 3.0]), st.integers(0, 1)
)
OTHER = st.tuples(st.sampled_from(["put back", "remove", "evict"]), st.integers(0, 9))
STEPS = st.lists(st.one_of(ADD, ADD, TAKE, TAKE, SKIP, SKIP, OTHER), min_size=10, max_size=80)


class Oracle:
    """When each request came, and how long later requests of its priority delayed it, summed
    directly.
    """

    def __init__(self) -> None:
        self.age: dict[Waiting, int] = {}
        self.lost: Counter[Waiting] = Counter()
        self.put_back: list[Waiting] = []
        #: when those came that overtook others and were skipped
        self.skipped: dict[Waiting, int] = {}
        #: priority -> overtaken in the last step that took one of it that had not been put back
        self.behind: dict[int, set[Waiting]] = {}

    def older(self, taken: Waiting, came: int) -> list[Waiting]:
        return [
            r
            for r in self.age
            if r.priority == taken.priority and r not in self.put_back and self.age[r] < came
        ]


#: A request is overtaken, and then two steps are long that come upon one that is skipped.
HOT = ("add", [0, 0], 0)
SKIPPING = [
    *(HOT, ("take", 1, 0.0), ("add", [1], 0), HOT, ("take", 1, 0.125), ("skip", 0, 3.0, 1)),
    *(HOT, ("skip", 1, 3.0, 0), HOT, ("skip", 1, 3.0, 0)),
]
#: One overtakes and is skipped, the oldest starts, and then a step is long in which that one does.
LATE = [
    *(HOT, ("take", 1, 0.0), ("add", [1], 0), ("add", [1, 0], 0), HOT, ("skip", 0, 0.125, 0)),
    *(("skip", 1, 0.125, 0), ("take", 1, 3.0), HOT, ("take", 1, 0.125)),
]


@hypothesis.example(steps=SKIPPING, bound=2.0)
@hypothesis.example(steps=LATE, bound=2.0)
@given(steps=STEPS, bound=st.sampled_from([0.0, 0.25, 2.0, math.inf]))
def test_every_request_is_served_once_and_none_loses_more_than_the_bound(steps, bound):
    cache, oracle = Cache(bound, by_priority=True), Oracle()
    names = itertools.count()
    served: list[Waiting] = []

    def take(count: int, seconds: float, skip: int = 0) -> None:
        overtaken: dict[int, set[Waiting]] = {}
        late: list[tuple[Waiting, int]] = []
        skipped: list[Waiting] = []
        started: list[Waiting] = []
        for i in range(min(skip + count, len(oracle.age))):
            urgent = min(r.priority for r in oracle.age)
            if i == 0:
                cache.queue.begin_step()
            request = cache.queue.pop_request() if i < skip else cache.take(same_step=True)
            assert request.priority == urgent
            if request in oracle.put_back:
                oracle.put_back.remove(request)
                if i >= skip and request in oracle.skipped:
                    late.append((request, oracle.skipped.pop(request)))
            else:
                assert not [r for r in oracle.put_back if r.priority == urgent]
                older = oracle.older(request, oracle.age[request])
                assert all(oracle.lost[r] < bound for r in older)
                overtaken.setdefault(urgent, set()).update(older)
                if i < skip:
                    oracle.skipped[request] = oracle.age[request]
            del oracle.age[request]
            (skipped if i < skip else started).append(request)
        cache.queue.prepend_requests(reversed(skipped))
        cache.queue.end_step(started)
        served.extend(started)
        oracle.put_back += skipped
        oracle.age.update(dict.fromkeys(skipped, 0))
        oracle.behind.update(overtaken)
        for request, came in late:
            oracle.behind.setdefault(request.priority, set()).update(oracle.older(request, came))
        cache.now += seconds
        for requests in oracle.behind.values():
            for r in requests:
                oracle.lost[r] += seconds

    def put_back(request: Waiting) -> None:
        oracle.age[request] = 0
        oracle.put_back.append(request)
        cache.queue.prepend_request(request)

    for asked, (kind, *values) in enumerate(steps):
        waiting = list(oracle.age)
        if kind == "add":
            request = Waiting(*values[0], next(names), priority=values[1])
            oracle.age[request] = asked
            fill(cache, request)
        elif kind == "take" and waiting:
            take(*values)
        elif kind == "skip" and waiting:
            count, seconds, new = values
            for _ in range(new):
                put_back(Waiting("blocked", next(names)))
            take(count, seconds, skip=1)
        elif kind == "put back" and served:
            put_back(served.pop(values[0] % len(served)))
        elif kind == "remove" and waiting:
            request = waiting[values[0] % len(waiting)]
            del oracle.age[request]
            oracle.put_back = [r for r in oracle.put_back if r is not request]
            cache.queue.remove_request(request)
        elif kind == "evict" and cache:
            cache.discard(sorted(cache)[values[0] % len(cache)])
        assert len(cache.queue) == len(oracle.age)
        assert set(cache.queue) == set(oracle.age)
    while oracle.age:
        take(1, 0.1)
    assert not cache.queue


@pytest.mark.parametrize(
    ("places", "arriving", "blocked"),
    [(1, 1, 0), (2, 1, 0), (8, 1, 0), (8, 7, 0), (8, 20, 0), (1, 1, 1), (8, 20, 3)],
)
def test_a_stream_of_cached_requests_starves_nobody(places, arriving, blocked):
    # each step, or each fourth one, has room for some requests, and before it some come that may
    # overtake; vLLM comes upon blocked requests in every step, and puts them back
    cache, step = Cache(bound=2.0), 0.125
    old = [Waiting(i) for i in range(80)]
    cache.update(Waiting("hot").block_hashes)
    fill(cache, *old)
    started: dict[Waiting, float] = {}
    skipped = [Waiting("blocked", i) for i in range(blocked)]
    every = 4 if blocked else 1
    for now in itertools.count():
        cache.now = now * step
        fill(cache, *(Waiting("hot", now, i) for i in range(arriving)))
        cache.queue.prepend_requests(reversed(skipped))
        cache.queue.begin_step()
        assert [cache.queue.pop_request() for _ in skipped] == skipped
        free = 0 if now % every else min(places, len(cache.queue))
        taken = [cache.take(same_step=True) for _ in range(free)]
        started.update((request, cache.now) for request in taken if request in old)
        if len(started) == len(old):
            break
    late = [started[request] - i // places * every * step for i, request in enumerate(old)]
    assert 0 < max(late) <= 2.0, "later than first come, first served"


@pytest.mark.parametrize("put_back", [True, False])
def test_who_overtook_and_was_skipped_counts_when_it_starts(put_back):
    """The oldest starts in between. vLLM puts what it skips back, or keeps it in another queue."""
    cache, lost = Cache(bound=2.0), 0.0
    queue = cache.queue
    old = [Waiting(i) for i in range(5)]
    fill(cache, *old, Waiting("behind"))
    cache.update(Waiting("hot").block_hashes)
    for oldest in old:
        fill(cache, hot := Waiting("hot", oldest))
        queue.begin_step()
        if queue.pop_request() is not hot:
            break
        if put_back:
            queue.prepend_request(hot)
        queue.end_step([])
        cache.now += 0.01
        queue.begin_step()
        assert not put_back or queue.pop_request() is hot
        assert queue.pop_request() is oldest
        if put_back:
            queue.prepend_request(hot)
        queue.end_step([oldest])
        cache.now += 0.01
        queue.begin_step()
        assert not put_back or queue.pop_request() is hot
        queue.end_step([hot])
        cache.now += 30.0
        lost += 30.0
    assert lost == 30.0, "the step that exceeds the bound"


def test_who_was_pre_empted_overtakes_nobody():
    cache = Cache(bound=2.0)
    cache.update(Waiting("hot").block_hashes)
    old, hot = Waiting("old"), Waiting("hot", 1)
    fill(cache, Waiting("older"), old, hot)
    cache.queue.begin_step()
    assert cache.queue.pop_request() is hot
    cache.queue.end_step([hot])
    cache.take()
    cache.queue.prepend_request(hot)
    cache.queue.begin_step()
    assert cache.queue.pop_request() is hot
    cache.queue.end_step([hot])  # a model runner of vLLM's has resumed requests among the new ones
    cache.now += 30.0
    fill(cache, late := Waiting("hot", 2))
    assert cache.take() is late


# -- inside vLLM's schedulers --


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    folder = write_llama_8b(tmp_path_factory.mktemp("model"))
    return ModelConfig(str(folder), skip_tokenizer_init=True, max_model_len=4096, dtype="float16")


def make_config(model_config: Any, num_blocks: int, **options: Any) -> Any:
    """options: fields of ``SchedulerConfig``."""
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    fields = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "max_model_len": 4096, **options}
    scheduler = SchedulerConfig(is_encoder_decoder=False, async_scheduling=False, **fields)
    return VllmConfig(
        model_config=model_config,
        cache_config=cache,
        scheduler_config=scheduler,
        device_config=DeviceConfig("cpu"),
    )


SHAPE: dict[str, Any] = {
    "block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float16,
}  # fmt: skip
FULL = FullAttentionSpec(**SHAPE)


def make_scheduler(
    make: Any, config: Any, specs: Sequence[Any] = (FULL,), retention: int | None = None
) -> Any:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            config.cache_config.num_gpu_blocks,
            [],
            groups,
            prefix_cache_retention_interval=retention,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


@functools.cache
def hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def add(scheduler: Any, name: object, prompt: list[int], tokens: int) -> Request:
    """Let a request come, whose answer has this number of tokens."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = Request(str(name), prompt, params, None, block_hasher=hasher())
    scheduler.add_request(request)
    return request


def started_in(step: Any) -> list[str]:
    """Names of the requests that start in a step."""
    return [request.req_id for request in step.scheduled_new_reqs]


def wait_for_grammar(request: Request) -> None:
    """Let the scheduler skip a request until its status is another one."""
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None, is_grammar_ready=False)


def set_clock(scheduler: Any, bound: float) -> Cache:
    """Give the scheduler a queue with this bound; returns what has the queue's clock."""
    clock = Cache()
    cached = scheduler.waiting._new_level.args[0]
    scheduler.waiting = PrefixQueue(cached, bound, clock=lambda: clock.now)
    return clock


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(1000), k=count)


def prompts_about(documents: int, questions: int, tokens: int) -> list[list[int]]:
    rng = random.Random(0)
    texts = [random_tokens(rng, tokens) for _ in range(documents)]
    return [[*text, *random_tokens(rng, 20)] for text in texts for _ in range(questions)]


def next_token(tokens: list[int]) -> int:
    """What follows ``tokens``, in place of a model."""
    return hash(tuple(tokens)) % 1000


def answer_to(prompt: list[int], tokens: int = 3) -> list[int]:
    whole = list(prompt)
    for _ in range(tokens):
        whole.append(next_token(whole))
    return whole[len(prompt) :]


class Served(NamedTuple):
    """computed: prefill tokens. admitted: requests in their order. answers: of each prompt."""

    computed: int
    admitted: list[str]
    answers: list[list[int]]


def serve(scheduler: Any, prompts: list[list[int]], pause: int = 0) -> Served:
    """Answer ``prompts``, which arrive ``pause`` steps apart. Tokens are written to the blocks that
    the scheduler names, and an answer follows from what a request then finds in its blocks.
    """
    memory: dict[tuple[int, int], int] = {}  # (block, place in it) -> token
    computed, admitted, finished = 0, [], 0
    answers: list[list[int]] = [[] for _ in prompts]
    for now in range(60 * len(prompts)):
        for i, prompt in enumerate(prompts):
            if i * pause == now:
                add(scheduler, i, prompt, 3)
        step = scheduler.schedule()
        admitted += started_in(step)
        places = {}
        for name, count in step.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            computed += max(0, min(count, request.num_prompt_tokens - end + count))
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
            places[name] = [(blocks[i // BLOCK], i % BLOCK) for i in range(end)]
            for i in range(end - count, end):
                memory[places[name][i]] = request.all_token_ids[i]
        sampled = []
        for name, where in places.items():
            whole = len(where) >= scheduler.requests[name].num_tokens
            sampled.append([next_token([memory[place] for place in where])] if whole else [])
        outputs = scheduler.update_from_output(
            step,
            ModelRunnerOutput(list(places), {n: i for i, n in enumerate(places)}, sampled),
        )
        for output in (o for c in outputs.values() for o in c.outputs):
            answers[int(output.request_id)] += output.new_token_ids
            finished += output.finish_reason is not None
        if finished == len(prompts):
            return Served(computed, admitted, answers)
    raise AssertionError("requests were left")


def answer_step(scheduler: Any, step: Any) -> None:
    """Give a token to each request of the step that has computed all others."""
    running = {name: i for i, name in enumerate(step.num_scheduled_tokens)}
    requests = [scheduler.requests[name] for name in running]
    tokens = [[1] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
    scheduler.update_from_output(step, ModelRunnerOutput([*running], running, tokens))


def test_shuffled_requests_compute_as_little_as_grouped_ones(model_config):
    # 60 blocks hold two documents of 24
    grouped = prompts_about(documents=6, questions=5, tokens=24 * BLOCK)
    shuffled = random.Random(1).sample(grouped, len(grouped))
    plain = functools.partial(make_scheduler, Scheduler)
    ordered = functools.partial(make_scheduler, OfflinePrefixOrderScheduler)
    best = serve(plain(make_config(model_config, 60)), grouped)
    worst = serve(plain(make_config(model_config, 60)), shuffled)
    ours = serve(ordered(make_config(model_config, 60)), shuffled)
    assert best.computed < worst.computed / 2
    assert ours.computed <= best.computed
    assert sorted(map(int, ours.admitted)) == list(range(30)), "each once"
    assert ours.answers == worst.answers


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 6])
def test_a_question_joins_a_prefill_of_its_document(model_config, chunks):
    """It comes when that many chunks are computed, after one about another document that begins
    with the same 40 blocks.
    """
    scheduler = make_scheduler(OfflinePrefixOrderScheduler, make_config(model_config, 400))
    rng = random.Random(0)
    system, a, b = (random_tokens(rng, 40 * BLOCK) for _ in range(3))

    def ask(name: str, document: list[int]) -> None:
        add(scheduler, name, [*system, *document, *random_tokens(rng, BLOCK)], 4)

    ask("a1", a)
    started: list[str] = []
    for now in range(40):
        if now == chunks:
            ask("b", b)
            ask("a2", a)
        step = scheduler.schedule()
        started += started_in(step)
        answer_step(scheduler, step)
    assert started == ["a1", "a2", "b"]


@pytest.mark.parametrize("make", [PrefixOrderAsyncScheduler, OfflinePrefixOrderScheduler])
def test_a_step_of_the_scheduler_counts_as_one(monkeypatch, model_config, make):
    # of the two that start in a step the last one is the oldest that waits
    names = itertools.count()
    monkeypatch.setenv("VLLM_PREFIXSHARE_ORDER_BOUND", "0.5")
    scheduler = make_scheduler(make, make_config(model_config, 60))

    def step(*arriving: int) -> list[str]:
        """Let requests come, named by their first token; end those that start; return them."""
        for token in arriving:
            add(scheduler, f"{token}-{next(names)}", [token] * (2 * BLOCK + 1), 9)
        started = started_in(scheduler.schedule())
        scheduler.finish_requests(started, RequestStatus.FINISHED_ABORTED)
        return [name.partition("-")[0] for name in started]

    assert step(1) == ["1"]
    assert step(2, 3, 4, 5, 1) == ["1", "2"]
    time.sleep(0.6)
    assert step(1) == ["3", "4"]


def test_the_bound_holds_while_the_scheduler_skips_a_request(model_config):
    """Few requests start in a step, because the KV cache is full, but each step comes upon one that
    cannot start.
    """
    config = make_config(model_config, 60, max_num_seqs=64)
    scheduler = make_scheduler(PrefixOrderScheduler, config)
    names, bound = itertools.count(), 2.0
    clock = set_clock(scheduler, bound)
    rng = random.Random(0)
    document = random_tokens(rng, 8 * BLOCK)

    wait_for_grammar(add(scheduler, "blocked", random_tokens(rng, 40), 4))
    came = 0.2
    for now in range(1000):
        clock.now = now * 0.01
        if clock.now == came:
            add(scheduler, "old", random_tokens(rng, 9 * BLOCK), 4)
        while len(scheduler.waiting) < 6:
            add(scheduler, next(names), [*document, *random_tokens(rng, 9 * BLOCK)], 60)
        step = scheduler.schedule()
        if "old" in started_in(step):
            break
        answer_step(scheduler, step)
    # some seconds for the bound, and then until there is room; by far more without a bound
    assert clock.now - came < bound + 2


def test_a_skipped_request_counts_when_the_scheduler_starts_it(model_config):
    """Requests on a cached document wait for their grammar, while two of the oldest start."""
    scheduler = make_scheduler(PrefixOrderScheduler, make_config(model_config, 60, max_num_seqs=1))
    clock, names = set_clock(scheduler, bound=2.0), itertools.count()

    def ask(token: int) -> Request:
        return add(scheduler, next(names), [token] * (2 * BLOCK + 1), 9)

    def step(seconds: float) -> list[str]:
        output = scheduler.schedule()
        clock.now += seconds
        answer_step(scheduler, output)
        started = started_in(output)
        scheduler.finish_requests(started, RequestStatus.FINISHED_ABORTED)
        return started

    ask(1)
    step(0.0)
    old = [ask(2 + i).request_id for i in range(10)]
    lost = 0.0
    while old:
        wait_for_grammar(hot := ask(1))
        assert step(0.01) == [old.pop(0)]
        assert step(0.01) == [old.pop(0)]
        hot.status, hot.structured_output_request = RequestStatus.WAITING, None
        if step(30.0) != [hot.request_id]:
            break
        lost += 30.0
    assert lost == 30.0, "the step that exceeds the bound"


@hypothesis.settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 24)),
    num_blocks=st.integers(30, 80),
    pause=st.integers(0, 4),
    seed=st.integers(0, 9),
    make=st.sampled_from([Scheduler, PrefixOrderScheduler, OfflinePrefixOrderScheduler]),
)
def test_order_changes_no_answer(model_config, shape, num_blocks, pause, seed, make):
    documents, questions, blocks = shape
    prompts = prompts_about(documents, questions, blocks * BLOCK)
    random.Random(seed).shuffle(prompts)
    scheduler = make_scheduler(make, make_config(model_config, num_blocks))
    served = serve(scheduler, prompts, pause)
    assert served.answers == [answer_to(prompt) for prompt in prompts]


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SHAPE, sliding_window=tokens)


#: KV-cache groups of models with full attention, windows, chunks and states
STATE = MambaSpec(BLOCK, ((8,),), (torch.float16,), mamba_cache_mode="align")
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "full": (FULL,),
    "window": (window(32),),
    "full and window": (FULL, window(64)),
    "two windows": (window(32), FULL, window(300)),
    "chunks": (FULL, ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)),
    "states": (FULL, STATE),
}


def cached_tokens(scheduler: Any, prompts: list[list[int]]) -> int:
    """Prompt tokens that are found in the KV cache, summed over ``prompts``, which come at once."""
    for i, prompt in enumerate(prompts):
        add(scheduler, i, prompt, 3)
    cached = 0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        cached += sum(new.num_computed_tokens for new in step.scheduled_new_reqs)
        answer_step(scheduler, step)
    return cached


#: The text that a prompt goes on from, how many of its tokens, and tokens of its own.
PROMPT = st.tuples(
    st.integers(0, 9),
    st.sampled_from([0, 40, 100, 160, 1000]),
    st.sampled_from([1, 16, 20, 40, 100, 160, 640]),
)
#: A long prompt, and beginnings of it in ascending length: each finds the end of the one before.
NESTED = [(0, 0, 480), (1, 40, 1), (1, 100, 1), (1, 160, 1), (1, 220, 1)]
#: A short prompt that comes and goes while a long one is computed in many steps.
BESIDE = [(0, 0, 16), (0, 0, 160)]


@hypothesis.settings(max_examples=100)
@hypothesis.example("full and window", NESTED, [0, 1, 2, 3, 4], 2, 256, 3000, 0)
@hypothesis.example("full", BESIDE, [0, 1, 0, 1], 2, 64, 3000, 0)
@hypothesis.example("states", BESIDE, [0, 1, 0, 1], 2, 64, 200, 0)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    texts=st.lists(PROMPT, min_size=2, max_size=8),
    chosen=st.lists(st.integers(0, 7), min_size=3, max_size=10),
    places=st.sampled_from([1, 2, 6]),
    budget=st.sampled_from([64, 256, 2048]),
    num_blocks=st.sampled_from([200, 3000]),
    retention=st.sampled_from([0, None]),
)
def test_order_never_lowers_the_cached_tokens_of_a_batch(
    model_config, layout, texts, chosen, places, budget, num_blocks, retention
):
    """With a retention of 0, its default, vLLM caches the windows and states of a prefix only at
    the ends of prompts and where prompts part; without one all of them.
    """
    rng = random.Random(0)
    whole: list[list[int]] = [[]]
    for origin, tokens, own in texts:
        begin = whole[origin % len(whole)][:tokens]
        whole.append([*begin, *random_tokens(rng, own)])
    prompts = [whole[1 + i % len(texts)] for i in chosen]
    config = make_config(
        model_config, num_blocks, max_num_seqs=places, max_num_batched_tokens=budget
    )
    config.cache_config.mamba_cache_mode = "align" if layout == "states" else "none"
    sparse = retention if layout not in ("full", "chunks") else None
    plain, ordered = (
        cached_tokens(make_scheduler(make, config, LAYOUTS[layout], sparse), prompts)
        for make in (Scheduler, OfflinePrefixOrderScheduler)
    )
    assert ordered >= plain


def test_requests_on_one_document_follow_each_other_over_windows_too(model_config):
    """The first two are served in the order they came: from then on the window's blocks at the end
    of what all share are cached.
    """
    rng = random.Random(0)
    system = random_tokens(rng, 4 * BLOCK)
    texts = [[*system, *random_tokens(rng, 20 * BLOCK)] for _ in range(4)]
    prompts = [[*texts[i % 4], *random_tokens(rng, 20)] for i in range(24)]
    plain, ordered = (
        cached_tokens(
            make_scheduler(make, make_config(model_config, 80), (FULL, window(32)), 0), prompts
        )
        for make in (Scheduler, OfflinePrefixOrderScheduler)
    )
    assert ordered > 2 * plain


def test_a_priority_policy_keeps_its_priorities(model_config):
    config = make_config(model_config, 60, policy="priority")
    scheduler = make_scheduler(OfflinePrefixOrderAsyncScheduler, config)
    assert isinstance(scheduler, AsyncScheduler)
    assert isinstance(scheduler.waiting, PrefixQueue)
    for i, priority in enumerate((2, 1, 2)):
        params = SamplingParams(max_tokens=1)
        scheduler.add_request(Request(str(i), [i] * 40, params, None, priority=priority))
    assert scheduler.waiting.pop_request().request_id == "1"


def config_with(scheduler_cls: Any = None, caching: bool = True) -> Any:
    scheduler = SchedulerConfig.default_factory(scheduler_cls=scheduler_cls)
    return SimpleNamespace(
        scheduler_config=scheduler, cache_config=SimpleNamespace(enable_prefix_caching=caching)
    )


@pytest.mark.parametrize(
    ("order", "offline", "bound"),
    [
        ("auto", True, math.inf),
        ("auto", False, None),
        ("prefix", True, math.inf),
        ("prefix", False, 2.0),
        ("off", True, None),
        ("off", False, None),
    ],
)
def test_who_gets_which_order(monkeypatch, order, offline, bound):
    monkeypatch.setenv("VLLM_PREFIXSHARE_ORDER", order)
    config = config_with()
    order_requests(config, offline)
    chosen = pickle.loads(pickle.dumps(config.scheduler_config)).get_scheduler_cls()
    if bound is None:
        assert chosen in (Scheduler, AsyncScheduler)
    else:
        assert issubclass(chosen, Scheduler)
        assert chosen.bound == bound
        # vLLM checks the types of the fields that it copies
        needed = {"max_model_len": 8192, "is_encoder_decoder": False}
        assert replace(config.scheduler_config, **needed).get_scheduler_cls() is chosen


@pytest.mark.parametrize(("order", "offline"), [("auto", False), ("off", True), ("auto", True)])
def test_a_bound_without_an_order_is_not_ignored_silently(monkeypatch, order, offline):
    said: list[str] = []
    log = SimpleNamespace(warning_once=said.append)
    monkeypatch.setattr("vllm_prefixshare.vllm_plugin.scheduling.order.logger", lambda: log)
    monkeypatch.setenv("VLLM_PREFIXSHARE_ORDER", order)
    order_requests(config_with(), offline)
    assert not said
    settings.cache_clear()
    monkeypatch.setenv("VLLM_PREFIXSHARE_ORDER_BOUND", "5")
    order_requests(config_with(), offline)
    ordered = order == "auto" and offline
    assert ["ORDER_BOUND has no effect" in text for text in said] == [True] * (not ordered)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (config_with(caching=False), "needs the prefix cache: switch prefix caching on"),
        (config_with(scheduler_cls=dict), "needs one of vLLM's own schedulers"),
    ],
)
def test_an_order_that_cannot_be_kept_is_refused_where_it_was_asked_for(
    monkeypatch, config, sentence
):
    before = config.scheduler_config.scheduler_cls
    order_requests(config, offline=True)  # auto
    assert config.scheduler_config.scheduler_cls is before
    set_variables(monkeypatch, ORDER="prefix")
    with pytest.raises(PrefixShareError, match=sentence):
        order_requests(config, offline=True)
