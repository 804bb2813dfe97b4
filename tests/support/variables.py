"""Environment variables of the package, in a test."""

import pytest

from vllm_prefixshare.settings import settings


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Set variables ``VLLM_PREFIXSHARE_*``, which the package reads again."""
    for name, value in values.items():
        monkeypatch.setenv(f"VLLM_PREFIXSHARE_{name}", value)
    settings.cache_clear()
