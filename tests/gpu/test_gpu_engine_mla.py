"""Multi-head latent attention (MLA) inside a real vLLM engine on a GPU: a small model in the shape
of DeepSeek V2, with 16 heads, and on two GPUs with 8 and 16 on each; also with an fp8 KV cache,
with drafts, and under decode context parallelism.

As in ``test_gpu_engine_extras.py`` the error in decode, against stock's prefill of the same tokens,
is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_mla.py
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_deepseek_v2, write_small_deepseek_v3
from tests.support.engine import ONE_PROCESS
from tests.support.engine_steps import drive
from tests.support.gpu_engines import GREEDY, Text, assert_shared, engines
from tests.support.gpu_layer import HOPPER, ON_GPU

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM"),
    pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0"),
]
#: prefills of several requests go through steps in which others decode
OPTIONS: dict[str, Any] = {
    **cases.QUICK,
    "dtype": "bfloat16",
    "max_model_len": 6144,
    "max_num_batched_tokens": 256,
}


FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
TWO_GPUS = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
)
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
    sampling: dict[str, Any] = {**GREEDY, "max_tokens": 64}
    if speculation.get("method") == "ngram":  # so that the text repeats itself
        sampling["allowed_token_ids"] = text.part(0, 3)
    # the layer that drafts keeps the parent's kernel
    has_layer = speculation.get("method") == "mtp"
    # of fewer requests or a shorter document, plans read most for each request alone
    shared = text.asking(4800, [50, 9, 31, 64, 17] * 6)
    alone = [text.part(900 * i, 300 + 37 * i) for i in range(7)]
    backend = "FLASHMLA" if "kv_cache_dtype" in options else "FLASH_ATTN_MLA"
    stock = cases.stock(model, **{**options, "backend": backend})
    extension = "tests.support.gpu_engines.KernelNames"
    # STRICT refuses a layer that is not served
    strict = {"VLLM_PREFIXSHARE_STRICT": "0" if has_layer else "1"}
    ours = cases.ours(model, runner, env=strict, worker_extension_cls=extension, **options)
    errors, runs = {}, {}
    with engines(stock, ours) as both:
        for name, prompts in (("shared", shared), ("alone", alone)):
            for who, engine in zip(("stock", "ours"), both, strict=True):
                engine.call(drive, prompts[:1], {**GREEDY, "max_tokens": 1})
                run = runs[name, who] = engine.call(drive, prompts, sampling)
                each = cases.errors(run.completions, both[0])
                errors[name, who] = np.concatenate(each)
                print(f"{name}, {who}, answers:", *(f"{error.mean():.3f}" for error in each))
        kernels = both[1].collective_rpc("kernels_in_graphs")
        drafted, accepted = (
            both[1].call(cases.metric, f"vllm:spec_decode_num_{kind}_tokens")
            for kind in ("draft", "accepted")
        )
    assert (drafted > 0) == bool(speculation)
    assert accepted > 0 or speculation.get("method") != "ngram"
    for name in ("shared", "alone"):
        (run, error), (stocks_run, stocks) = (
            (runs[name, who], errors[name, who]) for who in ("ours", "stock")
        )
        note(f"{name}: {cases.beside_stock(run, stocks_run, error, stocks)}")
    assert kernels == [["mla_hopper"]] * options.get("tensor_parallel_size", 1)
    assert_shared(runs["shared", "ours"], factor=1.5)
    assert runs["shared", "ours"].stats["decode_steps"] >= (20 if accepted else 63)
    assert runs["alone", "ours"].stats["shared_steps"] == 0
    assert not runs["shared", "ours"].stats["fallbacks"]
    for name in ("shared", "alone"):
        mine, stocks = errors[name, "ours"], errors[name, "stock"]
        assert stocks.mean() < 0.3, "stock's decode disagrees with its prefill: no reference"
        assert 0 < mine.mean() < 1.3 * stocks.mean() + 1e-3
        assert mine.max() < 2 * stocks.max() + 1e-2


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
    options = {**OPTIONS, "worker_extension_cls": "tests.support.gpu_engines.KernelNames"}
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
        # of fewer requests or a shorter document, plans read most for each request alone
        "shared": text.asking(4800, [50, 9, 31, 64, 17] * 6),
        # as many new tokens in each request, behind whole blocks of the document: FLASHMLA takes
        # them as decodes
        "uniform": text.asking(4800, [8] * 30, start=5000),
        "alone": [text.part(900 * i, 300 + 37 * i) for i in range(7)],
    }
    runs, errors = {}, {}
    with engines(*specs) as (eight_bits, mine, plain):
        of_layers = mine.call(cases.cache_scales)
        for name, asked in prompts.items():
            if name == "uniform":
                mine.call(cases.count_flash_mla)
            for who, engine in (("stock", eight_bits), ("ours", mine)):
                engine.call(drive, asked[:1], {**GREEDY, "max_tokens": 1})
                run = runs[name, who] = engine.call(drive, asked, {**GREEDY, "max_tokens": 64})
                each = cases.errors(run.completions, eight_bits)
                errors[name, who] = np.concatenate(each)
            of_bits = np.concatenate(cases.errors(runs[name, "stock"].completions, plain))
            errors[name, "bits"] = of_bits
            beside = cases.beside_stock(
                runs[name, "ours"], runs[name, "stock"], errors[name, "ours"], errors[name, "stock"]
            )
            note(f"{name}: {beside}; stock's fp8 from its 16 bits: mean {of_bits.mean():.4f}")
            if name == "uniform":
                assert mine.call(cases.flash_mla_calls) > 0
        kernels = mine.call(cases.kernels_in_graphs)
    assert kernels == ["mla_hopper"]
    assert all((q != 1.0, k != 1.0) == (bool(scales),) * 2 for (q,), (k,), _ in of_layers.values())
    for name in ("shared", "uniform"):
        assert_shared(runs[name, "ours"], factor=1.5)
        assert runs[name, "ours"].stats["decode_steps"] >= 63
    assert runs["alone", "ours"].stats["shared_steps"] == 0
    for name in prompts:
        assert not runs[name, "ours"].stats["fallbacks"]
        ours, stocks, of_bits = (errors[name, who] for who in ("ours", "stock", "bits"))
        assert stocks.mean() < 0.3, "stock's decode disagrees with its prefill: no reference"
        # of few tokens the means differ by chance, too
        assert 0 < ours.mean() <= of_bits.mean() * (1.1 if name == "alone" else 1)
        assert ours.mean() < 1.3 * stocks.mean() + 1e-3
        assert ours.max() < 2 * stocks.max() + 1e-2
