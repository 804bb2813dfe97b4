"""What a reproduction of a paper's figure or table is made of. Imports nothing heavy, so that a
list of the experiments and their published tables cost no import of torch.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean
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

    name: on the command line, and of its files. needs: of this machine. points: those of a setting,
    the most telling ones first. ours: our finding beside the claim, in one sentence. table: lines
    of Markdown; none if the sentence says it all. series: for a chart. seconds: after which another
    program that measures a point is ended: it begins only if `--minutes` leaves as much. at_once:
    whether that program measures all points, so that after the first the others take no time.
    reads_recordings: whether its points depend on the files in ``Setting.recordings``.

    The texts are in ``experiments.json``. item: of the paper, such as "figure 5". differs: what the
    published run has otherwise than the paper, in a phrase; "" for nothing. claim: what the paper
    found. changed: what differs here, and why. reason: why our finding differs from the claim.
    """

    name: str
    needs: str
    points: Callable[[Setting], Iterator[Point]]
    ours: Callable[[Results], str]
    table: Callable[[Results], list[str]] | None
    series: Callable[[Results], Series] | None
    seconds: float
    at_once: bool
    reads_recordings: bool
    paper: str
    item: str
    section: str
    differs: str
    claim: str
    changed: str
    reason: str

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
    possible: bool

    @property
    def status(self) -> str:
        """Whether it is missing or impossible here."""
        return "missing" if self.possible else "impossible"


#: for each paper the texts of its experiments, by their names, and of what is left out
TEXTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("experiments.json").read_text(encoding="utf-8")
)
LEFT_OUT = tuple(LeftOut(paper, **left) for paper, of in TEXTS.items() for left in of["left_out"])


def experiment(
    name: str,
    needs: str,
    points: Callable[[Setting], Iterator[Point]],
    ours: Callable[[Results], str],
    table: Callable[[Results], list[str]] | None = None,
    series: Callable[[Results], Series] | None = None,
    *,
    seconds: float = 0.0,
    at_once: bool = False,
    reads_recordings: bool = False,
) -> Experiment:
    """An experiment with its texts; see ``Experiment``."""
    paper = next(paper for paper, of in TEXTS.items() if name in of["experiments"])
    options = needs, points, ours, table, series, seconds, at_once, reads_recordings
    return Experiment(name, *options, paper, **TEXTS[paper]["experiments"][name])


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
    mean = geometric_mean(values)
    return f"{min(values):{form}} to {max(values):{form}} times, {mean:{form}} on average"
