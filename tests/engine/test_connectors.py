"""KV connectors on real engines: requests that arrive together on one stored prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ENVIRONMENT, SETTINGS
from tests.engine.test_engine import assert_same_tokens
from tests.support.dummy_model import write_small_llama
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, STOCK, Batch, EngineProcess

pytestmark = pytest.mark.engine

BLOCK = 32
#: A document of whole blocks, and questions that are shorter than a block.
DOCUMENT = [3 + i % 97 for i in range(10 * BLOCK)]
PROMPTS = [[*DOCUMENT, *range(5 + i, 9 + 2 * i)] for i in range(6)]
CONNECTORS = {
    "ExampleConnector": {"kv_connector": "ExampleConnector"},
    "AsyncExampleConnector": {
        "kv_connector": "AsyncExampleConnector",
        "kv_connector_module_path": "tests.support.async_connector",
    },
}
OPTIONS: dict[str, Any] = {
    **SETTINGS,
    "max_model_len": 1024,
    "block_size": BLOCK,
    "skip_tokenizer_init": True,
}


def ask(engine: EngineProcess) -> Batch:
    return engine.generate(PROMPTS, 24, gaps=True, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("small") / "model", num_layers=2)


@pytest.fixture(scope="module")
def expected(small: Path) -> Iterator[Batch]:
    """What vLLM's own backend answers without a connector."""
    with EngineProcess(STOCK, small, ONE_PROCESS, **OPTIONS) as engine:
        yield ask(engine)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_requests_on_a_stored_prompt_share_its_blocks(connector, small, expected, tmp_path):
    transfer = {
        **CONNECTORS[connector],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = {**OPTIONS, "kv_transfer_config": transfer}
    with EngineProcess(PREFIX_SHARE, small, ENVIRONMENT, **options) as engine:
        engine.generate(PROMPTS[:1], 1, detokenize=False)
        assert list(tmp_path.iterdir()), "the document is stored"
        engine.reset_prefix_cache()
        ours = ask(engine)
    assert_same_tokens(ours, expected)
    assert all(a.num_cached_tokens == len(DOCUMENT) for a in ours.answers)
    # with separate blocks, each request would read the document separately
    assert ours.stats["kv_tokens_stock"] > 3 * ours.stats["kv_tokens_read"]
