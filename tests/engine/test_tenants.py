"""Adapters and salts on a CPU engine: each has its own KV, so its own prefix tree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ENVIRONMENT, SETTINGS
from tests.support.dummy_model import write_lora, write_small_llama
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, STOCK, EngineProcess
from tests.support.engine_steps import drive, salted, start_engines

pytestmark = pytest.mark.engine

BLOCK = 32
#: Whole blocks, and questions that are shorter than a block.
DOCUMENT = [3 + i % 97 for i in range(10 * BLOCK)]
PROMPTS = [[*DOCUMENT, *range(5 + i, 9 + 2 * i)] for i in range(4)]
OPTIONS: dict[str, Any] = {
    **SETTINGS,
    "max_model_len": 1024,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 120,
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
}
SAMPLING = {"ignore_eos": True, "max_tokens": 16}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("small") / "model", num_layers=2)


@pytest.fixture(scope="module")
def engines(small: Path) -> Iterator[list[EngineProcess]]:
    """PREFIX_SHARE, and vLLM's own backend."""
    kinds = ((PREFIX_SHARE, ENVIRONMENT), (STOCK, ONE_PROCESS))
    specs = [{"backend": b, "model": small, "environment": e, **OPTIONS} for b, e in kinds]
    with start_engines(*specs) as started:
        yield started


def test_requests_share_with_those_of_their_adapter(engines, small, tmp_path):
    folders = [str(write_lora(tmp_path / str(i), small, seed=i)) for i in range(2)]
    adapters = [None, *folders]
    prompts = [prompt for prompt in PROMPTS for _ in adapters]
    runs = []
    for engine in engines:
        engine.call(drive, [PROMPTS[0]] * 3, {**SAMPLING, "max_tokens": 1}, None, adapters)
        runs.append(engine.call(drive, prompts, SAMPLING, None, adapters * len(PROMPTS)))
    found, expected = ([c.token_ids for c in run.completions] for run in runs)
    assert found == expected
    assert all(len(set(found[i : i + 3])) == 3 for i in range(0, len(found), 3)), "no effect"
    # four requests on each of three documents, of which a plan may read one more than once
    assert 1.5 < runs[0].stats["share_factor"] < 4


def test_requests_share_with_those_of_their_salt(engines):
    salts = ["one", "two", None]
    prompts = [prompt for prompt in PROMPTS for _ in salts]
    runs = []
    for engine in engines:
        engine.reset_prefix_cache()
        for salt in salts:
            _, cached = engine.call(salted, PROMPTS[:1], [salt], 1)
            assert cached == [0], "blocks of another tenant"
        run, cached = engine.call(salted, prompts, salts * len(PROMPTS), 16)
        assert set(cached) == {len(DOCUMENT)}
        runs.append(run)
    found, expected = ([c.token_ids for c in run.completions] for run in runs)
    assert found == expected
    assert 1.5 < runs[0].stats["share_factor"] < 4
