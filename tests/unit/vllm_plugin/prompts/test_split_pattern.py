"""Proofs about patterns, checked against the engine, and what is refused."""

from random import Random

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.support.tokenizers import DEEPSEEK, LLAMA3, LLAMA4, QWEN
from vllm_prefixshare.vllm_plugin.prompts.split_pattern import NotExactError, SplitPattern

LETTERS = "abcXYZ\u00e9\u044f\uac00"


@pytest.mark.parametrize("source", [LLAMA3, LLAMA4, QWEN, DEEPSEEK[2]])
def test_real_patterns_end_at_words(source: str) -> None:
    pattern = SplitPattern(source)
    assert not pattern.spans(LETTERS, " ")
    assert pattern.covers(LETTERS)


@pytest.mark.parametrize(
    "source",
    [
        r"\w+ ?",
        r"\p{L}+(?: \p{L}+)?",
        r"[\p{L} ]+",
        r"(?i:A B)|.",
        r"\p{L}+(?=\s)",
        r"\p{L}+(?!\s)",
        r"(?:a| )+",
        r"(\p{L}\s?){2,3}",
    ],
)
def test_patterns_that_cross_or_look_across(source: str) -> None:
    assert SplitPattern(source).spans("abA", " ")


@pytest.mark.parametrize(
    "source",
    [r"\p{N}+", r"\p{L}{2,}", r"x?\p{L}++y", r"\p{L}+(?![x])", r"\s*|\p{L}+", r"(?:ab)+|\s"],
)
def test_patterns_that_may_leave_letters_out(source: str) -> None:
    assert not SplitPattern(source).covers("ab")


@pytest.mark.parametrize(
    "source",
    [
        r"^a",
        r"a$",
        r"\ba",
        r"(?<=a)b",
        r"(?<!a)b",
        r"(?=ab)a",
        r"(a)\1",
        r"a(?i)b",
        r"(?m:a.b)",
        r"a{2}+",
        r"a**",
        r"(?i:\u00df)",
        "(?i:\u00df)",
        r"[]a]",
        r"[a",
        r"(a",
        r"a)",
        r"\Ga",
        r"\Xa",
    ],
)
def test_syntax_that_depends_on_more_is_refused(source: str) -> None:
    with pytest.raises(NotExactError):
        SplitPattern(source)


def _random_pattern(rnd: Random, depth: int = 0) -> str:
    atoms = ("a", "b", " ", r"\p{L}", r"\s", r"\S", "[^a]", "[ab ]", "(?![a])", r"(?=\s)")
    quantifiers = ("", "", "", "?", "*", "+", "{1,2}", "+?", "?+", "*+")

    def item() -> str:
        if depth < 2 and rnd.random() < 0.25:
            opening = rnd.choice(("(", "(?:", "(?>", "(?i:"))
            return opening + _random_pattern(rnd, depth + 1) + ")" + rnd.choice(quantifiers)
        atom = rnd.choice(atoms)
        return atom if atom.startswith("(") else atom + rnd.choice(quantifiers)

    alternatives = rnd.randrange(1, 4)
    return "|".join(
        "".join(item() for _ in range(rnd.randrange(1, 4))) for _ in range(alternatives)
    )


def test_random_patterns_divide_a_text_as_its_parts() -> None:
    """Where a pattern is proven to end at words, its pre-tokens of a text are those of the parts
    of the text before and after each cut.
    """
    rnd = Random(5)
    proven = 0
    for _ in range(8000):
        source = _random_pattern(rnd)
        pattern = SplitPattern(source)
        if pattern.spans("ab", " ") or not pattern.covers("ab"):
            continue
        try:
            split = pre_tokenizers.Split(Regex(source), "isolated")
        except Exception:  # the engine refuses it
            continue
        proven += 1
        for _ in range(6):
            left = "".join(rnd.choices("ab c1", k=rnd.randrange(6))) + rnd.choice("ab")
            right = " " + rnd.choice("ab") + "".join(rnd.choices("ab c1", k=rnd.randrange(6)))

            def tokens(text: str, split: pre_tokenizers.Split = split) -> list[str]:
                return [token for token, _ in split.pre_tokenize_str(text)]

            whole = tokens(left + right)
            assert whole == tokens(left) + tokens("a" + right)[1:], (source, left, right)
    assert proven > 100
