"""Run on a machine with a GPU what CI cannot run: tests, fuzzing, published figures.

    python -m benchmarks.on_gpu tests        # every test that needs a GPU
    python -m benchmarks.on_gpu fuzz         # compute-sanitizer, random forests, engine chaos
    python -m benchmarks.on_gpu figures kernel_fp8 kernel_mla
    python -m benchmarks.on_gpu figures kernel --path FASTTREE=~/FastTree-Artifact ...

Figures take --resume: what an interrupted run has written to --out is kept, and the rest measured.

Tests and fuzzing share the GPUs and the cores, since nothing of them is timed; on several GPUs
a step that needs one gets that with the fewest steps. A larger
``--cores`` than the machine has does not help: processes take turns on the GPU, and many engines at
once run into their time limits. Figures run one after the other: each by the command in its
published file, which writes to ``--out`` instead. Whatever a step prints is in ``--out`` too. Steps
that run when ``--minutes`` are over are interrupted, so that pytest says in which test; the exit
status is 1 if there are any, or if a step failed.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support.program import RESUME, ROOT, add_resume, make_parser, visible_gpus
from benchmarks.support.prompt_trees import FLASHFORGE

PROGRAM = "benchmarks.on_gpu"

PUBLISHED = Path(__file__).parent / "published"
#: files whose tests start engines of their own, in parts of about five minutes; the tests that no
#: part names are another one
PARTS = {
    "test_gpu_deployments": ("layouts", "modes", "sleep or wakes_up or connector"),
    "test_gpu_engine": (
        "speculative or draft or head_dim",
        "sliding or lora or synchronise or strict or wrong_setting",
        "two_gpus or context_parallelism",
    ),
    "test_gpu_engine_extras": ("scale or questions or differs",),
    "test_gpu_engine_hybrid": ("fp8 or drafts",),
    "test_gpu_mixed_graphs": ("two_gpus",),
}
#: files with tests for two GPUs, and what such a part of a file has in its name
ON_TWO = (
    "test_gpu_ranks", "test_gpu_ray", "test_gpu_data_parallel", "test_gpu_engine_mla", "two_gpus",
)  # fmt: skip
FOREST_RUNS, FORESTS = 22, 235  # 5,170 in all
ENGINE = "-m benchmarks.engine --start-together"
#: FastTree's workloads: 512 requests of Llama-2-7B need a GPU for each engine
ENGINES_APART = (
    f"{ENGINE} --apart --memory 0.9 --breakdown --tokens 256 --repeats 2 "
    "--workloads fasttree_a,fasttree_b,fasttree_c,fasttree_d"
)
#: workloads on which PREFIX_SHARE is compared with other baselines than FLASH_ATTN
OPPOSED = "doc32k,docs8k,samples,doc4k,unshared"
#: benchmarks whose interrupted runs can be resumed
RESUMABLE = ("benchmarks.engine", "benchmarks.kernel")
#: figures that were not published yet; later their commands are in their files
NEW = {
    "engine_long": f"{ENGINE} --workloads doc32k,few,single --tokens 512 --repeats 2",
    "kernel_fasttree": (
        "-m benchmarks.kernel --workloads fasttree --heads 16:1,32:8,32:32 --fasttree FASTTREE "
        "--deft DEFT --peers ours,portable,fa2,fa3,fa3_cascade,flashinfer,flashinfer_cascade,"
        "fasttree,deft"
    ),
    **{
        f"engine_{name}": f"{ENGINE} --baseline {name} --workloads {OPPOSED}"
        for name in ("flashinfer", "triton_attn", "cascade")
    },
    "engine_deft": (
        f"{ENGINE} --tokens 400 --repeats 2 --workloads fewshot20,fewshot30,fewshot50,deft "
        "--deft-trees 1 --deft SORTING DOCUMENTS KEYWORD SET"
    ),
    "engine_flashforge": (
        f"{ENGINE} --breakdown --tokens 32 --repeats 2 --workloads {','.join(FLASHFORGE)}"
    ),
    "engine_fasttree_llama2": f"{ENGINES_APART} --shape llama2-7b",
    "engine_fasttree_mistral": f"{ENGINES_APART} --shape mistral-7b",
}
CHAOS = "-m benchmarks.quality.soak engine --requests 1440 --minutes 1.6 --longest 48"


#: seconds between an interrupt and the end by force
GRACE = 10.0
#: seconds between two looks at what a figure's step has printed
PROGRESS = 15.0


@dataclass
class Step:
    """One command, how many cores it keeps busy, and how many GPUs it needs: one, or more, and
    then it sees all.
    """

    name: str
    command: str
    cores: int = 1
    gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    step: Step
    process: subprocess.Popen[bytes]
    began: float
    gpu: str | None = None
    interrupted: bool = False
    #: what was printed last of its output, and when that was looked for
    shown: str = ""
    looked: float = 0.0


def tests(out: Path) -> Iterator[Step]:
    """A step for each file, engines first: they take longest."""
    engines = ("mixed", "engine", "serve", "ray", "bad_input", "deployments", "data_parallel")
    starts_engines = tuple(f"test_gpu_{name}" for name in engines)
    files = sorted(Path(ROOT, "tests/gpu").glob("test_*.py"))
    files.sort(key=lambda path: not path.stem.startswith(starts_engines))
    for path in [*files, Path(ROOT, "tests/fuzz/test_batch_invariance.py")]:
        cores = 4 if path.stem.startswith(starts_engines) else 1
        command = f"-m pytest -q {path.relative_to(ROOT)}"
        named = PARTS.get(path.stem)
        if named is None:
            yield Step(path.stem, command, cores, 1 + (path.stem in ON_TWO))
            continue
        parts = [*named, f"not ({' or '.join(named)})"]
        for i, part in enumerate(parts, 1):
            on_two = any(part.startswith(name) for name in ON_TWO)
            what = f"{command} -k {shlex.quote(part)}"
            yield Step(f"{path.stem}_{i}", what, cores, 1 + on_two)


def fuzz(out: Path) -> Iterator[Step]:
    """The rows of docs/fidelity.md that need a GPU, servers excepted."""
    yield Step("sanitize", f"-m benchmarks.quality.sanitize --out {out}/sanitize.json", 4)
    for name, options in (("", ""), ("_shared", " --divider deft_flatten")):
        command = f"{CHAOS}{options} --out {out}/soak_engine_gpu{name}.json"
        yield Step(f"soak_engine_gpu{name}", command, 16)  # fourteen engines
    pytest = "-m pytest -q tests/fuzz/test_random_forests_on_gpu.py -k"
    yield Step("graph", f"{pytest} graph")
    for seed in range(1, FOREST_RUNS + 1):
        environment = {"FUZZ_SEED": str(seed), "FUZZ_FORESTS": str(FORESTS)}
        yield Step(f"forests_{seed}", f"{pytest} random", environment=environment)


def figure(name: str, out: Path, paths: dict[str, str], resume: bool = False) -> Step:
    """The command of a published file, or of ``NEW``; ``resume`` where its benchmark can.

    Raises:
        ValueError: there is no such file, it names no command, or a path is missing.
    """
    source = PUBLISHED / f"{name}.json"
    if source.exists():
        command = json.loads(source.read_text()).get("command")
    else:
        command = f"python {NEW[name]} --out {name}.json" if name in NEW else None
    if command is None:
        raise ValueError(f"{name}: no such file with a command in {PUBLISHED}.")
    words = [paths.get(word, word) for word in shlex.split(command)[1:]]
    words[words.index("--out") + 1] = f"{out}/{name}.json"
    if missing := [w for w in words if w.isupper() and not w.startswith("-")]:
        raise ValueError(f"{name}: where is {missing[0]}? Pass --path {missing[0]}=FOLDER.")
    if resume and words[1] in RESUMABLE:
        words.append(RESUME)
    return Step(name, shlex.join(words), cores=sys.maxsize, gpus=2)


def threads(step: Step) -> dict[str, str]:
    """As many threads as the step has cores: references in float64 run on the CPU, and sixteen
    processes with a thread for each core would wait for one another. What has all cores keeps the
    environment of its published command.
    """
    if step.cores == sys.maxsize:
        return {}
    return {"OMP_NUM_THREADS": str(min(step.cores, os.cpu_count() or 1))}


def start(step: Step, out: Path, gpu: str | None = None) -> Running:
    one = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with (out / f"{step.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(step.command)],
            cwd=ROOT,
            env={**os.environ, **threads(step), "PYTHONUNBUFFERED": "1", **step.environment, **one},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that the engines that it starts can be ended with it
            preexec_fn=_take_interrupts,
        )
    return Running(step, process, time.monotonic(), gpu)


def _take_interrupts() -> None:
    """Runs in the child: what a shell started in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    steps: list[Step], out: Path, cores: int, seconds: float, gpus: Sequence[str] = ()
) -> list[str]:
    """Run ``steps`` in their order, as many at once as ``cores`` can; the names of those that
    failed or did not end. Without ``gpus`` every step sees what this process sees.
    """
    waiting, running, wrong = list(steps), [], []
    deadline = time.monotonic() + seconds
    try:
        while (waiting or running) and time.monotonic() < deadline:
            free = cores - sum(r.step.cores for r in running)
            fitting = [step for step in waiting if step.cores <= free or not running]
            if fitting:
                waiting.remove(fitting[0])
                busy = Counter(r.gpu for r in running)
                one = min(gpus, key=busy.__getitem__) if gpus and fitting[0].gpus == 1 else None
                running.append(start(fitting[0], out, one))
                continue
            time.sleep(0.1)
            for r in running:
                show_progress(r, out)
            for r in [r for r in running if r.process.poll() is not None]:
                running.remove(r)
                if not report(r, out):
                    wrong.append(r.step.name)
    finally:  # also after an interrupt: engines of its own sessions would keep the GPUs' memory
        end(running, out)
    for step in waiting:
        print(f"{step.name}: not started", flush=True)
    return wrong + [r.step.name for r in running] + [step.name for step in waiting]


def end(running: list[Running], out: Path) -> None:
    """Interrupt steps, and end by force what is left of them after ``GRACE``."""
    for r in running:
        r.interrupted = True
        r.process.send_signal(signal.SIGINT)
    patience = time.monotonic() + GRACE
    for r in running:
        with suppress(subprocess.TimeoutExpired):
            r.process.wait(max(0.0, patience - time.monotonic()))
        with suppress(ProcessLookupError):  # nothing is left of its group
            os.killpg(r.process.pid, signal.SIGKILL)
        r.process.wait()
        report(r, out)


def last_line(step: Step, out: Path) -> str:
    """The beginning of the last line that a step has printed."""
    lines = (out / f"{step.name}.log").read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")[:160]


def show_progress(running: Running, out: Path) -> None:
    """Print what a step that has the machine to itself has printed last, if it is new; seldom,
    because reading a log takes time from what is measured.
    """
    now = time.monotonic()
    if running.step.cores < sys.maxsize or now - running.looked < PROGRESS:
        return
    running.looked = now
    last = last_line(running.step, out)
    if last not in ("", running.shown):
        print(f"{running.step.name}, {now - running.began:.0f} s: {last}", flush=True)
        running.shown = last


def report(ended: Running, out: Path) -> bool:
    """Print a line about a step; whether it is well."""
    status, last = ended.process.returncode, last_line(ended.step, out)
    said = "time was up" if ended.interrupted else f"status {status}"
    seconds = time.monotonic() - ended.began
    print(f"{ended.step.name}: {said}, {seconds:.0f} s: {last}", flush=True)
    return status == 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("what", choices=("tests", "fuzz", "figures"))
    parser.add_argument(
        "names", nargs="*", help="of steps, or of published files, in their order; default: all"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for all output")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that steps may share")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="what stands for NAME in a command, such as FASTTREE: the checkout of a peer",
    )
    add_resume(parser)
    parser.add_argument("--list", action="store_true", help="show the commands, and run nothing")
    args = parser.parse_intermixed_args(argv)
    out = args.out.resolve()
    try:
        if args.what == "figures":
            paths = dict(path.split("=", 1) for path in args.path)
            steps = [figure(name, out, paths, args.resume) for name in args.names]
        else:
            steps = list((tests if args.what == "tests" else fuzz)(out))
    except ValueError as e:
        parser.error(str(e))
    known = [step.name for step in steps]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{unknown[0]} is none of {', '.join(known)}")
    if args.what == "figures" and not steps:
        parser.error("name the published files whose figures to take anew, such as kernel_fp8")
    if args.names:  # in the order of their names
        steps = [steps[known.index(name)] for name in args.names]
    if args.list:
        for step in steps:
            variables = "".join(f"{k}={v} " for k, v in step.environment.items())
            print(f"{step.name}: {variables}python {step.command}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    wrong = run(steps, out, args.cores, 60 * args.minutes, visible_gpus())
    print(f"{len(steps) - len(wrong)} of {len(steps)} steps passed", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
