r"""Plans of another checkout of this project beside today's: the same kernels and batches, timed in
turns, for a change of the planner or of its prices.

    git worktree add ../before HEAD~1
    python -m benchmarks.planner.plans --before ../before --heads 32:8,16:1
    python -m benchmarks.planner.plans --before ../before --mla --heads 16:1,8:1 --block-size 64

Takes the options of ``benchmarks.kernel`` but for its peers. Without ``--tree`` and ``--workloads``
the batches are the anchors, and 8 to 256 requests on documents of 1200 to 32768 tokens. Only layers
whose plans differ are timed; every output is compared with float32 attention first, and the exit
status is 1 if one is wrong. Each time is the median of the turns' medians of CUDA-graph replays, L2
flushed.
"""

import argparse
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import torch

from benchmarks.kernel import bench as bench_kernel
from benchmarks.kernel.bench import CpuTimer
from benchmarks.peers import Case
from benchmarks.peers.ours import wrapper_arguments
from benchmarks.support.option_types import count
from benchmarks.support.program import make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from vllm_prefixshare import PrefixShareDecodeWrapper
from vllm_prefixshare.kernels.executors import executor_for
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.profiling.gpu_timing import GpuTimer, capture

PROGRAM = "benchmarks.planner.plans"

#: tokens that requests share, and their own
DOCUMENTS = (
    *((1200, 100), (2048, 200), (4096, 128), (6400, 200), (8192, 256), (12288, 400)),
    *((16384, 256), (32768, 256)),
)
REQUESTS = (8, 15, 24, 30, 40, 50, 60, 75, 100, 128, 160, 200, 256)
BATCHES = [f"1,{n}_{shared},{own}" for n, (shared, own) in product(REQUESTS, DOCUMENTS)]

Call = Callable[[], torch.Tensor]


class BeforeError(Exception):
    """The other checkout cannot be compared with."""


class Before:
    """Plans made by the checkout in ``folder``, in a process of its own.

    Raises:
        BeforeError: the folder is no checkout of this project.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "vllm_prefixshare" / "planning").is_dir():
            raise BeforeError(f"--before {folder} is no checkout of this project")
        path = os.pathsep.join([str(folder.resolve()), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("plans_of.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
        )

    def plan(self, arguments: dict[str, object], batch: tuple) -> DecodePlan:
        """The plan that it makes.

        Raises:
            BeforeError: it ended, or its plans are of another form.
        """
        try:
            pickle.dump((arguments, batch), self._process.stdin)
            self._process.stdin.flush()
            found = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError):
            raise BeforeError("the other checkout made no plan: see what it printed") from None
        if found.keys() != {f.name for f in fields(DecodePlan)}:
            raise BeforeError("plans of the other checkout have other fields")
        return DecodePlan(**found)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def same(a: DecodePlan, b: DecodePlan) -> bool:
    """Whether the plans do the same work in the same place; their estimates may differ."""
    names = [f.name for f in fields(DecodePlan) if f.name != "tile_cost"]
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def runner(case: Case, plan: DecodePlan, wrapper: PrefixShareDecodeWrapper, kernel: str) -> Call:
    """A call that runs the case by ``plan`` in the wrapper's kernel, and returns its output."""
    w = case.workload
    executor = executor_for(wrapper.attention, wrapper.device, kernel=kernel, query_len=w.query_len)
    starts = case.query_start_loc().cpu().numpy()
    executor.prepare(plan, HostBatch(w.block_table, w.seq_lens, starts))
    out = case.q.new_empty((*case.q.shape[:2], case.v_head_dim), dtype=case.out_dtype)
    tensors = case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens, out

    def call() -> torch.Tensor:
        executor.run(*tensors, case.sm_scale, extras=case.extras)
        return out

    return call


def time_in_turns(
    calls: dict[str, Call],
    expected: torch.Tensor,
    timer: GpuTimer | CpuTimer,
    args: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Microseconds and largest relative error of each call."""
    cuda = isinstance(timer, GpuTimer)
    graphs, errors, times = {}, {}, {name: [] for name in calls}
    for name, call in calls.items():
        errors[name] = bench_kernel.relative_error(call(), expected)
        graphs[name] = capture(call)[0] if cuda else None
    for _ in range(args.turns):
        for name, call in calls.items():
            replay = graphs[name].replay if cuda else call
            times[name].append(timer.time(replay, args.repeats).median_ms * 1e3)
    return {name: {"us": median(times[name]), "error": errors[name]} for name in calls}


@one_sentence(PROGRAM, BeforeError)
def main(argv: list[str] | None = None) -> int:
    return compare(parse(argv))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--kernel", default="auto", choices=["auto", "hopper", "portable"])
    parser.add_argument("--turns", type=count, default=3)
    args = bench_kernel.parse(argv, parser)
    if not args.tree and args.workloads == ["anchors"]:
        args.tree = BATCHES
    return args


def compare(args: argparse.Namespace) -> int:
    """Time every layer whose plans differ; whether an output is wrong."""
    timer, _ = bench_kernel.machine(args.device.type)
    tolerance = bench_kernel.TOLERANCE[getattr(torch, args.dtype)]
    if args.kv_dtype:
        tolerance = bench_kernel.FP8_TOLERANCE
    result = {
        "command": recorded_command(PROGRAM),
        "gpu": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "cpu",
        "versions": versions(),
        "layers": 0,
        "changed": [],
    }
    before, wrong = Before(args.before), 0
    for heads, w in product(args.heads, bench_kernel.workloads(args)):
        if w.query_parents is not None:
            continue  # a wrapper makes their masks
        case = bench_kernel.make_case(w, heads, args)
        arguments = wrapper_arguments(case, args.kernel, args.divider)
        starts = case.query_start_loc().tolist() if w.query_len > 1 else None
        batch = w.block_table, w.seq_lens, starts
        wrapper = PrefixShareDecodeWrapper(**arguments)
        plans = {"before": before.plan(arguments, batch), "now": wrapper.plan(*batch)}
        result["layers"] += 1
        if same(*plans.values()):
            continue
        calls = {name: runner(case, plans[name], wrapper, args.kernel) for name in plans}
        found = time_in_turns(calls, bench_kernel.reference(case), timer, args)
        for name, plan in plans.items():
            found[name] |= {"tiles": plan.num_tiles, "partials": int(plan.merge_indptr[-1])}
        bad = [name for name in found if not found[name]["error"] <= tolerance]
        wrong += len(bad)
        cell = {"workload": w.name, "heads": f"{heads[0]}:{heads[1]}", **found}
        result["changed"].append(cell)
        print(row(cell), *(f"{name} is WRONG" for name in bad), flush=True)
        write(args.out, result)
    before.close()
    print(summary(result))
    write(args.out, result)
    return int(wrong > 0)


def row(cell: dict[str, object]) -> str:
    times = "  ".join(
        f"{name} {cell[name]['us']:8.1f} us, {cell[name]['tiles']:4d} tiles, "
        f"{cell[name]['partials']:4d} partials"
        for name in ("before", "now")
    )
    ratio = cell["now"]["us"] / cell["before"]["us"]
    return f"{cell['workload']:42} {cell['heads']:>6}  {times}  {ratio:.3f}"


def summary(result: dict[str, object]) -> str:
    """The geometric mean of each kind of heads, over the layers whose plans differ."""
    changed = result["changed"]
    lines = [f"{len(changed)} of {result['layers']} plans differ"]
    for heads in dict.fromkeys(cell["heads"] for cell in changed):
        ratios = [c["now"]["us"] / c["before"]["us"] for c in changed if c["heads"] == heads]
        lines.append(
            f"{heads}: {geometric_mean(ratios):.3f} of the time in {len(ratios)} layers, "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
