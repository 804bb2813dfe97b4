"""Without a GPU, Triton's interpreter runs the portable kernels.

The environment variable of the interpreter must be set before anything imports triton, and holds
for the whole process. It is then removed from the environment, because engines that some tests
start inherit the environment.
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

# the duration of an example says nothing on a busy machine
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def settings_of_the_test() -> Iterator[None]:
    """Clear the cached settings, because each test may have its own environment."""
    settings.cache_clear()
    yield
    settings.cache_clear()
