"""Layers with extra features inside a real vLLM engine on a GPU: an fp8 KV cache, attention sinks,
a soft cap, ALiBi slopes, wide heads.

bfloat16 and fp8 round more than the float16 of ``test_gpu_engine.py``. So the error in decode,
against stock's prefill of the same tokens, is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_extras.py
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import (
    add_kv_scales,
    write_small_bloom,
    write_small_gemma2,
    write_small_gpt_oss,
    write_small_llama,
)
from tests.support.engine import EngineProcess
from tests.support.engine_steps import Run, drive
from tests.support.gpu_engines import GREEDY, Text, assert_shared, engines
from tests.support.gpu_layer import HOPPER, ON_GPU
from vllm_prefixshare import PrefixShareError

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [*ON_GPU, pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")]

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
#: as on GPUs before Hopper: FlashAttention-3 has no ALiBi, and FLASH_ATTN of vLLM 0.33 hands
#: FlashAttention-2 what is meant for it
FA2: dict[str, Any] = {"attention_config": {"flash_attn_version": 2}}
#: one reason why such layers are served only behind a setting
NO_WIDE_HEADS = pytest.mark.skip(
    reason="FLASH_ATTN needs FlashAttention-4 for head_dim 512, with which the engine did not "
    "finish within 90 seconds"
)
#: tokens of the document, and of each request alone
DOCUMENT, PRIVATE = 1200, [50, 9, 31, 64, 17] * 3


def llama(folder: Path) -> Path:
    return write_small_llama(folder, head_dim=128)


def wide_llama(folder: Path) -> Path:
    """As wide as a head of a Gemma 4 layer with full attention."""
    return write_small_llama(folder, head_dim=512)


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (llama, FP8),
        (write_small_gpt_oss, {}),
        (write_small_gemma2, {}),
        (write_small_gpt_oss, FP8),
        (write_small_bloom, FA2),
        pytest.param(wide_llama, {}, marks=NO_WIDE_HEADS),
    ],
    ids=["fp8", "gpt-oss", "Gemma 2", "gpt-oss, fp8", "Bloom", "head_dim 512"],
)
def test_as_exact_as_stock(write, options, tmp_path, note):
    model = write(tmp_path / "model")
    # layers with a sliding window keep the parent's kernel
    env = {"VLLM_PREFIXSHARE_STRICT": "0", "VLLM_PREFIXSHARE_EXPERIMENTAL": "alibi,head_dim"}
    options = {**cases.QUICK, "dtype": "bfloat16", **options}
    specs = cases.stock(model, **options), cases.ours(model, env=env, **options)
    for spec in specs:
        if "attention_config" in spec:
            spec["attention_config"] = {**spec["attention_config"], "backend": spec["backend"]}
    with engines(*specs) as both:
        assert_as_exact(both, Text(model).asking(DOCUMENT, PRIVATE), note)


def answers(engine: EngineProcess, prompts: list[list[int]], tokens: int = 64) -> Run:
    """The answers to questions on one document, which is cached."""
    engine.call(drive, prompts[:1], {**GREEDY, "max_tokens": 1})
    run: Run = engine.call(drive, prompts, {**GREEDY, "max_tokens": tokens})
    return run


def assert_as_exact(
    both: list[EngineProcess],
    prompts: list[list[int]],
    note: Callable[[str], None],
    tokens: int = 64,
) -> Run:
    """Assert that the second engine shares, and is as exact as the first, which is stock; returns
    its run.
    """
    runs = [answers(engine, prompts, tokens) for engine in both]
    stocks, ours = (np.concatenate(cases.errors(r.completions, both[0])) for r in runs)
    note(cases.beside_stock(runs[1], runs[0], ours, stocks))
    assert_shared(runs[1], factor=2.0)
    assert runs[1].stats["decode_steps"] >= tokens - 1
    if stocks.max() == 0:  # FlashAttention-2 decodes in the order of its prefill
        assert 0 < ours.mean() < cases.MEAN_ERROR and ours.max() < cases.MAX_ERROR
    else:
        assert 0 < ours.mean() < 1.3 * stocks.mean() + 1e-3
        assert ours.max() < 2 * stocks.max() + 1e-2
    return runs[1]


@pytest.mark.parametrize("of_heads", [False, True], ids=["of tensors", "of heads"])
def test_scales_of_a_checkpoint(of_heads, tmp_path, note):
    model = add_kv_scales(llama(tmp_path / "model"), of_heads)
    options: dict[str, Any] = {**cases.QUICK, "dtype": "bfloat16", **FP8}
    # STRICT refuses a layer that is not served
    ours = cases.ours(
        model, worker_extension_cls="tests.support.gpu_engines.KernelNames", **options
    )
    with engines(cases.stock(model, **options), ours) as both:
        scales = both[1].call(cases.cache_scales)
        assert_as_exact(both, Text(model).asking(DOCUMENT, PRIVATE), note)
    wanted = scales_in(model)
    assert scales.keys() == wanted.keys()
    for name, of_layer in wanted.items():
        for found, expected in zip(scales[name], of_layer, strict=True):
            assert found == pytest.approx(expected) and found != pytest.approx(1.0), name


def scales_in(model: Path) -> dict[str, list[list[float]]]:
    """The scales of queries, keys and values that vLLM makes of those in a checkpoint: queries have
    one for each KV head, the largest of its query heads.
    """
    from safetensors import safe_open

    found = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  it is no mapping
            if name.endswith(".k_scale"):
                layer = name.removesuffix(".k_scale")
                q, k, v = (weights.get_tensor(f"{layer}.{x}_scale").flatten() for x in "qkv")
                each = q.view(len(k), -1).amax(1), k, v
                found[f"{layer}.attn"] = [scales.tolist() for scales in each]
    return found


def test_a_scale_that_is_not_finite_is_refused_at_start_up(tmp_path):
    model = add_kv_scales(llama(tmp_path / "model"), last=float("inf"))
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # another process hides the reason
    spec = cases.ours(model, env=env, **cases.QUICK, dtype="bfloat16", **FP8)
    sentence = r"v_scale must be positive and finite, got \[inf\]"
    with pytest.raises(PrefixShareError, match=sentence), engines(spec):
        pass


@pytest.mark.skipif(not HOPPER, reason="short questions are planned on Hopper GPUs only")
def test_short_questions_with_an_fp8_cache(tmp_path, note):
    model = llama(tmp_path / "model")
    options: dict[str, Any] = {**cases.QUICK, "dtype": "bfloat16", **FP8}
    ours = cases.ours(
        model, worker_extension_cls="tests.support.gpu_engines.EveryQuestion", **options
    )
    prompts = Text(model).asking(DOCUMENT, [5, 12, 2, 9, 11, 7] * 2)
    with engines(cases.stock(model, **options), ours) as both:
        both[1].call(cases.plan_every_question)
        run = assert_as_exact(both, prompts, note, tokens=48)
    # as without a quantised cache: the step that reads the questions is planned, too
    assert run.stats["kv_tokens_stock"] >= 48 * len(prompts) * DOCUMENT


def test_fp8_differs_from_stocks_no_more_than_that_from_16_bits(tmp_path, note):
    """The log-probabilities of answers, in decode, against a prefill by stock: ours with an fp8 KV
    cache against stock with one, and that against stock in 16 bits.
    """
    model = llama(tmp_path / "model")
    options: dict[str, Any] = {**cases.QUICK, "dtype": "bfloat16"}
    specs = (
        cases.stock(model, **options, **FP8),
        cases.ours(model, **options, **FP8),
        cases.stock(model, **options),
    )
    with engines(*specs) as (quantised, mine, plain):
        prompts = Text(model).asking(DOCUMENT, PRIVATE)
        runs = [answers(engine, prompts) for engine in (quantised, mine)]
        from_plain = np.concatenate(cases.errors(runs[0].completions, plain))
        from_fp8 = np.concatenate(cases.errors(runs[1].completions, quantised))
        mine_from_plain = np.concatenate(cases.errors(runs[1].completions, plain))
    for what, error in (
        ("ours from stock's fp8", from_fp8),
        ("stock's fp8 from its 16 bits", from_plain),
        ("ours from stock's 16 bits", mine_from_plain),
    ):
        note(f"{what}: mean {error.mean():.4f}, max {error.max():.3f} nats")
    assert_shared(runs[1], factor=2.0)
    assert 0 < from_fp8.mean() <= from_plain.mean()
