"""A progress bar on standard error, where that is a terminal."""

import sys
import time
from typing import TextIO

WIDTH = 30


class Progress:
    """Counts steps; use it as a context manager, which removes the bar at the end.

    Args:
        total: number of steps.
        stream: standard error if None. Nothing is written unless it is a terminal.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self._stream = stream or sys.stderr  # None where standard error is closed
        self._shown = self._stream is not None and self._stream.isatty()
        self._began = time.monotonic()

    def step(self, count: int = 1) -> None:
        """Count steps as done."""
        before = self.done
        self.done = min(self.total, self.done + count)
        # at most a thousand times: files have many lines
        if (
            self._shown
            and self.done
            and self.done * 1000 // self.total > before * 1000 // self.total
        ):
            full = WIDTH * self.done // self.total
            left = (time.monotonic() - self._began) * (self.total - self.done) / self.done
            bar = "#" * full + "." * (WIDTH - full)
            text = f"\r[{bar}] {self.done}/{self.total}, about {left:.0f} s left \x1b[K"
            self._stream.write(text)
            self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
