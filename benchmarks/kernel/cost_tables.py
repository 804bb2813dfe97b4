"""Every cost table that is shipped for a GPU, measured on the one that is here: both GPU kernels at
head_dim 64, 128 and 256, with 16-bit and fp8 KV caches. MLA layers plan by an estimate.

    python -m benchmarks.kernel.cost_tables --out vllm_prefixshare/planning/costs/tables

Each table is a file, written when it is there; those that are there already are left out. A table
takes about 10 seconds on an H200. What no kernel serves is named.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.support.program import make_parser, one_sentence
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import fingerprint, has_gpu
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.profiling.gpu_table import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    measure_gpu,
)

PROGRAM = "benchmarks.kernel.cost_tables"

OUT = Path("results/cost_tables")
HEAD_DIMS = (64, 128, 256)
REPEATS = 15


KernelName = Literal["auto", "hopper", "portable"]


class Profiled(NamedTuple):
    """A layer, and the kernel that runs it."""

    attention: AttentionConfig
    kernel: KernelName

    @property
    def title(self) -> str:
        """Kernel, head_dim and type of the KV cache."""
        cache = "fp8" if self.attention.kv_dtype else "16-bit"
        return f"{self.kernel}, head_dim {self.attention.head_dim}, {cache} KV cache"


def profiled() -> Iterator[Profiled]:
    """Everything that has a table, the Hopper kernel first."""
    named: tuple[KernelName, ...] = ("hopper", "portable")
    for name, head_dim, cache in product(named, HEAD_DIMS, (None, FP8)):
        # as in an engine, queries are quantised where the cache is
        layer = NUM_QO_HEADS, NUM_KV_HEADS, head_dim, BLOCK_SIZE, "bfloat16", cache, cache
        yield Profiled(AttentionConfig(*layer), name)


def measure(of: Profiled) -> CostTable:
    """The table of one layer on this GPU.

    Raises:
        PrefixShareError: no kernel serves it here.
    """
    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
    from vllm_prefixshare.profiling.gpu_timing import GpuTimer, capture

    timer = GpuTimer()
    return measure_gpu(
        of.attention,
        lambda shape: GpuExecutor(shape, "cuda", kernel=of.kernel),
        lambda call: timer.time(capture(call)[0].replay, REPEATS).median_ms * 1e3,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of tables (default: {OUT})")
    parser.add_argument("--fresh", action="store_true", help="replace tables that are there")
    return parser.parse_args(argv)


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not has_gpu():
        raise PrefixShareError("there is no GPU here: 'vllm-prefixshare profile' measures a CPU.")
    for of in profiled():
        path = args.out / fingerprint(of.attention, of.kernel).file_name()
        if path.exists() and not args.fresh:
            print(f"{of.title}: {path.name} is there", flush=True)
            continue
        try:
            table = measure(of)
        except PrefixShareError as e:
            print(f"{of.title}: left out: {e}", flush=True)
            continue
        table.save(path)
        print(f"{of.title}: wrote {path.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
