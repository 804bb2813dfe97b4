"""Planning time on one core: from scratch, after a join or a leave, and per step in between. Also
the time of the plan's layout, for both kernels as they run on an H200.

Every plan is checked before its time counts; the exit status is 1 if one is wrong. Times are
medians of ``--repeats`` calls, the best of five rounds.

    python -m benchmarks.planner --out benchmarks/published/planner.json
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.support.option_types import count
from benchmarks.support.program import add_out, make_parser, recorded_command
from benchmarks.support.results import versions, write
from benchmarks.support.trees import Workload, forest, tree
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.hopper.launch import HopperKernel
from vllm_prefixshare.kernels.interface import Kernel
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.lookup import processor
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.planner import DecodePlanner

PROGRAM = "benchmarks.planner"

ATTENTION = AttentionConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
H200 = Gpu((9, 0), 132, 227 << 10)
KERNELS = {"hopper": HopperKernel, "portable": PortableKernel}
ROUNDS = 5


def documents(count: int, readers: int, blocks: int = 512) -> Workload:
    """``count`` documents, each read by ``readers`` requests with 4 to 16 blocks of their own."""
    parents = [-1] * count + [d for d in range(count) for _ in range(readers)]
    private = [(4 + (5 * i) % 13) * 16 for i in range(count * readers)]
    return forest(f"{count * readers}/{count}", parents, [blocks * 16] * count + private)


@dataclass(frozen=True)
class Budget:
    """A batch, with the most microseconds for each kind of step, the layout included; None without
    a limit.
    """

    name: str
    work: Workload
    scratch: float | None = None
    change: float | None = None


def budgets() -> list[Budget]:
    five_levels = tree("1,4,16,64,1024_1024,512,512,256,128")
    seven_levels = tree("1,2,4,8,16,32,1024_512,512,256,256,128,128,64")
    return [
        Budget("256 requests, 8 documents", documents(8, 32), scratch=500, change=200),
        Budget("1024 requests, five levels", five_levels, scratch=2000),
        Budget("1024 requests, seven levels", seven_levels, scratch=2000),
    ]


@cache
def kernel_of(name: str) -> Kernel:
    """A kernel with the number of workers that it has on an H200."""
    return KERNELS[name](ATTENTION, 1, H200)


def planner(kernel: Kernel, divider: str, share: str = "always") -> DecodePlanner:
    config = planner_config(kernel.limits, ATTENTION, divider, share, null_block_id=0)
    cost = analytic_cost(ATTENTION, kernel.name)
    return DecodePlanner(config, cost, 16, ATTENTION.gqa_group_size)


def microseconds(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median of ``repeats`` calls, the best of a few rounds. ``before`` runs before each call and
    is not timed.
    """
    medians = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(repeats):
            before()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times))
    return round(min(medians) * 1e6, 1)


def measure(
    kernel: Kernel, work: Workload, divider: str, repeats: int, share: str = "always"
) -> dict[str, float]:
    """Microseconds from scratch, after a join or leave, where the plan still holds, and of the
    layout after a new plan.

    Raises:
        InvariantError: a plan is wrong.
    """
    used = planner(kernel, divider, share)
    fewer = work.block_table[:-1], work.seq_lens[:-1]
    whole = work.block_table, work.seq_lens
    for batch in (fewer, whole):
        invariants.check(used.update(*batch).plan, *batch)

    def turns() -> Iterator[tuple]:
        while True:
            yield from (fewer, whole)

    turn = turns()
    change = microseconds(lambda: used.update(*next(turn)).plan, repeats)
    plans = used.counters.plans
    used.update(*whole)
    steady = microseconds(lambda: used.update(*whole).plan, repeats)
    if not plans <= used.counters.plans <= plans + 1:
        raise invariants.InvariantError("a plan was made where the last one holds")

    def forget() -> None:
        nonlocal used
        used = planner(kernel, divider, share)

    scratch = microseconds(lambda: used.update(*whole).plan, repeats, before=forget)
    plan = used.update(*whole).plan
    layout = microseconds(lambda: kernel.layout(plan), repeats)
    return {
        "scratch_us": scratch,
        "change_us": change,
        "steady_us": steady,
        "layout_us": layout,
    }


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--repeats", type=count, default=50, help="calls in a round")
    add_out(parser)
    args = parser.parse_args(argv)
    cases: list[tuple[str, str, Workload, str, str, Budget | None]] = [
        (name, b.name, b.work, kernel_of(name).limits.divider, "always", b)
        for name in KERNELS
        for b in budgets()
    ]
    cases += [  # as engines plan unless told otherwise
        (name, f"{b.name}, share=auto", b.work, kernel_of(name).limits.divider, "auto", b)
        for name in KERNELS
        for b in budgets()
    ]
    cases += [
        (
            name,
            f"growth, {n} requests",
            documents(8, n // 8),
            kernel_of(name).limits.divider,
            "always",
            None,
        )
        for name in KERNELS
        for n in (16, 64, 256, 1024, 4096)
    ]
    cases += [
        ("hopper", f"divider {name}", documents(8, 32), name, "always", None)
        for name in DIVIDERS
        if name != "depth_first"
    ]
    rows, wrong = [], 0
    print(
        f"{'kernel':<9} {'case':<40} {'scratch':>10} {'join/leave':>10} {'steady':>8} "
        f"{'layout':>8}  microseconds"
    )
    for kernel, name, work, divider, share, budget in cases:
        # plans of a few milliseconds need fewer calls
        repeats = args.repeats if divider == "depth_first" else max(1, args.repeats // 5)
        try:
            row = measure(kernel_of(kernel), work, divider, repeats, share)
        except invariants.InvariantError as e:
            wrong += 1
            print(f"{kernel:<9} {name:<40} WRONG: {e}")
            rows.append({"kernel": kernel, "case": name, "wrong": str(e)})
            continue
        limits = {"scratch_us": budget.scratch, "change_us": budget.change} if budget else {}
        late = [
            k
            for k, limit in limits.items()
            if limit is not None and row[k] + row["layout_us"] > limit
        ]
        note = f"over budget: {', '.join(late)}" if late else ""
        print(
            f"{kernel:<9} {name:<40} {row['scratch_us']:10.1f} {row['change_us']:10.1f} "
            f"{row['steady_us']:8.1f} {row['layout_us']:8.1f}  {note}",
            flush=True,
        )
        rows.append(
            {
                "kernel": kernel,
                "case": name,
                "divider": divider,
                "share": share,
                **row,
                "budget": limits,
            }
        )
    if args.out:
        result = {
            "command": recorded_command(PROGRAM),
            "repeats": args.repeats,
            "processor": processor(),
            "versions": versions("numba", "numpy"),
            "rows": rows,
        }
        write(args.out, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
