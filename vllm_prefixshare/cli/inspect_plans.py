"""Show how a batch is planned, or how an engine ran it, next to attention without sharing."""

import argparse
import json
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.cli import picture
from vllm_prefixshare.cli.batches import Batch, read_batch, tree_batch
from vllm_prefixshare.cli.options import (
    add_cache_argument,
    add_shape_arguments,
    attention_of,
    check_range,
)
from vllm_prefixshare.cli.output import print_table
from vllm_prefixshare.cli.planned import Layer, Planned, as_run, forest_of
from vllm_prefixshare.config import MAX_WORKERS, AttentionConfig
from vllm_prefixshare.core import Forest, IntArray, PrefixShareError
from vllm_prefixshare.planning.dividers.registry import DIVIDERS, get_divider
from vllm_prefixshare.planning.plan import DecodePlan

EXAMPLE = """\
16 requests on one document of 1024 tokens, in 4 groups that share 256 more, with 64 of their own:

    vllm-prefixshare inspect --tree 1,4,16_1024,256,64 --svg plan.svg

After the forest come a line for the plan, one without sharing, and what sharing is worth; plan.svg
shows the forest above the schedule. Give a FILE instead of --tree for a trace, or for block tables
of your own: docs/cli.md describes its form. --compare adds the other dividers."""

#: The batch without a file.
TREE = "1,4,16_1024,256,64"
#: The GPU that is planned for without a trace.
GPU = "H200"
#: Times below are taken for this one: a trace rounds its times, to 0 if need be.
MIN_US = 0.01
#: Most lines printed of a forest.
MAX_LINES = 24
#: Columns of the table: field of a row, title and format.
COLUMNS = (
    ("kv_tokens_read", "KV read", "d"),
    ("share_factor", "share", ".2f"),
    ("attention_us", "attention us", ".1f"),
    ("tiles", "tiles", "d"),
    ("partials", "partials", "d"),
    ("busiest_worker_us", "busiest us", ".1f"),
    ("mean_worker_us", "mean us", ".1f"),
    ("plan_ms", "plan ms", ".2f"),
)
#: Options whose values a trace has.
TRACED = (
    *("model", "num_qo_heads", "num_kv_heads", "head_dim", "dtype", "kv_cache_dtype"),
    *("gpu", "workers"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    command.add_argument(
        "file", type=Path, nargs="?", help="a trace, or other JSON with block tables"
    )
    command.add_argument(
        "--step", type=int, help="line of a FILE of several (default: one with the most requests)"
    )
    command.add_argument(
        "--tree", help=f"nodes_tokens of each level (default without FILE: {TREE})"
    )
    add_shape_arguments(command, block_size="16; a FILE has its own")
    add_cache_argument(command)
    command.add_argument("--divider", help="plan with this one (default: the kernel's)")
    command.add_argument("--compare", action="store_true", help="plan with all dividers, too")
    command.add_argument("--gpu", help=f"plan as on this GPU (default: {GPU})")
    command.add_argument("--workers", type=int, help="work queues (default: the kernel's)")
    command.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the forest and the schedule"
    )


@dataclass(frozen=True)
class Report:
    """What is shown.

    plans: the first is drawn and judged.
    unshared: the plan whose times and tokens without sharing are compared with: an engine's own, if
        there is one.
    attention: shape of the layer.
    made_by: how the first plan was made.
    prices: where the prices of the other plans come from; None if they are those of the first.
    """

    batch: Batch
    forest: Forest
    plans: list[Planned]
    unshared: Planned
    attention: AttentionConfig
    made_by: str
    prices: str | None = None

    @property
    def gain(self) -> float:
        """Estimated attention time without sharing over the first plan's."""
        return max(MIN_US, self.unshared.unshared_us) / max(MIN_US, self.plans[0].attention_us)

    @property
    def verdict(self) -> str:
        """What sharing is worth, in one line."""
        first = self.plans[0]
        planned_by = f"planned by {first.title}"
        if first.made.unshared is not None:
            return f"nothing is shared ({first.made.unshared}); {planned_by}"
        time = f"{self.gain:.2f} times less attention time"
        if self.gain < 1:
            time = f"{1 / self.gain:.2f} times the attention time"
        tokens = f"{first.share_factor:.2f} times fewer KV tokens"
        return f"reads {tokens}, estimated {time}; {planned_by}"


def run(args: argparse.Namespace) -> int:
    """Show the plan of a batch; the exit status is 0."""
    get_divider(args.divider or "flashforge")
    report = _report(args)
    if args.svg is not None:
        _draw(report, args.svg)
    if args.json:
        print(json.dumps(_as_json(report), indent=1))
    else:
        _print(report)
        if args.svg is not None:
            print(f"wrote {args.svg}")
    return 0


def _report(args: argparse.Namespace) -> Report:
    """Plan what is not recorded."""
    if args.file is None and args.step is not None:
        raise PrefixShareError("--step is a line of a FILE: name one, or leave it out.")
    if args.file is not None and args.block_size is not None:
        raise PrefixShareError(f"{args.file} says its block size: leave out --block-size.")
    batch = _batch(args)
    if batch.recorded is None:
        layer = _layer(args, batch.block_size)
        names = [args.divider or layer.config.divider]
        names += _others(*names) if args.compare else []
        plans = [layer.plan(batch, name) for name in names]
        forest = forest_of(batch, layer.attention)
        return Report(batch, forest, plans, plans[0], layer.attention, _priced(layer))
    _refuse_other_engines(args)
    engine = batch.recorded.engine
    forest = forest_of(batch, engine.attention, engine.query_len)
    ran = as_run(batch.recorded, forest)
    made_by = f"as the engine ran it: {engine.kernel} kernel on {engine.device}"
    names = [] if args.divider is None else [args.divider]
    names += _others(*names, ran.divider) if args.compare else []
    plans, prices = [], None
    if names:
        layer = Layer.of_engine(engine.attention, engine.kernel, engine.device, engine.query_len)
        plans = [layer.plan(batch, name) for name in names]
        prices = f"planned here for the same engine, {_priced(layer)}"
    if args.divider is not None:
        made_by = str(prices)
    plans.insert(0 if args.divider is None else 1, ran)
    return Report(batch, forest, plans, ran, engine.attention, made_by, prices)


def _priced(layer: Layer) -> str:
    return f"priced by the {layer.cost_source}"


def _others(*shown: str) -> list[str]:
    """The dividers but those shown."""
    return [name for name in DIVIDERS if name not in shown]


def _batch(args: argparse.Namespace) -> Batch:
    if args.file is None:
        size = attention_of(args).block_size
        return tree_batch(TREE if args.tree is None else args.tree, size)
    if args.tree is not None:
        raise PrefixShareError(f"{args.file} and --tree are two batches: leave out one of them.")
    return read_batch(args.file, args.step)


def _refuse_other_engines(args: argparse.Namespace) -> None:
    """Raise ``PrefixShareError`` for options that a trace answers."""
    given = [name for name in TRACED if vars(args)[name] not in (None, "auto")]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise PrefixShareError(
            f"{args.file} has the shape and the device of its engine: leave out {options}."
        )


def _layer(args: argparse.Namespace, block_size: int) -> Layer:
    """The layer that the options describe."""
    check_range(args, "workers", 1, MAX_WORKERS)
    attention = replace(attention_of(args), block_size=block_size)
    layer = Layer.on(GPU if args.gpu is None else args.gpu, attention)
    config = layer.config
    if args.workers is not None:
        config = replace(config, num_workers=args.workers)
    return replace(layer, config=config)


def _draw(report: Report, path: Path) -> None:
    """Write the picture of a plan."""
    made = report.plans[0].made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters of a name that the font has not
        figure = picture.picture(
            f"Prefix forest of {report.batch.name}",
            f"{_requests(report.forest)}, {made.kv_tokens:,} KV tokens one by one, "
            f"{made.kv_tokens_read:,} as planned ({report.plans[0].share_factor:.2f} times less)",
            f"divider {report.plans[0].title}; {report.made_by}",
            report.forest,
            made.plan,
            report.batch.seq_lens,
        )
        data = picture.encoded(figure)
    try:
        path.write_bytes(data)
    except OSError as e:
        raise PrefixShareError(f"{path} cannot be written ({e}): name another file.") from None


def _requests(forest: Forest) -> str:
    return "1 request" if forest.num_reqs == 1 else f"{forest.num_reqs} requests"


def _as_json(report: Report) -> dict[str, Any]:
    batch, forest, recorded = report.batch, report.forest, report.batch.recorded
    return {
        "batch": batch.name,
        "block_size": batch.block_size,
        "requests": forest.num_reqs,
        "kv_tokens": report.unshared.made.kv_tokens,
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
        "engine": None if recorded is None else asdict(recorded.engine),
        "made_by": report.made_by,
        "prices": report.prices,
        "attention_us_unshared": round(report.unshared.unshared_us, 2),
        "attention_gain": round(report.gain, 3),
        "verdict": report.verdict,
        "dividers": [_row(planned) for planned in report.plans],
        "workers": _workers(forest, report.plans[0].made.plan),
    }


def _row(planned: Planned) -> dict[str, Any]:
    plan = planned.made.plan
    loads = plan.worker_us
    return {
        "divider": planned.divider,
        "default": planned.divider == planned.default_divider,
        "as_run": planned.as_run,
        "kv_tokens_read": planned.made.kv_tokens_read,
        "share_factor": round(planned.share_factor, 3),
        "attention_us": round(planned.attention_us, 2),
        "tiles": plan.num_tiles,
        "partials": plan.num_partials,
        "busiest_worker_us": round(float(loads.max()), 2),
        "mean_worker_us": round(float(loads.mean()), 2),
        "plan_ms": round(planned.made.seconds * 1e3, 3),
    }


def _workers(forest: Forest, plan: DecodePlan) -> list[list[dict[str, Any]]]:
    """The work tiles of each worker; node -1 is what a request reads alone."""
    return [
        [
            {
                "us": round(tile.us, 2),
                "requests": tile.requests,
                "reads": [piece._asdict() for piece in tile.pieces],
            }
            for tile in tiles
        ]
        for tiles in picture.schedule(forest, plan)
    ]


def _print(report: Report) -> None:
    batch, forest = report.batch, report.forest
    kv_tokens = report.unshared.made.kv_tokens
    print(f"{batch.name}, {report.made_by}")
    print(_shape(report.attention))
    print(f"{_requests(forest)}, {kv_tokens} KV tokens read one by one")
    for line in forest_lines(forest, batch.seq_lens):
        print(line)
    print()
    rows = [("divider", *(title for _, title, _ in COLUMNS))]
    for planned in report.plans:
        row = _row(planned)
        name = planned.title + (", as run" if planned.as_run else "")
        rows.append((name, *(format(row[field], form) for field, _, form in COLUMNS)))
    unshared_us = f"{report.unshared.unshared_us:.1f}"
    rows.insert(2, ("unshared", str(kv_tokens), "1.00", unshared_us, *["-"] * 5))
    print_table(rows)
    if report.prices is not None and report.prices != report.made_by:
        print(f"other dividers are {report.prices}")
    print(report.verdict)


def _shape(a: AttentionConfig) -> str:
    text = f"{a.num_qo_heads} query and {a.num_kv_heads} KV heads, head_dim {a.head_dim}, {a.dtype}"
    if a.kv_dtype is not None:
        text += f", KV cache {a.kv_dtype}"
    if a.sliding_window is not None:
        text += f", sliding window of {a.sliding_window} tokens"
    return f"{text}, blocks of {a.block_size} tokens"


def forest_lines(forest: Forest, seq_lens: IntArray) -> list[str]:
    """A line for each node, indented below its parent, and one for the private parts.

    Args:
        seq_lens: ``[num_reqs]`` tokens of each batch row.
    """
    depth = np.zeros(forest.num_nodes, int)
    for i, parent in enumerate(forest.node_parent.tolist()):
        depth[i] = depth[parent] + 1 if parent >= 0 else 0
    # as many levels as fit, but always the first
    fits = np.cumsum(np.bincount(depth)) <= MAX_LINES
    levels = max(1, int(fits.sum()))
    tokens = forest.node_end - forest.node_start
    requests = forest.node_reader_end - forest.node_reader_start
    lines = [
        f"{'  ' * (depth[i] + 1)}node {i}: {tokens[i]} tokens x {requests[i]} requests"
        for i in np.flatnonzero(depth < levels)
    ][:MAX_LINES]
    if more := forest.num_nodes - len(lines):
        lines.append(f"  and {more} nodes more")
    private = seq_lens[forest.request_rows] - forest.private_start
    low, high = int(private.min()), int(private.max())
    of = f"{low}" if low == high else f"{low} to {high}"
    return [*lines, f"  private parts of {of} tokens"]
