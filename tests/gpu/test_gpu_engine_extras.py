"""Layers with extra features inside a real vLLM engine on a GPU: an fp8 KV cache, attention sinks,
a soft cap, ALiBi slopes, wide heads.

bfloat16 and fp8 round more than the float16 of ``test_gpu_engine.py``. So the error in decode,
against stock's prefill of the same tokens, is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_extras.py
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import (
    add_kv_scales,
    write_small_bloom,
    write_small_gemma2,
    write_small_gpt_oss,
    write_small_llama,
)
from tests.support.engine import ONE_PROCESS
from tests.support.gpu_engines import (
    DOCUMENT,
    FP8,
    PRIVATE,
    QUICK_BF16,
    Text,
    all_errors,
    assert_as_exact,
    assert_shared,
    engines,
    extension,
    greedy,
    llama_128,
)
from tests.support.gpu_layer import HOPPER, on_gpu_with
from vllm_prefixshare import PrefixShareError

pytestmark = on_gpu_with("vllm")

#: an fp8 KV cache, in bfloat16 otherwise
QUICK_FP8 = {**QUICK_BF16, **FP8}
#: as on GPUs before Hopper: FlashAttention-3 has no ALiBi, and FLASH_ATTN of vLLM 0.33 hands
#: FlashAttention-2 what is meant for it
FA2: dict[str, Any] = {"attention_config": {"flash_attn_version": 2}}
#: one reason why such layers are served only behind a setting
NO_WIDE_HEADS = pytest.mark.skip(
    reason="FLASH_ATTN needs FlashAttention-4 for head_dim 512, with which the engine did not "
    "finish within 90 seconds"
)


def wide_llama(folder: Path) -> Path:
    """As wide as a head of a Gemma 4 layer with full attention."""
    return write_small_llama(folder, head_dim=512)


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (llama_128, FP8),
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
    env = {**cases.LENIENT, "VLLM_PREFIXSHARE_EXPERIMENTAL": "alibi,head_dim"}
    options = {**QUICK_BF16, **options}
    specs = cases.stock(model, **options), cases.ours(model, env=env, **options)
    for spec in specs:
        if "attention_config" in spec:
            spec["attention_config"] = {**spec["attention_config"], "backend": spec["backend"]}
    with engines(*specs) as both:
        assert_as_exact(both, Text(model).asking(DOCUMENT, PRIVATE), note)


@pytest.mark.parametrize("of_heads", [False, True], ids=["of tensors", "of heads"])
def test_scales_of_a_checkpoint(of_heads, tmp_path, note):
    model = add_kv_scales(llama_128(tmp_path / "model"), of_heads)
    # STRICT refuses a layer that is not served
    ours = cases.ours(model, **QUICK_FP8, **extension(cases.KernelNames))
    with engines(cases.stock(model, **QUICK_FP8), ours) as both:
        (scales,) = both[1].collective_rpc("cache_scales")
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
    model = add_kv_scales(llama_128(tmp_path / "model"), last=float("inf"))
    spec = cases.ours(model, env=ONE_PROCESS, **QUICK_FP8)  # another process hides the reason
    sentence = r"v_scale must be positive and finite, got \[inf\]"
    with pytest.raises(PrefixShareError, match=sentence), engines(spec):
        pass


@pytest.mark.skipif(not HOPPER, reason="short questions are planned on Hopper GPUs only")
def test_short_questions_with_an_fp8_cache(tmp_path, note):
    model = llama_128(tmp_path / "model")
    ours = cases.ours(model, **QUICK_FP8, **extension(cases.EveryQuestion))
    prompts = Text(model).asking(DOCUMENT, [5, 12, 2, 9, 11, 7] * 2)
    with engines(cases.stock(model, **QUICK_FP8), ours) as both:
        both[1].collective_rpc("plan_every_question")
        run = assert_as_exact(both, prompts, note, tokens=48)
    # as without a quantised cache: the step that reads the questions is planned, too
    assert run.stats["kv_tokens_stock"] >= 48 * len(prompts) * DOCUMENT


def test_fp8_differs_from_stocks_no_more_than_that_from_16_bits(tmp_path, note):
    """The log-probabilities of answers, in decode, against a prefill by stock: ours with an fp8 KV
    cache against stock with one, and that against stock in 16 bits.
    """
    model = llama_128(tmp_path / "model")
    specs = (
        cases.stock(model, **QUICK_FP8),
        cases.ours(model, **QUICK_FP8),
        cases.stock(model, **QUICK_BF16),
    )
    with engines(*specs) as (quantised, mine, plain):
        prompts = Text(model).asking(DOCUMENT, PRIVATE)
        found = cases.compare([quantised, mine], prompts, greedy(64))
        from_plain = all_errors(found.stock_run, plain)
        mine_from_plain = all_errors(found.run, plain)
    for what, error in (
        ("ours from stock's fp8", found.errors),
        ("stock's fp8 from its 16 bits", from_plain),
        ("ours from stock's 16 bits", mine_from_plain),
    ):
        note(f"{what}: mean {error.mean():.4f}, max {error.max():.3f} nats")
    assert_shared(found.run, factor=2.0)
    assert 0 < found.errors.mean() <= from_plain.mean()
