"""Arrival times in a server's log, and how many requests were in flight."""

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import numpy as np

#: vLLM's "11-22 04:00:00", and what containers and journals write before a line.
STAMP = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
#: Characters of a line in which its time is looked for: prompts may have times as well.
MAX_START = 120
#: A time so much earlier than the one before is of the next year.
HALF_YEAR = timedelta(days=180)
#: Rounds in which a batch size and the latency at that size settle.
MAX_ROUNDS = 8


def has_time(line: str) -> bool:
    """Whether a line begins as lines of logs do."""
    return STAMP.search(line[:MAX_START]) is not None


class LogClock:
    """Reads the times of a log's lines, which may have no year."""

    def __init__(self) -> None:
        self._first: datetime | None = None
        self._last: datetime | None = None
        self._years = 0

    def seconds(self, line: str) -> float | None:
        """Seconds since the first time in the log; None if the line has no time."""
        stamp = STAMP.search(line[:MAX_START])
        if stamp is None:
            return None
        year, month, day, hour, minute, second = (int(x or 0) for x in stamp.groups()[:6])
        micros = int((stamp[7] or "0").ljust(6, "0"))
        try:
            time = datetime(year or 2000 + self._years, month, day, hour, minute, second, micros)
            if not year and self._last is not None and self._last - time > HALF_YEAR:
                self._years += 1
                time = time.replace(year=2000 + self._years)
        except ValueError:  # no such day
            return None
        self._first = self._first or time
        self._last = time
        return (time - self._first).total_seconds()


def in_flight(arrivals: Sequence[float], latency: float) -> float:
    """Mean number of requests in flight when a request arrives, itself included, if each stays for
    ``latency`` seconds. Requests of the same time see each other.
    """
    times = np.sort(np.asarray(arrivals))
    came = np.searchsorted(times, times, side="right")
    left = np.searchsorted(times, times - latency, side="right")
    return float((came - np.minimum(left, came - 1)).mean())


def concurrency(arrivals: Sequence[float], latency_at: Callable[[int], float], limit: int) -> int:
    """The batch size at which a server of estimated speed runs under these arrivals.

    Args:
        arrivals: seconds.
        latency_at: seconds of a request in a batch of this size.
        limit: maximum batch size.
    """
    size = 1
    for _ in range(MAX_ROUNDS):
        found = min(limit, max(1, round(in_flight(arrivals, latency_at(size)))))
        if found == size:
            break
        size = found
    return size
