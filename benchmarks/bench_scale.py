"""Decode attention over KV sharded across ranks: tree reduction and ring attention side by side
(Tree Attention, section 6), on the GPUs of one host over nccl or on a CPU over gloo.

    python benchmarks/bench_scale.py --out scale.json
    python benchmarks/bench_scale.py --device cpu --ranks 2 --tokens 4096 --requests 1,4

All requests share one context, of which each rank holds a shard. Every row is checked first: the
last and the first request are compared with one rank's attention over all tokens, in float32. Then
both ways are timed in turns, on each rank from a barrier to the end of its work on the device. The
time of a row is the slowest rank's, and the median over the repeats. The bound is the measured time
in which a rank attends to its own shard, plus the measured time of one small all-reduce.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import repository  # noqa: F401
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from results import versions, write

from vllm_prefixshare import PrefixShareDecodeWrapper, PrefixShareError, merge_states
from vllm_prefixshare.distributed import scaling
from vllm_prefixshare.distributed.ring import RingDecode
from vllm_prefixshare.distributed.shards import Shard, shard
from vllm_prefixshare.distributed.tree_reduction import REDUCTIONS, TreeDecode

BLOCK_SIZE = 16
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
TIMEOUT = 120.0
SMALL = 1024  # bytes of the small all-reduce


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="65536,131072,262144,524288,1048576,2097152")
    parser.add_argument("--requests", default="1,8,64")
    parser.add_argument("--heads", default="32:8", help="query:KV heads")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args(argv)
    for name in ("tokens", "requests"):
        try:
            values = [int(x) for x in getattr(args, name).split(",")]
        except ValueError:
            parser.error(f"--{name} must be numbers separated by commas")
        if min(values) < 1:
            parser.error(f"--{name} must be at least 1")
        setattr(args, name, values)
    try:
        args.qo_heads, args.kv_heads = (int(x) for x in args.heads.split(":"))
    except ValueError:
        parser.error("--heads must be such as 32:8")
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks} needs as many GPUs, {torch.cuda.device_count()} found")
    if args.ranks < 2 or args.repeats < 1:
        parser.error("--ranks must be at least 2, --repeats at least 1")
    return args


def main() -> int:
    args = parse()
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(rank_main, (args, port, results), nprocs=args.ranks)
    result = results.get()
    print_table(result)
    write(args.out, result)
    return 0 if all(row["right"] for row in result["rows"]) else 1


def rank_main(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    """Run one rank: every row in the same order. The first rank reports."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # some hosts with NVLink have no multicast of NVLink
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    decoders = make_decoders(args, device)
    rows = []
    for tokens in args.tokens:
        for num_reqs in args.requests:
            if rank == 0:
                print(f"{tokens} tokens, {num_reqs} requests", file=sys.stderr, flush=True)
            rows.append(measure(rank, args, device, decoders, tokens, num_reqs))
    if rank == 0:
        kind = torch.cuda.get_device_name(device) if args.device == "cuda" else "CPU"
        results.put(
            {
                "command": " ".join(["python", *sys.argv]),
                "device": kind,
                "ranks": args.ranks,
                "heads": args.heads,
                "versions": versions(),
                "repeats": args.repeats,
                "rows": rows,
            }
        )
    dist.destroy_process_group()


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def make_decoders(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Each way, made once, because it connects when it is made."""

    def wrapper() -> PrefixShareDecodeWrapper:
        return PrefixShareDecodeWrapper(
            num_qo_heads=args.qo_heads,
            num_kv_heads=args.kv_heads,
            head_dim=128,
            block_size=BLOCK_SIZE,
            dtype=dtype_on(device),
            device=device,
        )

    decoders: dict[str, Any] = {
        way: TreeDecode(wrapper(), reduction=way, timeout=TIMEOUT) for way in REDUCTIONS
    }
    decoders["ring"] = RingDecode(wrapper, timeout=TIMEOUT)
    return decoders


def measure(
    rank: int,
    args: argparse.Namespace,
    device: torch.device,
    decoders: dict[str, Any],
    tokens: int,
    num_reqs: int,
) -> dict[str, Any]:
    """Measure one row; every rank runs the same."""
    dtype = dtype_on(device)
    layer = scaling.Layer(num_reqs, tokens, 0, args.qo_heads, args.kv_heads, 128, dtype.itemsize)
    blocks = -(-tokens // BLOCK_SIZE)
    table = np.tile(np.arange(blocks, dtype=np.int32), (num_reqs, 1))
    lens = np.full(num_reqs, tokens, np.int32)
    _, own_lens = shard(table, lens, BLOCK_SIZE, rank, args.ranks)
    # each rank's cache holds only its own blocks, the same number on every rank
    held = -(-blocks // args.ranks)
    local = np.tile(np.arange(held, dtype=np.int32), (num_reqs, 1))
    generator = torch.Generator(device).manual_seed(rank)
    shape = (held, BLOCK_SIZE, args.kv_heads, 128)
    caches = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in "kv"]
    shared_seed = torch.Generator(device).manual_seed(1234)
    q = torch.randn(
        (num_reqs, args.qo_heads, 128), device=device, dtype=dtype, generator=shared_seed
    )
    tables = torch.from_numpy(local).to(device), torch.from_numpy(own_lens).to(device)
    own = Shard(caches[0], caches[1], *tables)

    for decoder in decoders.values():
        decoder.plan(local, own_lens)
    runs: dict[str, Callable[[], Any]] = {
        way: (lambda d=decoder: d.run(q, own)) for way, decoder in decoders.items()
    }
    runs["ring"] = lambda: decoders["ring"].run(q, *caches)
    alone = decoders["gather"]
    runs["own shard"] = lambda: alone.partial(q, own)
    small = torch.zeros(SMALL // 4, device=device)
    runs["small all-reduce"] = lambda: alone.ranks.all_reduce(small)

    expected = whole_context(args, q, caches, int(own_lens[0]))
    errors, sent, peaks = {}, {}, {}
    for way in decoders:
        before = decoders[way].ranks.bytes_sent
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
        out, _ = runs[way]()
        sent[way] = decoders[way].ranks.bytes_sent - before
        if device.type == "cuda":
            torch.cuda.synchronize()
            peaks[way] = torch.cuda.max_memory_allocated() - start
        error = (out[[0, -1]].float() - expected).norm() / expected.norm()
        errors[way] = float(error)
    times = in_turns(runs, args.repeats, device)
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, (times, errors))
    slowest = {
        way: median(max(of[0][way][i] for of in everyone) for i in range(args.repeats))
        for way in runs
    }
    worst = {way: max(of[1][way] for of in everyone) for way in errors}
    return {
        "tokens": tokens,
        "requests": num_reqs,
        "us": {way: round(1e6 * seconds, 2) for way, seconds in slowest.items()},
        "bound_us": round(1e6 * (slowest["own shard"] + slowest["small all-reduce"]), 2),
        "errors": worst,
        "right": max(worst.values()) <= TOLERANCE[str(dtype).removeprefix("torch.")],
        "bytes_sent": sent,
        "bytes_model": {
            "gather": scaling.gather_bytes(layer, args.ranks),
            "all_reduce": scaling.all_reduce_bytes(layer, args.ranks),
            "ring": scaling.ring_bytes(layer, args.ranks),
        },
        # without the shard, the queries and the plan, which were allocated before
        "peak_bytes": peaks,
        "peak_model": {
            "gather": scaling.tree_peak_bytes(layer, args.ranks) - layer.kv_bytes / args.ranks,
            "ring": scaling.ring_peak_bytes(layer, args.ranks) - layer.kv_bytes / args.ranks,
        },
    }


def whole_context(
    args: argparse.Namespace, q: torch.Tensor, caches: list[torch.Tensor], own_tokens: int
) -> torch.Tensor:
    """Attention of the first and the last request over all tokens, in float32 and in chunks, from
    every rank's own shard. It uses no kernel and no collective of the ways that are compared.
    """
    group = args.qo_heads // args.kv_heads
    rows = q[[0, -1]].float().view(2, args.kv_heads, group, 128)
    states = []
    flat = [c.view(-1, args.kv_heads, 128)[:own_tokens] for c in caches]
    for at in range(0, max(1, len(flat[0])), 1 << 16):
        k, v = (x[at : at + (1 << 16)].float() for x in flat)
        scores = torch.einsum("rhgd,thd->rhgt", rows, k) * 128**-0.5
        lse = scores.logsumexp(-1)
        out = torch.einsum("rhgt,thd->rhgd", (scores - lse[..., None]).exp(), v)
        states.append((out.flatten(1, 2), lse.flatten(1, 2)))
    outs, lses = (torch.stack(x) for x in zip(*states, strict=True))
    out, lse = merge_states(outs, lses)
    said: list[Any] = [None] * args.ranks
    dist.all_gather_object(said, (out.cpu(), lse.cpu()))
    merged, _ = merge_states(*(torch.stack(x).to(q.device) for x in zip(*said, strict=True)))
    return merged


def in_turns(
    runs: dict[str, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each repeat of each way, in turns; the L2 cache is overwritten before each run."""
    flush = (
        torch.empty(256 << 20, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    )
    times: dict[str, list[float]] = {way: [] for way in runs}
    for repeat in range(-2, repeats):
        for way, run in runs.items():
            if flush is not None:
                flush.zero_()
                torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 0:
                times[way].append(time.perf_counter() - began)
    return times


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['ranks']} ranks, {result['device']}, heads {result['heads']}; microseconds")
    names = ["gather", "all_reduce", "energy", "ring", "own shard", "small all-reduce"]
    print(f"{'tokens':>9} {'reqs':>5} " + " ".join(f"{n:>12.12}" for n in names)
          + f" {'ring/tree':>10} {'tree/bound':>10} {'worst error':>11}")  # fmt: skip
    for row in result["rows"]:
        us = row["us"]
        best = min(us[way] for way in REDUCTIONS)
        print(
            f"{row['tokens']:>9} {row['requests']:>5} "
            + " ".join(f"{us[n]:12.1f}" for n in names)
            + f" {us['ring'] / best:10.2f} {best / row['bound_us']:10.2f}"
            + f" {max(row['errors'].values()):11.1e}"
            + ("" if row["right"] else "  WRONG")
        )
    print(json.dumps({"bytes sent": result["rows"][-1]["bytes_sent"],
                      "by the equations": result["rows"][-1]["bytes_model"]}))  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrefixShareError as e:
        sys.exit(f"bench_scale.py: {e}")
