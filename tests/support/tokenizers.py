"""Tokenizers of the families that language models use, trained on Python's own help pages, and
texts that are hard to divide.
"""

import json
from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics
from random import Random
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA4 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Three splits one after the other, as in DeepSeek-V3.
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CHAT_TOKENS = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
_HAN_SAMPLE = "\u4e00\u4e2d\u6587\u5b57\u6211\u4eec\u7684\u6a21\u578b\uff0c\u3002\u3001"


@cache
def corpus() -> str:
    """English text with code and tables, and some Chinese, Russian, Greek and Korean."""
    text = "\n".join(topics.values())[:200_000]
    rnd = Random(0)
    others = "".join(rnd.choice(_HAN_SAMPLE) for _ in range(3000))
    return text + others + " \u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440" * 20


def _train(tokenizer: Tokenizer, trainer: Any) -> dict[str, Any]:
    text = corpus()
    chunks = [text[i : i + 2000] for i in range(0, len(text), 2000)]
    tokenizer.train_from_iterator(chunks, trainer)
    return dict(json.loads(tokenizer.to_str())["model"])


def _bpe(state: dict[str, Any], **options: Any) -> models.BPE:
    merges = [tuple(merge) for merge in state["merges"]]
    return models.BPE(vocab=state["vocab"], merges=merges, **options)


@cache
def _byte_level_model() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splits(LLAMA3)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet))


@cache
def _sentencepiece_model() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=3000, special_tokens=special))


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])


def _with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    special = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, special)
    return tokenizer


def byte_level(*patterns: str, bos: bool = False, **options: Any) -> Tokenizer:
    """A byte-level BPE with these patterns, and the special tokens of a chat template."""
    tokenizer = Tokenizer(_bpe(_byte_level_model(), **options))
    tokenizer.pre_tokenizer = _splits(*patterns)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CHAT_TOKENS])
    return _with_bos(tokenizer, "<|begin|>") if bos else tokenizer


def gpt2(add_prefix_space: bool = False) -> Tokenizer:
    """GPT-2's pre-tokenizer; RoBERTa's with a prefix space."""
    tokenizer = Tokenizer(_bpe(_byte_level_model()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def sentencepiece(style: str, across: str | None = None) -> Tokenizer:
    """A SentencePiece BPE without pre-tokens, in Llama 2's (``legacy``), Mistral's
    (``metaspace``) or Gemma's (``gemma``) style.

    across: a letter that the vocabulary has merged with the space behind it.
    """
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    space = "\u2581"
    state = dict(_sentencepiece_model())
    if across:
        state["vocab"] = {**state["vocab"], across + space: len(state["vocab"])}
        state["merges"] = [(across, space), *state["merges"]]
    tokenizer = Tokenizer(_bpe(state, **options))
    if style == "legacy":
        steps = [normalizers.Prepend(space), normalizers.Replace(" ", space)]
        tokenizer.normalizer = normalizers.Sequence(steps)
    elif style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(space, "first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", space)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return _with_bos(tokenizer, "<s>")


def unigram(split: bool = True, white_space: bool = False) -> Tokenizer:
    """A Unigram model as in T5, or as in XLM-R with ``white_space``."""
    tokenizer = Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=2000, special_tokens=special, unk_token="<unk>")
    _train(tokenizer, trainer)
    if white_space:
        steps_ = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps_)
    if not split:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    eos = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, eos)
    return tokenizer


def spanning() -> Tokenizer:
    """A BPE whose vocabulary spans words (SuperBPE)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<unk>"], max_token_length=12)
    _train(tokenizer, trainer)
    return tokenizer


def with_tokens(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    """The tokenizer with more added tokens."""
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def normalized(tokenizer: Tokenizer, normalizer: Any) -> Tokenizer:
    """The tokenizer with a normalizer."""
    tokenizer.normalizer = normalizer
    return tokenizer


#: Tokenizers whose texts can be cut.
EXACT: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "roberta": lambda: gpt2(add_prefix_space=True),
    "llama3": lambda: byte_level(LLAMA3, bos=True, ignore_merges=True),
    "llama4": lambda: byte_level(LLAMA4, bos=True),
    "qwen": lambda: normalized(byte_level(QWEN), normalizers.NFC()),
    "deepseek": lambda: byte_level(*DEEPSEEK, bos=True),
    "llama2": lambda: sentencepiece("legacy"),
    "mistral": lambda: sentencepiece("metaspace"),
    "gemma": lambda: sentencepiece("gemma"),
    "t5": unigram,
    "xlm-r": lambda: unigram(white_space=True),
    "stripping tokens": lambda: with_tokens(
        byte_level(LLAMA3),
        AddedToken("<a>", lstrip=True),
        AddedToken("<b>", rstrip=True),
        AddedToken("<c1>", single_word=True),
        AddedToken("  "),
        AddedToken("\n\n"),
    ),
}


def _encoding_special_tokens() -> Tokenizer:
    tokenizer = byte_level(LLAMA3)
    tokenizer.encode_special_tokens = True
    return tokenizer


#: Tokenizers whose texts cannot be cut, or not by what the analysis knows.
INEXACT: dict[str, Callable[[], Tokenizer]] = {
    "unigram without split": lambda: unigram(split=False),
    "vocabulary spans words": spanning,
    "one entry spans words": lambda: sentencepiece("gemma", across="e"),
    "pattern spans words": lambda: byte_level(r"\p{L}+ \p{L}+|\p{L}+|\s+|."),
    "pattern leaves letters out": lambda: byte_level(r"\p{N}+|\s"),
    "pattern looks ahead": lambda: byte_level(r"\p{L}+(?!\s)|\p{L}|\s+|."),
    "pattern may match nothing": lambda: byte_level(r"\s*|\p{L}+"),
    "pattern with a late flag": lambda: byte_level(r"\p{L}+|x(?i)y z|\s"),
    "pattern looks behind": lambda: byte_level(r"(?<=a) b|\p{L}+|\s+|."),
    "added token spans words": lambda: with_tokens(byte_level(LLAMA3), AddedToken("kernel reads")),
    "added token is a word": lambda: with_tokens(byte_level(LLAMA3), AddedToken("prefix")),
    "dropout": lambda: byte_level(LLAMA3, dropout=0.1),
    "special tokens as text": _encoding_special_tokens,
    "unknown normalizer": lambda: normalized(byte_level(LLAMA3), normalizers.StripAccents()),
    "lower case": lambda: normalized(byte_level(LLAMA3), normalizers.Lowercase()),
}

_CLUSTERS_TEXT = (
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea e\u0301 "
    "a\u0308\u0323 \u1100\u1161\u11a8 \ufb01 \u212b \u00a0 \u3000 \u200b \u200d \ufeff \ufffd "
    "\u2028 \x00 \x85 \u0130 \u00df \u017f \u212a \u00bd \u00b2 \u2167 \U0001d400"
)
_CLUSTERS = _CLUSTERS_TEXT.split(" ")
_WORDS_TEXT = (
    "the of and it's don't we'll THEY'RE I'm attention Prefix GPU kernel KV-cache x1 3.14 12345 "
    "1,000 foo_bar __init__ https://a.b/c?d=e&f=g camelCase ALLCAPS na\u00efve Stra\u00dfe "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u03b3\u03b5\u03b9\u03ac "
    "\uc548\ub155 \uc138\uacc4 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 <a> <b> <c1> ab</s>cd a b c z Z kernel reads prefix"
)
_WORDS = _WORDS_TEXT.split(" ")
_SPACES = (" ", "\n", "\r\n", "\t", "\n\n", "   ", "\r", "\u3000")
_HAN_TEXT = "\u4e00\u4e2d\u6587\u5b57\u6211\u4eec\u9f98\uff0c\u3002\uff1a,. a1\u300c"
_BLOCKS = (
    (0x20, 0x7F),
    (0xA0, 0x600),
    (0x900, 0xD00),
    (0x1100, 0x1200),
    (0x3000, 0x3100),
    (0xAC00, 0xD7A4),
    (0x1F300, 0x1FA00),
    (0xE000, 0xFFFD),
)


def _excerpt(rnd: Random) -> str:
    start = rnd.randrange(len(corpus()))
    return corpus()[start : start + rnd.randrange(1, 400)]


def _any_characters(rnd: Random) -> str:
    return "".join(chr(rnd.randrange(*rnd.choice(_BLOCKS))) for _ in range(rnd.randrange(1, 30)))


_FRAGMENTS: tuple[Callable[[Random], str], ...] = (
    _excerpt,
    _excerpt,
    lambda rnd: rnd.choice((" ", " ", " ", "  ", "\n", "")).join(
        rnd.choices(_WORDS, k=rnd.randrange(1, 30))
    ),
    lambda rnd: "".join(rnd.choices(_HAN_TEXT, k=rnd.randrange(1, 80))),
    lambda rnd: "".join(rnd.choices(_CLUSTERS, k=rnd.randrange(1, 6))),
    lambda rnd: rnd.choice(_SPACES) * rnd.randrange(1, 12),
    lambda rnd: rnd.choice((*CHAT_TOKENS, "<s>", "</s>", "<mask>", "<unk>")),
    _any_characters,
    lambda rnd: str(rnd.randrange(10 ** rnd.randrange(1, 30))),
    lambda rnd: "".join(rnd.choices("abcdefgh ", k=rnd.randrange(1, 60))),
    lambda rnd: (
        rnd.choice("a\u00e9x\u4e2d\u044f\uac00")
        + rnd.choice((" ", "\uff0c", " \u0301", "\u0301 ", " \u200d"))
        + rnd.choice(("b", "\u0301b", "e\u0301", "\u6587", "\u044f", "a\u0323"))
    ),
    lambda rnd: rnd.choice(("'s", "'S '", "''", "'ll x", "\u2019s", " 's")),
)


def random_text(rnd: Random, max_fragments: int) -> str:
    """A text of up to ``max_fragments`` fragments that are hard to divide."""
    count = rnd.randrange(1, max_fragments)
    return "".join(rnd.choice(_FRAGMENTS)(rnd) for _ in range(count))
