"""Prompts read from a file line by line: only the size of a line is limited."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.core import IntArray, PrefixShareError

MAX_LINE = 8 << 20
#: Bytes that count as a token where no tokenizer is named.
BYTES_PER_TOKEN = 4
#: What a JSON text, object or list begins with.
JSON_STARTS = ('"', "{", "[")
#: Token ids of a prompt as vLLM's request logger writes them at level DEBUG.
LOGGED = re.compile(r"prompt_token_ids: (\[[0-9, ]*\])")
FORMS = (
    'a JSON string, an object with "prompt", or a list of token ids on each line, or a log of '
    "vllm serve --enable-log-requests with VLLM_LOGGING_LEVEL=DEBUG"
)

#: text -> token ids
Tokenizer = Callable[[str], IntArray]


def byte_tokens(text: str) -> IntArray:
    """Four bytes of UTF-8 as one token: equal beginnings stay equal, and lengths about right."""
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data + bytes(-len(data) % BYTES_PER_TOKEN), np.int32)


def load_tokenizer(name: str) -> Tokenizer:
    """Args:
        name: a folder, or a name for transformers to look up; no code of its own is run.

    Raises:
        PrefixShareError: transformers is missing, or cannot load the tokenizer.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as e:  # what is wrong in its files raises errors of any kind
        reason = str(e).partition("\n")[0]
        raise PrefixShareError(f"tokenizer {name!r} cannot be loaded ({reason}).") from None

    def encode(text: str) -> IntArray:
        try:
            return np.array(tokenizer.encode(text), np.int32)
        except TypeError as e:  # such as half of a surrogate pair
            raise ValueError(f"the tokenizer does not take it: {e}") from None

    return encode


def read_prompts(path: Path, tokenizer: Tokenizer) -> Iterator[IntArray]:
    """Token ids of each prompt of a file that has one of ``FORMS``: a log if its first line is not
    JSON.

    Raises:
        PrefixShareError: it cannot be read, or a line is none of them.
    """

    def prompt(number: int, line: str) -> IntArray:
        try:
            return _tokens(json.loads(line), tokenizer)
        except (ValueError, RecursionError, OverflowError) as e:
            raise PrefixShareError(
                f"line {number} of {path} is not a prompt ({e}): give {FORMS}."
            ) from None

    lines = _lines(path)
    first = next(lines, (1, ""))
    is_log = not _is_json(first[1])
    meant_as_json = first[1].startswith(JSON_STARTS)
    found = False
    for number, line in chain([first], lines):
        if is_log:
            if _is_json(line):  # its text may look like a line of a log
                meant_as_json = True
                continue
            logged = LOGGED.findall(line)
            if not logged:
                continue
            line = logged[-1]  # the prompt's text comes earlier and may also match
        tokens = prompt(number, line)
        found = True
        yield tokens
    if not found:
        if meant_as_json:
            prompt(*first)  # says what is wrong with it
        raise PrefixShareError(f"{path} has no prompts: give {FORMS}.")


def _is_json(line: str) -> bool:
    """Whether a line is a JSON text, list or object."""
    if not line.startswith(JSON_STARTS):
        return False  # most lines of a log, at once
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1 on."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise PrefixShareError(
                        f"line {number} of {path} is longer than the {MAX_LINE >> 20} MiB that "
                        "are read."
                    )
                # programs for Windows begin a file with a mark
                if text := line.decode("utf-8-sig").strip():
                    yield number, text
    except UnicodeDecodeError:
        raise PrefixShareError(f"line {number} of {path} is not UTF-8 text.") from None
    except OSError as e:
        raise PrefixShareError(f"{path} cannot be read ({e.strerror}).") from None


def _tokens(data: Any, tokenizer: Tokenizer) -> IntArray:
    """Token ids of one prompt. Raises ValueError with what is wrong."""
    if isinstance(data, dict):
        data = data.get("prompt_token_ids", data.get("prompt"))
    if isinstance(data, str):
        tokens = tokenizer(data)
    elif isinstance(data, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in data):
        tokens = np.array(data, np.int32)
    else:
        raise ValueError("neither text nor token ids")
    if not len(tokens):
        raise ValueError("it is empty")
    return tokens
