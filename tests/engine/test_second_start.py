"""A compiled model on a CPU: an engine that finds the graphs of an earlier one in vLLM's compile
cache answers as that one did, and shares.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ENVIRONMENT, SETTINGS
from tests.support.dummy_model import write_small_llama
from tests.support.engine import PREFIX_SHARE, Batch, EngineProcess

pytestmark = pytest.mark.engine

DOCUMENT = [3 + i % 97 for i in range(320)]
PROMPTS = [[*DOCUMENT, *range(5 + i, 9 + 2 * i)] for i in range(4)]


def ask(model: Path, cache: Path) -> Batch:
    options: dict[str, Any] = {
        **SETTINGS, "max_model_len": 1024, "block_size": 32, "enforce_eager": False,
        "skip_tokenizer_init": True,
    }  # fmt: skip
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(cache)}
    with EngineProcess(PREFIX_SHARE, model, environment, **options) as engine:
        engine.generate(PROMPTS[:1], 1, detokenize=False)
        return engine.generate(PROMPTS, 16, ignore_eos=True, detokenize=False)


def written(cache: Path) -> dict[Path, int]:
    """The compiled graphs, and when each was written, in nanoseconds."""
    found = (cache / "torch_compile_cache").rglob("*")
    return {path: path.stat().st_mtime_ns for path in found if path.suffix in (".so", ".py")}


def test_a_second_engine_takes_the_graphs_of_the_first(tmp_path):
    model, cache = write_small_llama(tmp_path / "model", num_layers=2), tmp_path / "cache"
    first = ask(model, cache)
    graphs = written(cache)
    assert graphs, "nothing was compiled"
    second = ask(model, cache)
    assert written(cache) == graphs, "compiled again"
    assert [a.token_ids for a in second.answers] == [a.token_ids for a in first.answers]
    for batch in (first, second):
        assert batch.stats["shared_steps"] > 0
