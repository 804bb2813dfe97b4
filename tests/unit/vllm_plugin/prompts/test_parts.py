"""Activation of the parts of shared host work."""

import pytest

from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.settings import PROMPT_PARTS
from vllm_prefixshare.vllm_plugin.prompts import parts


@pytest.fixture(autouse=True)
def _inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_active", frozenset())
    monkeypatch.setattr(parts, "_unavailable", set())


@pytest.mark.parametrize(
    ("value", "uses_prefix_share", "expected"),
    [
        (None, True, set(PROMPT_PARTS)),
        (None, False, set()),
        ("off", True, set()),
        ("on", False, set(PROMPT_PARTS)),
        ("hashes,lookup", False, {"hashes", "lookup"}),
    ],
)
def test_parts_follow_the_backend_and_the_setting(monkeypatch, value, uses_prefix_share, expected):
    if value is not None:
        monkeypatch.setenv(parts.VARIABLE, value)
    parts.activate(uses_prefix_share)
    assert {part for part in PROMPT_PARTS if parts.is_enabled(part)} == expected


def test_a_wrong_variable_does_not_reach_engines_that_did_not_choose(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_DIVIDR", "fixed")
    parts.activate(uses_prefix_share=False)
    with pytest.raises(PrefixShareError, match="DIVIDR"):
        parts.activate(uses_prefix_share=True)
