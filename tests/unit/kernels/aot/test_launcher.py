"""Launches by way of what ``launch`` has kept are those by way of Triton (``launch_matrix.py``)."""

import pytest

from tests.support import tritons


@pytest.mark.parametrize("version", tritons.RELEASES)
def test_a_kept_binary_is_called_as_triton_calls_it(version):
    done = tritons.run(version, "-m", "tests.support.launch_matrix", timeout=1200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "the same calls"
