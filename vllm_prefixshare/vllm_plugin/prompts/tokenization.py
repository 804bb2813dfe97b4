"""Caches tokenized text, so that it is not tokenized again.

A text is divided at cuts (`text_cuts`), so that its token ids are the concatenated ids of its
pieces. Pieces, and windows of pieces, are looked up by their text. No common prefix is needed: a
sentence inserted in the middle of a document costs only that sentence.

Windows reduce the number of look-ups of a long text. A window of ``size`` characters that starts at
a cut is covered by the pieces that end inside it. They depend only on the text of the window, so
the same ``size`` characters always give the same pieces and ids. The text after the last window of
a size is covered by smaller windows, then by pieces, and the last few characters are encoded again
for each prompt.

With ``VLLM_USE_FASTOKENS=1`` the backend is fastokens, which caches words itself and encodes a new
text faster than this cache could store it: it is left unchanged.
"""

import itertools
import os
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from threading import Lock, Thread
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
from tokenizers import Tokenizer

from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import BoundedCache, part_limit
from vllm_prefixshare.vllm_plugin.prompts.parts import report_once
from vllm_prefixshare.vllm_plugin.prompts.split_pattern import NotExactError
from vllm_prefixshare.vllm_plugin.prompts.text_cuts import ANCHOR, find_cuts
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenArray, TokenIds, as_array

PART = "tokenization"
#: Characters of windows, large to small.
WINDOW_CHARS = (32768, 2048)
#: Minimum characters of a piece, and of the pieces near the end of a prompt: where a question
#: begins inside a piece, the text before it is encoded again.
PIECE_CHARS = 512
LAST_PIECE_CHARS = 64
#: Minimum characters of a prompt; a shorter one is tokenized as fast as it is looked up.
MIN_CHARS = 1024
#: Seconds per character that a tokenizer takes; a prompt waits this long for an analysis.
SECONDS_PER_CHAR = 1e-6
#: Modules whose tokenizers pass a text to the backend unchanged.
_KNOWN_MODULES = ("transformers.tokenization_", "vllm.tokenizers.hf")


class Span(NamedTuple):
    """The token ids of a stretch of text.

    ids: the ids as a list. array: the same, int32. chars: characters of text.
    """

    ids: list[int]
    array: TokenArray
    chars: int


class Stretch(NamedTuple):
    """A stretch of text, the key of a `Span`.

    tokenizer: number of the `TextTokenizer`. salt: of the request. is_start: whether the text
    starts with it. is_window: whether the span covers the part of ``text`` up to the last cut that
    ``text`` alone shows. The span of a piece covers all of ``text``, whose end is a cut only where
    the text that follows makes it one.
    """

    tokenizer: int
    salt: str | None
    is_start: bool
    text: str
    is_window: bool = False


class _NewWindow(NamedTuple):
    """A window to store: spans ``first`` to ``last`` (exclusive) of the plan."""

    key: Stretch
    first: int
    last: int


@dataclass(slots=True)
class _Plan:
    """How one text is covered.

    text, salt: of the prompt. spans: the spans that cover it, in order; an int is an index of
    ``new_pieces``. new_pieces: pieces to encode. new_windows: windows to store afterwards.
    """

    text: str
    salt: str | None
    spans: list[Span | int] = field(default_factory=list)
    new_pieces: list[Stretch] = field(default_factory=list)
    new_windows: list[_NewWindow] = field(default_factory=list)

    def add_new(self, piece: Stretch) -> None:
        """Cover the next characters by a piece that has to be encoded."""
        self.spans.append(len(self.new_pieces))
        self.new_pieces.append(piece)


_numbers = itertools.count()


class TextTokenizer:
    """A memo in front of one tokenizer. Thread-safe.

    Args:
        backend: the tokenizer. Its truncation and padding, which vLLM sets for each prompt, do not
            change.
        cache: stores pieces and windows; tokenizers may share one.
        truncation_side: where `truncated` drops ids, ``"left"`` or ``"right"``.

    Raises:
        NotExactError: the tokenizer's ids of a text are not provably the ids of its pieces.
    """

    def __init__(
        self,
        backend: Tokenizer,
        cache: BoundedCache[Stretch, Span],
        truncation_side: str = "right",
    ) -> None:
        self.truncation_side = truncation_side
        if type(backend) is not Tokenizer:
            raise NotExactError(f"{type(backend).__module__} is the backend")
        self._encoder = Tokenizer.from_str(backend.to_str())
        self._encoder.encode_special_tokens = backend.encode_special_tokens
        # JSON does not keep the last bit of each score of a Unigram model.
        self._encoder.model = backend.model
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._cuts = find_cuts(self._encoder)
        self._prefix = _special(self._cuts.prefix_ids)
        self._suffix = _special(self._cuts.suffix_ids)
        self._cache = cache
        self._number = next(_numbers)
        # One int object per id, shared by all lists.
        num_ids = max(self._encoder.get_vocab(with_added_tokens=True).values()) + 1
        self._int_objects = np.arange(num_ids).astype(object)

    def encode(
        self, text: str, add_special_tokens: bool, salt: str | None = None
    ) -> tuple[TokenIds, int]:
        """The ids that the tokenizer gives for ``text``, and how many characters of it came from
        the cache.

        Args:
            text: the whole text.
            add_special_tokens: as for the tokenizer.
            salt: texts of different salts share no entry.
        """
        plan = _Plan(text, salt)
        end = self._cover(plan, 0, len(text) - PIECE_CHARS, WINDOW_CHARS)
        end = self._add_pieces(plan, end, len(text), LAST_PIECE_CHARS)
        plan.add_new(self._stretch(plan, end, len(text)))
        encoded = self._encode(plan.new_pieces)
        for piece, span in zip(plan.new_pieces[:-1], encoded, strict=False):
            self._keep(piece, span)
        spans = [encoded[span] if isinstance(span, int) else span for span in plan.spans]
        for window in plan.new_windows:
            self._keep(window.key, _joined(spans[window.first : window.last]))
        if add_special_tokens:
            spans = [self._prefix, *spans, self._suffix]
        ids = TokenIds(array=_joined_arrays(spans))
        _extend(ids, spans)
        return ids, len(text) - sum(span.chars for span in encoded)

    def truncated(
        self, token_ids: TokenIds, max_length: int, add_special_tokens: bool
    ) -> TokenIds | None:
        """The ids that the tokenizer gives with truncation, which keeps the special tokens.

        Args:
            token_ids: more than ``max_length`` ids from `encode`.
            max_length: number of ids to keep.
            add_special_tokens: as for `encode`.

        Returns:
            None if only special tokens would be kept.
        """
        prefix, suffix = (self._prefix, self._suffix) if add_special_tokens else (_EMPTY, _EMPTY)
        if max_length <= len(prefix.ids) + len(suffix.ids):
            return None
        surplus = len(token_ids) - max_length
        from_left = self.truncation_side == "left"
        start = len(prefix.ids) if from_left else max_length - len(suffix.ids)
        array = token_ids.array
        ids = TokenIds(array=np.concatenate([array[:start], array[start + surplus :]]))
        list.extend(ids, itertools.islice(token_ids, start))
        list.extend(ids, itertools.islice(token_ids, start + surplus, None))
        return ids

    def _stretch(self, plan: _Plan, start: int, end: int, is_window: bool = False) -> Stretch:
        return Stretch(self._number, plan.salt, start == 0, plan.text[start:end], is_window)

    def _cover(self, plan: _Plan, start: int, end: int, sizes: tuple[int, ...]) -> int:
        """Cover ``text[start:end]`` by windows of these sizes and by pieces, which depend only on
        ``text[:end]``. Returns where the last one ends.
        """
        if not sizes:
            return self._add_pieces(plan, start, end, PIECE_CHARS)
        size, smaller = sizes[0], sizes[1:]
        while end - start >= size:
            key = self._stretch(plan, start, start + size, is_window=True)
            known = self._cache.get(key)
            if known is not None:
                plan.spans.append(known)
                start += known.chars
                continue
            first = len(plan.spans)
            stop = self._cover(plan, start, start + size, smaller)
            if stop > start:
                plan.new_windows.append(_NewWindow(key, first, len(plan.spans)))
            else:  # no cut in the window
                stop = self._add_piece(plan, start, end, size)
                if stop == start:
                    return start
            start = stop
        return self._cover(plan, start, end, smaller)

    def _add_pieces(self, plan: _Plan, start: int, end: int, min_chars: int) -> int:
        while (stop := self._add_piece(plan, start, end, min_chars)) > start:
            start = stop
        return start

    def _add_piece(self, plan: _Plan, start: int, end: int, min_chars: int) -> int:
        """Add the piece that ends at the first cut after ``min_chars`` characters. Returns its end,
        or ``start`` if there is no cut.
        """
        stop = self._cuts.next_cut(plan.text, start + min_chars, end)
        if stop is None:
            return start
        piece = self._stretch(plan, start, stop)
        known = self._cache.get(piece)
        if known is None:
            plan.add_new(piece)
        else:
            plan.spans.append(known)
        return stop

    def _encode(self, pieces: list[Stretch]) -> list[Span]:
        texts = [piece.text if piece.is_start else ANCHOR + piece.text for piece in pieces]
        # Up to three times faster than `encode`, because it leaves out the offsets.
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        anchor_ids = self._cuts.anchor_ids
        ids_of = [
            encoding.ids if piece.is_start else encoding.ids[anchor_ids:]
            for piece, encoding in zip(pieces, encodings, strict=True)
        ]
        array = as_array(list(itertools.chain.from_iterable(ids_of)))
        ids = self._int_objects[array].tolist()
        ends = list(itertools.accumulate(map(len, ids_of)))
        return [
            # A copy, so that a small entry does not keep the whole array.
            Span(ids[start:end], array[start:end].copy(), len(piece.text))
            for piece, start, end in zip(pieces, [0, *ends], ends, strict=False)
        ]

    def _keep(self, key: Stretch, span: Span) -> None:
        pointer_bytes = 8 * len(span.ids)
        num_bytes = sys.getsizeof(key.text) + pointer_bytes + span.array.nbytes
        self._cache.put(key, span, num_bytes)


def _special(ids: Iterable[int]) -> Span:
    listed = list(ids)
    return Span(listed, np.array(listed, np.int32), 0)


_EMPTY = _special(())


def _joined(spans: list[Span]) -> Span:
    ids: list[int] = []
    _extend(ids, spans)
    return Span(ids, _joined_arrays(spans), sum(span.chars for span in spans))


def _joined_arrays(spans: list[Span]) -> TokenArray:
    return np.concatenate([span.array for span in spans])


def _extend(ids: list[int], spans: list[Span]) -> None:
    """Append the ids of ``spans``. A `TokenIds` keeps its array."""
    for span in spans:
        list.extend(ids, span.ids)


@dataclass(slots=True)
class _Analysis:
    """The memo of one backend, None if it has none, and its vocabulary's size at that time."""

    vocab_size: int
    result: Future[TextTokenizer | None]


#: By the id of the backend: a weak dictionary compares tokenizers, with all their tokens.
_analyses: dict[int, _Analysis] = {}
_analyses_lock = Lock()


@cache
def text_cache() -> BoundedCache[Stretch, Span]:
    """The cache of this process, shared by all tokenizers."""
    return BoundedCache(part_limit(PART))


def text_tokenizer(tokenizer: Any, timeout: float) -> TextTokenizer | None:
    """The memo of vLLM's tokenizer; None, with the reason in the log, if it has none, or if its
    analysis, which takes up to seconds in a thread, does not end within ``timeout`` seconds.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None:
        report_once(PART, f"{type(tokenizer).__name__} has no fast backend")
        return None
    size = backend.get_vocab_size()
    with _analyses_lock:
        analysis = _analyses.get(id(backend))
        if analysis is None:
            analysis = _analyses[id(backend)] = _Analysis(size, Future())
            finalize(backend, _analyses.pop, id(backend), None).atexit = False
            Thread(
                target=_analyze,
                args=(tokenizer, analysis.result),
                name="prefixshare-tokenizer-analysis",
                daemon=True,
            ).start()
    if analysis.vocab_size != size:
        report_once(PART, f"{_name(tokenizer)}: tokens were added after it was analyzed")
        return None
    try:
        return analysis.result.result(timeout)
    except TimeoutError:
        return None


def _analyze(tokenizer: Any, result: Future[TextTokenizer | None]) -> None:
    memo = None
    try:
        _check_python_side(tokenizer)
        memo = TextTokenizer(_encoding_backend(tokenizer), text_cache(), tokenizer.truncation_side)
    except NotExactError as e:
        report_once(PART, f"{_name(tokenizer)}: {e}{_advice()}")
    except Exception as e:  # an unknown tokenizer must not stop an engine
        report_once(PART, f"{_name(tokenizer)}: {e!r}"[:300])
    result.set_result(memo)


def _encoding_backend(tokenizer: Any) -> Tokenizer:
    """The backend that encodes; a copy if vLLM has a pool of copies."""
    backend = tokenizer._tokenizer
    pooled = any(c.__name__ == "ThreadSafeHFTokenizerMixin" for c in type(tokenizer).__mro__)
    return deepcopy(backend) if pooled else backend


def _advice() -> str:
    """What else makes tokenization faster, to append to a reason."""
    if os.environ.get("VLLM_USE_FASTOKENS", "0") != "0":
        return ""
    return " (fastokens may be faster: VLLM_USE_FASTOKENS=1)"


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _check_python_side(tokenizer: Any) -> None:
    """Check that the tokenizer's ids of a text are its backend's.

    Raises:
        NotExactError: they may differ.
    """
    for owner in type(tokenizer).__mro__:
        own = {"__call__", "_encode_plus", "_batch_encode_plus", "_call_one"} & vars(owner).keys()
        if own and not owner.__module__.startswith(_KNOWN_MODULES):
            raise NotExactError(f"{owner.__name__} has its own {min(own)}")
    if tokenizer.split_special_tokens:
        raise NotExactError("special tokens are encoded as text")
