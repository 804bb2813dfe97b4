"""Tokenizers with decoders of many kinds, and detokenizers with the whole prompt and with its end
compared on them.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from examples.embedded_model import embedded_model_path
from tests.support import tokenizers as families
from tests.support.shared_prefixes import active

_SPACE = "\u2581"


def _word_piece(cleanup: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=1500, special_tokens=special)
    tokenizer.train_from_iterator([families.corpus()], trainer)
    tokenizer.decoder = decoders.WordPiece("##", cleanup)
    return tokenizer


def _suffixes() -> Tokenizer:
    """A BPE whose words end in a suffix, as in CLIP."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>"], end_of_word_suffix="</w>"
    )
    tokenizer.train_from_iterator([families.corpus()], trainer)
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def _words() -> Tokenizer:
    """Words without a decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=1500, special_tokens=["<unk>"])
    tokenizer.train_from_iterator([families.corpus()], trainer)
    return tokenizer


def _sentencepiece(style: str, *steps: Any) -> Tokenizer:
    tokenizer = families.sentencepiece(style)
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = families.unigram()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _llama2() -> Tokenizer:
    replace = decoders.Replace(_SPACE, " ")
    steps = (replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    return _sentencepiece("legacy", *steps)


def _gemma() -> Tokenizer:
    steps = (decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse())
    return _sentencepiece("gemma", *steps)


#: Tokenizers whose tokens may be bytes of a character.
BYTES: dict[str, Callable[[], Tokenizer]] = {
    "embedded model": lambda: Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json")),
    "byte level": lambda: families.byte_level(families.LLAMA3),
    "GPT-2": families.gpt2,
    "Llama 2": _llama2,
    "Gemma": _gemma,
}
KINDS: dict[str, Callable[[], Tokenizer]] = {
    **BYTES,
    "Unigram": _unigram,
    "WordPiece": lambda: _word_piece(cleanup=True),
    "WordPiece without clean-up": lambda: _word_piece(cleanup=False),
    "suffixes": _suffixes,
    "words": _words,
}


@cache
def backend(name: str) -> Tokenizer:
    """The tokenizer of one of ``KINDS``."""
    return KINDS[name]()


def request(prompt: list[int] | None, params: SamplingParams) -> EngineCoreRequest:
    values: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    for field in ("resumable", "abort_immediately"):
        values.pop(field, None)
    values |= {"request_id": "r", "prompt_token_ids": prompt, "sampling_params": params}
    values |= {"arrival_time": 0.0}
    required = ("request_id", "prompt_token_ids", "sampling_params", "arrival_time")
    defaults = dict(
        zip(
            EngineCoreRequest.__struct_fields__[::-1],
            EngineCoreRequest.__struct_defaults__[::-1],
            strict=False,
        )
    )
    given = {k: v for k, v in values.items() if k in required or k not in defaults}
    return EngineCoreRequest(**given)


def detokenizer(
    tokenizer: Any, prompt: list[int] | None, params: SamplingParams
) -> FastIncrementalDetokenizer:
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    wrapped._tokenizer = tokenizer
    return FastIncrementalDetokenizer(wrapped, request(prompt, params))


def texts(
    tokenizer: Any,
    prompt: list[int] | None,
    outputs: list[int],
    skip_special_tokens: bool = True,
    between: bool = True,
) -> list[str]:
    """The text of each output token; ``between``: with spaces between special tokens."""
    params = SamplingParams(
        skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=between
    )
    made = detokenizer(tokenizer, prompt, params)
    return [made.decode_next(token) for token in outputs]


def assert_same_texts(
    tokenizer: Any,
    prompt: list[int] | None,
    outputs: list[int],
    skip_special_tokens: bool,
    between: bool = True,
) -> None:
    """Both detokenizers return the same. A prompt that ends inside a character may instead have
    the end of what vLLM returns, whose start is the prompt.
    """
    with active():
        theirs = texts(tokenizer, prompt, outputs, skip_special_tokens, between)
    with active("detokenization"):
        ours = texts(tokenizer, prompt, outputs, skip_special_tokens, between)
    if ours == theirs:
        return
    assert prompt is not None
    text = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    assert text.endswith("\ufffd"), (prompt[-12:], outputs, theirs, ours)
    first = next(i for i, t in enumerate(theirs) if t)
    assert theirs[first].endswith(ours[first])
    assert ours[:first] + ours[first + 1 :] == theirs[:first] + theirs[first + 1 :]


def compare(rnd: Random, tokenizer: Any, cases: int) -> None:
    """Compare on random ids, and on texts divided anywhere, also inside a character."""
    added = sorted(tokenizer.get_added_tokens_decoder())
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    size = tokenizer.get_vocab_size()
    for _ in range(cases):
        if rnd.random() < 0.25:
            ids = [rnd.randrange(size) for _ in range(rnd.randrange(20, 200))]
        else:
            text = families.random_text(rnd, 12) + rnd.choice(("", *special))
            text += families.random_text(rnd, 12)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        cut = rnd.randrange(len(ids) + 1)
        prompt, outputs = ids[:cut], ids[cut : cut + 16]
        if added and rnd.random() < 0.2:
            prompt = prompt + [rnd.choice(added) for _ in range(rnd.randrange(1, 12))]
        if rnd.random() < 0.2:
            outputs = [rnd.randrange(size) for _ in range(4)] + outputs
        for skip in (True, False):
            assert_same_texts(tokenizer, prompt, outputs, skip, rnd.random() < 0.7)
