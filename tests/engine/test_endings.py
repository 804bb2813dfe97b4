"""An engine of the tests ends when its parent is killed."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.support.processes import alive, tree

pytestmark = pytest.mark.engine

#: Starts an engine as the examples and the benchmarks do.
PARENT = """
import sys
from tests.support.engine import STOCK, EngineProcess
with EngineProcess(STOCK, sys.argv[1], max_model_len=256, enforce_eager=True, pause=True):
    pass
"""


def test_a_killed_parent_leaves_no_process(model):
    """Kill the parent while vLLM starts, as soon as an engine core exists."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(model)])
    found: list[psutil.Process] = []
    try:
        while not any("EngineCore" in " ".join(p.cmdline()) for p in found):
            assert parent.poll() is None, "the parent ended before it had an engine core"
            time.sleep(0.2)
            found = tree(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    while (left := [p for p in found if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"
