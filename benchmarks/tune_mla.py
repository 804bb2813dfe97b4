"""Variants of the kernels for latent KV caches beside FlashAttention-3, in one table.

Every output is compared with float32 attention, for all requests, before its time counts; times are
medians of CUDA-graph replays with the L2 cache flushed before each. A wrong variant makes the exit
status 1.

    python benchmarks/tune_mla.py
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench_kernel import KNOWN_RATES, make_case, parse, reference, roof_bytes_and_flops, run_peer
from peers import Options, UnavailableError, make

from vllm_prefixshare.costs.gpu_timing import GpuTimer, measure_rates
from vllm_prefixshare.kernels.mla import launch as portable
from vllm_prefixshare.kernels.mla_hopper import launch as hopper
from vllm_prefixshare.kernels.portable.launch import QTile
from vllm_prefixshare.kernels.registry import choose_kernel
from vllm_prefixshare.workloads.trees import tree

TREES = "1,64_32768,128", "1,128_4096,128", "1,256_2048,256", "64_4096"
#: name -> (peer, attributes of the modules that launch)
VARIANTS = {
    "FA3": ("fa3", {}),
    "hopper": ("ours", {}),
    "hopper, lazy": ("ours", {"lazy": True}),
    "triton 64x64": ("portable", {"tile": QTile(64, 64, 8, 2, 1)}),
    "triton 64x32": ("portable", {"tile": QTile(64, 32, 8, 3, 1)}),
    "triton 32x32": ("portable", {"tile": QTile(32, 32, 8, 2, 1)}),
}


@contextmanager
def variant(lazy: bool = False, tile: QTile | None = None) -> Iterator[None]:
    """Kernels that are chosen within this context are made so."""
    kept = hopper.LAZY, portable.q_tile
    choose_kernel.cache_clear()
    hopper.LAZY = lazy
    if tile is not None:
        portable.q_tile = lambda gpu: tile
    try:
        yield
    finally:
        hopper.LAZY, portable.q_tile = kept
        choose_kernel.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--tree", nargs="+", default=TREES)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    chosen = parser.parse_args()
    args = parse(["--mla", "--block-size", str(chosen.block_size)])
    timer = GpuTimer()
    rates = KNOWN_RATES.get(torch.cuda.get_device_name(), measure_rates(timer))
    options = Options(args.device, torch.bfloat16, {})
    wrong = False
    print("workload            heads    roof  " + "".join(f"{x:>20}" for x in chosen.variants))
    for heads in chosen.heads:
        for spec in chosen.tree:
            case = make_case(tree(spec, chosen.block_size), (heads, 1), args)
            expected = reference(case)
            roof = rates.roof_ms(*roof_bytes_and_flops(case))
            print(f"{spec:<20}{heads:>5}  {roof:.4f}  ", end="", flush=True)
            notes = []
            for name in chosen.variants:
                peer, attributes = VARIANTS[name]
                with variant(**attributes):
                    try:
                        made = make(peer, options)
                    except UnavailableError as e:
                        made = e
                    found = run_peer(made, case, expected, timer, chosen.repeats, 1e9)
                if found["status"] == "ok":
                    print(f"{found['ms']:>10.4f} e={found['error']:.4f} ", end="", flush=True)
                    notes.append(f"  {name}: {found['note']}")
                else:
                    wrong |= found["status"] != "unavailable"
                    print(f"{found['status']:>20}", end="", flush=True)
                    notes.append(f"  {name}: {found.get('reason') or found.get('error')}")
            print("\n" + "\n".join(notes), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
