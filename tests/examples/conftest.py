"""What the tests of the examples have in common."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Examples set variables of vLLM when they are imported: other tests must not see them."""
    with mock.patch.dict(os.environ):
        yield
