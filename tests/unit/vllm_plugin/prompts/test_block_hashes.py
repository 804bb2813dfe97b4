"""Block hashes taken from recent prompts are the bytes that vLLM's hasher computes."""

import importlib
import os
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core import kv_cache_utils

from tests.support import shared_prefixes as cases
from vllm_prefixshare.vllm_plugin.hooks import block_hashes as hooks
from vllm_prefixshare.vllm_plugin.prompts import block_hashes, known_code, parts
from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import ENTRY_BYTES, BoundedCache
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

BLOCK = 16


class CountingHash:
    """vLLM's SHA-256, counted."""

    def __init__(self) -> None:
        self.function = cases.algorithm("sha256")
        self.calls = 0

    def __call__(self, value: Any) -> bytes:
        self.calls += 1
        return self.function(value)


@pytest.fixture(autouse=True)
def hashes_are_shared(monkeypatch):
    monkeypatch.setattr(parts, "_active", frozenset({"hashes"}))
    monkeypatch.setattr(parts, "COUNTERS", {"hashes": parts.PartCounters()})
    segments = block_hashes._segments
    segments.cache_clear()
    yield
    segments.cache_clear()


def random_ids(seed: int, length: int) -> list[int]:
    rnd = Random(seed)
    return [rnd.randrange(cases.VOCABULARY) for _ in range(length)]


DOCUMENT = random_ids(1, 40 * BLOCK + 5)


@pytest.mark.parametrize("name", cases.ALGORITHMS)
@pytest.mark.parametrize("seed", range(5))
def test_random_families_have_the_hashes_of_vllm(name, seed):
    function = cases.algorithm(name)
    rnd = Random(f"{name} {seed}")
    for _ in range(10):
        cases.compare_hashes(rnd, function)


@settings(max_examples=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=8, max_size=60), min_size=2, max_size=5),
    block_size=st.integers(1, 4),
)
def test_prompts_that_branch_everywhere(prompts, block_size):
    baseline, shared = cases.hashers(cases.algorithm("sha256"), block_size)
    for ids in prompts:
        theirs = cases.make_request(ids, baseline).block_hashes
        assert cases.make_request(ids, shared).block_hashes == theirs


def test_a_request_on_a_cached_document_hashes_its_question_only():
    count = CountingHash()
    _, shared = cases.hashers(count, BLOCK)
    cases.make_request(DOCUMENT, shared)
    assert count.calls == 40
    for question in range(3):
        count.calls = 0
        cases.make_request(DOCUMENT + random_ids(question, 2 * BLOCK), shared)
        assert count.calls == 2
    counters = parts.COUNTERS["hashes"]
    assert (counters.requests, counters.fallbacks) == (4, 0)
    assert (counters.units, counters.shared_units) == (40 + 3 * 42, 3 * 40)
    assert counters.cache_bytes > DOCUMENT.__len__() * 4


def test_the_turns_of_a_conversation_share_their_past():
    count = CountingHash()
    _, shared = cases.hashers(count, BLOCK)
    ids: list[int] = []
    for turn in range(6):
        ids = ids + random_ids(turn, 10 * BLOCK)
        count.calls = 0
        cases.make_request(ids, shared)
        assert count.calls == 10


def test_documents_behind_one_system_prompt_do_not_displace_each_other():
    count = CountingHash()
    _, shared = cases.hashers(count, BLOCK)
    system = random_ids(0, 12 * BLOCK + 3)
    documents = [system + random_ids(i, 30 * BLOCK) for i in range(1, 30)]
    for ids in documents:
        cases.make_request(ids, shared)
    count.calls = 0
    for ids in documents:
        cases.make_request(ids, shared)
    assert count.calls == 0


def test_tenants_with_other_salts_share_no_hash():
    count = CountingHash()
    _, shared = cases.hashers(count, BLOCK)
    requests = [cases.make_request(DOCUMENT, shared, cache_salt=salt) for salt in ("s", "t", None)]
    assert count.calls == 3 * 40
    assert len({h for request in requests for h in request.block_hashes}) == 3 * 40
    assert parts.COUNTERS["hashes"].shared_units == 0


def test_images_share_hashes_where_they_are_equal():
    count = CountingHash()
    baseline, shared = cases.hashers(count, BLOCK)
    for second in ("B", "C"):
        images = [cases.feature("A", 20, 100), cases.feature(second, 400, 100)]
        theirs = cases.make_request(DOCUMENT, baseline, mm_features=images).block_hashes
        count.calls = 0
        assert cases.make_request(DOCUMENT, shared, mm_features=images).block_hashes == theirs
    assert count.calls == 40 - 400 // BLOCK


def test_features_that_overlap_are_left_to_vllm():
    baseline, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    for last in ([], [cases.feature("C", 290, 5)]):
        images = [cases.feature("A", 0, 300), cases.feature("B", 10, 20), *last]
        theirs = cases.make_request(DOCUMENT, baseline, mm_features=images).block_hashes
        assert cases.make_request(DOCUMENT, shared, mm_features=images).block_hashes == theirs
    assert parts.COUNTERS["hashes"].fallbacks == 2


@pytest.mark.parametrize("kind", [bool, np.int64])
def test_ids_that_equal_ints_but_hash_otherwise_are_left_to_vllm(kind):
    baseline, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    plain = [1] * (10 * BLOCK)
    other = [kind(1)] * (10 * BLOCK)
    assert cases.make_request(plain, shared).block_hashes != (
        cases.make_request(other, shared).block_hashes
    )
    assert cases.make_request(other, shared).block_hashes == (
        cases.make_request(other, baseline).block_hashes
    )


@pytest.mark.parametrize("token", [2**31, 2**40, -(2**31) - 1])
def test_ids_beyond_32_bits_are_left_to_vllm(token):
    baseline, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    for ids in ([*DOCUMENT, token], TokenIds([*DOCUMENT, token])):
        theirs = cases.make_request(ids, baseline).block_hashes
        assert cases.make_request(ids, shared).block_hashes == theirs
    assert parts.COUNTERS["hashes"].fallbacks == 2


def test_prompt_embeddings_are_left_to_vllm():
    baseline, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    for seed in (0, 1):
        embeddings = torch.randn(10 * BLOCK, 4, generator=torch.manual_seed(seed))
        theirs = cases.make_request(None, baseline, prompt_embeds=embeddings).block_hashes
        ours = cases.make_request(None, shared, prompt_embeds=embeddings).block_hashes
        assert ours == theirs
    assert parts.COUNTERS["hashes"].fallbacks == 2


def test_a_new_first_hash_starts_new_chains():
    baseline, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    cases.make_request(DOCUMENT, shared)
    cases.algorithm("sha256_cbor")  # another first hash
    theirs = cases.make_request(DOCUMENT, baseline).block_hashes
    assert cases.make_request(DOCUMENT, shared).block_hashes == theirs


def test_a_failing_hash_leaves_the_request_without_hashes():
    _, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    cases.make_request(DOCUMENT, shared)
    request = cases.make_request(DOCUMENT + random_ids(3, BLOCK), lambda _: [])

    def fails(_: Any) -> Any:
        raise RuntimeError("no hash")

    shared._baseline = fails
    with pytest.raises(RuntimeError, match="no hash"):
        shared(request)
    assert request.block_hashes == []


def test_the_cache_is_bounded(monkeypatch):
    cache: Any = BoundedCache(20_000)
    monkeypatch.setattr(block_hashes, "_segments", lambda: cache)
    baseline, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    for seed in range(20):
        ids = random_ids(seed % 7, 20 * BLOCK + seed)
        theirs = cases.make_request(ids, baseline).block_hashes
        assert cases.make_request(ids, shared).block_hashes == theirs
        assert cache.bytes <= 20_000
    assert cache.bytes > ENTRY_BYTES


def test_what_a_segment_holds_is_counted():
    _, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    cases.make_request(DOCUMENT, shared)
    assert 40 * (BLOCK * 4 + 32) < block_hashes._segments().bytes < 40 * (BLOCK * 4 + 100) + 1000


def test_segments_hold_no_prompt():
    _, shared = cases.hashers(cases.algorithm("sha256"), BLOCK)
    ids = TokenIds(DOCUMENT)
    cases.make_request(ids, shared)
    (entry,) = block_hashes._segments()._entries.values()
    assert entry[0].tokens.base is None
    assert not np.shares_memory(entry[0].tokens, ids.array)


def test_off_means_vllms_own(monkeypatch):
    count = CountingHash()
    _, shared = cases.hashers(count, BLOCK)
    cases.make_request(DOCUMENT, shared)
    monkeypatch.setattr(parts, "_active", frozenset())
    cases.make_request(DOCUMENT, shared)
    assert count.calls == 80


def test_another_vllm_gets_its_own_hasher_and_one_log_line(monkeypatch):
    changed = dict.fromkeys(block_hashes.KNOWN_CODE, ("another",))
    monkeypatch.setattr(block_hashes, "KNOWN_CODE", changed)
    monkeypatch.setattr(parts, "_reported", set())
    messages: list[str] = []
    monkeypatch.setattr(known_code, "report_once", lambda part, reason: messages.append(reason))
    block_hashes._is_supported.cache_clear()
    count = CountingHash()
    _, shared = cases.hashers(count, BLOCK)
    for _ in range(2):
        cases.make_request(DOCUMENT, shared)
    assert count.calls == 80
    assert len(messages) == 1
    assert "hash_block_tokens" in messages[0]
    block_hashes._is_supported.cache_clear()


def test_this_release_is_known():
    assert known_code.is_known("hashes", block_hashes.KNOWN_CODE)


def test_hooked_hashers_are_shared_ones():
    cases.install()
    for module in ("vllm.v1.core.kv_cache_utils", "vllm.v1.engine.core"):
        made = importlib.import_module(module).get_request_block_hasher(BLOCK, hash)
        assert isinstance(made, block_hashes.SharedBlockHasher)
        assert not isinstance(made._baseline, block_hashes.SharedBlockHasher), "once only"
    assert {hook.target for hook in hooks.HOOKS} >= {
        "vllm.v1.core.kv_cache_utils.get_request_block_hasher"
    }
    wrapped = hasattr(kv_cache_utils.get_request_block_hasher, "__wrapped__")
    assert wrapped != ("PREFIXSHARE_PATCHED" in os.environ)
