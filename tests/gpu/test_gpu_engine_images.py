"""A model whose image tokens attend to later tokens inside a real vLLM engine on a GPU: a small
Gemma 3 with a vision tower, and requests with and without an image in one batch.

vLLM sends steps with image tokens to TRITON_ATTN, all others to PREFIX_SHARE. As in
``test_gpu_engine_windows.py`` the error in decode, against the prefill of the same tokens in vLLM's
own backend, is compared with the error of its decode.

    python -m pytest -m gpu tests/gpu/test_gpu_engine_images.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from tests.support import gpu_engines as cases
from tests.support.dummy_model import START_OF_IMAGE, write_small_gemma3_with_images
from tests.support.engine import STOCK
from tests.support.engine_steps import Prompt
from tests.support.gpu_engines import Text, assert_shared, engines, extension, greedy
from tests.support.gpu_layer import on_gpu_with
from vllm_prefixshare.vllm_plugin.compat import vllm_version
from vllm_prefixshare.vllm_plugin.observability.stats import PrefixShareWorkerExtension

pytestmark = on_gpu_with("vllm", "torchvision")

#: Steps small enough that prompts with images are computed while other requests decode.
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2 << 30,
    "max_num_batched_tokens": 512,
    "limit_mm_per_prompt": {"image": 1},
}
EAGER = {"enforce_eager": True}
#: Tokens of the document, and of each request after it: every third one has an image as well.
DOCUMENT, PRIVATE = 2000, [50, 9, 31, 64, 17, 300, 500, 40, 12] * 2
TOKENS = 150


class Routes(PrefixShareWorkerExtension):
    """The plugin's worker extension, which also counts the layers that each backend computes."""

    layers_by_route: dict[str, int] | None = None

    def count_routes(self) -> dict[str, int]:
        """Layers computed since the last call, by backend; the first call starts counting."""
        from vllm_prefixshare.vllm_plugin.backends.cuda.composite import PrefixShareCompositeImpl

        found = Routes.layers_by_route
        Routes.layers_by_route = {"images": 0, "causal": 0}
        if found is None:
            choose = PrefixShareCompositeImpl.get_impl_for_metadata

            def counting(self: Any, metadata: Any) -> Any:
                impl = choose(self, metadata)
                if metadata is not None:
                    Routes.layers_by_route["causal" if impl is self.causal_impl else "images"] += 1
                return impl

            PrefixShareCompositeImpl.get_impl_for_metadata = counting
        return found or {"images": 0, "causal": 0}


def image(seed: int) -> Any:
    """Coloured rectangles."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((160, 120), Image.Resampling.NEAREST)


def with_images(text: Text) -> list[Prompt]:
    """Questions on one document, every third one after an image, and two unrelated prompts."""
    prompts: list[Prompt] = []
    document = text.part(0, DOCUMENT)
    for i, count in enumerate(PRIVATE):
        own = text.part(7000 + 311 * i, count)
        if i % 3 == 2:
            ids = [*document, START_OF_IMAGE, *own]
            prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": image(i)}})
        else:
            prompts.append([*document, *own])
    ids = [*text.part(5000, 100), START_OF_IMAGE, *text.part(5100, 100)]
    prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": image(99)}})
    return [*prompts, text.part(9000, 700)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    if vllm_version() < Version("0.33"):
        pytest.skip("Gemma 3 has image masks from vLLM 0.33 on")
    return write_small_gemma3_with_images(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("runner", "options"),
    [("V2", {}), ("V2", EAGER), ("V1", EAGER)],
    ids=["V2", "V2, eager", "V1, eager"],
)
def test_text_is_shared_next_to_images(model, runner, options, note):
    options = {**OPTIONS, **options}
    # STRICT refuses a layer that is not served
    mine = cases.ours(model, runner, **options, **extension(Routes))
    theirs = {"backend": STOCK, "model": model, **options}
    with engines(theirs, mine) as both:
        text = Text(model)
        both[1].collective_rpc("count_routes")
        found = cases.compare(both, with_images(text), greedy(TOKENS))
        (with_image,) = both[1].collective_rpc("count_routes")
        note(f"{found}; layers computed: {with_image}")
        plain = cases.compare(both, text.asking(DOCUMENT, PRIVATE), greedy(TOKENS))
        (without,) = both[1].collective_rpc("count_routes")
        note(f"{plain}; layers computed: {without}")
    for each in (found, plain):
        each.assert_as_exact(max_slack=2e-2)
        assert_shared(each.run, factor=1.5)
    # six layers in nearly every step
    assert with_image["images"] > 0 and with_image["causal"] > 5 * TOKENS
    # a prompt without an image never needs the masks
    assert without["images"] == 0 and without["causal"] > 5 * TOKENS
    assert found.run.stats["plans"] < found.run.stats["decode_steps"]


def test_an_image_changes_the_answer(model):
    """Otherwise the comparison above would not notice a wrong image."""
    with engines({"backend": STOCK, "model": model, **OPTIONS, **EAGER}) as (engine,):
        text = Text(model)
        prompts = [
            {
                "prompt_token_ids": [*text.part(0, 100), START_OF_IMAGE, *text.part(900, 20)],
                "multi_modal_data": {"image": image(seed)},
            }
            for seed in (0, 1)
        ]
        run = cases.drive_primed(engine, prompts, greedy(8))
    first, second = (completion.logprobs for completion in run.completions)
    assert np.abs(np.subtract(first, second)).mean() > 2 * cases.MEAN_ERROR
