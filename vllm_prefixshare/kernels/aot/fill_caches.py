r"""Program that fills the caches of Triton or Numba with compiled code; it needs no GPU.

On a fresh machine Triton compiles kernels and Numba planning for half a minute.
``vllm_plugin.background_compilation`` starts this program for each while an engine imports its
modules and loads its weights:

    python -m vllm_prefixshare.kernels.aot.fill_caches kernels --capability 9.0 \
        --num-qo-heads 32 --num-kv-heads 8 --head-dim 128
    python -m vllm_prefixshare.kernels.aot.fill_caches planning --capability 9.0
"""

import argparse
import sys
from pathlib import Path

import torch

from vllm_prefixshare.config import FP8, KERNELS, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.aot.compilation import CompileError, load_cache_write
from vllm_prefixshare.kernels.aot.dispatch import only_compile
from vllm_prefixshare.kernels.aot.gpu_target import stand_in
from vllm_prefixshare.kernels.interface import Kernel
from vllm_prefixshare.kernels.plans import planner_config
from vllm_prefixshare.kernels.registry import candidates, first_that_compiles, make_kernel
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.plan import longest_first
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.utils.numba_cache import is_kept


def warm_up_planning(kernel: Kernel, attention: AttentionConfig) -> None:
    """Compile the planning and layout functions for the default divider of ``kernel``."""
    config = planner_config(kernel.limits, attention)
    cost = analytic_cost(attention, "hopper")
    planner = DecodePlanner(config, cost, attention.block_size, attention.gqa_group_size)
    planner.warm_up(then=kernel.layout)


def compile_cache_write(attention: AttentionConfig) -> None:
    """Compile the cache write. A failure is printed only, because an engine runs without it."""
    try:
        with only_compile():
            load_cache_write(attention, torch.device("meta"))
    except CompileError as e:
        print(e, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the program.

    Returns:
        Exit status: 0 if all is compiled; 2 after an error on standard error.
    """
    parser = argparse.ArgumentParser(description=__doc__, prog="fill_caches")
    parser.add_argument("what", choices=("kernels", "planning"))
    parser.add_argument("--capability", required=True, help="of the GPU, as in 9.0")
    # the defaults are Llama-3.1-8B's; planning is the same for all of them
    parser.add_argument("--num-qo-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-lora-rank", type=int, help="of a latent KV cache (MLA)")
    parser.add_argument("--kv-dtype", choices=(FP8,), help="of the KV cache, and of queries")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--query-len", type=int, default=1, help="1 + speculative tokens")
    parser.add_argument("--kernel", default="auto", choices=KERNELS)
    parser.add_argument("--done", type=Path, help="make this empty file once all is compiled")
    args = parser.parse_args(arguments)
    try:
        major, _, minor = args.capability.partition(".")
        gpu = stand_in((int(major), int(minor or 0)))
        heads = args.num_qo_heads, args.num_kv_heads
        attention = AttentionConfig(
            *heads, args.head_dim, args.block_size, args.dtype, args.kv_dtype, args.kv_dtype,
            kv_lora_rank=args.kv_lora_rank,
        )  # fmt: skip
        if args.what == "planning":
            if not is_kept(longest_first):  # an engine would wait for the lock, then compile
                print("Numba has no folder for what it compiles", file=sys.stderr)
                return 2
            name = candidates(attention, gpu, args.kernel, args.query_len)[0]
            warm_up_planning(make_kernel(name, attention, args.query_len, gpu), attention)
            print(f"compiled planning for kernel '{name}'")
        else:
            choice = first_that_compiles(attention, gpu, args.kernel, args.query_len)
            if choice.passed_over:
                print(choice.passed_over, file=sys.stderr)
            if attention.kv_dtype is None:  # as in an engine
                compile_cache_write(attention)
            print(
                f"compiled kernel '{choice.kernel.name}' for compute capability {args.capability}"
            )
        if args.done is not None:
            args.done.parent.mkdir(parents=True, exist_ok=True)
            args.done.touch()
    except (PrefixShareError, ValueError, OSError) as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
