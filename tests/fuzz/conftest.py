import pytest

from tests.support import fuzz_scale as scale

KEY = "prefixshare_fuzz"


def pytest_sessionfinish(session):
    """A worker of pytest-xdist sends its lines to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[KEY] = scale.REPORT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    scale.REPORT.extend(getattr(node, "workeroutput", {}).get(KEY, ()))


def pytest_terminal_summary(terminalreporter):
    if scale.REPORT:
        terminalreporter.section("fuzz: what was tried")
        for line in scale.REPORT:
            terminalreporter.line(line)
