r"""Decode attention of one layer: this project's kernels and their peers, in one run.

Every peer's output is compared with float32 attention, for all requests, before its time counts. A
wrong output is reported as wrong, and the exit status is 1. GPU times are medians of CUDA-graph
replays with the L2 cache flushed before each; plans and metadata are made outside the timed region.

    python -m benchmarks.kernel --workloads anchors --heads 32:8,32:32,64:8,16:1 --out kernel.json

Layers with an fp8 KV cache, sinks, a soft cap or ALiBi: each option is passed to the peers that
support it, and the others are listed as unavailable.

    python -m benchmarks.kernel --kv-dtype fp8 --peers ours,portable,fa3 \
        --tree 1,64_32768,128 --tree 1,128_4096,128 --tree 1,256_2048,256 --tree 128_2048
    python -m benchmarks.kernel --sinks --heads 64:8 --head-dim 64 --peers ours,portable,fa3
    python -m benchmarks.kernel --soft-cap 50 --heads 32:16 --peers ours,portable,fa3

The first step after a prefix hit, in which requests have several query tokens:

    python -m benchmarks.kernel --workloads first_step --peers tokens,ours,fa3

Sliding windows, of Gemma 3 and gpt-oss:

    python -m benchmarks.kernel --sliding-window 1024 --head-dim 256 --heads 16:8 \
        --tree 1,64_4096,64 --tree 1,64_4096,512 --tree 64_2048 --peers ours,portable,fa3
    python -m benchmarks.kernel --sliding-window 128 --sinks --head-dim 64 --heads 64:8 \
        --tree 1,64_4096,64 --peers ours,portable,fa3

Latent KV caches (MLA), with DeepSeek's 512 + 64 numbers a token and one KV head:

    python -m benchmarks.kernel --mla --heads 16:1,8:1 --block-size 64 \
        --peers ours,fa3,flashmla --tree 1,64_32768,128 --tree 1,128_4096,128 --tree 1,256_2048,256
    python -m benchmarks.kernel --mla --kv-dtype fp8 --peers ours,flashmla  # and the same
    python -m benchmarks.kernel --mla --query-len 2  # and the same, with one draft
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.kernel import report
from benchmarks.kernel.tables import measured_how
from benchmarks.peers import PEERS, Case, Launch, Options, Peer, UnavailableError, first_line, make
from benchmarks.support.machine_rates import MachineRates, measure_rates
from benchmarks.support.option_types import count, heads, names, several
from benchmarks.support.program import (
    CHECKOUTS,
    add_out,
    add_resume,
    make_parser,
    one_sentence,
    recorded_command,
)
from benchmarks.support.results import resumed, versions, write
from benchmarks.support.trees import Workload, tree
from benchmarks.support.workload_sets import WORKLOAD_SETS, workload_set
from vllm_prefixshare import LayerExtras
from vllm_prefixshare.config import LATENT_SHAPE
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.window import first_in_window, tokens_seen
from vllm_prefixshare.profiling.gpu_timing import GpuTimer, Timing, capture

PROGRAM = "benchmarks.kernel"

#: largest relative error of a correct output of a request; FA3's is about 0.003
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
#: tolerance for quantised queries: FlashAttention-3 then also rounds the weights to e4m3
FP8_TOLERANCE = 6e-2
FP8 = torch.float8_e4m3fn
#: roofline rates of known GPUs, so that fractions of different days can be compared; for other GPUs
#: the rates measured at the start of the run are used
KNOWN_RATES = {"NVIDIA H200": MachineRates(4.35e12, 700e12)}
#: a peer slower than this many times the fastest so far is timed only once
HOPELESS, HOPELESS_MS = 8, 1.0


def make_case(w: Workload, heads: tuple[int, int], args: argparse.Namespace) -> Case:
    """Random queries and cache for a workload, and the extra features of the layer."""
    torch.manual_seed(0)
    dtype, device = getattr(torch, args.dtype), args.device
    fp8 = args.kv_dtype == "fp8"
    k_cache, v_cache = make_caches(w, heads[1], args)
    tokens = w.num_reqs * w.query_len
    q = torch.randn(tokens, heads[0], args.head_dim, device=device, dtype=dtype)
    table, lens = (torch.from_numpy(x).to(device) for x in (w.block_table, w.seq_lens))
    if fp8:
        q = q.to(FP8)
    q_scale, k_scale, v_scale = torch.tensor([0.75, 1.25, 0.5], device=device).split(1)
    if args.mla:
        v_scale = k_scale  # one cache
    extras = LayerExtras(
        sinks=torch.linspace(-1, 4, heads[0], device=device) if args.sinks else None,
        soft_cap=args.soft_cap,
        alibi_slopes=(
            2.0 ** -torch.linspace(1, 8, heads[0], device=device) if args.alibi else None
        ),
        q_scale=q_scale if fp8 else None,
        k_scale=k_scale if fp8 else None,
        v_scale=v_scale if fp8 else None,
    )
    return Case(w, q, k_cache, v_cache, table, lens, dtype, extras, args.sliding_window)


def make_caches(
    w: Workload, num_kv_heads: int, args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V, ``[num_blocks, block_size, num_kv_heads, head_dim]``; of a latent KV cache V
    is a view of K.
    """
    shape = (w.num_blocks, w.block_size, num_kv_heads, args.head_dim)
    dtype = getattr(torch, args.dtype)
    kept = FP8 if args.kv_dtype == "fp8" else dtype
    k_cache = torch.randn(shape, device=args.device, dtype=dtype).to(kept)
    if args.mla:
        return k_cache, k_cache[..., : LATENT_SHAPE[1]]
    return k_cache, torch.randn(shape, device=args.device, dtype=dtype).to(kept)


def reference(case: Case) -> torch.Tensor:
    """Float32 attention, one request after the other: ``[num_reqs, query_len * heads * dim]``."""
    w = case.workload
    group = case.num_qo_heads // case.num_kv_heads
    length = w.query_len
    sees = case.seen_queries().to(case.q.device)
    x = case.extras
    q_scale, k_scale, v_scale = (1.0 if scale is None else scale for scale in x[3:])

    def of_heads(values: torch.Tensor) -> torch.Tensor:
        """A value for each query head, as scores of ``[KV heads, heads * queries, tokens]``."""
        values = values.view(case.num_kv_heads, group, 1).expand(-1, -1, length)
        return values.reshape(case.num_kv_heads, -1, 1)

    outs = []
    for row, tokens in enumerate(w.seq_lens.tolist()):
        ids = case.block_table[row, : -(-tokens // w.block_size)].long()
        k, v = (
            blocks(cache, ids).flatten(0, 1)[:tokens].float().transpose(0, 1)
            for cache in (case.k_cache, case.v_cache)
        )
        q = case.q[row * length : (row + 1) * length].float()
        q = q.view(length, case.num_kv_heads, group, -1).permute(1, 2, 0, 3)
        scores = q.flatten(1, 2) @ k.transpose(1, 2) * (case.sm_scale * q_scale * k_scale)
        if x.soft_cap:
            scores = torch.tanh(scores / x.soft_cap) * x.soft_cap
        if x.alibi_slopes is not None:
            at = torch.arange(tokens, device=q.device)
            own = at[tokens - length :].repeat(group)[:, None]
            scores += of_heads(x.alibi_slopes) * (at - own)
        among = scores.view(case.num_kv_heads, group, length, tokens)[..., tokens - length :]
        among.masked_fill_(~sees, float("-inf"))
        if case.sliding_window is not None:
            at = torch.arange(tokens, device=q.device)
            own = at[tokens - length :].repeat(group)[:, None]
            scores.masked_fill_(at <= own - case.sliding_window, float("-inf"))
        if x.sinks is not None:
            scores = torch.cat([scores, of_heads(x.sinks)], -1)
        weights = torch.softmax(scores, -1)[..., :tokens]
        out = (weights @ v * v_scale).view(case.num_kv_heads, group, length, -1)
        outs.append(out.permute(2, 0, 1, 3).reshape(-1))
    return torch.stack(outs)


def blocks(cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``cache[ids]``; as bytes where torch cannot index the type."""
    if cache.element_size() > 1:
        return cache[ids]
    return cache.view(torch.uint8)[ids].view(cache.dtype)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error over the requests; NaN if any output is not finite."""
    difference = (out.reshape(expected.shape).float() - expected).norm(dim=1)
    return (difference / expected.norm(dim=1)).max().item()


class CpuTimer:
    """Replaces ``GpuTimer`` where the harness itself is tested."""

    def time(self, call: Callable[[], object], repeats: int) -> Timing:
        times: list[float] = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
        return Timing(float(np.median(times[1:])), min(times[1:]), max(times[1:]), repeats)

    def rates(self) -> MachineRates:
        a = torch.randn(512, 512)
        b = torch.empty(1 << 23)
        return MachineRates(
            2 * b.nbytes / self.time(lambda: b.clone(), 5).min_ms * 1e3,
            2 * 512**3 / self.time(lambda: a @ a, 5).median_ms * 1e3,
        )


@cache
def machine(device: str) -> tuple[GpuTimer | CpuTimer, MachineRates]:
    """A timer for "cuda" or "cpu", and what the device can do at most; measured once.

    Raises:
        PrefixShareError: there is no GPU.
    """
    torch.set_float32_matmul_precision("highest")
    if device != "cuda":
        slow = CpuTimer()
        return slow, slow.rates()
    if not torch.cuda.is_available():
        raise PrefixShareError("there is no GPU; --device cpu tries the harness")
    timer = GpuTimer()
    return timer, measure_rates(timer)


def measure(
    launch: Launch,
    expected: torch.Tensor,
    tolerance: float,
    timer: GpuTimer | CpuTimer,
    repeats: int,
    hopeless_ms: float,
) -> dict[str, object]:
    """Time one launch, then check the output of the timed calls."""
    call, result, graph = launch.call, None, None
    if launch.graph:
        graph, result = capture(launch.call)
        call = graph.replay
    else:
        result = launch.call()
    host = host_ms(launch) if launch.graph else None

    try:
        notes = [launch.note] if launch.note else []
        timing = timer.time(call, 3)
        if timing.median_ms > max(hopeless_ms, HOPELESS_MS):
            notes.append("3 repeats")
        else:
            timing = timer.time(call, repeats)
        result.fill_(float("nan"))  # the output counts only if the call writes all of it
        written = call()
        error = relative_error(result if launch.graph else written, expected)
    finally:
        if graph is not None:
            graph.reset()
    return {
        "status": "ok" if error <= tolerance else "wrong",
        "ms": timing.median_ms,
        "min_ms": timing.min_ms,
        "max_ms": timing.max_ms,
        "error": error if math.isfinite(error) else None,
        "graph": launch.graph,
        "host_ms": host,
        "plan_ms": launch.plan_ms,
        "note": ", ".join(notes),
    }


def host_ms(launch: Launch, calls: int = 10) -> float:
    """Host time of one call that is not in a graph, as in vLLM's steps with prefills."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        launch.call()
    return (time.perf_counter() - began) / calls * 1e3


def run_peer(
    peer: Peer | UnavailableError,
    case: Case,
    expected: torch.Tensor,
    timer: GpuTimer | CpuTimer,
    repeats: int,
    hopeless_ms: float,
) -> dict[str, object]:
    """The fastest of a peer's launches; one wrong launch makes the peer wrong."""
    if isinstance(peer, UnavailableError):
        return {"status": "unavailable", "reason": str(peer)}
    try:
        best: dict[str, object] = {}
        case.require_served_by(peer)
        tolerance = TOLERANCE[case.out_dtype] if case.q.element_size() > 1 else FP8_TOLERANCE
        for launch in peer.prepare(case):
            found = measure(launch, expected, tolerance, timer, repeats, hopeless_ms)
            if found["status"] == "wrong":
                return found
            if not best or found["ms"] < best["ms"]:
                best = found
        return best
    except UnavailableError as e:
        return {"status": "unavailable", "reason": str(e)}
    except Exception as e:  # other projects' code: one peer's failure must not end the run
        return {"status": "failed", "reason": first_line(e)}


def roof_bytes_and_flops(case: Case) -> tuple[int, int]:
    """Bytes of each KV token, query and output once; FLOPs of all scores and weighted sums."""
    w = case.workload
    both = case.head_dim + case.v_head_dim
    kept = case.head_dim if case.kv_lora_rank else both
    kv = kv_tokens(case) * case.num_kv_heads * kept * case.k_cache.element_size()
    seen = tokens_seen(w.seq_lens, case.sliding_window, w.query_len)
    flops = 2 * seen * w.query_len * case.num_qo_heads * both
    rows = case.q.shape[0] * case.num_qo_heads
    sizes = case.head_dim * case.q.element_size() + case.v_head_dim * case.out_dtype.itemsize
    return kv + rows * sizes, flops


def kv_tokens(case: Case) -> int:
    """Distinct KV tokens that any request sees; with a window, in whole blocks."""
    w = case.workload
    if case.sliding_window is None:
        return w.kv_tokens
    first = first_in_window(w.seq_lens, case.sliding_window, w.query_len) // w.block_size
    last = -(-w.seq_lens // w.block_size)
    columns = np.arange(w.block_table.shape[1])
    used = (columns >= first[:, None]) & (columns < last[:, None])
    return len(np.unique(w.block_table[used])) * w.block_size


def run_cell(
    w: Workload,
    heads: tuple[int, int],
    peers: dict[str, Peer | UnavailableError],
    timer: GpuTimer | CpuTimer,
    rates: MachineRates,
    args: argparse.Namespace,
) -> dict[str, object]:
    """All peers on one workload and head configuration."""
    case = make_case(w, heads, args)
    expected = reference(case)
    roof = rates.roof_ms(*roof_bytes_and_flops(case))
    distinct = kv_tokens(case)
    share = tokens_seen(w.seq_lens, case.sliding_window, w.query_len) / distinct
    cell = {
        "workload": w.name,
        "heads": f"{heads[0]}:{heads[1]}",
        "batch": w.num_reqs,
        "query_len": w.query_len,
        "kv_tokens": distinct,
        "share_factor": round(share, 2),
        "roof_ms": roof,
        "peers": {},
    }
    fastest = float("inf")
    for name, peer in peers.items():
        found = run_peer(peer, case, expected, timer, args.repeats, HOPELESS * fastest)
        if found["status"] == "ok":
            fastest = min(fastest, found["ms"])
            found["roofline"] = roof / found["ms"]
        cell["peers"][name] = found
        if args.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()  # raises if the CUDA context is broken: no peer can run
            torch.cuda.empty_cache()
    return cell


def workloads(args: argparse.Namespace) -> Iterable[Workload]:
    for spec in args.tree:
        yield replace(tree(spec, args.block_size), query_len=args.query_len)
    for name in args.workloads:
        yield from workload_set(name, args.block_size, args.deft_data, args.quick)


def parse(
    argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The command line; ``parser`` may have options of its own."""
    parser = parser or make_parser(PROGRAM, __doc__)
    parser.add_argument(
        "--workloads",
        type=names(WORKLOAD_SETS),
        default=[],
        help=f"sets, of {','.join(WORKLOAD_SETS)}",
    )
    parser.add_argument("--tree", action="append", default=[], help="such as 1,4_1024,64; repeat")
    parser.add_argument(
        "--query-len", type=count, default=1, help="query tokens of each request of a --tree"
    )
    parser.add_argument("--heads", type=several(heads), default="32:8", help="such as 32:8,64:8")
    special = ("tokens", "flashmla", "fa2", "medusa")
    usual = ",".join(x for x in PEERS if "invariant" not in x and x not in special)
    parser.add_argument("--peers", type=names(PEERS), default=usual, help=f"of {','.join(PEERS)}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--kv-dtype", choices=["fp8"], help="of the KV cache (default: --dtype)")
    parser.add_argument("--sinks", action="store_true", help="attention sinks")
    parser.add_argument("--soft-cap", type=float, default=0.0, help="for the scores, such as 50")
    parser.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    parser.add_argument("--sliding-window", type=int, help="tokens that each query sees")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mla", action="store_true", help="a latent KV cache; heads such as 16:1")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--divider", help="divider of our plans (default: the device's)")
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--repeats", type=count, default=20, help="timed replays of each kernel")
    parser.add_argument("--quick", action="store_true", help="few workloads of each set")
    for name in CHECKOUTS:
        parser.add_argument(f"--{name}", type=Path, help=f"your checkout of {name}")
    parser.add_argument("--deft-data", type=Path, help="folder of DeFT's recorded trees")
    add_out(parser)
    add_resume(parser)
    args = parser.parse_args(argv)
    if not args.workloads and not args.tree:
        args.workloads = ["anchors"]
    if args.mla:
        args.head_dim = LATENT_SHAPE[0]
    return args


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    timer, measured = machine(args.device.type)
    gpu = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "cpu"
    rates = KNOWN_RATES.get(gpu, measured)
    result = {
        "command": recorded_command(PROGRAM),
        "gpu": gpu,
        "versions": versions(),
        "dtype": args.dtype,
        "kv_dtype": args.kv_dtype,
        "sinks": args.sinks,
        "soft_cap": args.soft_cap,
        "alibi": args.alibi,
        "mla": args.mla,
        "sliding_window": args.sliding_window,
        "head_dim": args.head_dim,
        "block_size": args.block_size,
        "repeats": args.repeats,
        "measured": vars_of(measured),
        "roofline": vars_of(rates),
        "titles": {name: PEERS[name][2] for name in args.peers},
        "cells": [],
    }
    if args.resume:
        result["cells"] = resumed(args.out, result, "cells")
    there = {(cell["workload"], cell["heads"]) for cell in result["cells"]}
    print(measured_how(result), flush=True)
    options = Options(
        args.device,
        getattr(torch, args.dtype),
        {name: getattr(args, name) for name in ("fasttree", "deft", "pat")},
        args.divider,
    )
    peers: dict[str, Peer | UnavailableError] = {}
    for name in args.peers:
        try:
            peers[name] = make(name, options)
        except UnavailableError as e:
            peers[name] = e
            print(f"{name}: unavailable: {e}", flush=True)
    print(report.header(result), flush=True)
    gc.freeze()  # what was imported stays: collections after each peer need not walk it
    broken = False
    try:
        for w, heads in product(workloads(args), args.heads):
            if (w.name, f"{heads[0]}:{heads[1]}") in there:
                continue
            try:
                cell = run_cell(w, heads, peers, timer, rates, args)
            except torch.OutOfMemoryError as e:
                print(f"{w.name} {heads}: left out: {first_line(e)}", flush=True)
                continue
            result["cells"].append(cell)
            print(report.row(result, cell), flush=True)
            write(args.out, result)
    except RuntimeError as e:  # CUDA errors of torch; earlier measurements still count
        broken = True
        print(f"stopped: {first_line(e)}", file=sys.stderr)
    print(report.summary(result))
    write(args.out, result)
    return int(broken or bool(report.bad_results(result)) or not result["cells"])


def vars_of(rates: MachineRates) -> dict[str, float]:
    return {"TB/s": rates.bytes_per_second / 1e12, "TFLOP/s": rates.flops_per_second / 1e12}


if __name__ == "__main__":
    sys.exit(main())
