"""Estimate from a file of prompts how much is shared, what decode would gain on a GPU, and where
the time of the whole call goes.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_prefixshare.cli.call_time import (
    MEASURED,
    Attention,
    Times,
    Work,
    call_times,
    parse_costs,
    weight_bytes,
)
from vllm_prefixshare.cli.options import (
    add_cache_argument,
    add_shape_arguments,
    attention_of,
    check_block_size,
    check_cache_argument,
    shape_option,
)
from vllm_prefixshare.cli.output import print_table
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import Forest, IntArray, PrefixShareError
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind, layer_kinds

if TYPE_CHECKING:
    from vllm_prefixshare.cli.batches import Batch
    from vllm_prefixshare.cli.gpus import GpuPlanning

EXAMPLE = """\
prompts.jsonl has a prompt on each line, such as "Once upon a time" or {"prompt": [1, 2, 3]}:

    vllm-prefixshare estimate prompts.jsonl --gpu H200 --tokenizer meta-llama/Llama-3.1-8B

Neighbours in the file decode together, --batch of them at a time. A server's log will do as well,
from: VLLM_LOGGING_LEVEL=DEBUG vllm serve MODEL --enable-log-requests"""

#: Microseconds of a layer beside its busiest worker: launches, start and merging. On an H200, in 28
#: published cells, 4 to 26 and 10 in the median; taken for both sides.
LAYER_US = 10.0
#: Time without sharing of a token that another request reads as well, over that of a token from
#: memory: 0.60 to 0.67 with FlashAttention-3 on an H200, where documents of 2k tokens and more are
#: read again from the L2 cache.
READ_AGAIN = 0.63
#: The same of latents, where arithmetic decides: with it gains are 0.88 to 1.02 of those measured
#: on an H200, in 16 published cells with 8 to 32 heads.
LATENT_AGAIN = 0.85
MAX_WEIGHTS_GB = 10_000
#: Most tokens of a batch; token ids take four bytes each.
MAX_TOKENS = 1 << 26


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    command.add_argument("file", type=Path, help="prompts, or a request log of vllm serve")
    command.add_argument("--gpu", required=True, help="such as H200")
    command.add_argument("--tokenizer", help="for text (default: 4 bytes count as a token)")
    command.add_argument("--batch", type=int, default=256, help="requests that decode together")
    command.add_argument("--output-tokens", type=int, default=256, help="that each will generate")
    command.add_argument(
        "--weights-gb", type=float, help="GB of the weights (default: the files in --model)"
    )
    command.add_argument(
        "--host-costs",
        default="",
        help="microseconds per prompt token of a part, such as tokenization=0.06 with fastokens "
        "(default: as measured)",
    )
    add_shape_arguments(command, block_size="vLLM's own, by the layers")
    add_cache_argument(command)


class Totals(NamedTuple):
    """Sums over the batches; times in microseconds of all layers, once for each batch. See ``Work``
    for the tokens.
    """

    requests: int
    batches: int
    kv_tokens: int
    kv_tokens_read: int
    unshared_us: float
    shared_us: float
    prompt_tokens: int
    new_tokens: int
    attended: int


def run(args: argparse.Namespace) -> int:
    """Print what the prompts share and what decode would gain; the exit status is 0."""
    from vllm_prefixshare.cli.batches import MAX_REQUESTS
    from vllm_prefixshare.cli.gpus import planning_for
    from vllm_prefixshare.cli.prompts import byte_tokens, load_tokenizer, read_prompts

    if not 1 <= args.batch <= MAX_REQUESTS:
        raise PrefixShareError(f"--batch must be from 1 to {MAX_REQUESTS}, got {args.batch}.")
    if not 0 <= args.output_tokens <= 1 << 20:
        raise PrefixShareError(
            f"--output-tokens must be from 0 to {1 << 20}, got {args.output_tokens}."
        )
    changes = parse_costs(args.host_costs)
    if args.weights_gb is not None and not 0 < args.weights_gb <= MAX_WEIGHTS_GB:
        raise PrefixShareError(
            f"--weights-gb must be above 0 and at most {MAX_WEIGHTS_GB}, got {args.weights_gb}."
        )
    if args.weights_gb is not None and args.model is None:
        raise PrefixShareError("--weights-gb needs --model: name the folder with its config.json.")
    shapes, left_out = _layers(args)
    planning = {attention: planning_for(args.gpu, attention) for attention in shapes}
    tokenizer = byte_tokens if args.tokenizer is None else load_tokenizer(args.tokenizer)
    prompts = read_prompts(args.file, tokenizer)
    block_size = next(iter(shapes)).block_size
    batches = _batches(prompts, args.batch, block_size, args.output_tokens // 2)
    totals = _plan_all(batches, planning, shapes, args.output_tokens // 2)
    cost_source = "; ".join(dict.fromkeys(gpu.cost_source for gpu in planning.values()))
    found = _report(args, totals, cost_source, shapes.total(), left_out)
    times = _call_times(args, totals, shapes, changes)
    found["call_ms"] = {row: rounded._asdict() for row, rounded in times.items()}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(args, found)
    return 0


def _layers(args: argparse.Namespace) -> tuple[Counter[AttentionConfig], Counter[str]]:
    """How many layers there are of each shape, of those whose attention is estimated; and of the
    others with attention, by the reason.

    Raises:
        PrefixShareError: there is none to estimate.
    """
    from vllm_prefixshare.cli.gpus import gpu_named
    from vllm_prefixshare.cli.served import falls_back_on, shape_of
    from vllm_prefixshare.vllm_plugin import invariance
    from vllm_prefixshare.vllm_plugin.eligibility.layer import Engine
    from vllm_prefixshare.vllm_plugin.eligibility.platform import gpu_of

    check_block_size(args)
    check_cache_argument(args)
    capability = gpu_named(args.gpu).capability
    if args.model is None:
        attention = attention_of(args)
        if attention.kv_dtype is not None and "fp8" not in gpu_of(capability).extras:
            raise PrefixShareError(
                f"layers with an fp8 KV cache keep vLLM's own backend on {args.gpu}: name another "
                "GPU, or leave out --kv-cache-dtype."
            )
        return Counter({attention: 1}), Counter()
    kinds = layer_kinds(args.model)
    engine = Engine(is_hybrid=not all(kind.attention for kind in kinds))
    served: list[LayerKind] = []
    left_out: Counter[str] = Counter()
    for kind in kinds:
        if not kind.attention:
            continue
        kind = replace(
            kind,
            dtype=shape_option(args, "dtype"),
            use_batch_invariant=invariance.wanted(),
        )
        if args.kv_cache_dtype != "auto":
            kind = replace(kind, kv_cache_dtype=args.kv_cache_dtype)
        reason = falls_back_on(kind, capability, engine)
        if reason is None and kind.has_sliding_window:
            length = kind.sliding_window  # None: the file does not say
            reason = "a sliding window" + (f" of {length} tokens" if length else "")
        if reason is None:
            served.append(kind)
        else:
            left_out[reason] += kind.count
    if not served:
        reasons = ", ".join(left_out) or "none has attention"
        raise PrefixShareError(
            f"{args.model} has no layer to estimate on {args.gpu} ({reasons}): see what 'doctor "
            "--model' says of it."
        )
    # one size for all layers, as in an engine
    block_size = args.block_size
    if block_size is None:
        block_size = max(shape_of(kind).block_size for kind in served)
    shapes: Counter[AttentionConfig] = Counter()
    for kind in served:
        shapes[shape_of(kind, block_size=block_size)] += kind.count
    return shapes, left_out


def _batches(
    prompts: Iterator[IntArray], size: int, block_size: int, generated: int
) -> Iterator["Batch"]:
    """Batches of ``size`` prompts, each with ``generated`` tokens so far."""
    some: list[IntArray] = []
    tokens = 0
    for prompt in prompts:
        some.append(prompt)
        tokens += len(prompt)
        if tokens > MAX_TOKENS:
            raise PrefixShareError(
                f"{len(some)} prompts have more than {MAX_TOKENS} tokens: lower --batch."
            )
        if len(some) == size:
            yield batch_of(some, block_size, generated)
            some, tokens = [], 0
    if some:
        yield batch_of(some, block_size, generated)


def batch_of(prompts: list[IntArray], block_size: int, generated: int = 0) -> "Batch":
    """The block tables that vLLM's prefix caching would give these requests.

    Args:
        prompts: token ids of each.
        generated: tokens that each has generated, besides the one to be computed.
    """
    from vllm_prefixshare.cli.batches import MAX_ENTRIES, Batch

    lens = np.array([len(tokens) + generated + 1 for tokens in prompts], np.int32)
    blocks = -(-lens // block_size)
    width = int(blocks.max())
    if len(prompts) * width > MAX_ENTRIES:
        raise PrefixShareError(
            f"{len(prompts)} requests of up to {int(lens.max())} tokens are too many at a time: "
            "lower --batch."
        )
    table = np.zeros((len(prompts), width), np.int32)
    # a block is identified by the block before it and its own tokens
    known: dict[tuple[int, bytes], int] = {}
    used = 0
    for row, tokens, count in zip(table, prompts, blocks.tolist(), strict=True):
        before = 0
        # vLLM computes the last token of a prompt in any case, so its block is not shared
        shareable = (len(tokens) - 1) // block_size
        for i in range(shareable):
            key = before, tokens[i * block_size : (i + 1) * block_size].tobytes()
            if (block := known.get(key, 0)) == 0:
                block = known[key] = used = used + 1
            row[i] = before = block
        row[shareable:count] = np.arange(used + 1, used + 1 + count - shareable)
        used += count - shareable
    return Batch("prompts", table, lens, block_size)


def _plan_all(
    batches: Iterable["Batch"],
    planning: dict[AttentionConfig, "GpuPlanning"],
    layers: Counter[AttentionConfig],
    generated: int,
) -> Totals:
    totals = Totals(0, 0, 0, 0, 0.0, 0.0, 0, 0, 0)
    estimates = {attention: estimator(gpu, attention) for attention, gpu in planning.items()}
    for batch in batches:
        unshared = shared = 0.0
        for attention, estimate in estimates.items():
            read, one_by_one, together = estimate(batch)
            unshared += layers[attention] * one_by_one
            shared += layers[attention] * together
        these = Totals(
            len(batch.seq_lens),
            1,
            int(batch.seq_lens.sum()),
            read,
            unshared,
            shared,
            *_prompt_tokens(batch, generated),
        )
        totals = Totals(*map(add, totals, these))
    return totals


def _prompt_tokens(batch: "Batch", generated: int) -> tuple[int, int, int]:
    """Tokens of the prompts, those that no earlier request of the batch has in the same block, and
    the KV tokens to which the latter attend.

    Args:
        generated: tokens in ``batch.seq_lens`` that each request has generated.
    """
    lens = batch.seq_lens.astype(np.int64) - generated - 1
    new = np.zeros_like(lens)
    blocks = -(-batch.seq_lens // batch.block_size)
    highest = 0  # ids ascend in the order of their first request
    for i, (row, count) in enumerate(zip(batch.block_table, blocks.tolist(), strict=True)):
        seen = int((row[:count] <= highest).sum())
        highest = max(highest, int(row[:count].max()))
        new[i] = lens[i] - seen * batch.block_size
    attended = new * lens - new * (new - 1) // 2
    return int(lens.sum()), int(new.sum()), int(attended.sum())


def estimator(
    gpu: "GpuPlanning", attention: AttentionConfig
) -> Callable[["Batch"], tuple[int, float, float]]:
    """A function that returns, for a batch, the KV tokens that are read with sharing, and the
    microseconds of a layer's attention without and with sharing.

    Without sharing every request reads its own KV tokens, balanced over the workers; a token that
    several read comes from memory once, and from the cache for all others.
    """
    from vllm_prefixshare.planning.planner import DecodePlanner
    from vllm_prefixshare.planning.sharing import shareable_forest

    planners = [
        DecodePlanner(
            replace(gpu.config, share=share),
            gpu.cost,
            attention.block_size,
            attention.gqa_group_size,
        )
        for share in ("never", gpu.config.share)
    ]

    def estimate(batch: "Batch") -> tuple[int, float, float]:
        lens = batch.seq_lens
        unshared, shared = (p.update(batch.block_table, lens).plan for p in planners)
        forest = shareable_forest(
            batch.block_table, lens, batch.block_size, null_block_id=gpu.config.null_block_id
        )
        reading = reading_time(forest, int(lens.sum()), attention)
        return (
            shared.kv_tokens_read(lens),
            LAYER_US + reading * float(unshared.worker_us.max()),
            LAYER_US + float(shared.worker_us.max()),
        )

    return estimate


def reading_time(forest: Forest, kv_tokens: int, attention: AttentionConfig) -> float:
    """Time to read ``kv_tokens`` request by request on a GPU, over that of as many tokens that all
    come from memory.
    """
    read_again = READ_AGAIN if attention.kv_lora_rank is None else LATENT_AGAIN
    readers = forest.node_reader_end - forest.node_reader_start
    tokens = (forest.node_end - forest.node_start).astype(np.int64) @ (readers - 1)
    return 1 - (1 - read_again) * min(1.0, int(tokens) / kv_tokens)


def _tokens_are(args: argparse.Namespace) -> str:
    return "of 4 bytes each" if args.tokenizer is None else f"of {args.tokenizer}"


def _report(
    args: argparse.Namespace, totals: Totals, cost_source: str, layers: int, left_out: Counter[str]
) -> dict[str, object]:
    """What is found; tokens and times are of one decode step, the mean of the batches."""
    batches = totals.batches
    return {
        "file": str(args.file),
        "requests": totals.requests,
        "batches": batches,
        "tokens": _tokens_are(args),
        "kv_tokens": round(totals.kv_tokens / batches),
        "kv_tokens_read": round(totals.kv_tokens_read / batches),
        "share_factor": round(totals.kv_tokens / totals.kv_tokens_read, 3),
        "gpu": args.gpu,
        "cost": cost_source,
        "layers": layers,
        "layers_left_out": dict(left_out),
        "attention_us_unshared": round(totals.unshared_us / batches, 2),
        "attention_us_shared": round(totals.shared_us / batches, 2),
        "attention_gain": round(totals.unshared_us / totals.shared_us, 3),
    }


def _call_times(
    args: argparse.Namespace,
    totals: Totals,
    layers: Counter[AttentionConfig],
    changes: dict[str, float],
) -> dict[str, Times]:
    """Milliseconds of a batch, the mean of the batches."""
    from vllm_prefixshare.cli.gpus import gpu_named

    batches = totals.batches
    work = Work(
        totals.prompt_tokens / batches,
        totals.new_tokens / batches,
        totals.attended / batches,
        args.output_tokens,
    )
    attention = Attention(
        totals.unshared_us / batches,
        totals.shared_us / batches,
        sum(4.0 * a.num_qo_heads * a.head_dim * count for a, count in layers.items()),
    )
    num_bytes = weight_bytes(args.model)
    if args.weights_gb is not None:
        num_bytes = int(args.weights_gb * 1e9)
    costs = MEASURED.with_new_us(changes)
    times = call_times(work, attention, num_bytes, gpu_named(args.gpu), costs)
    return {row: Times(*(round(ms, 2) for ms in found)) for row, found in times.items()}


def _print(args: argparse.Namespace, found: dict[str, Any]) -> None:
    of = "one layer" if found["layers"] == 1 else f"{found['layers']} layers"
    print(
        f"{found['requests']} prompts, up to {args.batch} at a time; text counts as tokens "
        f"{found['tokens']}"
    )
    print(
        f"KV tokens of a decode step: {found['kv_tokens']} one by one, {found['kv_tokens_read']} "
        f"as planned, share factor {found['share_factor']:.2f}"
    )
    print(
        f"attention of {of} on {args.gpu}: {found['attention_us_unshared']:.1f} us unshared, "
        f"{found['attention_us_shared']:.1f} us shared, {found['attention_gain']:.2f} times as fast"
    )
    for reason, count in found["layers_left_out"].items():
        print(f"not counted: {count} with {reason}")
    print(f"from the {found['cost']}; the rest of a decode step takes as long as without sharing")
    print("where the time goes, ms of a batch, one thing after the other:")
    rows = [("", "vLLM", "parts off", "parts on")]
    rows += [
        (row, *(f"{ms:.1f}" for ms in times.values())) for row, times in found["call_ms"].items()
    ]
    print_table(rows)
    print(f"from {MEASURED.source}")
    if "prefill" not in found["call_ms"]:
        print("prefill and decode need the weights: name a --model that has them, or --weights-gb")
