"""Measure on this machine what sharing gains: attention of one layer, with and without it."""

import argparse
import json
import statistics
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_prefixshare.cli.batches import Batch, tree_batch
from vllm_prefixshare.cli.memory import check_room
from vllm_prefixshare.cli.options import add_device_argument, add_shape_arguments, attention_of
from vllm_prefixshare.cli.output import print_table
from vllm_prefixshare.cli.progress import Progress
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.costs.lookup import cost_model, gpu, has_gpu, processor
from vllm_prefixshare.planning.planner import DecodePlanner
from vllm_prefixshare.vllm_plugin import compat

if TYPE_CHECKING:
    import torch

EXAMPLE = """\
What would this machine gain for a model's shape, with 32 requests on a document of 4096 tokens?

    vllm-prefixshare bench --model /models/Llama-3.1-8B --tree 1,32_4096,64

Without --tree there is a row for each of a few usual batches, in two minutes at most. Results are
compared with a float64 reference first; the exit status is 1 if one differs."""

#: Default batches by device: documents with questions, a tree, and nothing shared.
TREES = {
    "cpu": ("1,8_2048,64", "1,16_4096,64", "1,32_4096,64", "1,4,16_2048,512,64", "16_1024"),
    "cuda": ("1,16_4096,64", "1,64_8192,128", "1,64_32768,128", "1,8,64_8192,1024,128", "64_2048"),
}
#: Fewest and most pairs per workload; requests whose result is compared with the reference.
MIN_PAIRS, MAX_PAIRS, CHECKED = 5, 200, 8
#: A gain is noisy if the ratio of the medians differs from it by more than this part of it: the
#: median of the pairs' ratios is the same unless other work on the machine came and went.
NOISE = 0.1
#: Greatest difference from the reference, over the reference's greatest value.
TOLERANCE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.03}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_device_argument(command)
    command.add_argument(
        "--tree",
        action="append",
        help="nodes_tokens of each level; repeatable (default: five usual batches)",
    )
    command.add_argument("--seconds", type=float, default=75.0, help="of timing, in all")
    add_shape_arguments(command, block_size="128 on a CPU, 16 on a GPU")


class Side(NamedTuple):
    """One way to compute a layer. seconds: times it; seconds of one run."""

    out: "torch.Tensor"
    run: Callable[[], object]
    seconds: Callable[[], float]
    kv_tokens: int


class Sides(NamedTuple):
    """Both ways, on the same queries and cache.

    kernel: of the shared side. baseline: name of the unshared side.
    rows: batch rows that are compared. reference: their float64 result.
    """

    unshared: Side
    shared: Side
    kernel: str
    baseline: str
    rows: list[int]
    reference: "torch.Tensor"


def run(args: argparse.Namespace) -> int:
    """Compare with the reference, then time; the exit status is 1 if results differ."""
    if not 0 < args.seconds <= 3600:
        raise PrefixShareError(
            f"--seconds must be more than 0 and at most 3600, got {args.seconds}."
        )
    if args.device == "cuda" and not has_gpu():
        raise PrefixShareError("torch finds no NVIDIA GPU here: use --device cpu.")
    on_gpu = args.device == "cuda" or (args.device == "auto" and has_gpu())
    attention = attention_of(args, block_size=16 if on_gpu else 128)  # vLLM's own
    trees = args.tree or TREES["cuda" if on_gpu else "cpu"]
    batches = [tree_batch(spec, attention.block_size) for spec in trees]
    results = []
    with Progress(len(batches)) as progress:
        for batch in batches:
            sides = _sides_gpu(attention, batch) if on_gpu else _sides_cpu(attention, batch)
            results.append(_measure(batch, sides, attention, args.seconds / len(batches)))
            of = {"device": gpu() if on_gpu else processor(), "shared": sides.kernel}
            of["unshared"] = sides.baseline
            progress.step()
    wrong = sum(not row["right"] for row in results)
    if args.json:
        print(json.dumps({**of, "right": not wrong, "rows": results}, indent=1))
    else:
        _print(of, results)
    return 1 if wrong else 0


def _measure(
    batch: Batch, sides: Sides, attention: AttentionConfig, seconds: float
) -> dict[str, Any]:
    """Compare, then time in pairs, so that other load on the machine affects both sides."""
    errors = {}
    scale = float(sides.reference.abs().max())
    for name in ("unshared", "shared"):
        side: Side = getattr(sides, name)
        side.out.fill_(float("nan"))
        side.run()
        difference = (side.out[sides.rows].double() - sides.reference).abs()
        errors[name] = float(difference.max()) / scale
    row: dict[str, Any] = {
        "batch": batch.name,
        "requests": len(batch.seq_lens),
        "kv_tokens": sides.unshared.kv_tokens,
        "share_factor": round(sides.unshared.kv_tokens / sides.shared.kv_tokens, 2),
        # a comparison with NaN is False
        "right": all(error <= TOLERANCE[attention.dtype] for error in errors.values()),
        "errors": errors,
    }
    if not row["right"]:
        return row
    until = time.monotonic() + seconds
    pairs: list[tuple[float, float]] = []
    while len(pairs) < MIN_PAIRS or (time.monotonic() < until and len(pairs) < MAX_PAIRS):
        pairs.append((sides.unshared.seconds(), sides.shared.seconds()))
    unshared, shared = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    gain = statistics.median(a / b for a, b in pairs)
    row |= {
        "unshared_ms": round(unshared, 4),
        "shared_ms": round(shared, 4),
        "gain": round(gain, 2),
        "noisy": abs(unshared / shared - gain) > NOISE * gain,
        "pairs": len(pairs),
    }
    return row


def _sides_cpu(attention: AttentionConfig, batch: Batch) -> Sides:
    import torch

    from vllm_prefixshare.kernels.cpu.executor import cache_views, cpu_executor

    a, dtype = attention, getattr(torch, attention.dtype)
    num_blocks = int(batch.block_table.max()) + 1
    check_room(num_blocks * a.block_size, attention)
    kv_cache = torch.randn(num_blocks, a.num_kv_heads, a.block_size, 2 * a.head_dim).to(dtype)
    k_cache, v_cache = cache_views(kv_cache)
    q = torch.randn(len(batch.seq_lens), a.num_qo_heads, a.head_dim).to(dtype)

    notes: list[str] = []
    executor = cpu_executor(attention, notes.append)

    def side(share: str) -> Side:
        return _planned(attention, cpu_executor(attention), batch, share, (q, k_cache, v_cache))

    shared, unshared, baseline = side("auto"), side("never"), "the same kernel, one by one"
    if (cpu_attn := _cpu_attn(attention, q, kv_cache, batch)) is not None:
        unshared, baseline = cpu_attn, "vLLM's CPU_ATTN"
        if shared.kv_tokens == unshared.kv_tokens:  # the backend also leaves this batch to CPU_ATTN
            shared = cpu_attn
    unshared, shared = (
        way._replace(seconds=partial(timeit.timeit, way.run, number=1))
        for way in (unshared, shared)
    )
    kernel = " ".join([f"{executor.name}.", *notes]).removesuffix(".")
    return Sides(unshared, shared, kernel, baseline, *_reference(batch, q, k_cache, v_cache))


def _cpu_attn(
    attention: AttentionConfig, q: "torch.Tensor", kv_cache: "torch.Tensor", batch: Batch
) -> Side | None:
    """CPU_ATTN's kernel; None if vLLM is not installed for CPUs.

    Raises:
        PrefixShareError: CPU_ATTN does not take such a layer.
    """
    import torch

    try:
        compat.check_release(on_cpu=True)
        from vllm_prefixshare.vllm_plugin.backends.cpu.timing import check_shape, cpu_attn_call
    except (PrefixShareError, ImportError):
        return None
    check_shape(attention)
    out = torch.empty_like(q)
    table, lens = (torch.from_numpy(x) for x in (batch.block_table, batch.seq_lens))
    call = cpu_attn_call(attention, q, kv_cache, table, lens, out)
    return Side(out, call, lambda: 0.0, int(batch.seq_lens.sum()))


def _sides_gpu(attention: AttentionConfig, batch: Batch) -> Sides:
    import torch

    from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
    from vllm_prefixshare.profiling.gpu_timing import GpuTimer, capture

    a, dtype = attention, getattr(torch, attention.dtype)
    shape = int(batch.block_table.max()) + 1, a.block_size, a.num_kv_heads, a.head_dim
    check_room(shape[0] * a.block_size, attention, on_gpu=True)
    k_cache, v_cache = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
    q = torch.randn(len(batch.seq_lens), a.num_qo_heads, a.head_dim, dtype=dtype, device="cuda")
    timer = GpuTimer()

    def side(share: str) -> Side:
        executor = GpuExecutor(attention, "cuda")
        found = _planned(attention, executor, batch, share, (q, k_cache, v_cache))
        graph, _ = capture(found.run)
        return found._replace(seconds=lambda: timer.time(graph.replay, 5, 1).median_ms / 1e3)

    baseline = "the same kernel, one by one"
    reference = _reference(batch, q, k_cache, v_cache)
    kernel = GpuExecutor(attention, "cuda").name
    return Sides(side("never"), side("auto"), kernel, baseline, *reference)


def _planned(
    attention: AttentionConfig,
    executor: Any,
    batch: Batch,
    share: str,
    tensors: "tuple[torch.Tensor, torch.Tensor, torch.Tensor]",
) -> Side:
    """A layer under the plan that an engine would make with this ``share`` policy."""
    import torch

    from vllm_prefixshare.kernels.interface import HostBatch

    q, k_cache, v_cache = tensors
    planner = DecodePlanner(
        executor.planner_config(None, share, null_block_id=0),
        cost_model(attention, executor.name),
        attention.block_size,
        attention.gqa_group_size,
    )
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    starts = np.arange(len(batch.seq_lens) + 1, dtype=np.int32)
    executor.prepare(plan, HostBatch(batch.block_table, batch.seq_lens, starts))
    table, lens = (torch.from_numpy(x).to(q.device) for x in (batch.block_table, batch.seq_lens))
    out, scale = torch.empty_like(q), attention.head_dim**-0.5

    def call() -> object:
        return executor.run(q, k_cache, v_cache, table, lens, out, scale)

    return Side(out, call, lambda: 0.0, plan.kv_tokens_read(batch.seq_lens))


def _reference(
    batch: Batch, q: "torch.Tensor", k_cache: "torch.Tensor", v_cache: "torch.Tensor"
) -> "tuple[list[int], torch.Tensor]":
    """Up to ``CHECKED`` rows spread over the batch, and their reference results."""
    import torch

    from vllm_prefixshare.kernels.reference import reference_attention

    n = len(batch.seq_lens)
    rows = np.unique(np.linspace(0, n - 1, min(n, CHECKED)).astype(int)).tolist()
    table = torch.from_numpy(batch.block_table[rows]).to(q.device)
    lens = torch.from_numpy(batch.seq_lens[rows]).to(q.device)
    return rows, reference_attention(q[rows], k_cache, v_cache, table, lens)


def _print(of: dict[str, str], results: list[dict[str, Any]]) -> None:
    print(f"attention of one layer on {of['device']}")
    print(f"unshared: {of['unshared']}; shared: {of['shared']}")
    rows: list[tuple[str, ...]] = [
        ("batch", "requests", "KV tokens", "share", "unshared ms", "shared ms", "gain")
    ]
    for row in results:
        start = (
            row["batch"],
            str(row["requests"]),
            str(row["kv_tokens"]),
            f"{row['share_factor']:.2f}",
        )
        if row["right"]:
            gain = f"{row['gain']:.2f}{' noisy' if row['noisy'] else ''}"
            times = f"{row['unshared_ms']:.3f}", f"{row['shared_ms']:.3f}", gain
            rows.append((*start, *times))
        else:
            errors = ", ".join(f"{name} {error:.2g}" for name, error in row["errors"].items())
            note = f"WRONG: off the reference by {errors} of its greatest value"
            rows.append((*start, note))
    print_table(rows)
    if any(row.get("noisy") for row in results):
        print(
            "noisy: the machine had other work, so that the ratio of the medians is another than "
            "the pairs' gain; measure again when it is idle, or raise --seconds."
        )
    if any(row.get("gain", 1.0) < 0.9 for row in results):
        print(
            "Where the gain is below 1, sharing costs time here: measure a cost table with "
            "'vllm-prefixshare profile', so that VLLM_PREFIXSHARE_SHARE=auto knows."
        )
