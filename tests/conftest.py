"""Without a GPU, Triton's interpreter runs the portable kernels.

The environment variable of the interpreter must be set before anything imports triton, and holds
for the whole process. It is then removed from the environment, because engines that some tests
start inherit the environment.
"""

import logging
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
    from tests.support.engine import fork_engines
    from tests.support.interpreter import leave_out_idle_work

    fork_engines()
    leave_out_idle_work()
    del os.environ["TRITON_INTERPRET"]

# engines that tests start with another cache folder find the loops of planning compiled
os.environ.setdefault("NUMBA_CACHE_DIR", str(settings().cache / "numba"))

LOG_LEVEL = "VLLM_LOGGING_LEVEL"

# the duration of an example says nothing on a busy machine
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


#: Files that take minutes. They come first: at the end, other processes would wait for one of them.
LONGEST = (
    "tests/examples/test_ray.py",
    "tests/unit/vllm_plugin/test_other_releases.py",
    "tests/engine/test_engine.py",
    "tests/examples/test_trl.py",
    "tests/engine/test_serve.py",
    "tests/examples/test_examples.py",
    "tests/examples/test_minimal.py",
    "tests/patches/test_series.py",
    "tests/unit/kernels/aot/test_compile.py",
    "tests/unit/benchmarks/test_bench_whole_call.py",
    "tests/engine/test_engine_order.py",
    "tests/engine/test_connectors.py",
    "tests/unit/kernels/aot/test_precompile.py",
    "tests/unit/distributed/test_ranks.py",
    "tests/docs/test_snippets.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    places = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(autouse=True)
def log_level_of_the_test() -> Iterator[None]:
    """Undo what ``doctor`` does to the log of the process in which it runs."""
    before = os.environ.get(LOG_LEVEL)
    yield
    if os.environ.get(LOG_LEVEL) != before:
        del os.environ[LOG_LEVEL]
        logging.getLogger("vllm").setLevel(logging.INFO)  # vLLM's own, read when it is imported


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
