"""The effect of each part of the planner on a GPU: one kernel, many ways to divide the work.

Every variant runs over the same trees, heads and caches. Its output is checked against float64
before its time counts, and a wrong output makes the exit status 1. Times are medians of CUDA-graph
replays with the L2 cache flushed before each.

    python -m benchmarks.kernel.ablation --out benchmarks/published/ablation.json
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.support.program import add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from benchmarks.support.trees import tree
from benchmarks.support.workload_sets import ANCHORS
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.geometry import CPU
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.kernels.reference import reference_attention
from vllm_prefixshare.planning.costs.lookup import cost_model, fingerprint, gpu, processor
from vllm_prefixshare.planning.costs.model import CostModel
from vllm_prefixshare.planning.costs.roofline import AnalyticCost, analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.profiling.cpu_table import median_seconds
from vllm_prefixshare.profiling.gpu_table import measure_gpu

PROGRAM = "benchmarks.kernel.ablation"

SPLITS = (1, 2, 4, 8, 16, 32, 64)
#: A correct kernel's relative error of a request's output is below this.
MAX_ERROR = {"bfloat16": 0.01, "float16": 0.002, "float32": 1e-4}
CHECKED_REQUESTS = 8


@dataclass(frozen=True)
class Variant:
    """One way to plan; ``divider`` None is the kernel's default."""

    name: str
    divider: str | None = None
    share: str = "always"
    grouping: bool = True
    num_splits: int = 1
    analytic: bool = False


VARIANTS = (
    Variant("default"),
    Variant("no tree, default divider", share="never"),
    Variant("no tree, split requests", "per_request", share="never"),
    Variant("tree, undivided", "deft_node"),
    *(Variant(f"fixed, {n} splits", "fixed", num_splits=n) for n in SPLITS),
    *(
        Variant(f"divider {name}", name)
        for name in DIVIDERS
        if name not in ("per_request", "fixed", "deft_node")
    ),
    Variant("flashforge, no grouping", "flashforge", grouping=False),
    Variant("default, analytic cost", analytic=True),
    Variant("flashforge, analytic cost", "flashforge", analytic=True),
)


class Layer:
    """Random tensors of one attention layer over a tree, and float64 results of some requests."""

    def __init__(self, attention: AttentionConfig, spec: str, device: str) -> None:
        torch.manual_seed(0)
        work = tree(spec, attention.block_size)
        dtype = getattr(torch, attention.dtype)

        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_()

        cache = (work.num_blocks, attention.block_size, attention.num_kv_heads)
        num_reqs = len(work.seq_lens)
        self.block_table, self.seq_lens = work.block_table, work.seq_lens
        self.k_cache = random(*cache, attention.head_dim)
        self.v_cache = random(*cache, attention.head_dim)
        self.q = random(num_reqs, attention.num_qo_heads, attention.head_dim)
        self.out = torch.empty_like(self.q)
        self.device_table = torch.from_numpy(work.block_table).to(device)
        self.device_lens = torch.from_numpy(work.seq_lens).to(device)
        self.sm_scale = attention.head_dim**-0.5
        picked = np.linspace(0, num_reqs - 1, min(num_reqs, CHECKED_REQUESTS)).astype(int)
        self._picked = torch.from_numpy(picked).to(device)
        self._expected = [
            reference_attention(
                self.q[i : i + 1],
                self.k_cache,
                self.v_cache,
                self.device_table[i : i + 1],
                self.device_lens[i : i + 1],
            )[0]
            for i in picked.tolist()
        ]

    def error(self) -> float:
        """Largest relative error of a checked request in ``out``; infinite if any output of the
        batch is not finite.
        """
        if not torch.isfinite(self.out).all():
            return math.inf
        got = self.out[self._picked].double()
        pairs = zip(got, self._expected, strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)


class CpuRunner:
    """Runs plans with the torch executor, to try this program out without a GPU."""

    def __init__(self, attention: AttentionConfig) -> None:
        self.name, self.device, self.kernel = processor(), "cpu", "torch"
        self._executor = TorchExecutor(attention)

    def planner_config(self, variant: Variant) -> PlannerConfig:
        divider = variant.divider or "flashforge"
        return PlannerConfig(
            divider, variant.share, num_workers=16, max_tile_requests=32, geometry=CPU
        )

    def measure(self, plan: DecodePlan, layer: Layer, repeats: int) -> tuple[float, float]:
        """Relative error and milliseconds of ``plan``."""
        starts = np.arange(len(layer.seq_lens) + 1, dtype=np.int32)
        tables = layer.block_table, layer.seq_lens
        self._executor.prepare(plan, HostBatch(*tables, starts))

        def run() -> None:
            self._executor.run(
                layer.q, layer.k_cache, layer.v_cache, *tables, layer.out, layer.sm_scale
            )

        layer.out.fill_(torch.nan)
        run()
        return layer.error(), median_seconds(run, repeats) * 1e3


class GpuRunner:
    """Runs plans with the GPU executor."""

    def __init__(self, attention: AttentionConfig, kernel: str) -> None:
        # imported here, because some machines without a GPU have no triton
        from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
        from vllm_prefixshare.profiling.gpu_timing import GpuTimer, capture

        self._make: Callable[[AttentionConfig], GpuExecutor] = lambda shape: GpuExecutor(
            shape, "cuda", kernel=kernel
        )
        self._attention, self._executor = attention, self._make(attention)
        timer = GpuTimer()
        self._time_ms: Callable[[Callable[[], object], int], float] = lambda call, repeats: (
            timer.time(capture(call)[0].replay, repeats).median_ms
        )
        self.name, self.device, self.kernel = gpu(), "cuda", self._executor.name

    def planner_config(self, variant: Variant) -> PlannerConfig:
        return self._executor.planner_config(variant.divider, variant.share)

    def measure(self, plan: DecodePlan, layer: Layer, repeats: int) -> tuple[float, float]:
        """Relative error and milliseconds of ``plan``."""
        # a new executor, because the workspace of a captured graph does not grow
        executor = self._make(self._attention)
        executor.prepare(plan)

        def run() -> None:
            executor.run(
                layer.q,
                layer.k_cache,
                layer.v_cache,
                layer.device_table,
                layer.device_lens,
                layer.out,
                layer.sm_scale,
            )

        layer.out.fill_(torch.nan)
        run()
        error = layer.error()
        return error, self._time_ms(run, repeats)

    def measure_table(self) -> CostTable:
        """The cost table of this GPU, measured now."""
        return measure_gpu(self._attention, self._make, lambda f: self._time_ms(f, 15) * 1e3)


def choose_table(
    runner: CpuRunner | GpuRunner, attention: AttentionConfig, path: Path | None
) -> tuple[CostModel, str]:
    """The cost model of all variants but the analytic ones, and its source."""
    if path is not None:
        return CostTable.load(path, fingerprint(attention, runner.kernel)), str(path)
    if isinstance(runner, CpuRunner):
        return analytic_cost(attention, "torch"), "analytic"
    found = cost_model(attention, runner.kernel)
    if isinstance(found, AnalyticCost):
        return runner.measure_table(), "measured at the start of this run"
    return found, "shipped, or measured on this machine before"


def run_variant(
    variant: Variant,
    runner: CpuRunner | GpuRunner,
    attention: AttentionConfig,
    costs: dict[bool, CostModel],
    layer: Layer,
    repeats: int,
) -> dict[str, object]:
    """One cell: measurements, or the reason why there are none."""
    try:
        config = replace(
            runner.planner_config(variant),
            grouping=variant.grouping,
            num_splits=variant.num_splits,
        )
        planner = DecodePlanner(
            config, costs[variant.analytic], attention.block_size, attention.gqa_group_size
        )
        plan = planner.update(layer.block_table, layer.seq_lens).plan
        error, ms = runner.measure(plan, layer, repeats)
    except (PrefixShareError, torch.OutOfMemoryError) as e:
        return {"refused": str(e)}
    return {
        "ms": round(ms, 5),
        "error": float(f"{error:.3g}"),
        "wrong": not error < MAX_ERROR[attention.dtype],
        "kv_tokens_read": plan.kv_tokens_read(layer.seq_lens),
        "tiles": plan.num_tiles,
        "partials": plan.num_partials,
        "plan_ms": round(planner.counters.plan_seconds * 1e3, 3),
    }


def show(cell: dict[str, object]) -> str:
    if "refused" in cell:
        return "refused"
    return "WRONG" if cell["wrong"] else f"{cell['ms']:.4f}"


def slowdowns(rows: list[dict[str, dict[str, object]]]) -> dict[str, float]:
    """Geometric mean over the trees of each variant's time over the default's."""
    means = {}
    for name in rows[0]:
        logs = [
            math.log(row[name]["ms"] / row["default"]["ms"])
            for row in rows
            if "ms" in row[name] and "ms" in row["default"]
        ]
        if logs:
            means[name] = math.exp(sum(logs) / len(logs))
    return means


def arguments() -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--trees", nargs="+", default=ANCHORS, metavar="TREE")
    parser.add_argument("--heads", default="32:8", help="query heads:KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(MAX_ERROR))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kernel", default="auto", choices=("auto", "hopper", "portable"))
    parser.add_argument("--table", type=Path, help="cost table (default: the one that matches)")
    parser.add_argument("--repeats", type=int, default=20, help="timed replays of each cell")
    add_out(parser)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    heads = args.heads.split(":")
    if len(heads) != 2 or not all(n.isdigit() for n in heads):
        parser.error("--heads must look like 32:8")
    args.heads = tuple(map(int, heads))
    return args


@one_sentence(PROGRAM)
def main() -> int:
    args = arguments()
    rows: list[dict[str, dict[str, object]]] = []
    attention = AttentionConfig(*args.heads, args.head_dim, args.block_size, args.dtype)
    if args.device == "cpu":
        runner: CpuRunner | GpuRunner = CpuRunner(attention)
    else:
        runner = GpuRunner(attention, args.kernel)
    table, source = choose_table(runner, attention, args.table)
    estimate = analytic_cost(attention, runner.kernel)
    costs: dict[bool, CostModel] = {False: table, True: estimate}
    print(f"{runner.name}, kernel {runner.kernel}, cost table: {source}")
    for spec in args.trees:
        layer = Layer(attention, spec, runner.device)
        print(f"\n{spec}", flush=True)
        row = {}
        for variant in VARIANTS:
            row[variant.name] = run_variant(variant, runner, attention, costs, layer, args.repeats)
            print(f"  {variant.name:<28} {show(row[variant.name]):>9}", flush=True)
        rows.append(row)
        del layer
    means = slowdowns(rows)
    print("\ntime over the default's, geometric mean over the trees that ran")
    for name, mean in means.items():
        print(f"  {name:<28} {mean:9.3f}")
    if args.out:
        result = {
            "command": recorded_command(PROGRAM),
            "device": runner.name,
            "kernel": runner.kernel,
            "cost_table": source,
            "heads": list(args.heads),
            "head_dim": args.head_dim,
            "block_size": args.block_size,
            "dtype": args.dtype,
            "repeats": args.repeats,
            "versions": versions("torch"),
            "slowdown": {name: round(mean, 4) for name, mean in means.items()},
            "trees": dict(zip(args.trees, rows, strict=True)),
        }
        write(args.out, result)
    return 1 if any(cell.get("wrong") for row in rows for cell in row.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
