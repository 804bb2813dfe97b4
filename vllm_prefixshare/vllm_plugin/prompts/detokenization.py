"""Decodes the text of a prompt once.

A request's stream starts from the end of the prompt instead of the whole prompt (`init`), and the
beams of a prompt, which `LLM.beam_search` returns with the prompt's text, take it from the first of
them (`CommonPrefixDecoder`).

vLLM gives `DecodeStream` the whole prompt, and the stream's first step decodes it twice. A step
returns the text that its token appends to the text of all ids, and after the first returned text
the stream drops the ids before it. So a tail T of the prompt P gives the same outputs if a fixed X
exists with decode(P + S) = X + decode(T + S) for all continuations S, and decode(T) is neither
empty nor ends inside a character. This holds if

- the decoder works token by token, except for bytes of one character, the text's first token, and
  its last one (`_decodes_by_token` lists the decoders), and
- T starts with a token that is no added token (it may be skipped), no byte token (it may belong to
  the character before), not white space (a decoder may strip the text's first space, and must not
  reach the second token) and whose text starts with a whole character.

A prompt that ends inside a character has no text from which the stream could start: vLLM's stream
then returns the whole prompt with the first output (vLLM #48853). Here the stream starts from the
tokens of whole characters and takes the other tokens as its first steps, which return no text: the
output starts with the incomplete character.

If the last 64 ids have no such tail, the stream gets the whole prompt.
"""

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_prefixshare.vllm_plugin.prompts.known_code import is_known
from vllm_prefixshare.vllm_plugin.prompts.parts import is_enabled, measured, report_once
from vllm_prefixshare.vllm_plugin.prompts.token_ids import as_array, num_common_ids

PART = "detokenization"
#: Numbers of last ids in which to look for a tail, in this order.
_TAIL_SIZES = (8, 24, 64)
#: Minimum number of ids from the start of a tail to the end of its whole characters.
_MIN_TAIL = 4
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _Start(NamedTuple):
    """The start of a stream. ids: the ids it is created with. pending: its first steps."""

    ids: list[int]
    pending: list[int]


def init(
    baseline: Callable[[Any, Any, Any], None], detokenizer: Any, tokenizer: Any, request: Any
) -> None:
    """`FastIncrementalDetokenizer.__init__`.

    Args:
        baseline: vLLM's function.
        detokenizer: the `FastIncrementalDetokenizer`.
        tokenizer: the `TokenizersBackend`.
        request: the `EngineCoreRequest`.
    """
    if not is_enabled(PART) or not _is_supported() or not request.prompt_token_ids:
        return baseline(detokenizer, tokenizer, request)
    with measured(PART) as counters:
        ids = request.prompt_token_ids
        counters.units += len(ids)
        skip_special_tokens = request.sampling_params.skip_special_tokens
        start = _find_start(tokenizer._tokenizer, ids, skip_special_tokens)
        if start is None:
            counters.fallbacks += 1
            return baseline(detokenizer, tokenizer, request)
        counters.shared_units += len(ids) - len(start.ids) - len(start.pending)
        request = copy.copy(request)
        request.prompt_token_ids = start.ids
        baseline(detokenizer, tokenizer, request)
        for token_id in start.pending:
            detokenizer.stream.step(detokenizer.tokenizer, token_id)


def _find_start(backend: Any, ids: list[int], skip_special_tokens: bool) -> _Start | None:
    """The end of the prompt to start from, or None for the whole prompt."""
    decoding = _Decoding.of(backend)
    if decoding is None:
        return None
    for size in _TAIL_SIZES:
        tail = list(ids[-size:])
        first = 0 if size >= len(ids) else decoding.first_safe(tail, skip_special_tokens)
        if first is not None:
            start = decoding.split(tail[first:], skip_special_tokens)
            if start is not None:
                return start
        if size >= len(ids):
            break
    return None


class CommonPrefixDecoder:
    """Decodes lists of ids most of which begin as the one before: what they have in common up to a
    tail T is decoded once, since decode(P + S) = X + decode(T + S).

    Args:
        tokenizer: as vLLM's renderer has it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = _unchanged_backend(tokenizer)
        self._decoding = None if backend is None else _Decoding.of(backend)
        #: the last ids that were decoded as a whole, and their text
        self._ids, self._text = as_array([]), ""
        #: where the tail starts, and the text before it; None where there is no tail
        self._start = 0
        self._head: str | None = None

    def decode(self, ids: list[int], **options: Any) -> str:
        """``tokenizer.decode``, with the same options in each call."""
        with measured(PART) as counters:
            counters.units += len(ids)
            num_common = num_common_ids(self._ids, as_array(ids))
            if self._head is None or num_common < self._start + _MIN_TAIL:
                self._find_head(num_common, options)
            if self._head is not None:
                counters.shared_units += self._start
                return self._head + str(self._tokenizer.decode(ids[self._start :], **options))
            counters.fallbacks += 1
            self._ids, self._text = as_array(ids), self._tokenizer.decode(ids, **options)
            return self._text

    def _find_head(self, num_common: int, options: dict[str, Any]) -> None:
        """Divide the first ``num_common`` ids before a tail."""
        self._head = None
        if self._decoding is None:
            return
        skip_special_tokens = options.get("skip_special_tokens", False)
        begin = max(1, num_common - _TAIL_SIZES[-1])
        end = self._ids[begin:num_common].tolist()
        while (first := self._decoding.first_safe(end, skip_special_tokens)) is not None:
            self._start = num_common - len(end) + first
            tail = self._tokenizer.decode(self._ids[self._start :].tolist(), **options)
            if self._text.endswith(tail):  # not if its first token continues a word
                self._head = self._text.removesuffix(tail)
                return
            del end[: first + 1]


def _unchanged_backend(tokenizer: Any) -> Any:
    """The backend of a tokenizer that returns its text unchanged; None for others."""
    from transformers import PreTrainedTokenizerFast as Fast

    if not isinstance(tokenizer, Fast) or type(tokenizer)._decode is not Fast._decode:
        return None
    backend = tokenizer._tokenizer
    # transformers from 5.0 on leaves the text of BPE models as it is
    is_kept = type(backend.model).__name__ == "BPE" and not getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True
    )
    return backend if is_kept or not tokenizer.clean_up_tokenization_spaces else None


class _Decoding:
    """How a tokenizer decodes.

    Args:
        backend: a `tokenizers.Tokenizer` or fastokens' counterpart.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added_ids = frozenset(backend.get_added_tokens_decoder())

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(backend: Any) -> "_Decoding | None":
        """The decoding of a backend, or None if a tail may decode differently."""
        try:
            decoder = _decoder_config(backend)
            if _decodes_by_token(decoder):
                return _Decoding(backend)
            reason = f"its decoder is {json.dumps(decoder)[:200]}"
        except Exception as error:  # a backend of another kind or version
            reason = f"its decoder cannot be read ({error!r})"
        report_once(PART, f"a tokenizer needs its whole prompt: {reason}")
        return None

    def first_safe(self, tail: list[int], skip_special_tokens: bool) -> int | None:
        """The first token of ``tail`` whose text does not depend on the tokens before it."""
        for index, token_id in enumerate(tail[: 1 - _MIN_TAIL]):
            token = None if token_id in self._added_ids else self._backend.id_to_token(token_id)
            if token and not _BYTE_TOKEN.fullmatch(token):
                text = self._decode([token_id], skip_special_tokens)
                if text and text[0] != _REPLACEMENT and not text.isspace():
                    return index
        return None

    def split(self, tail: list[int], skip_special_tokens: bool) -> _Start | None:
        """The tail divided after its last whole character."""
        for end in range(len(tail), 0, -1):
            text = self._decode(tail[:end], skip_special_tokens)
            if not text:
                break
            if text[-1] != _REPLACEMENT:
                return _Start(tail[:end], tail[end:])
        return None

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))


def _decoder_config(backend: Any) -> dict[str, Any] | None:
    """The decoder of a backend in the format of tokenizer.json."""
    if type(backend).__module__.partition(".")[0] == "fastokens":
        config = json.loads(backend.to_str())["decoder"]
    else:
        config = backend.decoder and json.loads(backend.decoder.__getstate__())
    assert config is None or isinstance(config, dict)
    return config


def _decodes_by_token(decoder: dict[str, Any] | None, fused: bool = False) -> bool:
    """Whether a decoder works token by token, as the module's docstring requires.

    Args:
        decoder: its configuration; None for tokens joined by spaces.
        fused: whether it gets the whole text as one token.
    """
    if decoder is None:
        return True
    kind = decoder["type"]
    if kind == "Sequence":
        for part in decoder["decoders"]:
            if not _decodes_by_token(part, fused):
                return False
            fused |= part["type"] == "Fuse"
        return True
    if kind == "Strip":
        return bool(decoder["stop"] == 0 and decoder["start"] <= 1)
    if kind == "Replace":
        return not fused and "String" in decoder["pattern"]
    if kind in ("Metaspace", "ByteFallback", "WordPiece", "BPEDecoder"):
        return not fused
    return kind in ("ByteLevel", "Fuse")


#: The function that this module wraps, in vLLM 0.29 to 0.33.
KNOWN_CODE = {
    "vllm.v1.engine.detokenizer.FastIncrementalDetokenizer.__init__": ("f22bb9a561b1",),
}


@functools.cache
def _is_supported() -> bool:
    return is_known(PART, KNOWN_CODE)
