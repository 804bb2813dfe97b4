"""Standard output that is closed or has another encoding, and notices on a terminal."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runs import PROGRAM
from vllm_prefixshare.cli import doctor
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.utils import numba_cache

BUFFERED, UNBUFFERED = "", "1"
#: More than Python keeps in its buffer, so that the command itself meets the error.
LONG = ["inspect", "--tree", "1,4096_64,64", "--json", "--divider", "depth_first"]


def run_into(output: int, buffering: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": buffering},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "buffering"),
    [
        (LONG, BUFFERED),
        (LONG, UNBUFFERED),
        (["inspect"], BUFFERED),
        (["inspect"], UNBUFFERED),
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(arguments, buffering):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(writer, buffering, *arguments)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_name_that_standard_output_cannot_encode_is_escaped(tmp_path, encoding):
    path = os.fsencode(tmp_path) + b"/b\xff\xe6\x97\xa5"
    Path(os.fsdecode(path)).write_text(
        '{"block_size": 16, "block_tables": [[1, 2]], "kv_lens": [20]}'
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [sys.executable, "-c", PROGRAM, "inspect", path]
    done = subprocess.run(words, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"b\\udcff")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_terminal_shows_what_the_package_says(stream, monkeypatch):
    def run(_: object) -> int:
        logging.getLogger(numba_cache.__name__).info("a notice")
        return 0

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(doctor, "run", run)
    assert main(["doctor"]) == 0
    assert stream.getvalue() == ("a notice\n" if stream.isatty() else "")
