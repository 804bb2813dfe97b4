"""Compile the variants of the kernels that a backend can choose, with the first Triton on the path
and its own assembler; no GPU is needed. Prints one JSON object per binary.

    python -m tests.support.compile_matrix --capability 9.0 --variants main
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch
import triton

from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.kernels.aot.compilation import compile_launches, load_cache_write
from vllm_prefixshare.kernels.aot.dispatch import only_compile
from vllm_prefixshare.kernels.aot.gpu_target import stand_in
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.catalog import candidates
from vllm_prefixshare.kernels.registry import make_kernel

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
HEADS = ((16, 1), (64, 8), (32, 8), (32, 32))
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Variant:
    heads: tuple[int, int]
    head_dim: int
    queries: int = 1
    tree: bool = False
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Extra(Variant):
    """A variant with extra features of a layer; ``features`` as in ``AttentionConfig``."""

    kv_dtype: str | None = None
    query_dtype: str | None = None
    features: tuple[str, ...] = ()
    block_size: int = 16
    kv_lora_rank: int | None = None


LATENTS = Extra((16, 1), 576, block_size=64, kv_lora_rank=512)  # MLA
FP8_LATENTS = Extra((16, 1), 576, kv_dtype=FP8, query_dtype=FP8, block_size=64, kv_lora_rank=512)


def extras(which: str) -> Iterator[Variant]:
    """Variants with extras. ``few-extras``: most extras at once; ``extras``: all."""
    yield Extra((32, 8), 128, kv_dtype=FP8, query_dtype=FP8, features=("sinks", "soft_cap"))
    yield Extra((16, 2), 256, 2, block_size=528)  # Qwen3-Next
    yield LATENTS
    yield FP8_LATENTS
    yield replace(FP8_LATENTS, queries=2)  # drafts
    if which == "few-extras":
        return
    yield from (Extra((n, 1), 576, block_size=64, kv_lora_rank=512) for n in (8, 24, 32))
    yield from (replace(FP8_LATENTS, heads=(n, 1)) for n in (8, 32))
    yield replace(LATENTS, queries=2)
    yield Extra((32, 8), 128, features=("sinks", "soft_cap"))
    for features in (("sinks",), ("soft_cap",), ("alibi",), ("alibi", "sinks", "soft_cap")):
        yield Extra((32, 8), 128, features=features)
        yield Extra((32, 8), 128, 4, True, features=features)
    yield Extra((64, 8), 64, features=("sinks",))  # gpt-oss
    yield Extra((16, 8), 256, features=("soft_cap",))  # Gemma 2
    for heads, dim in (((32, 8), 112), ((32, 32), 192)):  # the others that are not a power of two
        yield Extra(heads, dim)
        yield Extra(heads, dim, 4, True)
    yield Extra((16, 2), 512)
    yield Extra((16, 2), 512, 4, True)
    yield Extra((32, 8), 128, kv_dtype=FP8)
    for heads, dim in product(HEADS, (64, 128, 256)):
        yield Extra(heads, dim, kv_dtype=FP8, query_dtype=FP8)
    yield Extra((32, 8), 128, 4, True, kv_dtype=FP8, query_dtype=FP8)
    yield Extra((64, 8), 64, kv_dtype=FP8, query_dtype=FP8, features=("sinks",))


def variants(which: str) -> Iterator[Variant]:
    """``few``: the commonest variants; ``main``: each property changed alone; ``all``: every
    variant.
    """
    if which.endswith("extras"):
        yield from extras(which)
        return
    few = [Variant((32, 8), 128), Variant((32, 8), 128, 4, True), Variant((32, 32), 128)]
    yield from few
    if which == "few":
        return
    if which == "main":
        yield from (Variant(heads, 128) for heads in ((16, 1), (64, 8)))
        yield from (Variant((32, 8), dim) for dim in HEAD_DIMS if dim != 128)
        yield Variant((32, 8), 128, 4)
        yield Variant((16, 1), 128, 4)
        yield Variant((32, 8), 256, 4, True)
        yield Variant((32, 8), 128, dtype="float16")
        return
    for heads in HEADS:
        for dim in HEAD_DIMS:
            for queries, tree in ((1, False), (4, False), (4, True)):
                if Variant(heads, dim, queries, tree) not in few:
                    yield Variant(heads, dim, queries, tree)
    yield from (Variant((32, 8), dim, dtype="float16") for dim in HEAD_DIMS)


def compile_cache_write(attention: AttentionConfig, capability: str) -> dict:
    """What the cache write of a layer uses, and how many of its accesses move 16 bytes at once.

    Raises:
        CompileError: it does not compile.
    """
    major, minor = map(int, capability.split("."))
    stand_in((major, minor))
    log = io.StringIO()
    with contextlib.redirect_stdout(log), only_compile() as binaries:
        load_cache_write(attention, torch.device("meta"))
        for layout in ("NHD", "HND"):
            write_some(CacheWrite.of(attention), layout)
    binary = binaries[0]
    assert all(b is binary for b in binaries), "one binary serves every batch and layout"
    accesses = re.findall(r"(?:ld|st)\.global\S*", binary.asm["ptx"])
    return {
        "triton": triton.__version__,
        "capability": capability,
        "kernel": "cache_write",
        "head_dim": attention.head_dim,
        "warps": binary.metadata.num_warps,
        **used(log.getvalue())[0],
        "starts_next": "griddepcontrol.launch_dependents" in binary.asm["ptx"],
        "accesses": len(accesses),
        "wide": sum(access.endswith((".v4.b32", ".v2.b64")) for access in accesses),
    }


def write_some(write: CacheWrite, layout: str) -> None:
    """A step's write of three tokens as vLLM asks for it, on tensors without memory."""
    heads, widths = write.num_heads, (write.k_width, write.v_width)
    new = {"dtype": write.dtype, "device": "meta"}
    qkv = torch.empty(3, 5 * heads * max(widths), **new)
    key, value = (qkv[:, : heads * width].unflatten(1, (heads, width)) for width in widths)
    shape = (heads, write.block_size) if layout == "HND" else (write.block_size, heads)
    cache = torch.empty(7, 3, *shape, sum(widths), **new)[:, 0]  # of three layers
    if layout == "HND":
        cache = cache.transpose(1, 2)
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    assert write.write(key, value, *cache.split(widths, dim=-1), slots)


def used(log: str) -> list[dict]:
    """Registers and bytes spilled by a thread of each binary, from the assembler's log."""
    spills = re.findall(r"(\d+) bytes spill stores", log)
    registers = re.findall(r"Used (\d+) registers", log)
    assert len(spills) == len(registers), log
    return [
        {"registers": int(registers), "spilled": int(spilled)}
        for spilled, registers in zip(spills, registers, strict=True)
    ]


def compile_variant(
    variant: Variant, capability: str, kernel: str | None, lse: bool = False
) -> Iterator[dict]:
    """Registers, bytes spilled by a thread and shared memory of each binary.

    Raises:
        CompileError: the kernel does not compile, or does not fit the shared memory of such a GPU.
    """
    major, minor = map(int, capability.split("."))
    gpu = stand_in((major, minor))
    more = {name: getattr(variant, name) for name in set(asdict(variant)) - set(asdict(PLAIN))}
    more = {"block_size": 16, "dtype": variant.dtype, **more}
    attention = AttentionConfig(*variant.heads, variant.head_dim, **more)
    if attention.kv_lora_rank is not None and capability != "9.0":
        return  # vLLM's own backend serves it
    for name in candidates(attention, gpu):
        if kernel not in (None, name):
            continue
        made = make_kernel(name, attention, variant.queries, gpu)
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            options = {"tree": variant.tree, "lse": lse}
            binaries = compile_launches(made, attention, variant.queries, gpu, **options)
            other = compile_launches(made, attention, variant.queries, gpu, layout="HND", **options)
        assert [a.hash for a in binaries] == [b.hash for b in other], "NHD and HND are one binary"
        # merge states depends on fewer properties: most of its binaries are compiled already
        fresh = [b for b in binaries if b.hash not in SEEN]
        SEEN.update(b.hash for b in fresh)
        if name == "portable" and major != 10:  # 10.0 waits for its products as well
            (ir,) = (b.asm["ttgir"] for b in binaries if "merge" not in b.name)
            waits = ir.count("ttg.async_wait")
            assert waits == WAITS, f"{variant}: a loop is not pipelined, {waits} waits"
        if name == "portable":  # each thread block takes 1 KiB more than it asks for
            most = max(binary.metadata.shared for binary in binaries) + 1024
            blocks = made.tile.blocks_per_sm
            assert blocks * most <= gpu.shared_memory + 1024, f"{variant}: {most} B, {blocks} times"
        for binary, uses in zip(fresh, used(log.getvalue()), strict=True):
            yield {
                "triton": triton.__version__,
                "capability": capability,
                "kernel": "merge_states" if "merge" in binary.name else name,
                **asdict(variant),
                "warps": binary.metadata.num_warps,
                **uses,
                "shared": binary.metadata.shared,
            }


PLAIN = Variant((32, 8), 128)
#: layers for the cache write: Llama's; blocks and heads that are no powers of two; with latents
CACHE_WRITES = (
    AttentionConfig(32, 8, 128, 16),
    AttentionConfig(24, 12, 80, 528, "float16"),
    AttentionConfig(16, 1, 576, 64, kv_lora_rank=512),
)
#: for K and for V, in each of the two loops over KV tiles of the portable kernel
WAITS = 4
#: binaries that this process has compiled
SEEN: set[str] = set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", nargs="+", default=CAPABILITIES)
    parser.add_argument(
        "--variants",
        default="all",
        choices=("few", "main", "all", "few-extras", "extras", "cache-write"),
    )
    parser.add_argument("--kernel", choices=("hopper", "portable"))
    parser.add_argument("--lse", action="store_true", help="with the log-sum-exp as a result")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th of them, from the I-th on")
    args = parser.parse_args()
    expected = os.environ.get("PREFIXSHARE_EXPECT_TRITON", triton.__version__)
    assert triton.__version__ == expected, f"found Triton {triton.__version__}"
    triton.knobs.compilation.always_compile = True  # for the assembler's log of resources
    triton.knobs.nvidia.dump_ptxas_log = True
    if args.variants == "cache-write":
        for attention, capability in product(CACHE_WRITES, args.capability):
            print(json.dumps(compile_cache_write(attention, capability)), flush=True)
        return
    part, parts = map(int, args.part.split("/"))
    everything = list(product(variants(args.variants), args.capability))
    for variant, capability in everything[part::parts]:
        for row in compile_variant(variant, capability, args.kernel, args.lse):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
