"""What ``benchmarks.quality.sanitize`` makes of compute-sanitizer's words."""

import pytest

from benchmarks.quality import sanitize

LAUNCHED = "launched hopper, sinks\nlaunched portable, sinks\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
RACE = """\
========= Error: Race reported between Read access at partial_attention+0x230 in {0}
=========     and Write access at partial_attention+0x12d10 in {1} [242 hazards]
=========
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


def races(*pairs):
    """What racecheck says of a read and a write each."""
    text = "".join(RACE.format(*pair) for pair in pairs)
    return (
        f"{LAUNCHED}{text}========= RACECHECK SUMMARY: {len(pairs)} hazards displayed (1 error)\n"
    )


def test_only_the_dispatch_of_warps_is_let_pass():
    ours = sorted(place for place in sanitize.dispatches() if place.startswith("kernel.py"))
    control = sorted(sanitize.dispatches() - set(ours))
    assert len(ours) == len(control) == 4
    for places in (ours[:2], ours[2:], control[:2], control[2:]):
        row = sanitize.judge("racecheck", races(places), [0], 1.0, 2)
        assert (row["of_dispatch"], row["wrong"]) == (1, [])
    for places in ((ours[0], "kernel.py:1"), ("kernel.py:1", "kernel.py:2")):
        row = sanitize.judge("racecheck", races(ours[:2], places), [0], 1.0, 2)
        assert row["of_dispatch"] == 1
        assert [line.split()[-1 - line.endswith("]") * 2] for line in row["wrong"]] == [*places]


def test_only_handovers_that_the_control_has_too_are_let_pass():
    (control,) = (p for p in sanitize.handovers() if p[0].startswith("sanitize_control"))
    maxima, sums = sorted(sanitize.handovers() - {control})
    both = [pair[::-1] for pair in (maxima, sums)]  # RACE names the read first
    row = sanitize.judge("racecheck", races(*both, control[::-1]), [0], 1.0, 2)
    assert (row["of_handovers"], row["wrong"]) == (3, [])
    assert sanitize.judge("racecheck", races(*both), [0], 1.0, 2)["wrong"]
    for read, written in (maxima, (maxima[1], sums[0]), (sums[1], "kernel.py:1")):
        row = sanitize.judge("racecheck", races((read, written), control[::-1]), [0], 1.0, 2)
        assert row["of_handovers"] == 1 and len(row["wrong"]) == 2


def test_the_words_of_every_report_are_understood():
    text = LAUNCHED + "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    assert sanitize.judge("racecheck", text, [0], 1.0, 2)["wrong"]
