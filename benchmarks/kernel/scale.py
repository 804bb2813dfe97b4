"""Decode attention over KV sharded across ranks: tree reduction and ring attention side by side
(Tree Attention, section 6), on the GPUs of one host over nccl or on a CPU over gloo.

    python -m benchmarks.kernel.scale --out scale.json
    python -m benchmarks.kernel.scale --device cpu --ranks 2 --tokens 4096 --requests 1,4

All requests share one context, of which each rank holds a shard. Every row is checked first: the
last and the first request are compared with one rank's attention over all tokens, in float32. Then
all ways are timed in turns; the time of a row is the slowest rank's, and the median over the
repeats.

On GPUs each way is captured in a CUDA graph of several calls, as the layers of a decode step are,
and a replay is timed by events behind an all-reduce, with which the GPUs begin together; the time
is that of one call. The L2 cache is overwritten before; each call reads a shard that is larger.
The same calls launched from Python are timed by the host, from a barrier to the end of their work.

The bound is the time in which a rank could read its shard and multiply, at the rates that a large
copy and a large matrix product reach, plus that of one small all-reduce; these are timed in the
same way, in turns with the others. So are attention over a long context with many queries, and
vLLM's FlashAttention-3, where it is installed, on the rank's own shard, as one sequence with the
queries of all requests, by contiguous tokens and by the blocks that ours reads. A CPU has no
graphs; there the bound is the time of the rank's own shard and of the small all-reduce.
"""

import argparse
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from math import nan
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernel import scaling
from benchmarks.peers import Options, UnavailableError
from benchmarks.peers.ring import RingDecode
from benchmarks.peers.vllm_fa3 import require_fa
from benchmarks.support.option_types import count, heads, several
from benchmarks.support.program import add_out, make_parser, one_sentence, recorded_command
from benchmarks.support.results import versions, write
from vllm_prefixshare import PrefixShareDecodeWrapper, PrefixShareError, merge_states
from vllm_prefixshare.distributed.shards import Shard, shard
from vllm_prefixshare.distributed.tree_reduction import COLLECTIVES, REDUCTIONS, TreeDecode

PROGRAM = "benchmarks.kernel.scale"

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
TIMEOUT = 120.0
SMALL = 1024  # bytes of the small all-reduce
CALLS = 8  # in a CUDA graph
FA3, PAGED_FA3 = "FlashAttention-3", "paged FlashAttention-3"
FA3_SPLITS = 0  # its own choice


class Ceiling(NamedTuple):
    """A call, and the bytes that it copies (read and written each) or its operations."""

    run: Callable[[], Any]
    amount: int


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    tokens = "65536,131072,262144,524288,1048576,2097152"
    parser.add_argument("--tokens", type=several(count), default=tokens)
    parser.add_argument("--requests", type=several(count), default="1,8,64")
    parser.add_argument("--heads", type=heads, default="32:8", help="query:KV heads")
    parser.add_argument("--block-size", type=count, default=16, help="tokens of a KV block")
    parser.add_argument("--repeats", type=count, default=20)
    add_out(parser)
    args = parser.parse_args(argv)
    args.qo_heads, args.kv_heads = args.heads
    args.heads = f"{args.qo_heads}:{args.kv_heads}"
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks} needs as many GPUs, {torch.cuda.device_count()} found")
    if args.ranks < 2:
        parser.error("--ranks must be at least 2")
    return args


@one_sentence(PROGRAM)
def main() -> int:
    args = parse()
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        multiprocessing.spawn(rank_main, (args, port, results), nprocs=args.ranks)
    except (
        multiprocessing.ProcessRaisedException,
        multiprocessing.ProcessExitedException,
    ) as e:
        *_, why = str(e).strip().splitlines()
        sys.exit(f"{PROGRAM}: rank {e.error_index}: {why}")
    result = results.get()
    last = result["rows"][-1]
    print(json.dumps({"bytes sent": last["bytes_sent"], "by the equations": last["bytes_model"]}))
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
    decoders, wrappers = make_decoders(args, device)
    limits = ceilings(device) if args.device == "cuda" else {}
    if limits:
        # graphs hold a workspace, so it gets the room that the largest plan needs
        blocks = -(-max(args.tokens) // (args.block_size * args.ranks)) + 1
        widest = np.tile(np.arange(blocks, dtype=np.int32), (max(args.requests), 1))
        for wrapper in wrappers:
            wrapper.plan(widest, np.full(len(widest), blocks * args.block_size, np.int32))
            wrapper.reserve()
    rows = []
    if rank == 0:
        print_heading(args)
    for tokens in args.tokens:
        for num_reqs in args.requests:
            rows.append(measure(rank, args, device, decoders, limits, tokens, num_reqs))
            if rank == 0:
                print_row(rows[-1])
    if rank == 0:
        kind = torch.cuda.get_device_name(device) if args.device == "cuda" else "CPU"
        results.put(
            {
                "command": recorded_command(PROGRAM),
                "device": kind,
                "ranks": args.ranks,
                "heads": args.heads,
                "block_size": args.block_size,
                "versions": versions(),
                "repeats": args.repeats,
                "rows": rows,
            }
        )
    dist.destroy_process_group()


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def ceilings(device: torch.device) -> dict[str, Ceiling]:
    """What this GPU reaches: a copy of 4 GiB, a product of 8192 x 8192 bfloat16 matrices, and
    attention of 16384 queries over as many tokens with 16 heads of 128, by cuDNN and without a
    mask. All are timed in turns with the ways that are compared, because a GPU that has worked for
    some milliseconds is slower than one that begins.
    """
    data = torch.randn(1 << 30, device=device)
    target = torch.empty_like(data)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in "ab")
    q, k, v = (torch.randn(1, 16, 16384, 128, device=device, dtype=torch.bfloat16) for _ in "qkv")

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    return {
        # not copy_, which a graph gives to the slower copy engine
        "copy": Ceiling(lambda: torch.neg(data, out=target), 2 * data.nbytes),
        "matrix product": Ceiling(lambda: a @ b, 2 * 8192**3),
        "dense attention": Ceiling(attend, 4 * 16 * 16384**2 * 128),
    }


def make_decoders(
    args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], list[PrefixShareDecodeWrapper]]:
    """Each way, made once, because it connects when it is made; and the operators of all."""
    wrappers: list[PrefixShareDecodeWrapper] = []

    def wrapper() -> PrefixShareDecodeWrapper:
        wrappers.append(
            PrefixShareDecodeWrapper(
                num_qo_heads=args.qo_heads,
                num_kv_heads=args.kv_heads,
                head_dim=128,
                block_size=args.block_size,
                dtype=dtype_on(device),
                device=device,
            )
        )
        return wrappers[-1]

    decoders: dict[str, Any] = {
        way: TreeDecode(wrapper(), reduction=way, timeout=TIMEOUT)
        for way in (REDUCTIONS if device.type == "cuda" else COLLECTIVES)
    }
    decoders["ring"] = RingDecode(wrapper, timeout=TIMEOUT)
    return decoders, wrappers


def measure(
    rank: int,
    args: argparse.Namespace,
    device: torch.device,
    decoders: dict[str, Any],
    limits: dict[str, Ceiling],
    tokens: int,
    num_reqs: int,
) -> dict[str, Any]:
    """Measure one row; every rank runs the same."""
    dtype = dtype_on(device)
    layer = scaling.Layer(num_reqs, tokens, 0, args.qo_heads, args.kv_heads, 128, dtype.itemsize)
    blocks = -(-tokens // args.block_size)
    table = np.tile(np.arange(blocks, dtype=np.int32), (num_reqs, 1))
    lens = np.full(num_reqs, tokens, np.int32)
    _, own_lens = shard(table, lens, args.block_size, rank, args.ranks)
    # each rank's cache holds only its own blocks, the same number on every rank
    held = -(-blocks // args.ranks)
    local = np.tile(np.arange(held, dtype=np.int32), (num_reqs, 1))
    generator = torch.Generator(device).manual_seed(rank)
    shape = (held, args.block_size, args.kv_heads, 128)
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
    peers = flash_attention_3(q, caches, int(own_lens[0]))
    runs.update(peers)
    small = torch.zeros(SMALL // 4, device=device)
    runs["small all-reduce"] = lambda: alone.ranks.all_reduce(small)

    on_gpu = device.type == "cuda"
    expected = whole_context(args, q, caches, int(own_lens[0]))
    sent, peaks = {}, {}
    errors: dict[str, float] = dict.fromkeys(decoders, 0.0)

    def check(way: str, out: torch.Tensor) -> None:
        error = (out[[0, -1]].float() - expected).norm() / expected.norm()
        # not the larger of both: a NaN would be lost
        errors[way] = errors[way] if float(error) <= errors[way] else float(error)

    for way in decoders:
        before = decoders[way].ranks.bytes_sent
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
        out, _ = runs[way]()
        sent[way] = decoders[way].ranks.bytes_sent - before
        if on_gpu:
            torch.cuda.synchronize()
            peaks[way] = torch.cuda.max_memory_allocated() - start
        check(way, out)
    for name, call in peers.items():
        wanted = alone.partial(q, own).out.float()
        error = (call().float() - wanted).norm() / wanted.norm()
        if not float(error) <= TOLERANCE["bfloat16"]:
            raise PrefixShareError(f"{name} has another result on the rank's shard: {error:.1e}.")
    # large, because writing it must take longer than launching a replay on the slower host
    flush = torch.empty(4 << 30, dtype=torch.uint8, device=device) if on_gpu else None

    def begin_together() -> None:
        dist.barrier()
        flush.zero_()
        runs["small all-reduce"]()

    times = launched = in_turns(runs, args.repeats, lambda run: host_seconds(run, flush))
    if on_gpu:
        graphs = {way: Captured(run) for way, run in runs.items()}
        for way in decoders:
            out, _ = graphs[way].result
            out.fill_(torch.nan)
            graphs[way].graph.replay()
            check(way, out)
        replays = {way: graph.graph.replay for way, graph in graphs.items()}
        graphs = {name: Captured(ceiling.run) for name, ceiling in limits.items()}
        replays.update({name: graph.graph.replay for name, graph in graphs.items()})
        times = in_turns(
            replays, args.repeats, lambda run: gpu_seconds(run, begin_together) / CALLS
        )
    everyone: list[Any] = [None] * args.ranks
    dist.all_gather_object(everyone, (times, launched, errors))
    us, launched_us = (
        {
            way: round(1e6 * median(max(t) for t in zip(*(r[way] for r in ranks), strict=True)), 2)
            for way in ranks[0]
        }
        for ranks in ([of[i] for of in everyone] for i in range(2))
    )
    rates = {name: ceiling.amount / us.pop(name) for name, ceiling in limits.items()}
    roof = us["own shard"]
    if rates:
        roof = max(layer.kv_bytes / rates["copy"], layer.flops / rates["matrix product"])
        roof /= args.ranks
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    return {
        "tokens": tokens,
        "requests": num_reqs,
        "us": us,
        "launched_us": launched_us,
        # a microsecond: bytes copied, operations
        "rates": {name: round(rate) for name, rate in rates.items()},
        "roof_us": round(roof, 2),
        "bound_us": round(roof + us["small all-reduce"], 2),
        "errors": {way: max(of[2][way] for of in everyone) for way in errors},
        "right": all(error <= tolerance for of in everyone for error in of[2].values()),
        "bytes_sent": sent,
        "bytes_model": {
            "gather": scaling.gather_bytes(layer, args.ranks),
            "one_shot": scaling.gather_bytes(layer, args.ranks),
            "all_reduce": scaling.all_reduce_bytes(layer, args.ranks),
            # two all-reduces of logarithms and one of outputs, as many bytes as algorithm 3
            "energy": scaling.all_reduce_bytes(layer, args.ranks),
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


def flash_attention_3(
    q: torch.Tensor, caches: list[torch.Tensor], tokens: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Attention of all queries over the shard, as one sequence without a mask, by contiguous tokens
    and by blocks; none without vLLM's FlashAttention 3.
    """
    try:
        require_fa(3, Options(q.device, q.dtype, {}))
    except (ImportError, UnavailableError):
        return {}
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    def attend(kv: list[torch.Tensor], **layout: torch.Tensor) -> torch.Tensor:
        return flash_attn_varlen_func(
            q=q,
            k=kv[0],
            v=kv[1],
            cu_seqlens_q=starts,
            max_seqlen_q=len(q),
            max_seqlen_k=tokens,
            softmax_scale=128**-0.5,
            causal=False,
            fa_version=3,
            num_splits=FA3_SPLITS,
            **layout,
        )

    starts, starts_k, lengths = integers(0, len(q)), integers(0, tokens), integers(tokens)
    blocks = torch.arange(len(caches[0]), dtype=torch.int32, device=q.device)[None]
    flat = [c.flatten(0, 1)[:tokens] for c in caches]
    return {
        FA3: lambda: attend(flat, cu_seqlens_k=starts_k),
        PAGED_FA3: lambda: attend(caches, seqused_k=lengths, block_table=blocks),
    }


class Captured:
    """``CALLS`` calls in a CUDA graph, and the tensors that the last one returned."""

    def __init__(self, run: Callable[[], Any]) -> None:
        run()  # connects and compiles
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                self.result = run()
        torch.cuda.synchronize()


def in_turns(
    runs: dict[str, Callable[[], Any]],
    repeats: int,
    seconds_of: Callable[[Callable[[], Any]], float],
) -> dict[str, list[float]]:
    """Seconds of each repeat of each way, after two of each that do not count. A GPU is the slower
    the more power the way before took, so each repeat has an order of its own, on all ranks.
    """
    times: dict[str, list[float]] = {way: [] for way in runs}
    shuffle = random.Random(0)
    for repeat in range(-2, repeats):
        for way in shuffle.sample(list(runs), len(runs)):
            seconds = seconds_of(runs[way])
            if repeat >= 0:
                times[way].append(seconds)
    return times


def host_seconds(run: Callable[[], Any], flush: torch.Tensor | None) -> float:
    """Seconds from a barrier to the end of the work, on the GPU if there is a buffer to flush its
    L2 cache with.
    """
    if flush is not None:
        flush.zero_()
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    run()
    if flush is not None:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def gpu_seconds(run: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Seconds that the GPU takes; the host launches the work while ``before`` still runs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return 1e-3 * begin.elapsed_time(end)


WAYS = (*REDUCTIONS, "ring", "own shard", FA3, PAGED_FA3, "small all-reduce")


def print_heading(args: argparse.Namespace) -> None:
    what = "microseconds; launched: the best tree's without a graph"
    print(f"{args.ranks} ranks, {args.device}, heads {args.heads}; {what}")
    names = *WAYS, "bound", "ring/tree", "tree/bound", "launched", "error"
    print(f"{'tokens':>9} {'reqs':>5} " + " ".join(f"{n:>10.10}" for n in names), flush=True)


def print_row(row: dict[str, Any]) -> None:
    us = row["us"]
    best, launched = (
        min(x[way] for way in REDUCTIONS if way in x) for x in (us, row["launched_us"])
    )
    print(
        f"{row['tokens']:>9} {row['requests']:>5} "
        + " ".join(f"{x:10.1f}" for x in (*(us.get(way, nan) for way in WAYS), row["bound_us"]))
        + f" {us['ring'] / best:10.2f} {best / row['bound_us']:10.2f} {launched:10.1f}"
        + f" {max(row['errors'].values()):10.1e}"
        + ("" if row["right"] else "  WRONG"),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
