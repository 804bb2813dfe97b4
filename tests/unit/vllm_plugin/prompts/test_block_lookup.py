"""The shared look-up and counts leave a prefix cache as vLLM's code leaves it."""

from random import Random
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from tests.support import shared_prefixes as cases
from vllm_prefixshare.vllm_plugin.prompts import block_lookup, known_code, parts

BLOCK = 16


@pytest.fixture(autouse=True, scope="module")
def hooks_are_installed():
    cases.install()
    assert block_lookup._is_supported(), "asked once, before a test replaces a function of vLLM"


@pytest.fixture
def counters(monkeypatch):
    found = parts.PartCounters()
    monkeypatch.setattr(parts, "COUNTERS", {"lookup": found})
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_cache_stays_as_vllms_under_random_events(seed, monkeypatch):
    monkeypatch.setattr(block_lookup, "_STORED_STEP", (1, 2, 64)[seed % 3])
    twins = cases.Twins(Random(seed), cases.algorithm("sha256"))
    for _ in range(40):
        twins.step()
        twins.check()


def _cache_with_document(blocks: int, specs: int = 1) -> tuple[cases.Cache, Any, list[int]]:
    rnd = Random(7)
    hasher = cases.hashers(cases.algorithm("sha256"), BLOCK)[0]
    cache = cases.Cache.create([cases.full(BLOCK)] * specs, 2 * specs * blocks + 10, BLOCK)
    ids = [rnd.randrange(cases.VOCABULARY) for _ in range(blocks * BLOCK)]
    with cases.active():
        cache.start(cases.make_request([*ids, 1], hasher, "writer"))
    return cache, hasher, ids


@pytest.mark.parametrize("specs", [1, 2])
def test_a_cached_document_takes_no_call_per_block(monkeypatch, counters, specs):
    cache, hasher, ids = _cache_with_document(200, specs)
    calls = []
    original = BlockPool.get_cached_block
    monkeypatch.setattr(BlockPool, "get_cached_block", lambda *a: calls.append(1) or original(*a))
    request = cases.make_request([*ids, 2, 3], hasher, "reader")
    with cases.active("lookup"):
        assert cache.start(request) == 200 * BLOCK
    assert not calls
    assert (counters.requests, counters.fallbacks) == (1, 0)
    assert (counters.units, counters.shared_units) == (200, 200)


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 15, 16, 17, 47, 48, 199])
def test_a_hit_ends_at_the_first_evicted_block(missing, looked_up):
    cache, hasher, ids = _cache_with_document(200)
    request = cases.make_request([*ids, 2], hasher, "reader")
    if looked_up:
        with cases.active("lookup"):
            assert cache.manager.get_computed_blocks(request)[1] == 200 * BLOCK
    (block_ids,) = cache.manager.get_block_ids("writer")
    cache.manager.evict_blocks({block_ids[missing]})
    with cases.active("lookup"):
        blocks, num_cached = cache.manager.get_computed_blocks(request)[:2]
    assert num_cached == missing * BLOCK
    assert blocks.get_block_ids() == (block_ids[:missing],)


def test_a_second_look_up_makes_no_key_of_the_blocks_that_the_first_has_found(counters):
    cache, hasher, ids = _cache_with_document(200)
    pool = cache.manager.block_pool
    first, second = (cases.make_request([*ids, i], hasher, f"reader{i}") for i in (2, 3))
    kept = first.block_hashes[:192]  # a multiple of 64
    with cases.active("lookup"):
        assert block_lookup._recent(pool, kept, 0) is None
        blocks = cache.manager.get_computed_blocks(first)[0].blocks
        recent = block_lookup._recent(pool, kept, 0)
        assert recent.blocks == list(blocks[0][:192])
        assert block_lookup._recent(pool, second.block_hashes[:128], 0) is None
        assert cache.manager.get_computed_blocks(second)[0].blocks == blocks
        assert block_lookup._recent(pool, kept, 0) is recent
    assert counters.cache_bytes > 192 * 90


def test_duplicates_of_kept_blocks_are_looked_up_as_by_vllm():
    cache, hasher, ids = _cache_with_document(200)
    pool = cache.manager.block_pool
    request = cases.make_request([*ids, 2], hasher, "reader")
    with cases.active("lookup"):
        blocks = cache.manager.get_computed_blocks(request)[0].blocks
        spare = pool.get_new_blocks(1)[0]
        pool.cached_block_hash_to_block.insert(blocks[0][70].block_hash, spare)
        assert cache.manager.get_computed_blocks(request)[0].blocks == blocks
        recent = block_lookup._recent(pool, request.block_hashes[:192], 0)
        assert recent.blocks == list(blocks[0][:192])


def test_no_hit_probes_one_range(counters):
    cache, hasher, ids = _cache_with_document(200)
    probed = []

    class Probes(dict):
        def get(self, key):
            probed.append(key)
            return super().get(key)

    pool_map = cache.manager.block_pool.cached_block_hash_to_block
    pool_map._cache = Probes(pool_map._cache)
    request = cases.make_request([5, *ids], hasher, "reader")
    with cases.active("lookup"):
        assert cache.manager.get_computed_blocks(request)[1] == 0
    assert len(probed) == block_lookup._FIRST_RANGE
    assert counters.shared_units == 0


@pytest.mark.parametrize("drop_eagle_block", [False, True])
@pytest.mark.parametrize("alignment", [BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("max_length", [0, BLOCK - 1, 7 * BLOCK, 7 * BLOCK + 5, 10**6])
def test_every_argument_of_a_look_up(drop_eagle_block, alignment, max_length):
    cache, hasher, ids = _cache_with_document(30)
    hashes = cases.make_request(ids, hasher).block_hashes
    pool = cache.manager.block_pool
    arguments = (hashes, max_length, [0], pool, cases.full(BLOCK), drop_eagle_block, alignment)
    with cases.active():
        theirs = FullAttentionManager.find_longest_cache_hit(*arguments)
    with cases.active("lookup"):
        ours = FullAttentionManager.find_longest_cache_hit(*arguments)
    assert ours == theirs


@pytest.mark.parametrize("dcp", [1, 2])
def test_blocks_of_several_hashes(counters, dcp):
    """Groups with larger blocks than the hashes, and context parallelism."""
    rnd = Random(3)
    size = 4 * BLOCK
    hasher = cases.hashers(cases.algorithm("sha256"), BLOCK)[0]
    specs = [cases.full(size * dcp), cases.sliding(BLOCK, 3 * BLOCK)]
    cache = cases.Cache.create(specs, 500, BLOCK)
    ids = [rnd.randrange(cases.VOCABULARY) for _ in range(20 * size)]
    with cases.active():
        cache.start(cases.make_request([*ids, 1], hasher, "writer"))
    hashes = cases.make_request(ids, hasher).block_hashes
    pool = cache.manager.block_pool
    spec = cases.full(size)
    for block_hashes in (hashes, BlockHashListWithBlockSize(hashes, BLOCK, size * dcp)):
        arguments = (block_hashes, 10**6, [0], pool, spec, False, size * dcp, dcp)
        with cases.active():
            theirs = FullAttentionManager.find_longest_cache_hit(*arguments)
        with cases.active("lookup"):
            assert FullAttentionManager.find_longest_cache_hit(*arguments) == theirs
        assert len(theirs[0][0]) == 20 // dcp
    assert (counters.requests, counters.fallbacks) == (2, 1)


def test_hits_inside_a_block_are_left_to_vllm(counters):
    cache, hasher, ids = _cache_with_document(8)
    hashes = cases.make_request(ids, hasher).block_hashes
    pool = cache.manager.block_pool
    arguments = (hashes, 10**6, [0], pool, cases.full(2 * BLOCK), False, BLOCK)
    with cases.active():
        theirs = FullAttentionManager.find_longest_cache_hit(*arguments)
    with cases.active("lookup"):
        assert FullAttentionManager.find_longest_cache_hit(*arguments) == theirs
    assert counters.fallbacks == 1


def test_a_pool_with_its_own_look_up_is_asked(counters):
    cache, hasher, ids = _cache_with_document(8)
    hashes = cases.make_request(ids, hasher).block_hashes

    class Pool(BlockPool):
        def get_cached_block(self, *_: Any) -> None:
            return None

    pool = cache.manager.block_pool
    pool.__class__ = Pool
    with cases.active("lookup"):
        arguments = (hashes, 10**6, [0], pool, cases.full(BLOCK), False, BLOCK)
        assert FullAttentionManager.find_longest_cache_hit(*arguments) == (([],), 0)
    assert counters.fallbacks == 1


def test_a_failing_look_up_counts_nothing_twice():
    cache, hasher, ids = _cache_with_document(8)
    before = cache.state()
    request = cases.make_request([*ids, *range(10_000)], hasher, "reader")
    with cases.active("lookup"):
        assert cache.start(request) is None, "does not fit"
        assert cache.state() == before


def test_tenants_share_no_block():
    hasher = cases.hashers(cases.algorithm("sha256"), BLOCK)[0]
    cache = cases.Cache.create([cases.full(BLOCK)], 100, BLOCK)
    ids = list(range(20 * BLOCK))
    with cases.active("lookup"):
        for salt in ("s", "t", None):
            request = cases.make_request(ids, hasher, f"request {salt}", cache_salt=salt)
            assert cache.start(request) == 0
    tables = [set(cache.manager.get_block_ids(name)[0]) for name in cache.requests]
    assert len(set.union(*tables)) == sum(map(len, tables))


def test_another_vllm_gets_its_own_look_up(monkeypatch, counters):
    monkeypatch.setattr(block_lookup, "KNOWN_CODE", {"vllm.v1.core.gone.Name": ("123",)})
    messages: list[str] = []
    monkeypatch.setattr(known_code, "report_once", lambda part, reason: messages.append(reason))
    block_lookup._is_supported.cache_clear()
    cache, hasher, ids = _cache_with_document(8)
    with cases.active("lookup"):
        assert cache.start(cases.make_request([*ids, 2], hasher, "reader")) == 8 * BLOCK
    assert counters.requests == 0
    assert messages == [
        "vllm.v1.core.gone.Name of this vLLM is not the code that the part was written for"
    ]
    block_lookup._is_supported.cache_clear()


def test_this_release_is_known():
    assert known_code.is_known("lookup", block_lookup.KNOWN_CODE)
