"""Hybrid models inside a real vLLM engine on a GPU: small models in the shapes of Qwen3-Next and
Qwen3.5, in which one layer in four has full attention. vLLM makes their KV blocks as large as the
states of the other layers, several hundred tokens.

As in ``test_gpu_engine_extras.py`` the error in decode, against stock's prefill of the same tokens,
is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_hybrid.py
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_qwen3_5, write_small_qwen3_next
from tests.support.engine_steps import drive
from tests.support.gpu_engines import GREEDY, Text, assert_shared, engines
from tests.support.gpu_layer import HOPPER, ON_GPU

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [*ON_GPU, pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")]

OPTIONS: dict[str, Any] = {
    **cases.QUICK,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 4 << 30,
    # FlashInfer's kernel for the other layers' prefill need not be installed
    "additional_config": {"gdn_prefill_backend": "triton"},
}
FP8 = {"kv_cache_dtype": "fp8"}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SAMPLING = {**GREEDY, "max_tokens": 64}


@pytest.mark.parametrize(
    ("write", "runner", "options"),
    [
        (write_small_qwen3_next, "V2", {}),
        (write_small_qwen3_next, "V1", {}),
        (write_small_qwen3_next, None, {"enable_prefix_caching": False}),
        (write_small_qwen3_next, None, DRAFTS),
        (write_small_qwen3_next, None, FP8),
        (write_small_qwen3_5, "V2", {}),
        (write_small_qwen3_5, "V1", {}),
        (write_small_qwen3_5, None, DRAFTS),
        (write_small_qwen3_5, None, FP8),
    ],
    ids=[
        "Qwen3-Next, V2",
        "Qwen3-Next, V1",
        "Qwen3-Next, no prefix caching",
        "Qwen3-Next, drafts",
        "Qwen3-Next, fp8",
        "Qwen3.5, V2",
        "Qwen3.5, V1",
        "Qwen3.5, drafts",
        "Qwen3.5, fp8",
    ],
)
def test_hybrid_models(
    write: Callable[[Path], Path],
    runner: str | None,
    options: dict[str, Any],
    tmp_path: Path,
    note: Callable[[str], None],
) -> None:
    model = write(tmp_path / "model")
    caches = options.get("enable_prefix_caching", True)
    settings = {**OPTIONS, "enable_prefix_caching": caches, **options}
    # the layer that drafts keeps the parent's kernel
    env = {"VLLM_PREFIXSHARE_STRICT": "0" if "speculative_config" in options else "1"}
    ours = cases.ours(
        model, runner, env=env, worker_extension_cls="tests.support.gpu_engines.KernelNames",
        **settings,
    )  # fmt: skip
    prompts = Text(model).asking(2300, [50, 9, 31, 64, 17] * 3)
    runs, errors = [], []
    with engines(cases.stock(model, **settings), ours) as both:
        for engine in both:
            engine.call(drive, prompts[:1], {**GREEDY, "max_tokens": 1})
            run = engine.call(drive, prompts, SAMPLING)
            runs.append(run)
            errors.append(np.concatenate(cases.errors(run.completions, both[0])))
        kernels = both[1].call(cases.kernels_in_graphs)
        drafted = both[1].call(cases.metric, "vllm:spec_decode_num_draft_tokens")
    stocks, mine = errors
    note(cases.beside_stock(runs[1], runs[0], mine, stocks))
    assert kernels == ["hopper" if HOPPER else "portable"]
    assert (drafted > 0) == ("speculative_config" in options)
    if caches:
        assert_shared(runs[1], factor=2.0)
    else:  # vLLM gives each request blocks of its own
        assert runs[1].stats["shared_steps"] == 0 < runs[1].stats["decode_steps"]
    assert 0 < mine.mean() < 1.3 * stocks.mean() + 1e-3
    assert mine.max() < 2 * stocks.max() + 1e-2
