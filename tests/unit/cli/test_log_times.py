"""Times in a server's log, and the batch that follows from them."""

import numpy as np
import pytest

from vllm_prefixshare.cli.log_times import LogClock, concurrency, in_flight


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["INFO 11-22 04:00:00 [a.py:1] x", "DEBUG 11-22 04:01:05 [a.py:1] x"], [0, 65]),
        (["(APIServer pid=7) DEBUG 11-22 23:59:59 [a.py:1]", "DEBUG 11-23 00:00:01 [a]"], [0, 2]),
        (["2026-11-22T04:00:00.250Z x", "2026-11-22 04:00:01,5 x"], [0, 1.25]),
        (["DEBUG 12-31 23:59:58 x", "DEBUG 01-01 00:00:03 x"], [0, 5]),
        (["no time", "DEBUG 13-40 04:00:00 x", "DEBUG 11-22 04:00:00 x"], [None, None, 0]),
        ([f"{'x' * 200} 11-22 04:00:00"], [None]),
    ],
)
def test_times_of_lines(lines, seconds):
    clock = LogClock()
    assert [clock.seconds(line) for line in lines] == seconds


def test_requests_in_flight_are_counted_one_by_one():
    rng = np.random.default_rng(0)
    for latency in (0.5, 3.0, 20.0):
        arrivals = np.round(rng.uniform(0, 60, 80), 1)
        counts = [sum(t - latency < other <= t for other in arrivals) for t in arrivals]
        assert in_flight(arrivals.tolist(), latency) == pytest.approx(np.mean(counts))


def test_the_batch_is_where_size_and_latency_agree():
    arrivals = [i / 10 for i in range(1000)]
    assert concurrency(arrivals, lambda size: 1.0, 256) == 10
    assert concurrency(arrivals, lambda size: 1.0, 4) == 4
    found = concurrency(arrivals, lambda size: 1.0 + 0.05 * size, 256)
    assert found == pytest.approx(10 * (1 + 0.05 * found), abs=1)
