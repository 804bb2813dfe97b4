"""Requests read from a file in any of the forms in which people keep prompts.

Lines, rows and batches are read one after the other; only a JSON array is read as a whole.
"""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from vllm_prefixshare.cli.log_times import LogClock, has_time
from vllm_prefixshare.cli.tokenization import Tokenizer
from vllm_prefixshare.core import IntArray, PrefixShareError

MAX_LINE = 8 << 20
#: Maximum size of a JSON array that is the whole file.
MAX_ARRAY = 256 << 20
#: Maximum number of samples of a prompt.
MAX_SAMPLES = 4096
#: What a JSON text, object or list begins with.
JSON_STARTS = ('"', "{", "[")
#: The first line of JSON over several lines. A log may begin with ``[Gloo]`` or ``[2026-11-22``.
ARRAY_START = re.compile(r'\{\s*("|$)|\[\s*($|[\[{"]|[\d,\s-]+$)')
#: Token ids of a prompt as vLLM's request logger writes them at level DEBUG.
LOGGED = re.compile(r"prompt_token_ids: (\[[0-9, ]*\])")
LOGGED_NAME = re.compile(r"[Rr]equest (\S+?)(?: details)?: ")
#: Fields of an object, or columns, that hold a prompt; the first that is there counts.
COLUMNS = ("prompt_token_ids", "messages", "prompt")
#: Fields that name a request.
NAMES = ("custom_id", "request_id", "id")
FORMATS = ("auto", "json", "text", "csv", "parquet", "log", "trace")
SUFFIXES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
FORMS = (
    'a JSON string, an object with "prompt" or "messages", or a list of token ids on each line, a '
    'JSON array, CSV or Parquet with a column "prompt", lines of text with --format text, or a log '
    "of vllm serve --enable-log-requests with VLLM_LOGGING_LEVEL=DEBUG"
)


class Request(NamedTuple):
    """A prompt of a file.

    tokens: int32 token ids.
    name: its id in the file, else where it is, such as "line 3".
    samples: number of outputs that are asked for.
    arrival: seconds since some time, None if the file has no times.
    is_text: whether the ids were made from text here.
    """

    tokens: IntArray
    name: str
    samples: int = 1
    arrival: float | None = None
    is_text: bool = True


class Source(NamedTuple):
    """Where requests are read.

    path: "-" for standard input. format: one of ``FORMATS``.
    column: field or column with the prompts; None for the first of ``COLUMNS`` that is there.
    read: called with the number of bytes of each line that is read.
    """

    path: Path
    format: str = "auto"
    column: str | None = None
    read: Callable[[int], object] = lambda _: None

    def __str__(self) -> str:
        return "standard input" if str(self.path) == "-" else str(self.path)


def open_source(source: Source) -> AbstractContextManager[BinaryIO]:
    """The source as a binary stream, for a ``with`` statement.

    Raises:
        PrefixShareError: it cannot be read.
    """
    if str(source.path) == "-":
        if sys.stdin is None:
            raise PrefixShareError(
                "standard input is closed: pipe the prompts to it, or name a file."
            )
        return nullcontext(sys.stdin.buffer)
    try:
        return source.path.open("rb")
    except OSError as e:
        raise PrefixShareError(f"{source} cannot be read ({e.strerror}).") from None


def read_requests(source: Source, file: BinaryIO, tokenizer: Tokenizer) -> Iterator[Request]:
    """The requests of a file that has one of ``FORMS``.

    The format is taken from the file's ending, else from its content: if its first line is not
    JSON it is a log, or text if its name ends in .txt and the line has no time.

    Args:
        file: the source, open.

    Raises:
        PrefixShareError: it cannot be read, or has something else.
    """
    form = source.format
    if form == "auto":
        form = SUFFIXES.get(source.path.suffix.lower(), "auto")
    rows: Rows
    if form == "parquet":
        rows = _parquet_rows(source, file)
    elif form == "csv":
        rows = _csv_rows(source, file)
    elif form == "text":
        rows = (_Row(f"line {number}", line) for number, line in _lines(source, file))
    else:
        rows = _json_or_log(source, file, form)
    found = False
    with closing(rows):  # before the file is closed
        for row in rows:
            for request in _requests(source, row, tokenizer):
                found = True
                yield request
    if not found:
        raise PrefixShareError(f"{source} has no prompts: give {FORMS}.")


class _Row(NamedTuple):
    """Data of one place in the file.

    data: a text, or what JSON has there.
    """

    place: str
    data: Any
    name: str | None = None
    arrival: float | None = None


Rows = Generator[_Row, None, None]


class _Prompt(NamedTuple):
    """A prompt before it is tokenized.

    content: a text, a list of token ids, or a list of messages.
    """

    content: Any
    tools: Any
    name: str | None
    samples: int


def _requests(source: Source, row: _Row, tokenizer: Tokenizer) -> Iterator[Request]:
    try:
        for prompt in _prompts(row.data, source.column):
            content = prompt.content
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
            name = prompt.name or row.name or row.place
            yield Request(tokens, name, prompt.samples, row.arrival, is_text)
    except (ValueError, RecursionError, OverflowError) as e:
        raise _no_prompt(source, row.place, e) from None


def _no_prompt(source: Source, place: str, reason: object) -> PrefixShareError:
    return PrefixShareError(f"{place} of {source} is not a prompt ({reason}): give {FORMS}.")


def _prompts(data: Any, column: str | None, outer: _Prompt | None = None) -> Iterator[_Prompt]:
    """The prompts in a JSON value. Raises ValueError with what is wrong."""
    outer = outer or _Prompt(None, None, None, 1)
    if isinstance(data, str) or _is_ids(data) or _is_chat(data):
        yield outer._replace(content=data)
    elif isinstance(data, list) and all(isinstance(item, str | list | dict) for item in data):
        for item in data:
            yield from _prompts(item, column, outer)
    elif isinstance(data, dict):
        name = next((str(data[key]) for key in NAMES if data.get(key) is not None), outer.name)
        inner = outer._replace(tools=data.get("tools", outer.tools), name=name)
        body = data.get("body")
        if isinstance(body, dict):  # OpenAI's batch files
            yield from _prompts(body, column, inner)
            return
        columns = COLUMNS if column is None else (column,)
        found = next((data[key] for key in columns if data.get(key) is not None), None)
        if found is None or (isinstance(found, dict) and column is None):
            raise ValueError("neither text nor token ids")
        samples = data.get("n") or outer.samples
        if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
            raise ValueError(f"n must be an integer from 1 to {MAX_SAMPLES}")
        yield from _prompts(found, column, inner._replace(samples=samples))
    else:
        raise ValueError("neither text nor token ids")


def _is_ids(data: Any) -> bool:
    return isinstance(data, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in data)


def _is_chat(data: Any) -> bool:
    if not isinstance(data, list) or not data:
        return False
    return all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in data)


def _json_or_log(source: Source, file: BinaryIO, form: str) -> Rows:
    lines = _lines(source, file)
    number, first = next(lines, (1, ""))
    is_json = _is_json(first)
    is_other = not (is_json or form == "json" or ARRAY_START.match(first))
    is_text = source.path.suffix.lower() == ".txt" and not has_time(first)
    if form == "auto" and is_other and is_text and first:
        for place, line in chain([(number, first)], lines):
            yield _Row(f"line {place}", line)
    elif form == "log" or is_other:
        yield from _logged(source, chain([(number, first)], lines), form)
    elif is_json:
        yield _json_row(source, number, first)
        for place, line in lines:
            yield _json_row(source, place, line)
    else:
        yield from _array(source, number, first, file)


def _json_row(source: Source, number: int, text: str) -> _Row:
    try:
        return _Row(f"line {number}", json.loads(text))
    except (ValueError, RecursionError) as e:
        raise _no_prompt(source, f"line {number}", e) from None


def _long_array(source: Source) -> PrefixShareError:
    return PrefixShareError(
        f"{source} is longer than the {MAX_ARRAY >> 20} MiB that are read of a JSON array: write "
        "one request on each line."
    )


def _array(source: Source, number: int, first: str, file: BinaryIO) -> Iterator[_Row]:
    """The items of JSON over several lines, of which the first is read."""
    rest = file.read(MAX_ARRAY + 1)
    if len(rest) > MAX_ARRAY:
        raise _long_array(source)
    source.read(len(rest))
    row = _json_row(source, number, f"{first}\n{rest.decode('utf-8', 'replace')}")
    if not isinstance(row.data, list) or _is_ids(row.data) or _is_chat(row.data):
        yield row
        return
    for i, item in enumerate(row.data, 1):
        yield _Row(f"item {i}", item)


def _logged(source: Source, lines: Iterable[tuple[int, str]], form: str) -> Iterator[_Row]:
    """The prompts in a log of vLLM."""
    first = None
    meant_as_json = False
    found = False
    clock = LogClock()
    for number, line in lines:
        first = first or (number, line)
        if form != "log" and _is_json(line):  # its text may look like a line of a log
            meant_as_json = True
            continue
        logged = LOGGED.findall(line)
        if not logged:
            continue
        found = True
        # the prompt's text comes earlier and may also match, so the last one counts
        row = _json_row(source, number, logged[-1])
        name = LOGGED_NAME.search(line)
        yield row._replace(name=name and name[1], arrival=clock.seconds(line))
    if not found and first is not None:
        number, line = first
        if meant_as_json or (form != "log" and line.startswith(JSON_STARTS)):
            _json_row(source, number, line)  # says what is wrong with it
            raise _no_prompt(source, f"line {number}", "neither text nor token ids")


def _is_json(line: str) -> bool:
    """Whether a line is a JSON text, list or object."""
    if not line.startswith(JSON_STARTS):
        return False  # most lines of a log, at once
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(source: Source, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1 on. The first may be a JSON array."""
    number = 0
    try:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            is_long = len(line) > MAX_LINE and not line.endswith(b"\n")
            if is_long and number == 1 and line.startswith((b"[", codecs.BOM_UTF8 + b"[")):
                line += file.readline(MAX_ARRAY - MAX_LINE)
                if len(line) > MAX_ARRAY:
                    raise _long_array(source)
            elif is_long:
                raise PrefixShareError(
                    f"line {number} of {source} is longer than the {MAX_LINE >> 20} MiB that are "
                    "read."
                )
            source.read(len(line))
            # programs for Windows begin a file with a mark
            if text := line.decode("utf-8-sig").strip():
                yield number, text
    except UnicodeDecodeError:
        raise PrefixShareError(f"line {number} of {source} is not UTF-8 text.") from None
    except OSError as e:
        raise PrefixShareError(f"{source} cannot be read ({e.strerror}).") from None


def _csv_rows(source: Source, file: BinaryIO) -> Rows:
    csv.field_size_limit(MAX_LINE)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    delimiter = "\t" if source.path.suffix.lower() == ".tsv" else ","
    reader = csv.DictReader(text, delimiter=delimiter)
    number = 1
    try:
        column = _column(source, reader.fieldnames or ())
        for number, row in enumerate(reader, 1):
            cell = row[column] or ""
            source.read(len(cell))
            yield _Row(f"row {number}", _cell(cell), _name_of(row))
    except UnicodeDecodeError:
        raise PrefixShareError(
            f"row {number} of {source} is not UTF-8 text: give a UTF-8 file."
        ) from None
    except csv.Error as e:
        raise PrefixShareError(
            f"row {number} of {source} is not CSV ({e}): name its --format."
        ) from None
    finally:
        text.detach()  # else it would close standard input


def _cell(text: str) -> Any:
    """A cell's text; token ids or messages if it has such a list."""
    if text.startswith("[") and _is_json(text):
        data = json.loads(text)
        if data and (_is_ids(data) or _is_chat(data)):
            return data
    return text


def _parquet_rows(source: Source, file: BinaryIO) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise PrefixShareError(
            f"reading {source} needs pyarrow: pip install pyarrow, or give its prompts as JSON "
            "lines."
        ) from None
    try:
        table = parquet.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
        names = table.schema_arrow.names
        column = _column(source, names)
        columns = [column, *(name for name in NAMES if name in names)]
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            source.read(batch.nbytes)
            for row in batch.to_pylist():
                number += 1
                yield _Row(f"row {number}", row[column], _name_of(row))
    except (ArrowException, OSError) as e:
        reason = " ".join(str(e).split())[:200]
        raise PrefixShareError(
            f"{source} cannot be read as Parquet ({reason}): write it again, or as JSON lines."
        ) from None


def _column(source: Source, names: Iterable[str]) -> str:
    """The column with the prompts."""
    names = list(names)
    wanted = COLUMNS if source.column is None else (source.column,)
    for name in wanted:
        if name in names:
            return name
    there = ascii(", ".join(map(str, names)))[1:-1][:200] or "none"
    missing = " or ".join(map(repr, reversed(wanted)))
    raise PrefixShareError(
        f"{source} has no column {missing} (its columns: {there}): name the one with prompts by "
        "--column."
    )


def _name_of(row: dict[str, Any]) -> str | None:
    return next((str(row[key]) for key in NAMES if row.get(key) is not None), None)


def head_of(file: BinaryIO, size: int = 4096) -> bytes:
    """The first bytes of a stream, which stay unread; fewer for a short stream or a pipe."""
    return cast(io.BufferedReader, file).peek(size)[:size]
