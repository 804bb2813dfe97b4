"""Features of deployments inside a real vLLM engine on a GPU: sleep, layouts of the KV cache, KV
connectors, adapters, salts, hits inside a block, modes of CUDA graphs, quantised weights.

    python -m pytest -m gpu tests/gpu/test_gpu_deployments.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_gpu_engine_hybrid import OPTIONS as HYBRID
from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_lora, write_small_deepseek_v2, write_small_qwen3_next
from tests.support.engine import RUNNERS, EngineProcess
from tests.support.engine_steps import drive, salted
from tests.support.gpu_engines import (
    DOCUMENT,
    FP8,
    PRIVATE,
    QUICK_BF16,
    Text,
    assert_as_exact,
    assert_as_stock,
    assert_same_texts,
    assert_shared,
    drive_primed,
    engines,
    greedy,
    llama_128,
)
from tests.support.gpu_layer import HOPPER, on_gpu_with

pytestmark = on_gpu_with("vllm")

#: order of layers, blocks, heads, tokens (N) and channels in memory, from the outermost
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
#: an fp8 KV cache in bfloat16, and a hybrid model
OTHER_CACHES = [
    pytest.param(llama_128, {**QUICK_BF16, **FP8}, id="fp8"),
    pytest.param(write_small_qwen3_next, HYBRID, id="hybrid"),
]


@pytest.fixture(scope="module")
def model(random_model: Path) -> Path:
    return random_model


# ---- sleep ----

#: level, and the tags that are woken one after the other; all at once where there are none
NAPS: list[tuple[int, tuple[str, ...]]] = [
    (1, ()),
    (1, ("weights", "kv_cache")),
    (1, ("kv_cache", "weights")),
    (2, ()),
    (2, ("weights", "kv_cache")),
]


def nap(llm: Any, level: int, tags: Sequence[str], checkpoint: Path) -> None:
    """Let an engine sleep and wake up; from level 2 on vLLM discards the weights, and they are
    loaded again.
    """

    def wake_up(some: list[str] | None) -> None:
        llm.wake_up(tags=some)
        if level > 1 and (some is None or "weights" in some):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})

    llm.sleep(level)
    for tag in tags:
        wake_up([tag])
    if not tags:
        wake_up(None)


@pytest.fixture(scope="module", params=list(RUNNERS))
def sleeper(request: pytest.FixtureRequest, model: Path) -> Iterator[EngineProcess]:
    options = {**cases.QUICK, "enable_sleep_mode": True}
    with engines(cases.ours(model, request.param, **options)) as (engine,):
        yield engine


@pytest.mark.parametrize(("level", "tags"), NAPS)
def test_an_engine_wakes_up(sleeper, stock, model, text, level, tags):
    prompts = text.asking(DOCUMENT, PRIVATE)
    before = drive_primed(sleeper, prompts, greedy(48))
    assert_shared(before)
    sleeper.call(nap, level, tags, model)
    run = drive_primed(sleeper, prompts, greedy(48))
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)
    assert run.stats["decode_steps"] >= 47


@pytest.mark.parametrize(("write", "options"), OTHER_CACHES)
def test_quantised_and_hybrid_caches_after_a_sleep(write, options, tmp_path, note):
    model = write(tmp_path / "model")
    ours = cases.ours(model, **options, enable_sleep_mode=True)
    with engines(cases.stock(model, **options), ours) as both:
        prompts = Text(model).asking(2300, PRIVATE)  # more than a block of a hybrid model
        assert_shared(drive_primed(both[1], prompts, greedy(64)))
        for level, tags in NAPS[1::3]:
            both[1].call(nap, level, tags, model)
            assert_as_exact(both, prompts, note)


# ---- layouts ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_kv_cache(model, stock, text, layout):
    ours = cases.ours(model, **cases.QUICK, env={"VLLM_KV_CACHE_LAYOUT": layout})
    with engines(ours) as (engine,):
        run = drive_primed(engine, text.asking(DOCUMENT, PRIVATE), greedy(48))
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)


@pytest.mark.parametrize("layout", LAYOUTS[1:4])
@pytest.mark.parametrize(
    ("write", "options"),
    [*OTHER_CACHES, pytest.param(write_small_deepseek_v2, QUICK_BF16, id="MLA")],
)
def test_layouts_of_other_caches(write, options, layout, tmp_path, note):
    model = write(tmp_path / "model")
    env = {"VLLM_KV_CACHE_LAYOUT": layout}
    specs = cases.stock(model, **options), cases.ours(model, env=env, **options)
    with engines(*specs) as both:
        assert_as_exact(both, Text(model).asking(2300, PRIVATE), note)


# ---- connectors ----


def connector(name: str, **extra: object) -> dict[str, Any]:
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {**cases.QUICK, "kv_transfer_config": transfer}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ["OffloadingConnector", "ExampleConnector"])
def test_requests_share_what_a_connector_loads(model, stock, text, name, runner, tmp_path, note):
    extra: dict[str, Any] = {"shared_storage_path": str(tmp_path)}
    if name == "OffloadingConnector":
        extra = {"cpu_bytes_to_use": 1 << 28}
    prompts = text.asking(DOCUMENT, PRIVATE)
    with engines(cases.ours(model, runner, **connector(name, **extra))) as (engine,):
        engine.call(drive, prompts[:1], greedy(24))  # stores the document
        engine.reset_prefix_cache()
        run = engine.call(drive, prompts, greedy(48))
        loaded = engine.call(cases.metric, "vllm:external_prefix_cache_hits")
    note(f"{name}, {runner}: {loaded} tokens loaded, {run.stats['share_factor']:.2f} times")
    assert loaded >= DOCUMENT - 2 * cases.BLOCK_SIZE
    assert_as_stock(run, stock)
    assert_shared(run, factor=2.0)


# ---- adapters and tenants ----


@pytest.mark.parametrize("runner", RUNNERS)
def test_several_adapters_in_a_batch(model, text, runner, tmp_path):
    options = {**cases.QUICK, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    folders = [write_lora(tmp_path / str(i), model, seed=i) for i in range(2)]
    adapters = [None, *map(str, folders)]
    prompts = text.asking(DOCUMENT, PRIVATE[:10])
    each = [adapters[i % 3] for i in range(30)]
    batch = [prompts[i // 3] for i in range(30)]
    with engines(cases.ours(model, runner, **options), cases.stock(model, **options)) as both:
        runs = []
        for engine in both:
            engine.call(drive, [prompts[0]] * 3, greedy(1), None, adapters)
            runs.append(engine.call(drive, batch, greedy(40), None, each))
    assert_same_texts(*runs)
    # three trees of ten requests
    assert_shared(runs[0], factor=1.5)
    found = [c.token_ids for c in runs[0].completions]
    assert all(len(set(found[i : i + 3])) == 3 for i in range(0, 30, 3)), "no effect"


def test_salts_share_no_block(model, stock, text):
    prompts = text.asking(DOCUMENT, PRIVATE)
    salts = [("a", "b", None)[i % 3] for i in range(15)]
    with engines(cases.ours(model, **cases.QUICK)) as (engine,):
        _, cached = engine.call(salted, prompts[:1], ["a"], 1)
        assert cached == [0]
        _, cached = engine.call(salted, prompts[:2], ["b", None], 1)
        assert cached == [0, 0], "of another tenant"
        run, cached = engine.call(salted, prompts, salts, 48)
        assert min(cached) >= DOCUMENT - cases.BLOCK_SIZE
    assert_as_stock(run, stock)
    # each step reads the document three times, once for each salt
    assert 1.5 < run.stats["share_factor"] < 5.5


# ---- hits inside a block ----


def block_size(llm: Any) -> int:
    """The tokens of a block, which vLLM makes as large as a state."""
    return int(llm.llm_engine.vllm_config.cache_config.block_size)


@pytest.mark.parametrize("unit", [16, 32])
def test_hits_inside_a_block_of_a_hybrid_model(unit, tmp_path, note):
    model = write_small_qwen3_next(tmp_path / "model")
    options = {**HYBRID, "prefix_match_unit": unit}
    with engines(cases.stock(model, **options), cases.ours(model, **options)) as both:
        size = both[1].call(block_size)
        document = size + size // 2
        prompts = Text(model).asking(document, PRIVATE)
        for engine in both:  # vLLM keeps the state where a prompt ends
            engine.call(drive, [prompts[0][:document]], greedy(1))
        _, cached = both[1].call(salted, prompts, [None] * len(prompts), 8)
        note(f"blocks of {size}, unit {unit}: {sorted(set(cached))} tokens cached")
        assert_as_exact(both, prompts, note)
    assert all(tokens % unit == 0 for tokens in cached)
    assert any(tokens % size for tokens in cached), "a hit inside a block"


# ---- modes of CUDA graphs ----


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]
)
def test_modes_of_cuda_graphs_with_512_requests(model, stock, text, mode, runner):
    options = {
        "max_num_seqs": 512,
        "compilation_config": {
            "mode": 3 if "PIECEWISE" in mode else 0,
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": [1, 16, 64, 256, 512],
        },
    }
    prompts = text.asking(DOCUMENT, [9 + i % 40 for i in range(512)])
    with engines(cases.ours(model, runner, **options)) as (engine,):
        run = drive_primed(engine, prompts, greedy(24))
    assert len(run.completions) == 512
    assert all(len(c.token_ids) == 24 for c in run.completions)
    assert_shared(run, factor=8.0)
    assert_as_stock(replace(run, completions=run.completions[::16]), stock)


# ---- quantised weights ----


@pytest.mark.skipif(not HOPPER, reason="weights in fp8 on Hopper GPUs")
@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_in_fp8_with_padded_rows(runner, tmp_path, note):
    model = llama_128(tmp_path / "model")
    options = {**QUICK_BF16, "quantization": "fp8"}
    specs = cases.stock(model, **options), cases.ours(model, runner, **options)
    with engines(*specs) as both:
        # 11 is no captured size: five rows are padding
        assert_as_exact(both, Text(model).asking(DOCUMENT, PRIVATE[:11]), note)
