"""Show what every divider makes of a tree."""

import argparse

from vllm_prefixshare.cli.model import add_shape_arguments, attention_of
from vllm_prefixshare.config import PlannerConfig


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_shape_arguments(command, block_size=16)
    command.add_argument("--tree", default="1,4,16_1024,256,64", help="see workloads.trees")
    command.add_argument("--divider", help="only this one")
    command.add_argument("--workers", type=int, default=132, help="thread blocks")
    command.add_argument("--tile-rows", type=int, default=128, help="rows of a Q tile")


def run(args: argparse.Namespace) -> int:
    from vllm_prefixshare.costs.cost_table import analytic_cost
    from vllm_prefixshare.planning.dividers.registry import DIVIDERS, get_divider
    from vllm_prefixshare.planning.planner import DecodePlanner
    from vllm_prefixshare.workloads.trees import tree

    get_divider(args.divider or "flashforge")
    attention = attention_of(args)
    work = tree(args.tree, attention.block_size)
    stock = int(work.seq_lens.sum())
    print(f"{len(work.seq_lens)} requests, {stock} KV tokens read one by one")
    print(f"{'divider':<16} {'KV read':>9} {'share':>6} {'tiles':>6} {'partials':>8} {'ms':>7}")
    for name in [args.divider] if args.divider else DIVIDERS:
        config = PlannerConfig(
            divider=name,
            share="always",
            num_workers=args.workers,
            max_tile_requests=max(1, args.tile_rows // attention.gqa_group_size),
        )
        planner = DecodePlanner(
            config, analytic_cost(attention, "triton"), work.block_size, attention.gqa_group_size
        )
        planner.warm_up()
        plan = planner.update(work.block_table, work.seq_lens)
        read = plan.kv_tokens_read(work.seq_lens)
        print(
            f"{name:<16} {read:9} {stock / read:6.2f} {plan.num_tiles:6} {plan.num_partials:8} "
            f"{planner.counters.plan_seconds * 1e3:7.2f}"
        )
    return 0
