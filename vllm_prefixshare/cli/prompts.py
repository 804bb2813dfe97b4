"""Files of prompts: JSON lines, lines of text, and logs of vLLM."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vllm_prefixshare.cli.tokenization import Tokenizer
from vllm_prefixshare.core import IntArray, PrefixShareError

#: Maximum number of samples of a prompt.
MAX_SAMPLES = 4096
#: Token ids of a prompt as vLLM's request logger writes them at level DEBUG.
LOGGED = re.compile(r"prompt_token_ids: (\[[0-9, ]*\])")
LOGGED_NAME = re.compile(r"[Rr]equest (\S+?)(?: details)?: ")
#: Fields of an object that hold a prompt; the first that is there counts.
FIELDS = ("prompt_token_ids", "messages", "prompt")
#: Fields that name a request.
NAMES = ("custom_id", "request_id", "id")
FORMATS = ("auto", "json", "text", "log")
SUFFIXES = {".txt": "text", ".log": "log"}
FORMS = (
    'a JSON string, an object with "prompt" or "messages", or a list of token ids on each line, '
    "lines of text with --format text, or with --format log a log of vllm serve "
    "--enable-log-requests with VLLM_LOGGING_LEVEL=DEBUG"
)


class Request(NamedTuple):
    """A prompt of a file.

    tokens: int32 token ids.
    name: its id in the file, else where it is, such as "line 3".
    samples: number of outputs that are asked for.
    is_text: whether the ids were made from text here.
    """

    tokens: IntArray
    name: str
    samples: int = 1
    is_text: bool = True


class Source(NamedTuple):
    """Where requests are read.

    path: "-" for standard input. format: one of ``FORMATS``; auto: by the ending of the file's
        name, else JSON.
    """

    path: Path
    format: str = "auto"

    def __str__(self) -> str:
        return "standard input" if str(self.path) == "-" else str(self.path)


def open_source(source: Source) -> AbstractContextManager[BinaryIO]:
    """The source as a binary stream, for a ``with`` statement.

    Raises:
        PrefixShareError: it cannot be read.
    """
    if str(source.path) == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return source.path.open("rb")
    except OSError as e:
        raise PrefixShareError(f"{source} cannot be read ({e.strerror}).") from None


def read_requests(source: Source, file: BinaryIO, tokenizer: Tokenizer) -> Iterator[Request]:
    """The requests of a file that has one of ``FORMS``.

    Args:
        file: the source, open.

    Raises:
        PrefixShareError: it cannot be read, or has something else.
    """
    form = source.format
    if form == "auto":
        form = SUFFIXES.get(source.path.suffix.lower(), "json")
    found = False
    for number, line in _lines(source, file):
        row = _Row(f"line {number}", line, is_json=form != "text")
        if form == "log":
            logged = LOGGED.findall(line)
            if not logged:
                continue
            # the prompt's text comes earlier and may also match, so the last one counts
            name = LOGGED_NAME.search(line)
            row = row._replace(data=logged[-1], name=name and name[1])
        for request in _requests(source, row, tokenizer):
            found = True
            yield request
    if not found:
        raise PrefixShareError(f"{source} has no prompts: give {FORMS}.")


class _Row(NamedTuple):
    """A prompt, or several, on one line of the file.

    data: a text, or what JSON has there: a text, token ids, messages, or an object or list of them.
    is_json: whether ``data`` is JSON that is not parsed yet.
    """

    place: str
    data: Any
    is_json: bool = False
    name: str | None = None
    tools: Any = None
    samples: int = 1


def _requests(source: Source, row: _Row, tokenizer: Tokenizer) -> Iterator[Request]:
    try:
        if row.is_json:
            row = row._replace(data=json.loads(row.data))
        for prompt in _prompts(row):
            content = prompt.data
            if not content:  # of which some tokenizers make a token
                raise ValueError("it is empty")
            if isinstance(content, str):
                tokens = tokenizer.encode(content)
            elif _is_chat(content):
                tokens = tokenizer.encode_chat(content, prompt.tools)
            else:
                tokens = np.array(content, np.int32)
            if not len(tokens):
                raise ValueError("it is empty")
            is_text = type(content[0]) is not int
            name = prompt.name or row.place
            yield Request(tokens, name, prompt.samples, is_text)
    except (ValueError, RecursionError, OverflowError) as e:
        raise PrefixShareError(
            f"{row.place} of {source} is not a prompt ({e}): give {FORMS}."
        ) from None


def _prompts(row: _Row) -> Iterator[_Row]:
    """A row for each prompt in a row. Raises ValueError with what is wrong."""
    data = row.data
    if isinstance(data, str) or _is_ids(data) or _is_chat(data):
        yield row
    elif isinstance(data, list) and all(isinstance(item, str | list | dict) for item in data):
        for item in data:
            yield from _prompts(row._replace(data=item))
    elif isinstance(data, dict):
        inner = row._replace(tools=data.get("tools", row.tools), name=_name_of(data) or row.name)
        body = data.get("body")
        if isinstance(body, dict):  # OpenAI's batch files
            yield from _prompts(inner._replace(data=body))
            return
        found = next((data[key] for key in FIELDS if data.get(key) is not None), None)
        if found is None or isinstance(found, dict):
            raise ValueError("neither text nor token ids")
        samples = data.get("n") or row.samples
        if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
            raise ValueError(f"n must be an integer from 1 to {MAX_SAMPLES}")
        yield from _prompts(inner._replace(data=found, samples=samples))
    else:
        raise ValueError("neither text nor token ids")


def _is_ids(data: Any) -> bool:
    return isinstance(data, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in data)


def _is_chat(data: Any) -> bool:
    if not isinstance(data, list) or not data:
        return False
    return all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in data)


def _name_of(data: dict[str, Any]) -> str | None:
    return next((str(data[key]) for key in NAMES if data.get(key) is not None), None)


def _lines(source: Source, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1 on."""
    try:
        for number, line in enumerate(file, 1):
            # programs for Windows begin a file with a mark
            if text := line.decode("utf-8-sig").strip():
                yield number, text
    except UnicodeDecodeError:
        raise PrefixShareError(f"line {number} of {source} is not UTF-8 text.") from None
    except OSError as e:
        raise PrefixShareError(f"{source} cannot be read ({e.strerror}).") from None
