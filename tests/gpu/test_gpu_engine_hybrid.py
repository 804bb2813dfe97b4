"""Hybrid models inside a real vLLM engine on a GPU: small models in the shapes of Qwen3-Next and
Qwen3.5, in which one layer in four has full attention. vLLM makes their KV blocks as large as the
states of the other layers, several hundred tokens.

As in ``test_gpu_engine_extras.py`` the error in decode, against stock's prefill of the same tokens,
is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_hybrid.py
"""

from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_qwen3_5, write_small_qwen3_next
from tests.support.gpu_engines import (
    FP8,
    PRIVATE,
    Text,
    assert_shared,
    engines,
    extension,
    greedy,
)
from tests.support.gpu_layer import HOPPER, on_gpu_with

pytestmark = on_gpu_with("vllm")

OPTIONS: dict[str, Any] = {
    **cases.QUICK_BF16,
    "kv_cache_memory_bytes": 4 << 30,
    # FlashInfer's kernel for the other layers' prefill need not be installed
    "additional_config": {"gdn_prefill_backend": "triton"},
}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


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
def test_hybrid_models(write, runner, options, tmp_path, note):
    model = write(tmp_path / "model")
    caches = options.get("enable_prefix_caching", True)
    settings = {**OPTIONS, "enable_prefix_caching": caches, **options}
    # the layer that drafts keeps the parent's kernel
    env = cases.LENIENT if "speculative_config" in options else {}
    ours = cases.ours(model, runner, env=env, **extension(cases.KernelNames), **settings)
    with engines(cases.stock(model, **settings), ours) as both:
        found = cases.compare(both, Text(model).asking(2300, PRIVATE), greedy(64))
        (kernels,) = both[1].collective_rpc("kernels_in_graphs")
        drafted = both[1].call(cases.metric, "vllm:spec_decode_num_draft_tokens")
    note(str(found))
    assert kernels == ["hopper" if HOPPER else "portable"]
    assert (drafted > 0) == ("speculative_config" in options)
    if caches:
        assert_shared(found.run, factor=2.0)
    else:  # vLLM gives each request blocks of its own
        assert found.run.stats["shared_steps"] == 0 < found.run.stats["decode_steps"]
    found.assert_as_exact()
