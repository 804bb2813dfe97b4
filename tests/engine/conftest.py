"""Two real engines on the embedded model: PREFIX_SHARE and stock."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.embedded_model import embedded_model_path
from tests.support.engine import ONE_PROCESS, PREFIX_SHARE, STOCK, Batch, EngineProcess

#: The start of a text; the length is limited by max_model_len and the time of a test.
DOCUMENT = (Path(__file__).parents[2] / "examples" / "document.md").read_text()[:6500]

#: float32, so that a differing token is a fault and not a rounding of bfloat16 logits. Few blocks
#: and a small token budget, so that prefill is chunked, batches are mixed and requests are
#: pre-empted.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 3072,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 40,
    "enforce_eager": True,
    "pause": True,
}
ENVIRONMENT = {
    **ONE_PROCESS,
    "VLLM_PREFIXSHARE_SHARE": "always",
    "VLLM_PREFIXSHARE_CHECK_PLANS": "1",
}


@pytest.fixture(scope="session")
def model() -> Path:
    return embedded_model_path()


@pytest.fixture(scope="session")
def ours(model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(PREFIX_SHARE, model, ENVIRONMENT, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="session")
def stock(model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(STOCK, model, ONE_PROCESS, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="session")
def both(ours: EngineProcess, stock: EngineProcess) -> Callable[..., tuple[Batch, Batch]]:
    """A function that runs the same prompts on both engines: (PREFIX_SHARE, stock)."""

    def run(prompts: Any, max_tokens: int, **options: Any) -> tuple[Batch, Batch]:
        batches = [e.generate(prompts, max_tokens, gaps=True, **options) for e in (ours, stock)]
        return batches[0], batches[1]

    return run
