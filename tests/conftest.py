"""Without a GPU, Triton's interpreter runs the portable kernels.

The environment variable of the interpreter must be set before anything imports triton, and holds
for the whole process. It is then removed from the environment, because engines that some tests
start inherit the environment.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from vllm_prefixshare.settings import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401

    import vllm_prefixshare.kernels.cache_write
    import vllm_prefixshare.kernels.merge_states
    import vllm_prefixshare.kernels.portable.kernel
    import vllm_prefixshare.kernels.token_rows  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

# the duration of an example says nothing on a busy machine
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def settings_of_the_test() -> Iterator[None]:
    """Clear the cached settings, because each test may have its own environment."""
    settings.cache_clear()
    yield
    settings.cache_clear()


def _files() -> set[str]:
    """What lies in the checkout, without what tools leave there and git ignores."""
    ignored = ("build", "dist", "site")
    names = {path.name for path in Path(__file__).parents[1].iterdir()}
    return {n for n in names if n not in ignored and n[0] not in "._" and ".egg-info" not in n}


@pytest.fixture(autouse=True)
def leaves_no_file() -> Iterator[None]:
    """Refuse a test that leaves a file in the checkout, where tests run: it belongs into a
    temporary folder.
    """
    before = _files()
    yield
    assert _files() <= before, "a test has left a file in the checkout"
