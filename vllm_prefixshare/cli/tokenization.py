"""Tokenizers for a file of prompts: a checkpoint's, or four bytes as one token."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.core import IntArray, PrefixShareError

#: Bytes that count as a token where no tokenizer is named.
BYTES_PER_TOKEN = 4
#: Maximum number of texts whose ids are kept, for prompts that are repeated.
MAX_KEPT = 64
#: Minimum characters of a text whose pieces are kept, and maximum bytes of all pieces.
MIN_CHARS, MAX_PIECE_BYTES = 1024, 256 << 20

Messages = Sequence[dict[str, Any]]


class ByteTokenizer:
    """Four bytes of UTF-8 as one token: equal beginnings stay equal, and lengths about right."""

    #: What a token is.
    description = f"of {BYTES_PER_TOKEN} bytes each"

    def encode(self, text: str) -> IntArray:
        """Token ids of a prompt."""
        data = text.encode("utf-8", "surrogatepass")
        return np.frombuffer(data + bytes(-len(data) % BYTES_PER_TOKEN), np.int32)

    def encode_chat(self, messages: Messages, tools: Any) -> IntArray:
        """Token ids of a chat, by a template that many models have.

        Raises:
            ValueError: with what is wrong.
        """
        turns = [("tools", json.dumps(tools))] if tools else []
        turns += [(str(m["role"]), str(m.get("content") or "")) for m in plain(messages)]
        text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        return self.encode(f"{text}<|im_start|>assistant\n")

    def decode(self, ids: IntArray) -> str:
        """The text of a few token ids."""
        return ids.astype(np.int32).tobytes().rstrip(b"\0").decode("utf-8", "replace")


class CheckpointTokenizer:
    """The tokenizer of a checkpoint. Text that is known is not tokenized again.

    Only a chat template, or a folder without ``tokenizer.json``, needs transformers.

    Args:
        name: a folder, or a name for transformers to look up; no code of its own is run.

    Raises:
        PrefixShareError: the tokenizer cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self.description = f"of {name}"
        self._name = name
        path = Path(name) / "tokenizer.json"
        if path.is_file():
            self._backend: Any = _loaded(name, lambda: _from_file(path))
        else:
            self._backend = getattr(self._transformers, "_tokenizer", None)
        self._kept = lru_cache(MAX_KEPT)(self._encode)

    @cached_property
    def _transformers(self) -> Any:
        def load() -> Any:
            # it advises to install PyTorch, which tokenizers do not need
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self._name, trust_remote_code=False)

        return _loaded(self._name, load)

    @cached_property
    def _memo(self) -> Any:
        """The memo of the shared host work; None where it is not exact or cannot be imported."""
        try:
            from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import BoundedCache
            from vllm_prefixshare.vllm_plugin.prompts.split_pattern import NotExactError
            from vllm_prefixshare.vllm_plugin.prompts.tokenization import TextTokenizer
        except ImportError:
            return None
        try:
            return TextTokenizer(self._backend, BoundedCache(MAX_PIECE_BYTES))
        except NotExactError:
            return None

    def encode(self, text: str) -> IntArray:
        """Token ids of a prompt. Raises ValueError if the tokenizer does not take the text."""
        return self._kept(text, True)

    def encode_chat(self, messages: Messages, tools: Any) -> IntArray:
        """Token ids of a chat by the chat template, which writes the special tokens.

        Raises:
            ValueError: with what is wrong.
        """
        try:
            text = self._transformers.apply_chat_template(
                plain(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except PrefixShareError:
            raise
        except Exception as e:  # templates raise errors of any kind
            reason = " ".join(str(e).split())[:200]
            raise ValueError(f"its messages do not suit the chat template: {reason}") from None
        return self._kept(text, False)

    def _encode(self, text: str, special: bool) -> IntArray:
        try:
            if self._backend is None:
                ids = self._transformers.encode(text, add_special_tokens=special)
            elif len(text) >= MIN_CHARS and self._memo is not None:
                ids = self._memo.encode(text, special)[0]
            else:
                ids = self._backend.encode(text, add_special_tokens=special).ids
        except TypeError as e:  # such as half of a surrogate pair
            raise ValueError(f"the tokenizer does not take it: {e}") from None
        return np.array(ids, np.int32)

    def decode(self, ids: IntArray) -> str:
        """The text of a few token ids."""
        source = self._transformers if self._backend is None else self._backend
        return str(source.decode(ids.tolist(), skip_special_tokens=False))


Tokenizer = ByteTokenizer | CheckpointTokenizer


def _from_file(path: Path) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as e:  # what is wrong in its files raises errors of any kind
        reason = str(e).partition("\n")[0]
        raise PrefixShareError(f"tokenizer {name!r} cannot be loaded ({reason}).") from None


def plain(messages: Messages) -> list[dict[str, Any]]:
    """Messages whose content is text, as vLLM flattens its parts.

    An image or another part that is not text becomes a short text that differs with its content,
    so that equal prefixes stay equal; its tokens are not counted.

    Raises:
        ValueError: a content that is neither text nor a list of parts.
    """
    return [{**message, "content": _text_of(message.get("content"))} for message in messages]


def _text_of(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("the content of a message is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8)
            texts.append(f"<{digest.hexdigest()}>")
    return "\n".join(texts)
