"""``vllm-prefixshare``: doctor, profile, inspect."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vllm_prefixshare import envs
from vllm_prefixshare.config import DTYPES, AttentionConfig, PlannerConfig
from vllm_prefixshare.records import PrefixShareError

if TYPE_CHECKING:
    from vllm_prefixshare.costs.cost_table import CostTable, Grid


def doctor(args: argparse.Namespace) -> int:
    """Say what is installed, what is set, and whether the backend can be chosen."""
    from importlib.metadata import entry_points

    from vllm_prefixshare import __version__
    from vllm_prefixshare.integration import compat

    print(f"vllm_prefixshare   {__version__}")
    plugins = entry_points(group="vllm.general_plugins")
    found = any(p.value.startswith("vllm_prefixshare.") for p in plugins)
    print(f"plugin             {'registered' if found else 'not registered'}")
    for name in envs.VARIABLES:
        print(f"{name:<30} {envs.get(name)}")
    envs.check_environment()
    print(f"vLLM               {compat.vllm_version()}")
    compat.check_vllm_version()
    if not found:
        raise PrefixShareError("vLLM does not see the plugin: install it with 'pip install .'.")
    from vllm_prefixshare.integration.hooks import HOOKS, check_platform, install_hooks
    from vllm_prefixshare.kernels.cpu.native import NativeUnavailableError, load_library

    try:
        load_library()
        print("native executor    ready")
    except NativeUnavailableError as e:
        print(f"native executor    no: {e}")
    install_hooks()
    for hook in HOOKS:
        print(f"hook               {hook.target}")
    check_platform()
    print("PREFIX_SHARE can be chosen")
    return 0


def attention_of(args: argparse.Namespace) -> AttentionConfig:
    """The attention shape named by ``--model``, or by its numbers."""
    if args.model is None:
        return AttentionConfig(
            args.num_qo_heads, args.num_kv_heads, args.head_dim, args.block_size, args.dtype
        )
    path = args.model / "config.json"
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)  # of a multimodal model
        heads = config["num_attention_heads"]
        return AttentionConfig(
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            args.block_size,
            args.dtype,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        if isinstance(e, PrefixShareError):
            raise
        raise PrefixShareError(f"{path} does not describe a model ({e}).") from None


def profile(args: argparse.Namespace) -> int:
    """Measure the cost table of this machine for one attention shape."""
    attention = attention_of(args)
    from vllm_prefixshare.costs.lookup import cache_folder, has_gpu

    on_gpu = args.device == "cuda" or (args.device == "auto" and has_gpu())
    table = _profile_gpu(attention, args.kernel) if on_gpu else _profile_cpu(attention)
    path = args.out or cache_folder()
    if path.suffix != ".json":
        path /= table.fingerprint.file_name()
    table.save(path)
    print("microseconds of a tile: query rows of a KV head (down) x KV tokens (across)")
    _print_grid(table.tile_us)
    if table.tile_l2_us is not None:
        print("the same where other tiles read these tokens at the same time (from L2)")
        _print_grid(table.tile_l2_us)
    if table.unshared_us is not None:
        print(" alone" + "".join(f"{us:10.1f}" for us in table.unshared_us.microseconds[0]))
    print(f"merging a row of a partial result: {table.merge_us:.4f}")
    print(f"written to {path}")
    return 0


def _profile_cpu(attention: AttentionConfig) -> "CostTable":
    from vllm_prefixshare.integration import compat

    compat.check_vllm_version()
    from vllm_prefixshare.costs.profile_cpu import measure_cpu
    from vllm_prefixshare.integration.cpu.timing import cpu_attn_timer

    return measure_cpu(attention, cpu_attn_timer(attention))


def _profile_gpu(
    attention: AttentionConfig, kernel: Literal["auto", "hopper", "portable"]
) -> "CostTable":
    from vllm_prefixshare.costs.lookup import has_gpu
    from vllm_prefixshare.costs.profile_gpu import measure_gpu

    if not has_gpu():
        raise PrefixShareError("torch finds no NVIDIA GPU here: use --device cpu.")
    from vllm_prefixshare.costs.gpu_timing import GpuTimer, capture
    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor

    timer = GpuTimer()
    return measure_gpu(
        attention,
        lambda shape: GpuExecutor(shape, "cuda", kernel=kernel),
        lambda call: timer.time(capture(call)[0].replay, repeats=15).median_ms * 1e3,
    )


def _print_grid(grid: "Grid") -> None:
    print(" " * 6 + "".join(f"{n:10.0f}" for n in grid.kv_len))
    for rows, line in zip(grid.rows, grid.microseconds, strict=True):
        print(f"{rows:6.0f}" + "".join(f"{us:10.1f}" for us in line))


def inspect(args: argparse.Namespace) -> int:
    """Show what every divider makes of a tree."""
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


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="vllm-prefixshare", description=__doc__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    add(doctor)
    for run in (profile, inspect):
        command = add(run)
        command.add_argument("--model", type=Path, help="checkpoint folder to take the shape from")
        command.add_argument("--num-qo-heads", type=int, default=32)
        command.add_argument("--num-kv-heads", type=int, default=8)
        command.add_argument("--head-dim", type=int, default=128)
        command.add_argument("--block-size", type=int, default=128 if run is profile else 16)
        command.add_argument("--dtype", choices=DTYPES, default="bfloat16")
        if run is profile:
            command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
            command.add_argument(
                "--kernel", choices=("auto", "hopper", "portable"), default="auto", help="of a GPU"
            )
            command.add_argument(
                "--out", type=Path, help="a .json file or a folder; default: the cache folder"
            )
        else:
            command.add_argument(
                "--tree", default="1,4,16_1024,256,64", help="see testing.workloads"
            )
            command.add_argument("--divider", help="only this one")
            command.add_argument("--workers", type=int, default=132, help="thread blocks")
            command.add_argument("--tile-rows", type=int, default=128, help="rows of a Q tile")
    return root


def main(argv: list[str] | None = None) -> int:
    """Run a command. A user's mistake is one line on standard error and exit status 2."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except PrefixShareError as e:
        print(f"vllm-prefixshare: error: {e}", file=sys.stderr)
        return 2
