r"""Figures and tables of the papers that this project builds on, on this machine.

Without names, every experiment that the machine can carry. Results are JSON: a file for each
point, as soon as it is there, and one for each experiment. A run that was stopped goes on where
it stopped. Every output is checked before its time counts; exit status 1 says that one was wrong,
or that a program failed.

    python -m benchmarks.reproduce --list
    python -m benchmarks.reproduce flashforge-figure-6 --out results/papers
    python -m benchmarks.reproduce --minutes 10
    python -m benchmarks.reproduce --tiny
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import vllm_prefixshare
from benchmarks.papers import EXPERIMENTS, LEFT_OUT, PAPERS
from benchmarks.papers.experiment import (
    GPU,
    GPUS,
    Experiment,
    Point,
    Results,
    Setting,
    good_points,
    has_failed,
    is_wrong,
)
from benchmarks.papers.tables import chart
from benchmarks.support.charts import adaptive
from benchmarks.support.option_types import count, positive
from benchmarks.support.program import CHECKOUTS, make_parser, one_sentence
from benchmarks.support.results import versions
from vllm_prefixshare.core import PrefixShareError

PROGRAM = "benchmarks.reproduce"

REPEATS = 10
#: where results go; miniatures have names of real points, and would replace them
OUT, TINY_OUT = Path("results/papers"), Path("results/papers-tiny")
#: what the file of a kept point holds
KEPT = {"setting": dict, "command": str, "date": str, "figures": dict}
#: names of DeFT's recordings: trees of thoughts, token trees, and token trees of published runs
RECORDINGS = ("*ToT.json", "tree_size*.json", "APPS_tree_size*.json")
#: files of the package that a result may depend on: code, cost tables
SOURCES = {".py", ".c", ".json"}


@dataclass
class Progress:
    """An experiment that runs: the points that are left, and the seconds that it has had."""

    experiment: Experiment
    folder: Path
    left: list[Point]
    done: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    results: Results = field(default_factory=dict)
    #: of each point with results: the day and the command of its run
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)

    def file(self, point: Point) -> Path:
        """Where a point's figures are kept."""
        return self.folder / (re.sub(r"[^\w.-]+", "_", point.name) + ".json")


def write(path: Path, data: object) -> None:
    """Write JSON; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)


def trouble(figures: dict, setting: Setting) -> str:
    """Why the next run tries a point again: it failed, an output was wrong, or one of this
    project's kernels failed. "" if it is good; other projects' kernels may fail.
    """
    if has_failed(figures):
        return figures["failed"]
    if is_wrong(figures):
        return "WRONG"
    return ", ".join(
        f"{title} {found['status'].upper()}"
        for title, found in figures.get("peers", {}).items()
        if found["status"] == "wrong"
        or (found["status"] == "failed" and title.partition(",")[0] not in setting.peers)
    )


def begin(experiment: Experiment, setting: Setting, out: Path, fresh: bool) -> Progress:
    """The experiment as the last run left it; without what it did if ``fresh``."""
    folder = out / "points" / experiment.name
    run = Progress(experiment, folder, [], longest=experiment.seconds)
    agreed = described(setting, experiment)
    for point in experiment.points(setting):
        kept = None if fresh else read_kept(run.file(point))
        if kept and kept["setting"] == agreed and not trouble(kept["figures"], setting):
            run.results[point.name] = kept["figures"]
            run.origins[point.name] = kept["date"], kept["command"]
            run.done += 1
        else:
            run.left.append(point)
    return run


def read_kept(file: Path) -> dict | None:
    """A kept point; None if there is none, or the file is damaged or of another format."""
    try:
        kept = json.loads(file.read_text())
        right = all(isinstance(kept[key], of) for key, of in KEPT.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if right else None


def described(setting: Setting, experiment: Experiment) -> dict:
    """What a kept result must agree in."""
    agree = {
        "device": device_name(setting.device),
        "tiny": setting.tiny,
        "repeats": setting.repeats,
        "peers": list(setting.peers),
        "versions": versions(),
        "sources": sources(),
    }
    if experiment.reads_recordings:
        agree["recordings"] = setting.recordings and digest(setting.recordings)
    return agree


@cache
def digest(recordings: Path) -> str:
    """Names and contents of a folder's recordings, as a short hash."""
    return digest_of(recordings, [file for form in RECORDINGS for file in recordings.glob(form)])


@cache
def sources() -> str:
    """Names and contents of the package's files and of the benchmarks' programs, as a short hash:
    a version stays the same while the code changes.
    """
    package, benchmarks = Path(vllm_prefixshare.__file__).parent, Path(__file__).parent
    of_package = [p for p in package.rglob("*") if p.suffix in SOURCES]
    return f"{digest_of(package, of_package)}-{digest_of(benchmarks, benchmarks.rglob('*.py'))}"


def digest_of(folder: Path, files: Iterable[Path]) -> str:
    """Names inside a folder and contents of some of its files, as a short hash."""
    found = sha256()
    for name, file in sorted((f.relative_to(folder).as_posix(), f) for f in files):
        found.update(f"{name}\0{sha256(file.read_bytes()).hexdigest()}\0".encode())
    return found.hexdigest()[:12]


def device_name(device: str) -> str:
    """Name of the GPU, or "cpu"."""
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name()


def turns(runs: list[Progress]) -> Iterator[Progress]:
    """The experiments in turns, as long as they have points: next is whoever had the least time."""
    while waiting := [run for run in runs if run.left]:
        yield min(waiting, key=lambda run: run.seconds)


def carry_out(runs: list[Progress], setting: Setting, deadline: float) -> bool:
    """Run the points that are left until the deadline; whether all outputs were right, and no
    program failed.
    """
    total = sum(len(run.left) for run in runs)
    from benchmarks.peers import first_line

    began, right, number = time.monotonic(), True, 0
    for run in turns(runs):
        if time.monotonic() + run.longest > deadline:
            run.seconds = float("inf")  # the others may still have a point that fits
            if all(r.seconds == float("inf") for r in runs if r.left):
                break
            continue
        point = run.left[0]
        number += 1
        since, able = time.monotonic(), True
        try:
            figures = point.run()
        except PrefixShareError as e:  # this machine cannot
            figures, able = {"failed": first_line(e)}, False
        except Exception as e:  # compilers and CUDA raise anything; other points may still run
            figures = {"failed": first_line(e)}
        taken = time.monotonic() - since
        run.left.pop(0)
        run.seconds += taken
        run.longest = 0.0 if run.experiment.at_once else max(run.longest, taken)
        run.results[point.name] = figures
        said = trouble(figures, setting)
        run.done += not said
        right &= not (said and able)
        day, command = date.today().isoformat(), setting.command
        run.origins[point.name] = day, command
        agreed = described(setting, run.experiment)
        write(
            run.file(point),
            {"setting": agreed, "command": command, "date": day, "figures": figures},
        )
        elapsed = time.monotonic() - began
        print(f"[{number}/{total} {elapsed:4.0f} s] {run.experiment.name}: {point.name}: "
              f"{said or f'{taken:.1f} s'}", flush=True)  # fmt: skip
        collect(run, setting)
    return right


def collect(run: Progress, setting: Setting) -> None:
    """Write the file of an experiment: all its points so far, in their order."""
    order = [p.name for p in run.experiment.points(setting)]
    points = {name: run.results[name] for name in order if name in run.results}
    # days in their order, and commands in that of their days
    origins = sorted(run.origins[name] for name in points)
    days, commands = ([origin[i] for origin in origins] for i in (0, 1))
    write(
        run.folder.parent.parent / f"{run.experiment.name}.json",
        {
            "experiment": run.experiment.name,
            "command": " && ".join(dict.fromkeys(commands)),
            "date": " to ".join(dict.fromkeys([days[0], days[-1]])),
            **described(setting, run.experiment),
            "complete": run.done == len(order),
            "of_points": len(order),
            "points": points,
        },
    )


def chosen(names: Iterable[str]) -> list[Experiment]:
    """Experiments by name, or by the beginning of their names; all without names.

    Raises:
        PrefixShareError: nothing has that name.
    """
    if not names:
        return list(EXPERIMENTS.values())
    found: dict[str, Experiment] = {}
    for name in names:
        matching = {n: e for n, e in EXPERIMENTS.items() if n == name} or {
            n: e for n, e in EXPERIMENTS.items() if n.startswith(name)
        }
        if not matching:
            raise PrefixShareError(f"no experiment is called {name!r}: --list names them.")
        found |= matching
    return list(found.values())


def show_list(experiments: list[Experiment]) -> None:
    for paper in PAPERS:
        of_paper = [e for e in experiments if e.paper == paper]
        if not of_paper:
            continue
        print(f"{paper}")
        for e in of_paper:
            print(f"  {e.name} (needs {e.needs}): {e.item}, section {e.section}")
            print(f"    {e.status}")
            print(f"    the paper: {e.claim}")
            print(f"    changed: {e.changed}")
        for left in LEFT_OUT:
            if left.paper == paper:
                print(f"  {left.status}: {left.item}: {left.why}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="or how names begin; see --list")
    parser.add_argument(
        "--list", action="store_true", help="name every experiment, and what changed"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder of results (default: {OUT}, with --tiny {TINY_OUT})",
    )
    parser.add_argument("--minutes", type=positive, help="begin nothing that would end later")
    parser.add_argument("--tiny", action="store_true", help="in miniature, on a CPU")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="default: the GPU, if there is one"
    )
    parser.add_argument("--repeats", type=count, default=REPEATS, help="timed replays of a kernel")
    parser.add_argument("--deft-recordings", type=Path, help="folder of DeFT's recorded trees")
    parser.add_argument(
        "--peers", default="", help="further kernels to time, such as fa3,flashinfer"
    )
    for name in CHECKOUTS:
        parser.add_argument(f"--{name}", type=Path, help=f"your checkout of {name}, for --peers")
    parser.add_argument("--fresh", action="store_true", help="do not go on where a run has stopped")
    args = parser.parse_args(argv)
    args.peers = tuple(filter(None, args.peers.split(",")))
    args.out = args.out or (TINY_OUT if args.tiny else OUT)
    return args


def command_of(args: argparse.Namespace) -> str:
    """The command of a run, without the paths of this machine."""
    words = ["python", "-m", PROGRAM, *args.names]
    words += ["--tiny"] if args.tiny else []
    words += ["--minutes", f"{args.minutes:g}"] if args.minutes else []
    words += ["--repeats", str(args.repeats)] if args.repeats != REPEATS else []
    words += ["--deft-recordings", "FOLDER"] if args.deft_recordings else []
    words += ["--peers", ",".join(args.peers)] if args.peers else []
    for name in CHECKOUTS:
        words += [f"--{name}", name.upper()] if getattr(args, name) else []
    return shlex.join(words)


def setting_of(args: argparse.Namespace) -> Setting:
    """How to run, and on what.

    Raises:
        PrefixShareError: a GPU is asked for and there is none; an unknown peer; no recordings, or
            of another format.
    """
    import torch

    from benchmarks.peers import PEERS

    for name in args.peers:
        if name not in PEERS:
            raise PrefixShareError(f"peer {name!r} is unknown: use some of {', '.join(PEERS)}.")
    device = "cpu" if args.tiny and args.device is None else args.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise PrefixShareError("there is no GPU here: leave --device out, or take --tiny.")
    if args.deft_recordings is not None:
        check_recordings(args.deft_recordings)
    repeats = 1 if args.tiny else args.repeats
    checkouts = tuple((name, getattr(args, name)) for name in CHECKOUTS if getattr(args, name))
    return Setting(
        device, args.tiny, repeats, args.deft_recordings, args.peers, checkouts, command_of(args)
    )


def check_recordings(folder: Path) -> None:
    """Read what experiments take from a folder of DeFT's recordings.

    Raises:
        PrefixShareError: it has none, or one has another format.
    """
    found = {form: sorted(folder.glob(form)) for form in RECORDINGS}
    runs, trees, published = found.values()
    if not any(found.values()):
        raise PrefixShareError(
            f"{folder} has no JSON files: name the folder of DeFT's {', '.join(RECORDINGS)}."
        )
    from benchmarks.papers.recordings import contexts
    from benchmarks.peers import first_line
    from benchmarks.support.workload_sets import recorded_step, token_tree_parents

    for file in (*runs, *trees, *published):
        try:
            recorded = json.loads(file.read_text())
            if file in runs:
                for run in recorded:
                    if nodes := list(run["data"].values()):
                        recorded_step(file.stem, nodes, max(n["end"] for n in nodes), 16)
                continue
            token_tree_parents(recorded["Tree_Structure"])
            if file in published:
                contexts(recorded["Records"][0]["Accept_length"])
        except Exception as e:  # the user's own file may hold anything
            raise PrefixShareError(
                f"{file} does not have the format of DeFT's recordings ({first_line(e)})."
            ) from e


def gpus_needed(experiment: Experiment) -> int:
    return {GPU: 1, GPUS: 2}.get(experiment.needs, 0)


def make_folder(out: Path) -> None:
    """Make the folder of results.

    Raises:
        PrefixShareError: nothing can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as e:
        raise PrefixShareError(f"--out {out}: {e.strerror}.") from e


def show_findings(runs: list[Progress], out: Path) -> None:
    """Each experiment's finding next to the paper's, its chart if matplotlib is installed, and what
    is left to do.
    """
    has_matplotlib = find_spec("matplotlib") is not None
    for run in runs:
        good, found = good_points(run.results), run.results.values()
        counts = {
            "points left": len(run.left),
            "failed": sum(map(has_failed, found)),
            "wrong": sum(map(is_wrong, found)),
        }
        missing = [f"{what}: {count}" for what, count in counts.items() if count]
        if good or missing:
            print("\n" + ", ".join([run.experiment.name, *missing]))
        if good:
            if has_matplotlib and (drawn := chart(run.experiment, good)):
                (out / f"{run.experiment.name}.svg").write_text(adaptive(drawn))
            print(f"  the paper: {run.experiment.claim}")
            print(f"  here: {run.experiment.ours(good)}")
    if left := sum(len(run.left) for run in runs):
        print(f"\npoints left: {left}; the same command goes on with them")


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    experiments = chosen(args.names)
    if args.list:
        show_list(experiments)
        return 0
    setting = setting_of(args)
    make_folder(args.out)
    gpus = 0
    if setting.device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    runs = []
    for experiment in experiments:
        if not setting.tiny and gpus_needed(experiment) > gpus:
            print(f"left out: {experiment.name} needs {experiment.needs}")
            continue
        runs.append(begin(experiment, setting, args.out, args.fresh))
        if not runs[-1].left and not runs[-1].done:
            why = "it has no miniature" if setting.tiny else "--list says what it needs"
            print(f"{experiment.name}: nothing to run here, {why}")
    deadline = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
    try:
        status = int(not carry_out(runs, setting, deadline))
    except KeyboardInterrupt:
        print("\nstopped")
        status = 130  # as shells have it
    show_findings(runs, args.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
