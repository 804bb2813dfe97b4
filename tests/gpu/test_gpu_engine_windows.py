"""Layers with a sliding window inside a real vLLM engine on a GPU: small models in the shapes of
Gemma 3, Gemma 2 (windows with a soft cap) and gpt-oss.

As in ``test_gpu_engine_extras.py`` the error in decode, against stock's prefill of the same tokens,
is compared with the error of stock's own decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_windows.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_gemma2, write_small_gemma3, write_small_gpt_oss
from tests.support.engine import EngineProcess
from tests.support.engine_steps import Run
from tests.support.gpu_engines import LENIENT, Text, assert_shared, engines, greedy
from tests.support.gpu_layer import HOPPER, on_gpu_with

pytestmark = on_gpu_with("vllm")

#: bfloat16: vLLM refuses Gemma 3 in float16
OPTIONS: dict[str, Any] = {**cases.QUICK_BF16, "kv_cache_memory_bytes": 2 << 30}
#: tokens of the document and of each request alone: in most windows of 1024 tokens, the document
#: is passed while the answers grow
DOCUMENT, PRIVATE = 2000, [50, 9, 31, 64, 17, 700, 1200] * 2


def as_exact(both: list[EngineProcess], model: Path, note: Callable[[str], None]) -> Run:
    """Assert that PREFIX_SHARE is as exact as stock: on questions on one document, a short prompt
    and a long one. Returns its run.
    """
    text = Text(model)
    prompts = text.asking(DOCUMENT, [n // 2 for n in PRIVATE])
    prompts += [text.part(5000, 300), text.part(9000, 2500)]
    found = cases.compare(both, prompts, greedy(200))
    note(str(found))
    found.assert_as_exact(max_slack=2e-2)
    return found.run


@pytest.mark.parametrize(
    ("write", "runner"),
    [(write_small_gemma3, "V2"), (write_small_gemma3, "V1"), (write_small_gemma2, "V2")],
    ids=["Gemma 3, V2", "Gemma 3, V1", "Gemma 2"],
)
def test_windows_are_shared(write, runner, tmp_path, note):
    model = write(tmp_path / "model", sliding_window=1024)
    # STRICT refuses a layer that is not served
    ours = cases.ours(model, runner, **OPTIONS)
    with engines(cases.stock(model, **OPTIONS), ours) as both:
        run = as_exact(both, model, note)
    assert_shared(run, factor=1.5)
    assert run.stats["plans"] < run.stats["decode_steps"] / 2


def test_full_attention_in_one_group_with_windows_is_shared(tmp_path, note):
    """As where vLLM's hybrid KV cache manager is off: blocks are kept for all tokens."""
    model = write_small_gemma3(tmp_path / "model", sliding_window=1024)
    options = {**OPTIONS, "disable_hybrid_kv_cache_manager": True}
    with engines(cases.stock(model, **options), cases.ours(model, env=LENIENT, **options)) as both:
        fallbacks = both[1].collective_rpc("prefix_share_stats")[0]["fallbacks"]
        run = as_exact(both, model, note)
    assert list(fallbacks) == ["a sliding window"]
    assert_shared(run, factor=1.5)


@pytest.mark.parametrize("kernel", ["hopper", "portable"] if HOPPER else ["portable"])
def test_short_windows_are_served_where_the_kernel_is_fast(kernel, tmp_path, note):
    model = write_small_gpt_oss(tmp_path / "model")  # windows of 128 tokens
    ours = cases.ours(model, env={**LENIENT, "VLLM_PREFIXSHARE_KERNEL": kernel}, **OPTIONS)
    with engines(cases.stock(model, **OPTIONS), ours) as both:
        fallbacks = both[1].collective_rpc("prefix_share_stats")[0]["fallbacks"]
        run = as_exact(both, model, note)
    assert_shared(run, factor=1.5)
    assert len(fallbacks) == (kernel == "portable")
    if fallbacks:
        (reason,) = fallbacks
        assert reason.startswith("a sliding window of 128 tokens where sharing pays from ")
