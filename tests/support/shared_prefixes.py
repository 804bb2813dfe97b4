"""Random requests and prefix caches, on which the shared parts are compared with vLLM's code."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_manager, kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_prefixshare.vllm_plugin.hooks import block_hashes, detokenization
from vllm_prefixshare.vllm_plugin.hooks.wrapping import Hook
from vllm_prefixshare.vllm_plugin.prompts import parts
from vllm_prefixshare.vllm_plugin.prompts.block_hashes import BlockHasher, SharedBlockHasher
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

#: vLLM's algorithms; xxHash where its package is installed.
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
VOCABULARY = 50_000


def algorithm(name: str) -> Callable[[Any], bytes]:
    """A hash function of vLLM, which the first hash of each chain is made with from now on."""
    if name.startswith("xxhash"):
        pytest.importorskip("xxhash")
    function = hashing.get_hash_fn_by_name(name)
    kv_cache_utils.init_none_hash(function)
    return function


def has_lookahead() -> bool:
    """Whether this vLLM's hashes can cover tokens after their block."""
    hasher = inspect.unwrap(kv_cache_utils.get_request_block_hasher)
    return "num_hash_lookahead_tokens" in inspect.signature(hasher).parameters


def hashers(
    function: Callable[[Any], bytes], block_size: int, lookahead: int = 0
) -> tuple[BlockHasher, SharedBlockHasher]:
    """A hasher of vLLM and the shared one."""
    more = (lookahead,) if has_lookahead() else ()
    baseline = inspect.unwrap(kv_cache_utils.get_request_block_hasher)(block_size, function, *more)
    if isinstance(baseline, SharedBlockHasher):  # in a patched vLLM
        baseline = baseline._baseline
    return baseline, SharedBlockHasher(baseline, block_size, function, *more)


def make_request(
    ids: list[int], hasher: BlockHasher, request_id: str = "r", **more: Any
) -> Request:
    return Request(
        request_id, ids, SamplingParams(max_tokens=8), None, block_hasher=hasher, **more
    )  # fmt: skip


def feature(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(None, "image", identifier, place)


def random_family(rnd: Random, block_size: int) -> list[dict[str, Any]]:
    """Arguments of requests that share a prefix up to a random place, with images, adapters and
    salts that are sometimes those of another one.
    """
    base = [rnd.randrange(VOCABULARY) for _ in range(rnd.randrange(1, 60 * block_size))]
    places = []
    offset = 0
    while rnd.random() < 0.5 and offset < len(base):
        offset += rnd.randrange(1 + len(base) // 2)
        length = rnd.randrange(1, 2 + len(base) // 4)
        places.append((rnd.choice("ABC"), offset, length))
        offset += length
    adapters = (
        None,
        LoRARequest("a", 1, "/x"),
        LoRARequest("a", 1, "/y"),
        LoRARequest("b", 2, "/x"),
    )
    family = []
    for _ in range(6):
        end = rnd.randrange(len(base) + 1) if rnd.random() < 0.7 else len(base)
        suffix = [rnd.randrange(VOCABULARY) for _ in range(rnd.randrange(12 * block_size))]
        ids = base[:end] + suffix
        images = [
            feature(name if rnd.random() < 0.9 else rnd.choice("ABC"), start, length)
            for name, start, length in places
            if start + length <= len(ids)
        ]
        family.append(
            {
                "ids": ids,
                "mm_features": images,
                "lora_request": rnd.choice(adapters) if rnd.random() < 0.3 else None,
                "cache_salt": rnd.choice(("s", "t")) if rnd.random() < 0.3 else None,
            }
        )
    return family


def compare_hashes(rnd: Random, function: Callable[[Any], bytes]) -> int:
    """Compare the hashes of a family of requests, output tokens included.

    Returns:
        The number of requests.
    """
    block_size = rnd.choice((1, 4, 16, 32))
    lookahead = rnd.choice((0, 0, 1, 3)) if has_lookahead() else 0
    baseline, shared = hashers(function, block_size, lookahead)
    family = random_family(rnd, block_size)
    for arguments in family:
        ids = arguments.pop("ids")
        outputs = [rnd.randrange(VOCABULARY) for _ in range(rnd.randrange(3 * block_size))]
        theirs = make_request(ids, baseline, **arguments)
        ours = make_request(rnd.choice((list, TokenIds))(ids), shared, **arguments)
        for token in outputs:
            theirs.append_output_token_ids(token)
            ours.append_output_token_ids(token)
        assert ours.block_hashes == theirs.block_hashes
        num_tokens = max(len(ids) + len(outputs) - lookahead, 0)
        assert len(ours.block_hashes) == num_tokens // block_size
    return len(family)


@dataclass
class Cache:
    """A `KVCacheManager` and the requests that hold blocks in it."""

    manager: kv_cache_manager.KVCacheManager
    requests: dict[str, Request]
    groups: int

    @staticmethod
    def create(
        specs: Sequence[Any], num_blocks: int, block_size: int, use_eagle: bool = False
    ) -> "Cache":
        """An empty cache with one group for each spec."""
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        manager = kv_cache_manager.KVCacheManager(
            KVCacheConfig(num_blocks, [], groups),
            max_model_len=4096,
            scheduler_block_size=max(spec.block_size for spec in specs),
            hash_block_size=block_size,
            enable_caching=True,
            use_eagle=use_eagle,
        )
        return Cache(manager, {}, len(groups))

    def start(self, request: Request) -> int | None:
        """Look up and allocate as the scheduler does.

        Returns:
            The number of cached tokens, or None if the request does not fit.
        """
        blocks, num_cached = self.manager.get_computed_blocks(request)[:2]
        new_tokens = request.num_tokens - num_cached
        slots = self.manager.allocate_slots(
            request, new_tokens, num_cached, blocks, full_sequence_must_fit=True
        )
        if slots is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self.requests[request.request_id] = request
        return num_cached

    def finish(self, request_id: str) -> None:
        self.manager.free(self.requests.pop(request_id))

    def append(self, request_id: str, token: int) -> bool:
        """One decode step. Returns whether a slot was free."""
        request = self.requests[request_id]
        request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        return True

    def state(self) -> Any:
        """All that the manager knows: counts, hashes, the order of eviction, and the cache."""
        pool = self.manager.block_pool
        cached = pool.cached_block_hash_to_block._cache
        return (
            [(b.block_id, b.ref_cnt, b.block_hash, b.block_hash_num_tokens) for b in pool.blocks],
            [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            pool.get_num_free_blocks(),
            {key: list(b) if isinstance(b, dict) else b.block_id for key, b in cached.items()},
            {name: self.manager.get_block_ids(name) for name in self.requests},
            {name: self.manager.estimate_cached_tokens(r) for name, r in self.requests.items()},
        )


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32
    )


def sliding(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.float32,
        sliding_window=window,
    )


def random_specs(rnd: Random, block_size: int) -> list[Any]:
    """Specs of one to three groups: full attention alone, twice, of another block size, or with a
    sliding window.
    """
    return rnd.choice(
        (
            [full(block_size)],
            [full(block_size), full(block_size)],
            [full(block_size), sliding(block_size, 3 * block_size)],
            [full(2 * block_size), sliding(block_size, 3 * block_size)],
            [full(block_size), full(block_size), sliding(2 * block_size, 4 * block_size)],
        )
    )


@contextmanager
def active(*names: str) -> Iterator[None]:
    """These parts, and no others, are active."""
    before = parts._active
    parts._active = frozenset(names)
    try:
        yield
    finally:
        parts._active = before


def install() -> None:
    """Hook vLLM's hasher and cache, and its detokenizer."""
    for hook in (*block_hashes.HOOKS, *detokenization.HOOKS):
        install_hook(hook)


def install_hook(hook: Hook) -> None:
    """Install a hook, or leave its work to a patch."""
    hook.apply(importlib.import_module(hook.module))


class Twins:
    """Two caches, one with vLLM's code and one with the shared look-up, that see the same events
    and must stay equal.
    """

    def __init__(self, rnd: Random, function: Callable[[Any], bytes]) -> None:
        self.rnd = rnd
        block_size = rnd.choice((1, 4, 16))
        specs = random_specs(rnd, block_size)
        use_eagle = rnd.random() < 0.25
        num_blocks = rnd.choice((40, 200, 800))
        self.ours = Cache.create(specs, num_blocks, block_size, use_eagle)
        self.theirs = Cache.create(specs, num_blocks, block_size, use_eagle)
        self.hasher = hashers(function, block_size)[0]
        base = [rnd.randrange(VOCABULARY) for _ in range(100 * block_size)]
        self.prompts = [
            base[: rnd.randrange(1, len(base))]
            + [rnd.randrange(VOCABULARY) for _ in range(rnd.randrange(1, 10 * block_size))]
            for _ in range(8)
        ]
        self.num_events = 0

    def check(self) -> None:
        with active("lookup"):
            ours = self.ours.state()
        with active():
            assert ours == self.theirs.state()

    def _both(self, event: Callable[[Cache], Any]) -> None:
        with active("lookup"):
            ours = event(self.ours)
        with active():
            assert ours == event(self.theirs)
        self.num_events += 1

    def step(self) -> None:
        """One random event in both caches."""
        rnd = self.rnd
        kind = rnd.random()
        running = sorted(self.ours.requests)
        if kind < 0.45 or not running:
            self._start()
        elif kind < 0.7:
            name = rnd.choice(running)
            self._both(lambda cache: cache.finish(name))
        elif kind < 0.85:
            name, token = rnd.choice(running), rnd.randrange(VOCABULARY)
            self._both(lambda cache: cache.append(name, token))
        elif kind < 0.95:
            pool = self.ours.manager.block_pool
            ids = {rnd.randrange(1, pool.num_gpu_blocks) for _ in range(rnd.randrange(4))}
            self._both(lambda cache: cache.manager.evict_blocks(ids))
        else:
            if rnd.random() < 0.5:
                for name in running:
                    self._both(lambda cache, name=name: cache.finish(name))
            self._both(lambda cache: cache.manager.reset_prefix_cache())

    def _start(self) -> None:
        ids = self.rnd.choice(self.prompts)
        if self.rnd.random() < 0.2:
            ids = ids[: self.rnd.randrange(1, len(ids) + 1)]
        name = f"request{self.num_events}"
        skips_cache = self.rnd.random() < 0.1  # its blocks become duplicates

        def start(cache: Cache) -> int | None:
            request = make_request(ids, self.hasher, name)
            request.skip_reading_prefix_cache = skips_cache
            return cache.start(request)

        self._both(start)
