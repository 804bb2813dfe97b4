"""Shared detokenization, block hashes and look-up against vLLM's own code, on random requests.

Only with vLLM installed; FUZZ_PROMPTS sets the number of cases.
"""

from random import Random

import pytest

from tests.support import fuzz_scale as scale

pytest.importorskip("vllm")

from tests.support import decoding
from tests.support import shared_prefixes as cases
from vllm_prefixshare.vllm_plugin.prompts import block_hashes, parts


@pytest.fixture(autouse=True)
def fresh_counters(monkeypatch):
    cases.install()
    names = ("hashes", "lookup", "detokenization")
    monkeypatch.setattr(parts, "COUNTERS", {name: parts.PartCounters() for name in names})
    block_hashes._segments.cache_clear()
    yield
    block_hashes._segments.cache_clear()


@pytest.mark.parametrize("name", cases.ALGORITHMS)
def test_block_hashes(name):
    function = cases.algorithm(name)
    rnd = Random(scale.seed_of("block hashes", name))
    num_requests = 0
    with cases.active("hashes"):
        while num_requests < scale.PROMPTS // len(cases.ALGORITHMS):
            num_requests += cases.compare_hashes(rnd, function)
    counters = parts.COUNTERS["hashes"]
    assert counters.shared_units > 0
    scale.report(
        f"block hashes, {name}: {num_requests:,} requests, {counters.shared_units:,} of "
        f"{counters.units:,} hashes shared, all equal"
    )


def test_caches_under_random_events():
    num_events = 0
    seed = 0
    while num_events < scale.PROMPTS:
        twins = cases.Twins(Random(scale.seed_of("look-up", seed)), cases.algorithm("sha256"))
        seed += 1
        for _ in range(60):
            twins.step()
            twins.check()
        num_events += twins.num_events
    counters = parts.COUNTERS["lookup"]
    assert counters.shared_units > 0
    scale.report(
        f"look-up: {num_events:,} events, {counters.requests:,} look-ups, "
        f"{counters.shared_units:,} cached blocks, caches equal after each"
    )


@pytest.mark.parametrize("name", decoding.KINDS)
def test_detokenization(name):
    num_cases = max(scale.PROMPTS // len(decoding.KINDS), 20)
    decoding.compare(Random(scale.seed_of("detokenizer", name)), decoding.backend(name), num_cases)
    counters = parts.COUNTERS["detokenization"]
    from_tail = counters.requests - counters.fallbacks
    assert from_tail > 0
    scale.report(
        f"detokenizer, {name}: {2 * num_cases:,} prompts, {from_tail:,} from a tail, "
        "all texts equal"
    )
