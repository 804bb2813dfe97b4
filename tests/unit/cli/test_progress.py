"""The progress bar: shown on a terminal only, and erased at the end."""

import io
import logging
import os
import pty
import subprocess
import sys

import pytest

from tests.support.cli_runs import PROGRAM
from vllm_prefixshare.cli import doctor
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.progress import Progress
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.profiling import cpu_table
from vllm_prefixshare.utils import numba_cache


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_drawn_where_standard_error_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(1) as progress:
        progress.step()
    assert progress.done == 1


def test_the_bar_fills_and_goes():
    stream = Terminal()
    with Progress(4, stream) as progress:
        for _ in range(4):
            progress.step()
    drawn = stream.getvalue().split("\r")
    assert [line.count("#") for line in drawn[1:5]] == [7, 15, 22, 30]
    assert "1/4, about " in drawn[1]
    assert drawn[5] == "\x1b[K"


def test_steps_may_be_counted_together():
    stream = Terminal()
    with Progress(10_000, stream) as progress:
        for _ in range(10_000):
            progress.step()
        progress.step(5)
    assert progress.done == 10_000
    assert len(stream.getvalue().split("\r")) <= 1 + 1000 + 1, "a thousand times at most"
    with Progress(10, Terminal()) as progress:
        progress.step(7)
    assert progress.done == 7


def test_nothing_is_written_into_a_file():
    stream = io.StringIO()
    with Progress(2, stream) as progress:
        progress.step()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_terminal_shows_what_the_package_says(stream, monkeypatch):
    def run(_: object) -> int:
        logging.getLogger(numba_cache.__name__).info("a notice")
        return 0

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(doctor, "run", run)
    assert main(["doctor"]) == 0
    assert stream.getvalue() == ("a notice\n" if stream.isatty() else "")


def test_every_step_of_a_profile_is_counted(monkeypatch):
    monkeypatch.setattr(cpu_table, "median_seconds", lambda call, repeats=7: 1e-3)
    steps: list[int] = []
    shape = AttentionConfig(4, 2, 64, 64)
    cpu_table.measure_cpu(shape, lambda requests, tokens: 1e-3, lambda: steps.append(1))
    assert len(steps) == cpu_table.STEPS


def test_bench_draws_one_on_a_terminal():
    shape = ["--num-qo-heads", "4", "--num-kv-heads", "2", "--head-dim", "64"]
    small = ["bench", "--device", "cpu", "--seconds", "0.01", "--tree", "1,2_128,8", "--json"]
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *small, *shape], stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, said
    assert "[##############################] 1/1" in said
    assert done.stdout.startswith(b"{")
