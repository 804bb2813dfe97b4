"""Steps with new requests in FULL CUDA graphs, inside a real vLLM engine on a GPU.

At most ``MAX_SEQS`` requests run, so that each one that ends lets a new one in beside the decodes
of the others. Python must call no layer: FULL graphs are replayed in every step.

    python -m pytest -m gpu tests/gpu/test_gpu_mixed_graphs.py
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_lora
from tests.support.engine import EngineProcess
from tests.support.engine_steps import Run, drive
from tests.support.gpu_engines import (
    DOCUMENT,
    FP8,
    Text,
    all_errors,
    assert_as_stock,
    assert_same_texts,
    assert_shared,
    drive_primed,
    engines,
    extension,
    greedy,
    llama_128,
)
from tests.support.gpu_layer import HOPPER, TWO_GPUS, on_gpu_with

pytestmark = [
    *on_gpu_with("vllm"),
    pytest.mark.skipif(not HOPPER, reason="mixed steps run in FULL graphs on Hopper GPUs only"),
]
MAX_SEQS = 16
#: Tokens after the document of each request, and tokens of each answer.
PRIVATE, LENGTHS = [50, 9, 131, 64, 17, 1] * 4, [9, 30, 17, 2, 41, 23, 12] * 4
#: FULL graphs without compilation, as large as the plugin chooses for ``FEW``.
QUICK: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
}
FEW: dict[str, Any] = {
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": 512,
    **extension(cases.LayerCounter),
}


def ours(model: Path, **options: Any) -> dict[str, Any]:
    return cases.ours(model, "V2", **{**FEW, **options})


def lengths_of(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [greedy(LENGTHS[i]) for i in range(len(prompts))]


def joining(
    engine: EngineProcess, prompts: list[list[int]], lora: list[str | None] | None = None
) -> Run:
    """Answers to prompts of which each joins the decodes of others; the document is cached. No
    layer is called by Python.
    """
    cached = list(dict.fromkeys(lora or [None]))
    engine.call(drive, [prompts[0]] * len(cached), greedy(1), None, cached)
    engine.collective_rpc("count_layers")
    run: Run = engine.call(drive, prompts, lengths_of(prompts), None, lora)
    called = engine.collective_rpc("count_layers")
    assert not any(called), f"layers called from Python: {called}"
    return run


@pytest.fixture(scope="module")
def model(random_model: Path) -> Path:
    return random_model


@pytest.fixture(scope="module")
def both(model: Path) -> Iterator[list[EngineProcess]]:
    # compiled, and in the mode that the plugin chooses
    with engines(cases.stock(model), ours(model)) as started:
        yield started


def test_requests_that_join_decodes(both, text):
    stock, engine = both
    run = joining(engine, text.asking(DOCUMENT, PRIVATE))
    assert [len(c.token_ids) for c in run.completions] == LENGTHS[: len(PRIVATE)]
    assert_as_stock(run, stock)
    assert_shared(run)


def test_requests_that_share_nothing(both, text):
    stock, engine = both
    prompts = [text.part(1000 * i, 90 + 41 * i) for i in range(9)]
    run = joining(engine, [text.asking(DOCUMENT, [3])[0], *prompts])
    assert_as_stock(run, stock)


def test_long_prompts_in_pieces_beside_decodes(both, text):
    # 512 tokens a step, as many as the largest graph holds
    stock, engine = both
    prompts = [*text.asking(DOCUMENT, PRIVATE[:9]), text.part(3000, 1100), text.part(5000, 900)]
    run = joining(engine, prompts)
    assert_as_stock(run, stock)
    assert run.stats["shared_steps"] > 0


def test_an_fp8_cache_is_as_near_to_16_bits_as_stocks(tmp_path, note):
    """The reference has a 16-bit cache: stock's prefill with an fp8 cache rounds the prompts as
    stock has rounded them for its answers, and so is nearer to these than to any other rounding.
    """
    model = llama_128(tmp_path / "model")
    plain = {"dtype": "bfloat16"}
    options = {**plain, **FP8}
    specs = (
        cases.stock(model, **options),
        ours(model, **QUICK, **options),
        cases.stock(model, **plain),
    )
    with engines(*specs) as (stock, engine, reference):
        prompts = Text(model).asking(DOCUMENT, PRIVATE)
        expected = drive_primed(stock, prompts, lengths_of(prompts))
        run = joining(engine, prompts)
        of_stock, own = all_errors(expected, reference), all_errors(run, reference)
    note(cases.beside_stock(run, expected, own, of_stock))
    assert_shared(run)
    assert 0 < own.mean() < 1.15 * of_stock.mean() + 1e-3
    assert own.max() < 2 * of_stock.max() + 1e-2


def test_adapters(model, text, tmp_path):
    adapter = str(write_lora(tmp_path / "adapter", model))
    options = {"enable_lora": True, "max_lora_rank": 8}
    stock = cases.stock(model, **options, **cases.QUICK)
    with engines(stock, ours(model, **QUICK, **options)) as both:
        prompts = text.asking(DOCUMENT, PRIVATE)
        adapters = [adapter if i % 2 else None for i in range(len(prompts))]
        run = joining(both[1], prompts, adapters)
        expected = both[0].call(drive, prompts, lengths_of(prompts), None, adapters)
    assert_same_texts(run, expected)
    assert run.stats["shared_steps"] > 0


@TWO_GPUS
def test_two_gpus(model, text):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    stock = cases.stock(model, **options, enforce_eager=True)
    with engines(stock, ours(model, **QUICK, **options)) as both:
        run = joining(both[1], text.asking(DOCUMENT, PRIVATE))
        assert_as_stock(run, both[0])
    assert_shared(run)
