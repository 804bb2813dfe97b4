"""Show the prefix forest of a batch, what every divider makes of it, and a picture of both."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_prefixshare.cli.options import add_cache_argument, add_shape_arguments, attention_of
from vllm_prefixshare.cli.output import print_table, write_file
from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import Forest, PrefixShareError

if TYPE_CHECKING:
    from vllm_prefixshare.cli.batches import Batch
    from vllm_prefixshare.planning.costs.model import CostModel
    from vllm_prefixshare.planning.plan import DecodePlan

EXAMPLE = """\
16 requests on one document of 1024 tokens, in 4 groups that share 256 more, with 64 of their own:

    vllm-prefixshare inspect --tree 1,4,16_1024,256,64 --svg plan.svg

The first line says how many KV tokens are read with and without sharing, then comes the forest,
then a line for each divider; plan.svg shows the forest above the schedule. Give a FILE instead of
--tree to look at block tables of your own: docs/cli.md describes its form."""

#: The batch without a file.
TREE = "1,4,16_1024,256,64"
PICTURES = ("svg", "png")
#: Most lines printed of a forest.
MAX_LINES = 24


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    command.add_argument("file", type=Path, nargs="?", help="JSON with block tables")
    command.add_argument("--step", type=int, help="line of a FILE of several (default: the last)")
    command.add_argument(
        "--tree", help=f"nodes_tokens of each level (default without FILE: {TREE})"
    )
    add_shape_arguments(command, block_size="16; a FILE has its own")
    add_cache_argument(command)
    command.add_argument(
        "--divider", help="only this one, and with --json its schedule (default: all)"
    )
    command.add_argument("--gpu", help="plan as on this GPU, such as H200")
    command.add_argument("--workers", type=int, default=132, help="thread blocks, without --gpu")
    command.add_argument(
        "--tile-rows", type=int, default=128, help="rows of a Q tile, without --gpu"
    )
    for kind in PICTURES:
        command.add_argument(
            f"--{kind}", type=Path, metavar="FILE", help="draw the forest and the schedule"
        )
    command.add_argument("--dark", action="store_true", help="draw on a dark background")


@dataclass(frozen=True)
class Planned:
    """The plan of one divider. seconds: planning time."""

    divider: str
    plan: "DecodePlan"
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Plan the batch with each divider and print what comes out; the exit status is 0."""
    from vllm_prefixshare.cli.batches import NULL_BLOCK_ID, read_batch, tree_batch
    from vllm_prefixshare.planning.dividers.registry import DIVIDERS, get_divider
    from vllm_prefixshare.planning.sharing import shareable_forest

    get_divider(args.divider or "flashforge")
    if args.file is None and args.step is not None:
        raise PrefixShareError("--step is a line of a FILE: name one, or leave it out.")
    if args.file is not None and args.block_size is not None:
        raise PrefixShareError(f"{args.file} says its block size: leave out --block-size.")
    attention = attention_of(args)
    if args.file is None:
        batch = tree_batch(TREE if args.tree is None else args.tree, attention.block_size)
    elif args.tree is not None:
        raise PrefixShareError(f"{args.file} and --tree are two batches: leave out one of them.")
    else:
        batch = read_batch(args.file, -1 if args.step is None else args.step)
        attention = replace(attention, block_size=batch.block_size)
    config, cost, cost_source = _planning(args, attention)
    plans = [
        _plan(replace(config, divider=name), cost, batch, attention)
        for name in ([args.divider] if args.divider else DIVIDERS)
    ]
    forest = shareable_forest(
        batch.block_table, batch.seq_lens, batch.block_size, null_block_id=NULL_BLOCK_ID
    )
    drawn = next((p for p in plans if p.divider == config.divider), plans[0])
    files = _draw(args, batch, forest, drawn, cost_source)
    if args.json:
        report = _report(batch, forest, plans, cost_source)
        if args.divider:
            report["workers"] = _workers(forest, plans[0].plan)
        print(json.dumps(report, indent=1))
    else:
        _print(batch, forest, plans)
        for path in files:
            print(f"wrote {path}")
    return 0


def _planning(
    args: argparse.Namespace, attention: AttentionConfig
) -> tuple[PlannerConfig, "CostModel", str]:
    """Limits of the kernel and the cost model; where the costs come from."""
    if args.gpu is not None:
        from vllm_prefixshare.cli.gpus import planning_for

        gpu = planning_for(args.gpu, attention)
        return gpu.config, gpu.cost, gpu.cost_source
    from vllm_prefixshare.kernels.geometry import GPU
    from vllm_prefixshare.planning.costs.roofline import analytic_cost

    if args.workers > 1 << 16:
        raise PrefixShareError(f"--workers must be at most {1 << 16}, got {args.workers}.")
    if args.tile_rows < 1:
        raise PrefixShareError(f"--tile-rows must be at least 1, got {args.tile_rows}.")
    config = PlannerConfig(
        geometry=GPU,
        divider="depth_first",
        share="always",
        num_workers=args.workers,
        max_tile_requests=max(1, args.tile_rows // attention.gqa_group_size),
        null_block_id=0,
    )
    return config, analytic_cost(attention, "hopper"), "analytic cost of an H200's multiprocessor"


def _plan(
    config: PlannerConfig, cost: "CostModel", batch: "Batch", attention: AttentionConfig
) -> Planned:
    from vllm_prefixshare.planning.planner import DecodePlanner

    planner = DecodePlanner(config, cost, batch.block_size, attention.gqa_group_size)
    planner.warm_up()
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    return Planned(config.divider, plan, planner.counters.plan_seconds)


def _draw(
    args: argparse.Namespace, batch: "Batch", forest: Forest, drawn: Planned, made_by: str
) -> list[Path]:
    """Write the pictures that are asked for; returns their files."""
    files: dict[str, Path] = {kind: vars(args)[kind] for kind in PICTURES if vars(args)[kind]}
    if not files:
        return []
    from vllm_prefixshare.cli.picture import DARK, LIGHT, encoded, picture

    unshared, read = int(batch.seq_lens.sum()), drawn.plan.kv_tokens_read(batch.seq_lens)
    figure = picture(
        f"Prefix forest of {batch.name}",
        f"{_requests(forest)}, {unshared:,} KV tokens one by one, {read:,} as planned "
        f"({unshared / read:.2f} times less)",
        f"divider {drawn.divider}; {made_by}",
        forest,
        drawn.plan,
        batch.seq_lens,
        DARK if args.dark else LIGHT,
    )
    for kind, path in files.items():
        write_file(path, encoded(figure, kind))
    return list(files.values())


def _requests(forest: Forest) -> str:
    return "1 request" if forest.num_reqs == 1 else f"{forest.num_reqs} requests"


def _report(
    batch: "Batch", forest: Forest, plans: list[Planned], cost_source: str
) -> dict[str, Any]:
    return {
        "batch": batch.name,
        "block_size": batch.block_size,
        "requests": forest.num_reqs,
        "kv_tokens": int(batch.seq_lens.sum()),
        "nodes": [
            {
                "parent": int(forest.node_parent[i]),
                "tokens": [int(forest.node_start[i]), int(forest.node_end[i])],
                "requests": forest.request_rows[
                    forest.node_reader_start[i] : forest.node_reader_end[i]
                ].tolist(),
            }
            for i in range(forest.num_nodes)
        ],
        "cost": cost_source,
        "dividers": [_row(batch, planned) for planned in plans],
    }


def _row(batch: "Batch", planned: Planned) -> dict[str, Any]:
    plan = planned.plan
    read = plan.kv_tokens_read(batch.seq_lens)
    loads = plan.worker_us
    return {
        "divider": planned.divider,
        "kv_tokens_read": read,
        "share_factor": round(int(batch.seq_lens.sum()) / read, 3),
        "tiles": plan.num_tiles,
        "partials": plan.num_partials,
        "busiest_worker_us": round(float(loads.max()), 2),
        "mean_worker_us": round(float(loads.mean()), 2),
        "plan_ms": round(planned.seconds * 1e3, 3),
    }


def _workers(forest: Forest, plan: "DecodePlan") -> list[list[dict[str, Any]]]:
    """The work tiles of each worker; node -1 is what a request reads alone."""
    from vllm_prefixshare.cli.picture import schedule

    return [
        [
            {
                "us": round(tile.us, 2),
                "requests": tile.requests,
                "reads": [piece._asdict() for piece in tile.pieces],
            }
            for tile in tiles
        ]
        for tiles in schedule(forest, plan)
    ]


def _print(batch: "Batch", forest: Forest, plans: list[Planned]) -> None:
    print(f"{_requests(forest)}, {int(batch.seq_lens.sum())} KV tokens read one by one")
    for line in _forest_lines(forest, batch):
        print(line)
    print()
    rows = [
        ("divider", "KV read", "share", "tiles", "partials", "busiest us", "mean us", "plan ms")
    ]
    for planned in plans:
        row = _row(batch, planned)
        rows.append(
            (
                row["divider"],
                str(row["kv_tokens_read"]),
                f"{row['share_factor']:.2f}",
                str(row["tiles"]),
                str(row["partials"]),
                f"{row['busiest_worker_us']:.1f}",
                f"{row['mean_worker_us']:.1f}",
                f"{row['plan_ms']:.2f}",
            )
        )
    print_table(rows)


def _forest_lines(forest: Forest, batch: "Batch") -> list[str]:
    """A line for each node, indented below its parent, and one for the private parts."""
    depth = np.zeros(forest.num_nodes, int)
    for i, parent in enumerate(forest.node_parent.tolist()):
        depth[i] = depth[parent] + 1 if parent >= 0 else 0
    # as many levels as fit, but always the first
    fits = np.cumsum(np.bincount(depth)) <= MAX_LINES
    levels = max(1, int(fits.sum()))
    tokens, requests = (
        forest.node_end - forest.node_start,
        forest.node_reader_end - forest.node_reader_start,
    )
    lines = [
        f"{'  ' * (depth[i] + 1)}node {i}: {tokens[i]} tokens x {requests[i]} requests"
        for i in np.flatnonzero(depth < levels)
    ][:MAX_LINES]
    if more := forest.num_nodes - len(lines):
        lines.append(f"  and {more} nodes more")
    private = batch.seq_lens[forest.request_rows] - forest.private_start
    low, high = int(private.min()), int(private.max())
    of = f"{low}" if low == high else f"{low} to {high}"
    return [*lines, f"  private parts of {of} tokens"]
