"""The effect of each part of the planner: one kernel, many ways to divide the work.

Every way plans the same trees, heads and caches. As in ``benchmarks.kernel``, whose options it
takes but for the peers, outputs are compared with float32 attention before a time counts, and a
wrong one makes the exit status 1. Plans are priced by the cost table that fits the layer;
``vllm-prefixshare profile`` measures one where none is shipped.

    python -m benchmarks.kernel.ablation --out benchmarks/published/ablation.json
"""

import argparse
import sys
from statistics import geometric_mean

import torch

from benchmarks.kernel import bench
from benchmarks.papers.methods import Method, Planned, costs
from benchmarks.peers import Options
from benchmarks.support.program import make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.planning.costs.lookup import gpu, processor
from vllm_prefixshare.planning.costs.roofline import AnalyticCost
from vllm_prefixshare.planning.dividers.registry import DIVIDERS

PROGRAM = "benchmarks.kernel.ablation"

DEFAULT = "default"
SPLITS = (1, 2, 4, 8, 16, 32, 64)


def variants(kernel: str) -> list[Method]:
    """Ways to plan for a kernel, as ``Method.kernel`` names it."""
    return [
        Method(DEFAULT, kernel),
        Method("no tree, default divider", kernel, share="never"),
        Method("no tree, split requests", kernel, "per_request", share="never"),
        Method("tree, undivided", kernel, "deft_node"),
        *(Method(f"fixed, {n} splits", kernel, "fixed", options={"num_splits": n}) for n in SPLITS),
        *(
            Method(f"divider {name}", kernel, name)
            for name in DIVIDERS
            if name not in ("per_request", "fixed", "deft_node")
        ),
        Method("flashforge, no grouping", kernel, "flashforge", options={"grouping": False}),
        Method("default, analytic cost", kernel, cost="estimate"),
        Method("flashforge, analytic cost", kernel, "flashforge", cost="estimate"),
    ]


def slowdowns(trees: list[dict[str, dict]]) -> dict[str, float]:
    """Geometric mean over the trees of each way's time over the default's."""
    ratios: dict[str, list[float]] = {}
    for cells in trees:
        ms = {name: cell["ms"] for name, cell in cells.items() if cell["status"] == "ok"}
        for name in ms if DEFAULT in ms else ():
            ratios.setdefault(name, []).append(ms[name] / ms[DEFAULT])
    return {name: geometric_mean(of) for name, of in ratios.items()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--kernel", default="auto", choices=("auto", "hopper", "portable"))
    args = bench.parse(argv, parser)
    if len(args.heads) > 1:
        parser.error("--heads must be one pair, such as 32:8")
    return args


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    (heads,) = args.heads
    timer, rates = bench.machine(args.device.type)
    attention = AttentionConfig(*heads, args.head_dim, args.block_size, args.dtype)
    device, kernel = processor(), "torch"
    if args.device.type == "cuda":
        device, kernel = gpu(), GpuExecutor(attention, "cuda", kernel=args.kernel).name
    ways = variants(args.kernel)
    estimated = isinstance(costs(ways[0], attention, kernel, None), AnalyticCost)
    source = "an estimate" if estimated else "shipped, or measured on this machine before"
    print(f"{device}, kernel {kernel}, cost table: {source}")
    options = Options(args.device, getattr(torch, args.dtype), {})
    trees = {}
    for w in bench.workloads(args):
        print(f"\n{w.name}", flush=True)
        peers = {way.title: Planned(way, options) for way in ways}
        cells = bench.run_cell(w, heads, peers, timer, rates, args)["peers"]
        for name, cell in cells.items():
            shown = f"{cell['ms']:.4f}" if cell["status"] == "ok" else cell["status"].upper()
            print(f"  {name:<28} {shown:>9} {cell.get('reason', '')}", flush=True)
        trees[w.name] = cells
    means = slowdowns(list(trees.values()))
    print("\ntime over the default's, geometric mean over the trees that ran")
    for name, mean in means.items():
        print(f"  {name:<28} {mean:9.3f}")
    result = {
        "command": recorded_command(PROGRAM),
        "device": device,
        "kernel": kernel,
        "cost_table": source,
        "heads": list(heads),
        "head_dim": args.head_dim,
        "block_size": args.block_size,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "versions": versions("torch"),
        "slowdown": {name: round(mean, 4) for name, mean in means.items()},
        "trees": trees,
    }
    write(args.out, result)
    return int(
        any(cell["status"] == "wrong" for cells in trees.values() for cell in cells.values())
    )


if __name__ == "__main__":
    sys.exit(main())
