"""The memo of tokenized text: exactly the tokenizer's ids, each text encoded once, in bounded
memory.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support import tokenizers
from vllm_prefixshare.vllm_plugin.prompts import text_cuts, tokenization
from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import BoundedCache
from vllm_prefixshare.vllm_plugin.prompts.split_pattern import NotExactError
from vllm_prefixshare.vllm_plugin.prompts.tokenization import TextTokenizer

SIZES = (((64,), 12, 4), ((256, 48), 16, 2), ((2048, 512), 64, 8), ((32768, 2048), 512, 64))


@cache
def built(kind: str) -> Tokenizer:
    return tokenizers.EXACT[kind]()


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes(monkeypatch, SIZES[0])


def use_sizes(monkeypatch: pytest.MonkeyPatch, sizes: tuple[tuple[int, ...], int, int]) -> None:
    """Windows and pieces of other sizes, so that short texts have many."""
    monkeypatch.setattr(tokenization, "WINDOW_CHARS", sizes[0])
    monkeypatch.setattr(tokenization, "PIECE_CHARS", sizes[1])
    monkeypatch.setattr(tokenization, "LAST_PIECE_CHARS", sizes[2])


@cache
def shared_memo(kind: str) -> TextTokenizer:
    return memo_of(built(kind))


def memo_of(tokenizer: Tokenizer, max_bytes: int = 1 << 24) -> TextTokenizer:
    return TextTokenizer(tokenizer, BoundedCache(max_bytes))


def assert_exact(memo: TextTokenizer, tokenizer: Tokenizer, text: str, special: bool) -> None:
    token_ids, _ = memo.encode(text, special)
    expected = tokenizer.encode(text, add_special_tokens=special).ids
    assert token_ids == expected, repr(text)
    assert token_ids.array.tolist() == expected


class CountingEncoder:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self.chars = 0

    def encode(self, text: str, **kwargs: Any) -> Any:
        self.chars += len(text)
        return self._encoder.encode(text, **kwargs)

    def encode_batch_fast(self, texts: list[str], **kwargs: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self._encoder.encode_batch_fast(texts, **kwargs)


def test_a_piece_as_long_as_a_window_is_no_window() -> None:
    """A piece ends at a cut because of the space that follows it; its text alone has no cut."""
    window = tokenization.WINDOW_CHARS[-1]
    tokenizer = built("llama3")
    memo = memo_of(tokenizer)
    lengths: set[int] = set()
    for length in range(window - 12, window + 4):
        word = "in" * (length // 2) + "g" * (length % 2)
        for text in (f"{word} the end of it " * 6, f"{word}formation the end of it " * 6):
            assert_exact(memo, tokenizer, text, False)
        lengths |= {len(key.text) for key in memo._cache._entries if not key.is_window}
    assert window in lengths, "some piece is as long as a window"


@pytest.mark.parametrize("kind", tokenizers.EXACT)
def test_ids_are_the_tokenizers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that share a beginning, a middle or nothing, with windows of all sizes."""
    tokenizer = built(kind)
    memo = memo_of(tokenizer)
    rnd = Random(kind)
    for _ in range(40):
        use_sizes(monkeypatch, rnd.choice(SIZES))
        document = tokenizers.random_text(rnd, rnd.choice((6, 20, 60)))
        for _ in range(3):
            at = rnd.randrange(len(document) + 1)
            inserted = tokenizers.random_text(rnd, 6)
            for text in (
                document[:at] + inserted,
                document[:at] + inserted + document[at:],
                inserted + document,
            ):
                assert_exact(memo, tokenizer, text, rnd.random() < 0.5)


@pytest.mark.parametrize("kind", ["llama3", "deepseek", "llama2", "gemma", "t5"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.text(max_size=40) | st.sampled_from(["a b", " the", "word ", "<s>"]), max_size=8)
)
def test_any_unicode(kind: str, small_sizes: None, parts: list[str]) -> None:
    memo = shared_memo(kind)
    memo._cache.clear()
    text = "".join(parts)
    for shared in (text, text + text, "one two three " * 9 + text):
        assert_exact(memo, built(kind), shared, special=True)


@pytest.mark.parametrize("text", ["", " ", "a", "\x00", "\U0001f469\u200d", "\u0301", "a b"])
@pytest.mark.parametrize("kind", ["qwen", "mistral", "xlm-r"])
def test_the_shortest_texts(kind: str, text: str, small_sizes: None) -> None:
    assert_exact(shared_memo(kind), built(kind), text, special=True)
    assert_exact(shared_memo(kind), built(kind), text, special=False)


@pytest.mark.parametrize("kind", tokenizers.INEXACT)
def test_tokenizers_that_cannot_be_cut_are_refused(kind: str) -> None:
    with pytest.raises(NotExactError):
        memo_of(tokenizers.INEXACT[kind]())


@pytest.mark.parametrize(
    ("kind", "check", "unchecked"),
    [
        ("one entry spans words", "_separated_by_model", lambda tokenizer, cut, steps: cut),
        ("unigram without split", "_separated_by_model", lambda tokenizer, cut, steps: cut),
        ("pattern spans words", "_split_at", lambda cut, source: replace(cut, ends_pre_token=True)),
        ("added token spans words", "_added_token_across", lambda tokenizer, cut: None),
    ],
)
def test_the_checks_bite(
    kind: str, check: str, unchecked: Any, small_sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its check a tokenizer is accepted, and gives wrong ids."""
    monkeypatch.setattr(text_cuts, check, unchecked)
    tokenizer = tokenizers.INEXACT[kind]()
    memo = memo_of(tokenizer)
    text = tokenizers.corpus()[:20_000] + " the kernel reads it and" * 100
    texts = [text[start : start + 600] for start in range(0, len(text), 600)]
    assert any(memo.encode(text, False)[0] != tokenizer.encode(text).ids for text in texts)


@pytest.fixture
def counted() -> tuple[TextTokenizer, CountingEncoder]:
    memo = memo_of(built("llama3"))
    encoder = CountingEncoder(memo._encoder)
    memo._encoder = encoder  # type: ignore[assignment]
    return memo, encoder


@pytest.mark.parametrize("start", range(0, 90_000, 9_001))
def test_a_document_is_encoded_once(
    counted: tuple[TextTokenizer, CountingEncoder], start: int
) -> None:
    memo, encoder = counted
    tokenizer = built("llama3")
    document = tokenizers.corpus()[start : start + 100_000]
    memo.encode(document + " What is a block?", True)
    assert encoder.chars >= len(document)
    # A small piece may hold the end of the document and the start of the question. The first of
    # the longer questions also moves the place after which pieces are small.
    may_cost = 2 * tokenization.PIECE_CHARS
    for number in range(8):
        question = f" Question {number}: how many keys does each of the windows of a plan read?"
        encoder.chars = 0
        token_ids, known_chars = memo.encode(document + question, True)
        assert token_ids == tokenizer.encode(document + question).ids
        assert encoder.chars < len(question) + 150 + may_cost
        assert known_chars > len(document) - 150 - may_cost
        may_cost = 0


def test_a_change_in_the_middle_costs_its_surroundings(
    counted: tuple[TextTokenizer, CountingEncoder],
) -> None:
    memo, encoder = counted
    document = tokenizers.corpus()[:60_000]
    memo.encode(document, True)
    edited = document[:30_000] + " A sentence that is new here. " + document[30_000:]
    encoder.chars = 0
    token_ids, _ = memo.encode(edited, True)
    assert token_ids == built("llama3").encode(edited).ids
    assert encoder.chars < len(edited) - 29_000, "the text before the change was known"


def test_texts_of_different_salts_share_nothing(
    counted: tuple[TextTokenizer, CountingEncoder],
) -> None:
    memo, encoder = counted
    document = tokenizers.corpus()[:20_000]
    costs = []
    for salt in ("one", "one", "two", None, "two"):
        encoder.chars = 0
        memo.encode(document, True, salt)
        costs.append(encoder.chars)
    first, again, other, unsalted, other_again = costs
    assert first == other == unsalted
    assert again == other_again < 200


def test_memory_is_bounded() -> None:
    memo = memo_of(built("llama3"), max_bytes=1 << 20)
    rnd = Random(1)
    for number in range(12):
        text = f"{number} " + " ".join(str(rnd.random()) + " word" for _ in range(3000))
        assert_exact(memo, built("llama3"), text, special=True)
        assert memo._cache.bytes <= 1 << 20
    entries = list(memo._cache._entries.items())
    held = sum(len(key.text) + 12 * len(span.ids) for key, (span, _) in entries)
    assert held <= memo._cache.bytes <= 1 << 20


def test_text_without_cuts_is_the_tokenizers() -> None:
    memo = memo_of(built("llama3"))
    for text in ("x" * 70_000, "0123456789" * 7000, "a b " * 5 + "-" * 40_000 + " a b"):
        assert_exact(memo, built("llama3"), text, special=True)


def test_truncation_of_the_tokenizer_is_left_alone() -> None:
    tokenizer = tokenizers.byte_level(tokenizers.LLAMA3, bos=True)
    tokenizer.enable_truncation(8)
    memo = memo_of(tokenizer)
    text = "one two three " * 20
    assert len(memo.encode(text, True)[0]) > 40
    assert len(tokenizer.encode(text).ids) == 8


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", tokenizers.EXACT)
def test_truncated_ids_are_the_tokenizers(kind: str, side: str) -> None:
    tokenizer = tokenizers.EXACT[kind]()
    special_tokens = [("<first>", 0), ("<last>", 1)]
    tokenizer.post_processor = TemplateProcessing("<first> $A <last>", None, special_tokens)
    memo = TextTokenizer(tokenizer, BoundedCache(1 << 20), side)
    text = "one two three " * 200
    for special, smallest in ((True, 3), (False, 1)):
        token_ids, _ = memo.encode(text, special)
        for max_length in (smallest, 7, len(token_ids) - 1):
            tokenizer.enable_truncation(max_length, direction=side)
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            truncated = memo.truncated(token_ids, max_length, special)
            assert truncated == expected
            assert truncated is not None and truncated.array.tolist() == expected
        assert memo.truncated(token_ids, smallest - 1, special) is None


def test_threads_get_their_own_results() -> None:
    memo = memo_of(built("llama3"), max_bytes=1 << 21)
    rnd = Random(2)
    documents = [tokenizers.random_text(rnd, 200) for _ in range(6)]
    texts = [rnd.choice(documents) + tokenizers.random_text(rnd, 6) for _ in range(80)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda text: memo.encode(text, True)[0], texts))
    for text, token_ids in zip(texts, results, strict=True):
        assert token_ids == built("llama3").encode(text).ids


class PythonTokenizer:
    """The Python side of a tokenizer."""

    split_special_tokens = False
    truncation_side = "right"
    name_or_path = "some/model"

    def __init__(self, backend: Tokenizer) -> None:
        self._tokenizer = backend


@pytest.fixture
def python_tokenizer() -> Iterator[PythonTokenizer]:
    yield PythonTokenizer(tokenizers.byte_level(tokenizers.LLAMA3))
    tokenization.text_cache().clear()


def test_the_analysis_runs_once(python_tokenizer: PythonTokenizer) -> None:
    memo = tokenization.text_tokenizer(python_tokenizer, timeout=60)
    assert memo is not None
    assert tokenization.text_tokenizer(python_tokenizer, timeout=0) is memo


def test_tokens_added_later_end_it(python_tokenizer: PythonTokenizer) -> None:
    assert tokenization.text_tokenizer(python_tokenizer, timeout=60) is not None
    python_tokenizer._tokenizer.add_tokens([AddedToken("kernel reads")])
    assert tokenization.text_tokenizer(python_tokenizer, timeout=60) is None


@pytest.mark.parametrize("fastokens", ["0", "1"])
def test_a_tokenizer_with_its_own_call_is_refused(
    fastokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(tokenization, "report_once", lambda part, reason: messages.append(reason))
    monkeypatch.setenv("VLLM_USE_FASTOKENS", fastokens)

    class Own(PythonTokenizer):
        def __call__(self, text: str) -> None:
            """Tokenize in a way of its own."""

    tokenizer = Own(tokenizers.byte_level(tokenizers.LLAMA3))
    assert tokenization.text_tokenizer(tokenizer, timeout=60) is None
    (message,) = messages
    assert message.startswith("some/model: Own has its own __call__")
    assert ("fastokens may be faster" in message) == (fastokens == "0")
