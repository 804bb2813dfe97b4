"""What the tests on a GPU share: a small model with its prompts and its baseline, and figures such
as errors next to stock's. Pytest shows what a test prints only where it fails, and the log of a run
should have the figures of every test.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpu_engines as cases
from tests.support.dummy_model import write_small_llama
from tests.support.engine import EngineProcess

FIGURES = "figures"


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(random_model: Path) -> Path:
    """A real model if one is given. Modules with another model, or only random weights, override
    this fixture.
    """
    return Path(os.environ.get(cases.MODEL_VARIABLE) or random_model)


@pytest.fixture(scope="module")
def text(model: Path) -> cases.Text:
    return cases.Text(model)


@pytest.fixture(scope="module")
def stock(model: Path) -> Iterator[EngineProcess]:
    with cases.engines(cases.stock(model, enforce_eager=True)) as (engine,):
        yield engine


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """A function that notes a line of figures, for the end of the log."""

    def note(line: str) -> None:
        print(line)
        record_property(FIGURES, line)

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the lines that tests have noted, whether these passed or not."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    lines = [
        f"{report.nodeid}: {line}"
        for report in reports
        if report.when == "call"
        for name, line in report.user_properties
        if name == FIGURES
    ]
    if lines:
        terminalreporter.section(FIGURES)
        for line in lines:
            terminalreporter.write_line(line)
