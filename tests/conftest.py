"""Where there is no GPU, Triton's interpreter runs the portable kernels.

It has to be chosen before anything imports triton, and for all of triton at once. The choice is
taken back from the environment, which the engines that some tests start inherit.
"""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from vllm_prefixshare.settings import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401

    import vllm_prefixshare.kernels.merge_states
    import vllm_prefixshare.kernels.portable.kernel  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

# how long an example takes says nothing on a busy machine
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def settings_of_the_test() -> Iterator[None]:
    """A process reads its settings once; here each test may have an environment of its own."""
    settings.cache_clear()
    yield
    settings.cache_clear()
