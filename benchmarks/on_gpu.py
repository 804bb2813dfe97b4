"""Take published figures again, on a machine with a GPU.

    python -m benchmarks.on_gpu figures kernel_fp8 kernel_mla
    python -m benchmarks.on_gpu figures kernel --path FASTTREE=~/FastTree-Artifact ...

Figures run one after the other: each by the command in its published file, which writes to
``--out`` instead; what it prints is there, too. With --resume, what an interrupted run has written
is kept, and the rest measured. A figure that runs when ``--minutes`` are over is interrupted, and
no other begins; the exit status is 1 then, or if one failed.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.support.program import RESUME, ROOT, add_resume, make_parser
from benchmarks.support.prompt_trees import FLASHFORGE

PROGRAM = "benchmarks.on_gpu"

PUBLISHED = Path(__file__).parent / "published"
ENGINE = "-m benchmarks.engine --start-together"
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
}


#: seconds between an interrupt and the end by force
GRACE = 10.0


def figure(name: str, out: Path, paths: dict[str, str], resume: bool = False) -> list[str]:
    """Arguments of Python: the command of a published file, or of ``NEW``.

    Args:
        resume: go on with an interrupted run, where the benchmark can.

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
    return words


def run(name: str, arguments: list[str], out: Path, deadline: float) -> bool:
    """Run a figure and print a line about it; whether it is well."""
    log, began = out / f"{name}.log", time.monotonic()
    if began >= deadline:
        print(f"{name}: not started", flush=True)
        return False
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that the engines that it starts can be ended with it
            preexec_fn=_take_interrupts,
        ) as process,
    ):
        try:
            said = f"status {process.wait(deadline - began)}"
        except subprocess.TimeoutExpired:
            said = "time was up"
        finally:  # also after an interrupt: engines would keep the GPU's memory
            end(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:160] if lines else ""
    print(f"{name}: {said}, {time.monotonic() - began:.0f} s: {last}", flush=True)
    return said == "status 0"


def _take_interrupts() -> None:
    """Runs in the child: what a shell started in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process, and end by force what is left of its group after ``GRACE``."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):  # nothing is left of its group
        os.killpg(process.pid, signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("what", choices=("figures",))
    parser.add_argument("names", nargs="+", help="of published files, in the order to run")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for all output")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="what stands for NAME in a command, such as FASTTREE: the checkout of a peer",
    )
    add_resume(parser)
    args = parser.parse_args(argv)
    out = args.out.resolve()
    try:
        paths = dict(path.split("=", 1) for path in args.path)
        figures = {name: figure(name, out, paths, args.resume) for name in args.names}
    except ValueError as e:
        parser.error(str(e))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    wrong = [name for name in figures if not run(name, figures[name], out, deadline)]
    print(f"{len(figures) - len(wrong)} of {len(figures)} figures were taken", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
