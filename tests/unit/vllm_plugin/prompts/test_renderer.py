"""The hook in a real renderer of vLLM with the embedded model's tokenizer: the same prompts, the
same errors, the same engine inputs as without it.
"""

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import base, renderer_from_config
from vllm.renderers.params import ChatParams, TokenizeParams

from examples.embedded_model import embedded_model_path
from tests.support.tokenizers import corpus
from vllm_prefixshare.vllm_plugin.hooks.tokenization import hook_tokenization
from vllm_prefixshare.vllm_plugin.prompts import parts, tokenization
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds

DOCUMENT = corpus()[:12_000]


@cache
def renderer() -> Any:
    config = EngineArgs(model=str(embedded_model_path()), max_model_len=8192).create_engine_config()
    hook_tokenization(base)
    hook_tokenization(base)
    return renderer_from_config(config)


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[parts.PartCounters]:
    """The part, active, with an empty cache and new counters."""
    monkeypatch.setattr(parts, "_active", frozenset({"tokenization"}))
    counters = parts.PartCounters()
    monkeypatch.setitem(parts.COUNTERS, "tokenization", counters)
    tokenization.text_cache().clear()
    assert tokenization.text_tokenizer(renderer().get_tokenizer(), timeout=120) is not None
    yield counters
    tokenization.text_cache().clear()


def without_the_part(monkeypatch: pytest.MonkeyPatch, call: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_active", frozenset())
        return outcome(call)


def outcome(call: Any) -> Any:
    """What a call returns, without times, or its error."""
    try:
        inputs = call()
    except Exception as e:
        return type(e), str(e)
    for engine_input in inputs:
        del engine_input["arrival_time"]
    return inputs


def completions(*texts: str, **extras: str) -> list[Any]:
    prompts = [{"prompt": text} for text in texts]
    return list(renderer().render_cmpl(prompts, prompt_extras=extras or None))


PROMPTS = {
    "short": "hello",
    "empty": "",
    "one character": "a",
    "null": "\x00" * 2000,
    "document": DOCUMENT,
    "document and question": DOCUMENT + "\n\nWhat is a block?",
    "lone surrogate": DOCUMENT + "\ud800",
    "surrogate first": "\udfff" + DOCUMENT,
    "chat tokens": "<|im_start|>user\n" + DOCUMENT + "<|im_end|>\n<|im_start|>assistant\n",
    "too long": DOCUMENT * 8,
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_and_errors_are_vllms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = without_the_part(monkeypatch, lambda: completions(PROMPTS[kind]))
    for _ in range(2):
        assert outcome(lambda: completions(PROMPTS[kind])) == expected


def test_a_document_is_shared(active: parts.PartCounters) -> None:
    completions(DOCUMENT)
    assert active.shared_units == 0
    (engine_input,) = completions(DOCUMENT + " And what is a tile of the kernel?")
    assert active.shared_units > len(DOCUMENT) - 700
    assert (active.requests, active.fallbacks) == (2, 0)
    assert active.cache_bytes == tokenization.text_cache().bytes > 0
    token_ids = engine_input["prompt_token_ids"]
    assert isinstance(token_ids, TokenIds)
    assert token_ids.array.tolist() == token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"truncate_prompt_tokens": 100},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 100, "truncation_side": "left"},
        {"truncate_prompt_tokens": 100, "truncation_side": "right"},
        {"add_special_tokens": False},
        {"max_total_tokens": 1000},
        {"do_lower_case": True},
        {"return_token_offsets": True},
    ],
)
def test_parameters_mean_what_they_mean_in_vllm(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TokenizeParams(**{"max_total_tokens": 8192, **options})

    def call() -> list[Any]:
        return list(renderer().render_cmpl([{"prompt": DOCUMENT}], params))

    expected = without_the_part(monkeypatch, call)
    assert outcome(call) == expected
    assert outcome(call) == expected


def test_prompts_at_the_length_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(completions(DOCUMENT)[0]["prompt_token_ids"])
    for limit in (length - 1, length, length + 1):
        params = TokenizeParams(max_total_tokens=limit)

        def call(params: TokenizeParams = params) -> list[Any]:
            return list(renderer().render_cmpl([{"prompt": DOCUMENT}], params))

        assert outcome(call) == without_the_part(monkeypatch, call)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"truncate_prompt_tokens": 100}, DOCUMENT),
        ({"truncate_prompt_tokens": -1}, DOCUMENT * 8),
        ({}, DOCUMENT * 8),
    ],
)
def test_a_truncated_or_rejected_text_is_tokenized_once(
    options: dict[str, Any], text: str, active: parts.PartCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TokenizeParams(max_total_tokens=8192, **options)

    def call() -> list[Any]:
        return list(renderer().render_cmpl([{"prompt": text}], params))

    expected = without_the_part(monkeypatch, call)
    for _ in range(2):
        assert outcome(call) == expected
    assert (active.requests, active.fallbacks) == (2, 0)
    assert active.shared_units > len(text) - 700, "the second call takes the ids of the first"
    monkeypatch.setattr(renderer().get_tokenizer(), "truncation_side", "left")
    assert outcome(call) == without_the_part(monkeypatch, call)


def test_salts_share_no_tokenization(active: parts.PartCounters) -> None:
    completions(DOCUMENT)
    completions(DOCUMENT, cache_salt="one")
    completions(DOCUMENT, cache_salt="two")
    assert active.shared_units == 0
    (salted,) = completions(DOCUMENT, cache_salt="two")
    assert active.shared_units > 11_000
    assert salted["cache_salt"] == "two"
    before = active.shared_units
    renderer().render_cmpl([{"prompt": DOCUMENT, "cache_salt": "three"}])
    assert active.shared_units == before


def test_the_server_s_entry_points(active: parts.PartCounters) -> None:
    """Completions and chat, asynchronous, salted, at the same time."""
    chat = ChatParams(chat_template_kwargs={"tokenize": False})  # as LLM.chat and the server
    messages = [[{"role": "user", "content": DOCUMENT + " What is a block?"}]]

    async def requests() -> list[Any]:
        salted = {"prompt_extras": {"cache_salt": "one"}}
        return await asyncio.gather(
            renderer().render_cmpl_async([{"prompt": DOCUMENT}]),
            renderer().render_cmpl_async([{"prompt": DOCUMENT}], **salted),
            renderer().render_chat_async(messages, chat),
            renderer().render_chat_async(messages, chat, **salted),
        )

    asyncio.run(requests())
    first_chat = asyncio.run(requests())[2][1][0]["prompt_token_ids"]
    assert (active.requests, active.fallbacks) == (8, 0)
    assert active.shared_units > 4 * 11_000
    (_, (offline,)) = renderer().render_chat(messages, chat)
    assert offline["prompt_token_ids"] == first_chat


def test_outside_the_entry_points_the_salt_is_unknown(active: parts.PartCounters) -> None:
    params = TokenizeParams(max_total_tokens=8192)
    renderer().tokenize_prompt({"prompt": DOCUMENT}, params)
    assert active.fallbacks == 1


def test_ids_outside_the_vocabulary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(renderer(), "validate_token_ids"):
        pytest.skip("this vLLM validates ids elsewhere")
    for ids in ([1, 2, 3], [1, -2], [1, 10**6], []):
        errors = []
        for token_ids in (ids, TokenIds(ids)):
            try:
                renderer().validate_token_ids(token_ids)
                errors.append("")
            except Exception as e:
                errors.append(f"{type(e)} {e}")
        assert errors[0] == errors[1]
