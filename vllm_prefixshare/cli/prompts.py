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
    if form == "parquet":
        rows = _parquet_rows(source, file)
    elif form == "csv":
        rows = _csv_rows(source, file)
    elif form == "text":
        rows = _text_rows(_lines(source, file))
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
    """A prompt, or several, at one place in the file.

    data: a text, or what JSON has there: a text, token ids, messages, or an object or list of them.
    is_json: whether ``data`` is JSON that is not parsed yet.
    """

    place: str
    data: Any
    is_json: bool = False
    name: str | None = None
    arrival: float | None = None
    tools: Any = None
    samples: int = 1


Rows = Generator[_Row, None, None]
Lines = Iterator[tuple[int, str]]


def _requests(source: Source, row: _Row, tokenizer: Tokenizer) -> Iterator[Request]:
    try:
        if row.is_json:
            row = row._replace(data=json.loads(row.data))
        for prompt in _prompts(row, source.column):
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
            yield Request(tokens, name, prompt.samples, row.arrival, is_text)
    except (ValueError, RecursionError, OverflowError) as e:
        raise PrefixShareError(
            f"{row.place} of {source} is not a prompt ({e}): give {FORMS}."
        ) from None


def _prompts(row: _Row, column: str | None) -> Iterator[_Row]:
    """A row for each prompt in a row. Raises ValueError with what is wrong."""
    data = row.data
    if isinstance(data, str) or _is_ids(data) or _is_chat(data):
        yield row
    elif isinstance(data, list) and all(isinstance(item, str | list | dict) for item in data):
        for item in data:
            yield from _prompts(row._replace(data=item), column)
    elif isinstance(data, dict):
        inner = row._replace(tools=data.get("tools", row.tools), name=_name_of(data) or row.name)
        body = data.get("body")
        if isinstance(body, dict):  # OpenAI's batch files
            yield from _prompts(inner._replace(data=body), column)
            return
        columns = COLUMNS if column is None else (column,)
        found = next((data[key] for key in columns if data.get(key) is not None), None)
        if found is None or (isinstance(found, dict) and column is None):
            raise ValueError("neither text nor token ids")
        samples = data.get("n") or row.samples
        if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
            raise ValueError(f"n must be an integer from 1 to {MAX_SAMPLES}")
        yield from _prompts(inner._replace(data=found, samples=samples), column)
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


def _parsed(text: str) -> Any:
    """The JSON text, list or object in ``text``; None if it is something else."""
    if not text.startswith(JSON_STARTS):
        return None  # most lines of a log, at once
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_or_log(source: Source, file: BinaryIO, form: str) -> Rows:
    lines = _lines(source, file)
    number, first = next(lines, (1, ""))
    all_lines = chain([(number, first)], lines)
    is_json = _parsed(first) is not None
    is_other = not (is_json or form == "json" or ARRAY_START.match(first))
    is_text = source.path.suffix.lower() == ".txt" and not has_time(first)
    if form == "auto" and is_other and is_text and first:
        yield from _text_rows(all_lines)
    elif form == "log" or is_other:
        yield from _logged(all_lines, form)
    elif is_json:
        for place, line in all_lines:
            yield _Row(f"line {place}", line, is_json=True)
    else:
        yield from _array(source, number, first, file)


def _text_rows(lines: Lines) -> Rows:
    for number, line in lines:
        yield _Row(f"line {number}", line)


def _array(source: Source, number: int, first: str, file: BinaryIO) -> Rows:
    """The items of JSON over several lines, of which the first is read."""
    rest = file.read(MAX_ARRAY + 1)
    if len(rest) > MAX_ARRAY:
        raise _long_array(source)
    source.read(len(rest))
    text = f"{first}\n{rest.decode('utf-8', 'replace')}"
    data = _parsed(text)
    if not isinstance(data, list) or _is_ids(data) or _is_chat(data):
        yield _Row(f"line {number}", text, is_json=True)
        return
    for i, item in enumerate(data, 1):
        yield _Row(f"item {i}", item)


def _long_array(source: Source) -> PrefixShareError:
    return PrefixShareError(
        f"{source} is longer than the {MAX_ARRAY >> 20} MiB that are read of a JSON array: write "
        "one request on each line."
    )


def _logged(lines: Lines, form: str) -> Rows:
    """The prompts in a log of vLLM."""
    first = None
    meant_as_json = False
    found = False
    clock = LogClock()
    for number, line in lines:
        row = _Row(f"line {number}", line, is_json=True)
        first = first or row
        if form != "log" and _parsed(line) is not None:  # its text may look like a line of a log
            meant_as_json = True
            continue
        logged = LOGGED.findall(line)
        if not logged:
            continue
        found = True
        # the prompt's text comes earlier and may also match, so the last one counts
        name = LOGGED_NAME.search(line)
        yield row._replace(data=logged[-1], name=name and name[1], arrival=clock.seconds(line))
    if form == "log" or found or first is None:
        return
    if meant_as_json or first.data.startswith(JSON_STARTS):
        yield first  # of which the error tells what is wrong


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
            yield _Row(f"row {number}", _cell(cell), name=_name_of(row))
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
    data = _parsed(text) if text.startswith("[") else None
    return data if data and (_is_ids(data) or _is_chat(data)) else text


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
                yield _Row(f"row {number}", row[column], name=_name_of(row))
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


def head_of(file: BinaryIO, size: int = 4096) -> bytes:
    """The first bytes of a stream, which stay unread; fewer for a short stream or a pipe."""
    return cast(io.BufferedReader, file).peek(size)[:size]
