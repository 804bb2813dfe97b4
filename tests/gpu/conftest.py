"""Figures of the tests on a GPU, such as errors beside stock's. Pytest shows what a test prints
only where it fails, and the log of a run should have the figures of every test.
"""

from collections.abc import Callable
from typing import Any

import pytest

FIGURES = "figures"


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
