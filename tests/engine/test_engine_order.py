"""A KV cache that holds only some of the documents: shuffled questions compute as few tokens as
grouped questions, and the answers stay the same.
"""

import random
from collections.abc import Sequence

import pytest

from tests.engine.conftest import SETTINGS
from tests.engine.test_engine import assert_same_tokens
from tests.support.dummy_model import SMALL_VOCAB, write_small_llama
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, Batch, EngineProcess

pytestmark = pytest.mark.engine

#: 11 usable blocks of 128 tokens hold two documents of 4 blocks, their questions included
CACHE = {**SETTINGS, "num_gpu_blocks_override": 12, "max_num_seqs": 2, "max_model_len": 1024}


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, SMALL_VOCAB), k=count)


PROMPTS = [tokens(520, seed=i) + tokens(30, seed=10 + j) for i in range(4) for j in range(3)]
GROUPED = range(len(PROMPTS))
SHUFFLED = random.Random(2).sample(GROUPED, len(PROMPTS))


def answered(engine: EngineProcess, places: Sequence[int]) -> Batch:
    """Ask ``PROMPTS`` in the order of ``places``; return the answers in their own order."""
    engine.reset_prefix_cache()
    batch = engine.generate([PROMPTS[i] for i in places], 6, gaps=True, together=True)
    answers = [batch.answers[places.index(i)] for i in GROUPED]
    return Batch(tuple(answers), batch.seconds, batch.seconds_per_token)


def computed(batch: Batch) -> int:
    """Prompt tokens that were not found in the prefix cache."""
    return sum(a.num_prompt_tokens - a.num_cached_tokens for a in batch.answers)


def test_shuffled_questions_compute_as_little_as_grouped_ones(tmp_path):
    model = write_small_llama(tmp_path)
    off = {**ONE_PROCESS, "VLLM_PREFIXSHARE_ORDER": "off"}
    with EngineProcess(PREFIX_SHARE, model, off, **CACHE) as engine:
        grouped, shuffled = answered(engine, GROUPED), answered(engine, SHUFFLED)
    # auto: requests are ordered
    with EngineProcess(PREFIX_SHARE, model, ONE_PROCESS, **CACHE) as engine:
        ordered = answered(engine, SHUFFLED)
    assert computed(shuffled) > 1.2 * computed(grouped), "the cache must not hold everything"
    assert computed(ordered) <= computed(grouped)
    assert_same_tokens(shuffled, grouped)
    assert_same_tokens(ordered, shuffled)
