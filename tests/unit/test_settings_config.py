"""Environment variables and configuration: which values are refused, and the messages."""

import logging
import os
import tempfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tests.support.planning_cases import gpu_config
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import PREFIX, VARIABLES, read, settings

GOOD = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def value_of(name: str, environment: dict[str, str]) -> object:
    return getattr(read(environment), name.removeprefix(PREFIX).lower())


def test_every_variable_has_the_prefix_a_valid_default_and_a_meaning():
    for name, variable in VARIABLES.items():
        assert name.startswith(PREFIX)
        assert value_of(name, {}) == variable.parse(variable.default)
        assert len(variable.meaning) > 10


def test_defaults():
    found = read({})
    assert found.divider is None
    assert found.kernel == "auto"
    assert found.share == gpu_config().share
    assert found.cost_table is None
    assert found.order == "auto"
    assert found.order_bound is None
    assert found.cache == Path.home() / ".cache/vllm_prefixshare"
    assert found.strict is False
    assert found.check_plans is False
    with pytest.raises(FrozenInstanceError):
        found.strict = True


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VLLM_PREFIXSHARE_SHARE", "never", "never"),
        ("VLLM_PREFIXSHARE_SHARE", "ALWAYS", "always"),
        ("VLLM_PREFIXSHARE_EXPERIMENTAL", "", frozenset()),
        ("VLLM_PREFIXSHARE_EXPERIMENTAL", "alibi, Head_dim", frozenset({"alibi", "head_dim"})),
        ("VLLM_PREFIXSHARE_STRICT", "1", True),
        ("VLLM_PREFIXSHARE_STRICT", "0", False),
        ("VLLM_PREFIXSHARE_CHECK_PLANS", "1", True),
        ("VLLM_PREFIXSHARE_DIVIDER", "deft_flatten", "deft_flatten"),
        ("VLLM_PREFIXSHARE_DIVIDER", "AUTO", None),
        ("VLLM_PREFIXSHARE_COST_TABLE", "/some/table.json", Path("/some/table.json")),
        ("VLLM_PREFIXSHARE_COST_TABLE", "", None),
        ("VLLM_PREFIXSHARE_ORDER", "Prefix", "prefix"),
        ("VLLM_PREFIXSHARE_ORDER_BOUND", "", None),
        ("VLLM_PREFIXSHARE_ORDER_BOUND", "0.5", 0.5),
        ("VLLM_PREFIXSHARE_CACHE", "~/here", Path.home() / "here"),
    ],
)
def test_values_are_parsed(name, text, value):
    assert value_of(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("VLLM_PREFIXSHARE_SHARE", "sometimes", "auto, always, never"),
        ("VLLM_PREFIXSHARE_SHARE", "", "auto, always, never"),
        (
            "VLLM_PREFIXSHARE_EXPERIMENTAL",
            "alibi,head",
            "some of alibi,head_dim",
        ),
        ("VLLM_PREFIXSHARE_STRICT", "yes", "0 or 1"),
        ("VLLM_PREFIXSHARE_STRICT", "", "0 or 1"),
        ("VLLM_PREFIXSHARE_CHECK_PLANS", "true", "0 or 1"),
        ("VLLM_PREFIXSHARE_ORDER", "lpm", "auto, prefix, off"),
        ("VLLM_PREFIXSHARE_ORDER_BOUND", "-1", "seconds, 0 or more, or unset it"),
        ("VLLM_PREFIXSHARE_ORDER_BOUND", "nan", "seconds, 0 or more, or unset it"),
        ("VLLM_PREFIXSHARE_ORDER_BOUND", "soon", "seconds, 0 or more, or unset it"),
    ],
)
def test_a_bad_value_is_refused_with_what_would_be_good(name, text, allowed):
    with pytest.raises(PrefixShareError) as error:
        read({name: text})
    assert f"{name}={text!r}" in str(error.value)
    assert allowed in str(error.value)


def test_a_path_of_an_unknown_user_is_refused_by_the_name_of_the_variable():
    sentence = "COST_TABLE='~no-such-user-here/t' is not valid: set it to a path without ~, as no"
    with pytest.raises(PrefixShareError, match=sentence):
        read({"VLLM_PREFIXSHARE_COST_TABLE": "~no-such-user-here/t"})


def test_a_user_without_a_home_folder_has_a_temporary_cache(monkeypatch, caplog):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654)  # has no entry in /etc/passwd
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm.prefixshare"), "disabled", False)
    caplog.set_level(logging.WARNING, "vllm.prefixshare")
    temporary = Path(tempfile.gettempdir()) / "vllm_prefixshare-987654"
    assert settings().cache == settings().cache == temporary
    # a set: after some engine tests in one process, a record reaches caplog twice
    (said,) = {record.getMessage() for record in caplog.records}
    assert f"no home folder, so compiled code is kept in {temporary}" in said
    assert read({"VLLM_PREFIXSHARE_CACHE": "/tmp/cache"}).cache == Path("/tmp/cache")
    with pytest.raises(PrefixShareError, match=r"_CACHE=.* set it to a path without ~, as no such"):
        read({"VLLM_PREFIXSHARE_CACHE": "~/cache"})
    assert {record.getMessage() for record in caplog.records} == {said}


def test_an_unknown_variable_is_refused_and_the_known_ones_are_named():
    with pytest.raises(PrefixShareError) as error:
        read({"VLLM_PREFIXSHARE_DIVIDR": "fixed"})
    assert str(error.value).startswith("VLLM_PREFIXSHARE_DIVIDR is not a known variable")
    assert all(name in str(error.value) for name in VARIABLES)


def test_variables_of_others_are_left_alone():
    assert read({"VLLM_PREFIX": "1", "VLLM_ATTENTION_BACKEND": "PREFIX_SHARE"}) == read({})


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_SHARE", "never")
    assert settings().share == "never"
    monkeypatch.setenv("VLLM_PREFIXSHARE_SHARE", "always")
    assert settings().share == "never"


def test_a_refusal_is_a_value_error():
    assert issubclass(PrefixShareError, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_qo_heads", 0, "num_qo_heads must be at least 1, got 0."),
        ("num_kv_heads", 0, "num_kv_heads must be at least 1, got 0."),
        ("num_kv_heads", -1, "num_kv_heads must be at least 1, got -1."),
        ("block_size", 0, "block_size must be at least 1, got 0."),
        ("num_kv_heads", 5, "num_qo_heads must be a multiple of num_kv_heads, got 32 and 5."),
        ("num_kv_heads", 64, "num_qo_heads must be a multiple of num_kv_heads, got 32 and 64."),
        ("head_dim", 56, "head_dim must be a multiple of 8 from 64 to 512, got 56."),
        ("head_dim", 520, "head_dim must be a multiple of 8 from 64 to 512, got 520."),
        ("head_dim", 100, "head_dim must be a multiple of 8 from 64 to 512, got 100."),
        ("dtype", "int8", "dtype must be one of float32, bfloat16, float16, got int8."),
    ],
)
def test_attention_shapes_that_are_refused(name, value, sentence):
    with pytest.raises(PrefixShareError) as error:
        AttentionConfig(**{**GOOD, name: value})
    assert str(error.value) == sentence
