"""Compile the variants of the kernels that a backend can choose, with the first Triton on the path
and its own assembler; no GPU is needed. Prints one JSON object per binary.

    python -m tests.kernels.compile_matrix --capability 9.0 --variants main
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

import triton

from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.kernels.compile import compile_launches
from vllm_prefixshare.kernels.precompile import stand_in
from vllm_prefixshare.kernels.registry import candidates, make_kernel

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


def extras(which: str) -> Iterator[Variant]:
    """Variants with extras. ``few-extras``: most extras at once; ``extras``: all."""
    yield Extra((32, 8), 128, kv_dtype=FP8, query_dtype=FP8, features=("sinks", "soft_cap"))
    yield Extra((16, 2), 256, 2, block_size=528)  # Qwen3-Next
    if which == "few-extras":
        return
    yield Extra((32, 8), 128, features=("sinks", "soft_cap"))
    for features in (("sinks",), ("soft_cap",), ("alibi",), ("alibi", "sinks", "soft_cap")):
        yield Extra((32, 8), 128, features=features)
        yield Extra((32, 8), 128, 4, True, features=features)
    yield Extra((64, 8), 64, features=("sinks",))  # gpt-oss
    yield Extra((16, 8), 256, features=("soft_cap",))  # Gemma 2
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
        spills = re.findall(r"(\d+) bytes spill stores", log.getvalue())
        registers = re.findall(r"Used (\d+) registers", log.getvalue())
        # merge states depends on fewer properties: most of its binaries are compiled already
        fresh = [b for b in binaries if b.hash not in SEEN]
        SEEN.update(b.hash for b in fresh)
        if name == "portable" and major != 10:  # 10.0 waits for its products as well
            (ir,) = (b.asm["ttgir"] for b in binaries if "merge" not in b.name)
            waits = ir.count("ttg.async_wait")
            assert waits == WAITS, f"{variant}: a loop is not pipelined, {waits} waits"
        assert len(fresh) == len(spills) == len(registers), log.getvalue()
        for binary, spilled, used in zip(fresh, spills, registers, strict=True):
            yield {
                "triton": triton.__version__,
                "capability": capability,
                "kernel": "merge_states" if "merge" in binary.name else name,
                **asdict(variant),
                "warps": binary.metadata.num_warps,
                "registers": int(used),
                "spilled": int(spilled),
                "shared": binary.metadata.shared,
            }


PLAIN = Variant((32, 8), 128)
#: for K and for V, in each of the two loops over KV tiles of the portable kernel
WAITS = 4
#: binaries that this process has compiled
SEEN: set[str] = set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", nargs="+", default=CAPABILITIES)
    parser.add_argument(
        "--variants", default="all", choices=("few", "main", "all", "few-extras", "extras")
    )
    parser.add_argument("--kernel", choices=("hopper", "portable"))
    parser.add_argument("--lse", action="store_true", help="with the log-sum-exp as a result")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th of them, from the I-th on")
    args = parser.parse_args()
    expected = os.environ.get("PREFIXSHARE_EXPECT_TRITON", triton.__version__)
    assert triton.__version__ == expected, f"found Triton {triton.__version__}"
    triton.knobs.compilation.always_compile = True  # for the assembler's log of resources
    triton.knobs.nvidia.dump_ptxas_log = True
    part, parts = map(int, args.part.split("/"))
    everything = list(product(variants(args.variants), args.capability))
    for variant, capability in everything[part::parts]:
        for row in compile_variant(variant, capability, args.kernel, args.lse):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
