"""What a reproduction of a paper's figure or table is made of. Imports nothing heavy, so that a
list of the experiments and their published tables cost no import of torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

#: figures of one point, as they stand in its JSON file
Figures = dict
#: points of an experiment that ran: name -> figures
Results = dict[str, Figures]

CPU, GPU, GPUS = "no GPU", "one GPU", "two GPUs"


class Lazily:
    """A module of this folder, which is imported when one of its names is first used."""

    def __init__(self, module: str) -> None:
        self._module = f"{__package__}.{module}"

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


@dataclass(frozen=True)
class Setting:
    """How experiments run.

    device: "cuda" or "cpu". tiny: miniature workloads, which say nothing but that the program runs.
    repeats: timed replays of each kernel. recordings: folder of DeFT's recorded trees, or None.
    peers: names of further kernels to time (see ``peers.PEERS``). checkouts: the user's folders of
    some of them, by name. command: that asked for it.
    """

    device: str
    tiny: bool = False
    repeats: int = 10
    recordings: Path | None = None
    peers: tuple[str, ...] = ()
    checkouts: tuple[tuple[str, Path], ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Point:
    """One point of a figure, or one line of a table.

    run: measures or computes it. Raises PrefixShareError where this machine cannot.
    """

    name: str
    run: Callable[[], Figures]


@dataclass(frozen=True)
class Series:
    """What a chart shows: for each point the values of some series, in ``unit``."""

    unit: str
    values: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper, and what became of it here.

    name: on the command line, and of its files. differs: what the published run has otherwise than
    the paper, in a phrase; "" for nothing. item: of the paper, such as "figure 5".
    claim: what the paper found. changed: what differs here, and why. needs: of this machine.
    points: those of a setting, the most telling ones first. ours: our finding beside the claim, in
    one sentence. reason: why it differs from the claim. table: lines of Markdown; none if the
    sentence says it all. series: for a chart. seconds: after which another program that measures a
    point is ended: it begins only if `--minutes` leaves as much. at_once: whether that program
    measures all points, so that after the first the others take no time. reads_recordings: whether
    its points depend on the files in ``Setting.recordings``.
    """

    name: str
    paper: str
    differs: str
    section: str
    item: str
    claim: str
    changed: str
    needs: str
    points: Callable[[Setting], Iterator[Point]]
    ours: Callable[[Results], str]
    reason: str
    table: Callable[[Results], list[str]] | None = None
    series: Callable[[Results], Series] | None = None
    seconds: float = 0.0
    at_once: bool = False
    reads_recordings: bool = False

    @property
    def status(self) -> str:
        """Whether the paper's figure is reproduced exactly, or what differs."""
        return f"partial: {self.differs}" if self.differs else "exact"


@dataclass(frozen=True)
class LeftOut:
    """A figure or table that is not reproduced, with the reason. possible: whether the machines
    that this project has could reproduce it.
    """

    paper: str
    item: str
    why: str
    possible: bool = False

    @property
    def status(self) -> str:
        """Whether it is missing or impossible here."""
        return "missing" if self.possible else "impossible"


def has_failed(figures: Figures) -> bool:
    """Whether a point has no figures."""
    return "failed" in figures


def is_wrong(figures: Figures) -> bool:
    """Whether the figures of a point are of a wrong output. Each method under ``peers`` has a
    status of its own instead.
    """
    return figures.get("right") is False


def good_points(results: Results) -> Results:
    """The points whose figures may be shown."""
    return {n: f for n, f in results.items() if not has_failed(f) and not is_wrong(f)}


def mega(num_bytes: float) -> str:
    """Bytes in MiB."""
    return f"{num_bytes / 2**20:.1f}"


def span(values: list[float], form: str = ".1f") -> str:
    """The least, the largest and the geometric mean of ratios."""
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return f"{min(values):{form}} to {max(values):{form}} times, {product:{form}} on average"
