from . import scale


def pytest_terminal_summary(terminalreporter):
    if scale.REPORT:
        terminalreporter.section("trust: what was tried")
        for line in scale.REPORT:
            terminalreporter.line(line)
