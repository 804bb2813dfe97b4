"""Multi-head latent attention (MLA) inside a real vLLM engine on a GPU: a small model in the shape
of DeepSeek V2, with 16 heads, and on two GPUs with 8 and 16 on each; also with an fp8 KV cache,
with drafts, and under decode context parallelism.

As in ``test_gpu_engine_extras.py`` the error in decode, against stock's prefill of the same tokens,
is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_mla.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_deepseek_v2, write_small_deepseek_v3
from tests.support.engine import ONE_PROCESS
from tests.support.gpu_engines import FP8, Text, assert_shared, engines, extension, greedy
from tests.support.gpu_layer import HOPPER, TWO_GPUS, on_gpu_with

pytestmark = [
    *on_gpu_with("vllm"),
    pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0"),
]
#: prefills of several requests go through steps in which others decode
OPTIONS: dict[str, Any] = {
    **cases.QUICK_BF16,
    "max_model_len": 6144,
    "max_num_batched_tokens": 256,
}
ON_TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize(("heads", "runner"), [(16, "V2"), (16, "V1"), (32, "V2")])
def test_as_exact_as_stock(heads, runner, tmp_path, note):
    model = write_small_deepseek_v2(tmp_path / "model", num_heads=heads)
    assert_as_exact(model, runner, OPTIONS, note)


@TWO_GPUS
@pytest.mark.parametrize(
    ("heads", "runner", "cache"),
    [(32, "V2", {}), (32, "V1", {}), (16, "V2", {}), (32, "V2", FP8), (16, "V1", FP8)],
    ids=["32-V2", "32-V1", "16-V2", "32-V2-fp8", "16-V1-fp8"],
)
def test_two_gpus(heads, runner, cache, tmp_path, note):
    """Each GPU has half of the heads, and the latents of all."""
    model = write_small_deepseek_v2(tmp_path / "model", num_heads=heads)
    assert_as_exact(model, runner, {**OPTIONS, **ON_TWO, **cache}, note)


@TWO_GPUS
@pytest.mark.parametrize(("heads", "runner", "interleave"), [(32, "V2", 1), (16, "V1", 16)])
def test_shards_on_two_gpus(heads, runner, interleave, tmp_path, note):
    """Each GPU has half of the heads and every second run of tokens (decode context parallelism);
    it multiplies the queries of all heads.
    """
    model = write_small_deepseek_v2(tmp_path / "model", num_heads=heads)
    shards = {
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": interleave,
        "dcp_comm_backend": "a2a",  # the other needs a newer NCCL
    }
    assert_as_exact(model, runner, {**OPTIONS, **ON_TWO, **shards}, note)


@pytest.mark.parametrize(
    ("write", "heads", "runner", "method", "drafts", "cache"),
    [
        (write_small_deepseek_v3, 16, "V2", "mtp", 1, {}),
        (write_small_deepseek_v3, 8, "V1", "mtp", 3, {}),
        (write_small_deepseek_v3, 16, "V2", "mtp", 1, FP8),
        (write_small_deepseek_v2, 8, "V1", "ngram", 3, {}),
    ],
    ids=["16-V2-mtp-1", "8-V1-mtp-3", "16-V2-mtp-1-fp8", "8-V1-ngram-3"],
)
def test_drafts(write, heads, runner, method, drafts, cache, tmp_path, note):
    """Drafts of the layer that predicts the next tokens (MTP), and of n-grams, which are of unlike
    numbers, and of which some are accepted.
    """
    model = write(tmp_path / "model", num_heads=heads)
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": drafts}
    if method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {**OPTIONS, **cache, "speculative_config": speculation}
    assert_as_exact(model, runner, options, note)


def assert_as_exact(
    model: Path, runner: str, options: dict[str, Any], note: Callable[[str], None]
) -> None:
    """Assert that PREFIX_SHARE runs in its own kernel on every GPU and is as exact as stock."""
    text = Text(model)
    speculation = options.get("speculative_config", {})
    sampling = greedy(64)
    if speculation.get("method") == "ngram":  # so that the text repeats itself
        sampling["allowed_token_ids"] = text.part(0, 3)
    # the layer that drafts keeps the parent's kernel
    has_layer = speculation.get("method") == "mtp"
    backend = "FLASHMLA" if "kv_cache_dtype" in options else "FLASH_ATTN_MLA"
    stock = cases.stock(model, **{**options, "backend": backend})
    # STRICT refuses a layer that is not served
    env = cases.LENIENT if has_layer else {}
    ours = cases.ours(model, runner, env=env, **extension(cases.KernelNames), **options)
    with engines(stock, ours) as both:
        shared, alone = (
            cases.compare(both, prompts, sampling) for prompts in (sharing(text), unlike(text))
        )
        kernels = both[1].collective_rpc("kernels_in_graphs")
        drafted, accepted = (
            both[1].call(cases.metric, f"vllm:spec_decode_num_{kind}_tokens")
            for kind in ("draft", "accepted")
        )
    assert (drafted > 0) == bool(speculation)
    assert accepted > 0 or speculation.get("method") != "ngram"
    note(f"shared: {shared}")
    note(f"alone: {alone}")
    assert kernels == [["mla_hopper"]] * options.get("tensor_parallel_size", 1)
    assert_shared(shared.run, factor=1.5)
    assert shared.run.stats["decode_steps"] >= (20 if accepted else 63)
    assert alone.run.stats["shared_steps"] == 0
    assert not shared.run.stats["fallbacks"]
    for found in (shared, alone):
        assert found.stock_errors.mean() < 0.3, NO_REFERENCE
        found.assert_as_exact()


def sharing(text: Text) -> list[list[int]]:
    """Of fewer requests or a shorter document, plans read most for each request alone."""
    return text.asking(4800, cases.PRIVATE * 2)


def unlike(text: Text) -> list[list[int]]:
    return [text.part(900 * i, 300 + 37 * i) for i in range(7)]


NO_REFERENCE = "stock's decode disagrees with its prefill: no reference"
#: of queries and latents; no powers of two, and so large that no number is clipped
SCALES = "0.05,0.03"


@pytest.mark.parametrize(
    ("heads", "runner", "scales"),
    [(16, "V2", None), (16, "V1", SCALES), (32, "V2", SCALES)],
    ids=["16-V2", "16-V1-scales", "32-V2-scales"],
)
def test_fp8_latents_are_as_near_to_stocks_as_those_to_16_bits(
    heads, runner, scales, tmp_path, note
):
    """The log-probabilities of answers, in decode, against a prefill by stock: ours with an fp8 KV
    cache against stock with one, and that against stock in 16 bits.
    """
    model = write_small_deepseek_v2(tmp_path / "model", num_heads=heads)
    options = {**OPTIONS, **extension(cases.KernelNames)}
    # in one process, so that all requests of a call are in its first step
    environment = {**ONE_PROCESS, **({cases.LATENT_SCALES: scales} if scales else {})}
    quantised = {**options, **FP8, "environment": environment, "backend": "FLASHMLA"}
    specs = (
        cases.stock(model, **quantised),
        # STRICT refuses a layer that is not served
        cases.ours(model, runner, env=environment, **options, **FP8),
        cases.stock(model, **{**OPTIONS, "backend": "FLASH_ATTN_MLA"}),
    )
    text = Text(model)
    prompts = {
        "shared": sharing(text),
        # as many new tokens in each request, behind whole blocks of the document: FLASHMLA takes
        # them as decodes
        "uniform": text.asking(4800, [8] * 30, start=5000),
        "alone": unlike(text),
    }
    found, of_bits = {}, {}
    with engines(*specs) as (eight_bits, mine, plain):
        (of_layers,) = mine.collective_rpc("cache_scales")
        for name, asked in prompts.items():
            if name == "uniform":
                mine.collective_rpc("count_flash_mla")
            found[name] = cases.compare([eight_bits, mine], asked, greedy(64))
            of_bits[name] = cases.all_errors(found[name].stock_run, plain).mean()
            note(f"{name}: {found[name]}; stock's fp8 from its 16 bits: mean {of_bits[name]:.4f}")
            if name == "uniform":
                assert mine.collective_rpc("flash_mla_calls")[0] > 0
        (kernels,) = mine.collective_rpc("kernels_in_graphs")
    assert kernels == ["mla_hopper"]
    assert all((q != 1.0, k != 1.0) == (bool(scales),) * 2 for (q,), (k,), _ in of_layers.values())
    for name in ("shared", "uniform"):
        assert_shared(found[name].run, factor=1.5)
        assert found[name].run.stats["decode_steps"] >= 63
    assert found["alone"].run.stats["shared_steps"] == 0
    for name, compared in found.items():
        assert not compared.run.stats["fallbacks"]
        assert compared.stock_errors.mean() < 0.3, NO_REFERENCE
        # of few tokens the means differ by chance, too
        limit = of_bits[name] * (1.1 if name == "alone" else 1)
        assert 0 < compared.errors.mean() <= limit
        compared.assert_as_exact()
