"""What ``benchmarks/sanitize.py`` makes of compute-sanitizer's words."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sanitize

LAUNCHED = "launched hopper, sinks\nlaunched portable, sinks\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
RACE = """\
========= Error: Race reported between Read access at partial_attention+0x230 in {0}
=========     and Write access at partial_attention+0x12d10 in {1} [242 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_a_clean_run_is_clean():
    row = sanitize.judge("memcheck", LAUNCHED + CLEAN, [0], 1.0, 2)
    assert (row["launches"], row["wrong"]) == (2, [])


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (LAUNCHED + "========= ERROR SUMMARY: 3 errors\n", [0]),
        (LAUNCHED, [0]),  # no summary: the tool did not come to its end
        (LAUNCHED + CLEAN, [None]),
        (LAUNCHED + CLEAN, [1]),
        (CLEAN, [0]),
        (LAUNCHED + "other bits: hopper, sinks\n" + CLEAN, [0]),
    ],
    ids=["errors", "no summary", "time", "status", "launches", "bits"],
)
def test_all_else_is_a_fault(text, statuses):
    assert sanitize.judge("memcheck", text, statuses, 1.0, 2)["wrong"]


def test_only_the_dispatch_of_warps_is_let_pass():
    ours = [place for place in sanitize.dispatches() if place.startswith("kernel.py")]
    control = [place for place in sanitize.dispatches() if place not in ours]
    assert len(ours) == len(control) == 2
    for places in (ours, control):
        row = sanitize.judge("racecheck", LAUNCHED + RACE.format(*places), [0], 1.0, 2)
        assert (row["of_dispatch"], row["wrong"]) == (2, [])
    for places in ((ours[0], "kernel.py:1"), ("kernel.py:1", "kernel.py:2")):
        assert sanitize.judge("racecheck", LAUNCHED + RACE.format(*places), [0], 1.0, 2)["wrong"]
