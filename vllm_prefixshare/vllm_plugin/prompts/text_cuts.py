"""Where a text may be cut so that the token ids of its pieces are the token ids of the text.

A tokenizer finds added tokens in the text, normalizes the text between them, divides it into
pre-tokens, applies its model (BPE, Unigram) to each pre-token, and adds special tokens around the
result. A cut lies between a letter and a separator that a letter follows: before the space of
``word next``, or before a full-width comma between two Han characters. `find_cuts` proves from
the tokenizer's parts, for each kind of cut, that no step joins the two sides and that no step
treats one side differently because of the other:

1. *Added tokens.* None contains a letter followed by the separator or ends in a letter, so no
   match crosses or touches a cut from the left, and matches on both sides are found as before.
2. *Normalization* changes neither the letters nor their surroundings: each listed normalizer
   works on one character with its combining marks, and both neighbours of a cut are starters
   that do not change.
3. *Pre-tokens.* No match of the pattern takes a letter and then the separator, or looks from the
   letter at the separator and would find something else at the end of the text (`SplitPattern`).
   Every letter is part of a match, so that a pre-token ends at the cut.
4. *Model.* It sees one pre-token at a time. Where no pre-token ends at a cut (SentencePiece BPE)
   no vocabulary entry contains a letter and then the separator, so BPE never merges across it.
5. *Special tokens* are a constant prefix and suffix.

A piece after a cut is encoded after an anchor letter, whose ids are dropped, so that the tokenizer
applies its treatment of the start of a text to the anchor. Components that this module does not
know raise `NotExactError`.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from vllm_prefixshare.vllm_plugin.prompts.split_pattern import NotExactError, SplitPattern

#: The letter in front of a piece that does not start the text.
ANCHOR = "a"

#: Alphabets that may be left and right of a cut: Latin, Greek, Cyrillic, Hebrew, Arabic, Hangul.
_ALPHABETS = (
    (0x41, 0x5A),
    (0x61, 0x7A),
    (0xC0, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x52F),
    (0x5D0, 0x5EA),
    (0x620, 0x64A),
    (0xAC00, 0xD7A3),
)
_HAN = "".join(map(chr, range(0x4E00, 0x9FA6)))
#: Comma, full stop, enumeration comma, semicolon, colon, exclamation and question mark.
_FULL_WIDTH_PUNCTUATION = "\uff0c\u3002\u3001\uff1b\uff1a\uff01\uff1f"
_ASCII_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

#: The pattern that a ByteLevel pre-tokenizer uses if it is told to use one.
_BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LOCAL_NORMALIZERS = (
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Precompiled",
    "Lowercase",
    "Prepend",
    "Strip",
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """One kind of cut: after one of ``letters``, before one of ``separators`` that one of
    ``followers`` follows.

    normalized: the separators as the next step sees them. ends_pre_token: whether a pre-token is
    proven to end at the cut.
    """

    letters: str
    separators: str
    followers: str
    normalized: str
    ends_pre_token: bool = False

    @property
    def left(self) -> str:
        """Characters that may be left of the cut, the anchor included."""
        return self.letters if ANCHOR in self.letters else self.letters + ANCHOR

    def spanned_by(self, separators: str) -> re.Pattern[str]:
        """Finds a cut inside a token's text."""
        return re.compile(_char_class(self.left) + _char_class(separators))


@dataclass(frozen=True, slots=True)
class TextCuts:
    """Where texts may be cut for one tokenizer.

    prefix_ids, suffix_ids: the special tokens around a text. anchor_ids: number of ids of
    `ANCHOR` at the start of a text.
    """

    pattern: re.Pattern[str]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    anchor_ids: int

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """The first cut at or after ``start`` that ``text[:end]`` shows, or None."""
        found = self.pattern.search(text, max(start - 1, 0), end)
        return found.end() if found else None


def find_cuts(tokenizer: Tokenizer) -> TextCuts:
    """Analyze a tokenizer without truncation and padding.

    Raises:
        NotExactError: no cut between words can be proven exact.
    """
    if tokenizer.encode_special_tokens:
        raise NotExactError("special tokens are encoded as text")
    normalizer = _state(tokenizer.normalizer)
    pre_tokenizers = list(_flat(_state(tokenizer.pre_tokenizer), "pretokenizers"))
    _check_normalizers(_flat(normalizer, "normalizers"))
    cuts = [
        separated
        for cut in _between_pre_tokens(list(_candidates(tokenizer)), pre_tokenizers)
        if (separated := _separated_by_model(tokenizer, cut, pre_tokenizers))
    ]
    if not any(" " in cut.separators for cut in cuts):
        raise NotExactError("a token can span two words")
    for cut in cuts:
        token = _added_token_across(tokenizer, cut)
        if token is not None:
            raise NotExactError(f"added token {token!r}")
    prefix_ids, suffix_ids, anchor_ids = _special_tokens(tokenizer)
    pattern = "|".join(
        f"{_char_class(cut.letters)}(?={_char_class(cut.separators)}{_char_class(cut.followers)})"
        for cut in cuts
    )
    return TextCuts(re.compile(pattern), prefix_ids, suffix_ids, anchor_ids)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _flat(state: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    """The steps of a component, sequences of sequences included."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for member in state[members]:
        yield from _flat(member, members)


def _normalized(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text


def _check_normalizers(steps: Iterable[dict[str, Any]]) -> None:
    for step in steps:
        pattern = step.get("pattern", {})
        replaces_space = pattern.get("String") == " " and len(step["content"]) == 1
        replaces_spaces = pattern.get("Regex") == " {2,}"
        if step["type"] == "Replace" and (replaces_space or replaces_spaces):
            continue
        if step["type"] not in _LOCAL_NORMALIZERS:
            raise NotExactError(f"normalizer {step['type']}")


def _candidates(tokenizer: Tokenizer) -> Iterator[_Cut]:
    """The kinds of cut whose characters normalization does not move."""
    alphabets = "".join(
        chr(code)
        for first, last in _ALPHABETS
        for code in range(first, last + 1)
        if unicodedata.category(chr(code)) in ("Lu", "Ll", "Lo")
        and unicodedata.is_normalized("NFC", chr(code))
    )
    letters = alphabets if _keeps(tokenizer, alphabets) else _ASCII_LETTERS
    if not _keeps(tokenizer, letters):
        raise NotExactError("normalization changes letters")
    kinds = [(letters, " ", letters)]
    if _keeps(tokenizer, _HAN):
        kinds.append((_HAN, _FULL_WIDTH_PUNCTUATION, _HAN + _ASCII_LETTERS))
    start = _normalized(tokenizer, ANCHOR)
    for left, separators, followers in kinds:
        texts = [_normalized(tokenizer, ANCHOR + char + ANCHOR) for char in separators]
        if all(
            text.startswith(start) and text.endswith(ANCHOR) and len(text) == len(start) + 2
            for text in texts
        ):
            normalized = "".join(text[len(start)] for text in texts)
            yield _Cut(left, separators, followers, normalized)


def _keeps(tokenizer: Tokenizer, characters: str) -> bool:
    # A normalizer may prepend characters to a text.
    return _normalized(tokenizer, characters).endswith(characters)


def _between_pre_tokens(cuts: list[_Cut], steps: list[dict[str, Any]]) -> list[_Cut]:
    """The cuts that no pre-token can cross because of a pattern, with ``ends_pre_token`` and
    ``normalized`` as they are after all steps.
    """
    for number, step in enumerate(steps):
        if step["type"] == "ByteLevel" and number != len(steps) - 1:
            raise NotExactError("a pre-tokenizer after ByteLevel")
        cuts = [passed for cut in cuts if (passed := _pre_tokenized(cut, step))]
    return cuts


def _pre_tokenized(cut: _Cut, step: dict[str, Any]) -> _Cut | None:
    """The cut after one step of pre-tokenization; None if the step may join its sides."""
    kind = step["type"]
    if kind == "ByteLevel":
        return _split_at(cut, _BYTE_LEVEL_PATTERN) if step["use_regex"] else cut
    if kind == "Split":
        return _after_split(cut, step)
    if kind in ("Digits", "Punctuation"):  # divide at single characters that are no letters
        return cut
    at_space = cut.separators == " " and cut.normalized == " "
    if kind in ("WhitespaceSplit", "BertPreTokenizer"):
        return replace(cut, ends_pre_token=cut.ends_pre_token or at_space)
    if kind == "Metaspace":
        normalized = cut.normalized.replace(" ", step["replacement"])
        divides = step.get("split", True) and normalized == step["replacement"]
        return replace(cut, normalized=normalized, ends_pre_token=cut.ends_pre_token or divides)
    raise NotExactError(f"pre-tokenizer {kind}")


def _after_split(cut: _Cut, step: dict[str, Any]) -> _Cut | None:
    text = step["pattern"].get("String")
    if text is not None:
        if len(text) == 1 and text not in cut.left + cut.followers + cut.normalized:
            return cut
        raise NotExactError(f"pre-tokenizer that splits at {text!r}")
    takes_matches = step["behavior"] == "Removed" and step["invert"]
    if step["behavior"] != "Isolated" and not takes_matches:
        raise NotExactError(f"pre-tokenizer with the behavior {step['behavior']}")
    return _split_at(cut, step["pattern"]["Regex"])


def _split_at(cut: _Cut, source: str) -> _Cut | None:
    pattern = SplitPattern(source)
    if cut.ends_pre_token:
        return cut
    if pattern.spans(cut.left, cut.normalized):
        return None
    return replace(cut, ends_pre_token=pattern.covers(cut.left))


def _separated_by_model(
    tokenizer: Tokenizer, cut: _Cut, steps: list[dict[str, Any]]
) -> _Cut | None:
    """The cut, or None if a token of the model may cross it."""
    model = _state(tokenizer.model)
    assert model is not None
    if model["type"] not in ("BPE", "Unigram"):
        raise NotExactError(f"model {model['type']}")
    if model.get("dropout"):
        raise NotExactError("BPE with dropout")
    if cut.ends_pre_token:
        return cut
    plain_bpe = (
        model["type"] == "BPE"
        and not model.get("ignore_merges")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and all(step["type"] in ("Metaspace", "Split") for step in steps)
    )
    crosses = cut.spanned_by(cut.normalized).search
    # An unknown separator would fuse with unknown characters around it.
    known = all(char in model["vocab"] for char in cut.normalized) if plain_bpe else False
    return cut if known and not any(map(crosses, model["vocab"])) else None


def _added_token_across(tokenizer: Tokenizer, cut: _Cut) -> str | None:
    """An added token that may cross or touch the cut, or None."""
    for token in tokenizer.get_added_tokens_decoder().values():
        for text, separators in (
            (token.content, cut.separators),
            (_normalized(tokenizer, token.content), cut.normalized),
        ):
            if (
                not text
                or cut.spanned_by(separators).search(text)
                or text[-1] in cut.left
                or (token.lstrip and text[0] in cut.left)
                or (token.single_word and text[0] in separators)
            ):
                return str(token.content)
    return None


def _special_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Special ids before and after a text, and the number of ids of the anchor."""
    for step in _flat(_state(tokenizer.post_processor), "processors"):
        if step["type"] not in ("TemplateProcessing", "ByteLevel"):
            raise NotExactError(f"post-processor {step['type']}")
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False).ids
    whole = tokenizer.encode(ANCHOR, add_special_tokens=True).ids
    starts = [
        start
        for start in range(len(whole) - len(anchor) + 1)
        if whole[start : start + len(anchor)] == anchor
    ]
    two_words = tokenizer.encode(f"{ANCHOR} {ANCHOR}", add_special_tokens=False).ids
    if len(starts) != 1 or two_words[: len(anchor)] != anchor:
        raise NotExactError("special tokens that depend on the text")
    end = starts[0] + len(anchor)
    return tuple(whole[: starts[0]]), tuple(whole[end:]), len(anchor)


@lru_cache(maxsize=64)
def _char_class(characters: str) -> str:
    """A regular expression's class of these characters."""
    ranges: list[list[int]] = []
    for code in sorted(set(map(ord, characters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in ranges) + "]"
