"""Measure the cost table of this machine for one attention shape."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from vllm_prefixshare.cli.options import (
    add_cache_argument,
    add_shape_arguments,
    attention_of,
)
from vllm_prefixshare.cli.output import print_table
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import cache_folder, has_gpu
from vllm_prefixshare.planning.costs.table import CostTable, Grid
from vllm_prefixshare.vllm_plugin import compat

EXAMPLE = """\
The cost table for a model's shape, kept where the backend finds it:

    vllm-prefixshare profile --model /models/Llama-3.1-8B

It takes up to two minutes on an idle machine. 'vllm-prefixshare doctor --model ...' says whether
the table that is named in VLLM_PREFIXSHARE_COST_TABLE fits."""

#: vLLM's on a CPU.
BLOCK_SIZE = 128
MLA_REASON = (
    "which needs no cost table, as its plans were no faster by measured prices than estimated"
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_shape_arguments(command, block_size=str(BLOCK_SIZE))
    add_cache_argument(command)
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to measure; auto: on a GPU if there is one",
    )
    command.add_argument(
        "--kernel", choices=("auto", "hopper", "portable"), default="auto", help="of a GPU"
    )
    command.add_argument(
        "--out", type=Path, help="a .json file or a folder (default: the cache folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and store a table; the exit status is 0."""
    attention = attention_of(args, BLOCK_SIZE, MLA_REASON)
    on_gpu = args.device == "cuda" or (args.device == "auto" and has_gpu())
    table = _profile_gpu(attention, args.kernel) if on_gpu else _profile_cpu(attention)
    path = args.out or cache_folder()
    if path.suffix != ".json":
        path /= table.fingerprint.file_name()
    table.save(path)
    if args.json:
        print(json.dumps({"path": str(path), "table": table.to_json()}, indent=1))
    else:
        _print(table, path)
    return 0


def _profile_cpu(attention: AttentionConfig) -> CostTable:
    if attention.kv_dtype is not None:
        raise PrefixShareError(
            "layers with an fp8 KV cache keep vLLM's own backend on a CPU, which reads no cost "
            f"table: name --kv-cache-dtype {attention.dtype}, or --device cuda on a GPU."
        )
    compat.check_release(on_cpu=True)
    from vllm_prefixshare.profiling.cpu_table import measure_cpu
    from vllm_prefixshare.vllm_plugin.backends.cpu.timing import check_shape, cpu_attn_timer

    check_shape(attention)
    return measure_cpu(attention, cpu_attn_timer(attention))


def _profile_gpu(
    attention: AttentionConfig, kernel: Literal["auto", "hopper", "portable"]
) -> CostTable:
    from vllm_prefixshare.profiling.gpu_table import measure_gpu

    if not has_gpu():
        raise PrefixShareError("torch finds no NVIDIA GPU here: use --device cpu.")
    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
    from vllm_prefixshare.profiling.gpu_timing import GpuTimer, capture

    timer = GpuTimer()

    def microseconds(call: Callable[[], object]) -> float:
        return timer.time(capture(call)[0].replay, repeats=15).median_ms * 1e3

    return measure_gpu(
        attention, lambda shape: GpuExecutor(shape, "cuda", kernel=kernel), microseconds
    )


def _print(table: CostTable, path: Path) -> None:
    print("microseconds of a tile: query rows of a KV head (down) x KV tokens (across)")
    _print_grid(table.tile_us, table.unshared_us)
    if table.tile_l2_us is not None:
        print("the same where other tiles read these tokens at the same time (from L2)")
        _print_grid(table.tile_l2_us)
    print(f"merging a row of a partial result: {table.merge_us:.4f}")
    print(f"wrote {path}")


def _print_grid(grid: Grid, alone: Grid | None = None) -> None:
    """Print a table of microseconds, with a row for a single request, if there is one."""
    rows = [("", *(f"{n:.0f}" for n in grid.kv_len))]
    for count, line in zip(grid.rows, grid.microseconds, strict=True):
        rows.append((f"{count:.0f}", *(f"{us:.1f}" for us in line)))
    if alone is not None:
        rows.append(("alone", *(f"{us:.1f}" for us in alone.microseconds[0])))
    print_table(rows)
