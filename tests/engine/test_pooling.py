"""A pooling model on a CPU engine: it has no decode steps, and gives what it gives without
PREFIX_SHARE.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import ENVIRONMENT, SETTINGS
from tests.support.dummy_model import write_small_llama
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, STOCK
from tests.support.engine_steps import start_engines

pytestmark = pytest.mark.engine

DOCUMENT = [3 + i % 97 for i in range(320)]
PROMPTS = [[*DOCUMENT, *range(5 + i, 9 + 2 * i)] for i in range(4)]


def embed(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The embeddings of prompts; to be sent with ``EngineProcess.call``."""
    outputs = llm.embed([{"prompt_token_ids": list(p)} for p in prompts], use_tqdm=False)
    return [list(output.outputs.embedding) for output in outputs]


def test_embeddings_are_those_of_the_baseline(tmp_path):
    model = write_small_llama(tmp_path / "model", num_layers=2)
    options = {**SETTINGS, "max_model_len": 1024, "runner": "pooling", "convert": "embed"}
    kinds = ((PREFIX_SHARE, ENVIRONMENT), (STOCK, ONE_PROCESS))
    specs = [{"backend": b, "model": model, "environment": e, **options} for b, e in kinds]
    with start_engines(*specs) as (ours, stock):
        # the second time the document is cached
        found, again, expected = (e.call(embed, PROMPTS) for e in (ours, ours, stock))
        (stats,) = ours.collective_rpc("prefix_share_stats")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(again, expected, atol=1e-5)
    assert len({tuple(vector) for vector in found}) == len(PROMPTS)
    assert stats["decode_steps"] == 0
