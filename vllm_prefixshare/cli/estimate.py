"""Estimate from a file of prompts what a GPU would gain and cost, and what breaks the prefixes."""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vllm_prefixshare.cli.batches import MAX_REQUESTS
from vllm_prefixshare.cli.call_time import SIDES, SOURCE, call_times
from vllm_prefixshare.cli.decode_groups import DecodeGroup, decode_groups
from vllm_prefixshare.cli.estimate_report import print_report
from vllm_prefixshare.cli.estimated_model import (
    EstimatedModel,
    add_model_arguments,
    estimated_model,
)
from vllm_prefixshare.cli.options import (
    add_cache_argument,
    add_shape_arguments,
    check_range,
)
from vllm_prefixshare.cli.prefixes import SHOWN_TOKENS, Break, PrefixBlocks
from vllm_prefixshare.cli.prompts import (
    FORMATS,
    MAX_SAMPLES,
    Source,
    open_source,
    read_requests,
)
from vllm_prefixshare.cli.tokenization import ByteTokenizer, CheckpointTokenizer, Tokenizer
from vllm_prefixshare.core import FloatArray, PrefixShareError

EXAMPLE = """\
prompts.jsonl has a prompt on each line, such as "Once upon a time", {"prompt": [1, 2, 3]} or
{"messages": [{"role": "user", "content": "Hello"}]}; OpenAI's batch files, lines of text and logs
of vllm serve will do as well, and - is standard input:

    vllm-prefixshare estimate prompts.jsonl --gpu H200 --model Llama-3.1-8B --batch 64,256

Neighbours in the file decode together, --batch of them at a time. For a server's log, start it as
VLLM_LOGGING_LEVEL=DEBUG vllm serve MODEL --enable-log-requests"""

DEFAULT_BATCH = 256
MAX_SIZES = 16
#: Maximum number of places that are reported where a prefix breaks.
MAX_BREAKS = 5


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    command.add_argument("file", type=Path, help="prompts or a log; - for standard input")
    command.add_argument("--gpu", required=True, help="such as H200")
    command.add_argument("--tokenizer", help="for text (default: of --model, else 4 bytes a token)")
    command.add_argument(
        "--batch",
        default=str(DEFAULT_BATCH),
        help="requests that decode together, or several numbers such as 64,256,1024",
    )
    command.add_argument("--output-tokens", type=int, default=256, help="that each will generate")
    command.add_argument("--samples", type=int, default=1, help="outputs of each prompt, vLLM's n")
    command.add_argument("--limit", type=int, help="read only so many prompts")
    command.add_argument("--format", choices=FORMATS, default="auto", help="of the file")
    add_model_arguments(command)
    add_shape_arguments(command, block_size="vLLM's own, by the layers")
    add_cache_argument(command)


@dataclass
class Totals:
    """Sums over the groups of one batch size and order of the requests.

    output_tokens: that each request generates.
    unshared_us, shared_us: attention of all layers in one decode step of each group.
    times: part of the whole call -> milliseconds of ``SIDES``.
    kv_tokens, kv_tokens_read: of the mean layer in one decode step of each group.
    kv_bytes: of the largest group, on one GPU.
    """

    model: EstimatedModel
    output_tokens: int
    requests: int = 0
    batches: int = 0
    kv_tokens: int = 0
    kv_tokens_read: float = 0.0
    unshared_us: float = 0.0
    shared_us: float = 0.0
    times: dict[str, FloatArray] = field(default_factory=dict)
    kv_bytes: float = 0.0
    is_limited: bool = False

    def add(self, group: DecodeGroup) -> None:
        """Add the estimate of a group."""
        model = self.model
        read = 0
        unshared_us = shared_us = 0.0
        for attention, layer in model.planning.items():
            planned = layer.plan(group.batch)
            count = model.layers[attention]
            read += count * planned.made.kv_tokens_read
            unshared_us += count * planned.unshared_us
            shared_us += count * planned.attention_us
        attention_us = unshared_us, shared_us
        found = call_times(group, self.output_tokens, attention_us, model)
        self.requests += len(group.batch.seq_lens)
        self.batches += 1
        self.kv_tokens += int(group.batch.seq_lens.sum())
        self.kv_tokens_read += read / model.layers.total()
        self.unshared_us += unshared_us
        self.shared_us += shared_us
        self.times = {part: self.times.get(part, 0.0) + times for part, times in found.items()}
        self.kv_bytes = max(self.kv_bytes, group.kv_bytes)
        self.is_limited |= group.is_limited


def run(args: argparse.Namespace) -> int:
    """Print the estimate; the exit status is 1 if the GPU's memory is too small."""
    sizes = _sizes(args.batch)
    check_range(args, "output-tokens", 0, 1 << 20)
    check_range(args, "samples", 1, MAX_SAMPLES)
    check_range(args, "limit", 1, 1 << 30)
    source = Source(args.file, args.format)
    model = estimated_model(args)
    with open_source(source) as file:
        found = _estimate(args, model, source, file, sizes)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print_report(found)
    return 0 if found["memory"]["fits"] else 1


def _sizes(text: str) -> list[int]:
    """Batch sizes of ``--batch``, ascending."""
    items = text.split(",")
    if len(items) > MAX_SIZES or not all(
        item.isdecimal() and len(item) < 9 and 1 <= int(item) <= MAX_REQUESTS for item in items
    ):
        raise PrefixShareError(
            f"--batch must be from 1 to {MAX_REQUESTS}, or up to {MAX_SIZES} such numbers with "
            f"commas, got {text[:40]}."
        )
    return sorted(set(map(int, items)))


def _tokenizer(args: argparse.Namespace) -> Tokenizer:
    if args.tokenizer is not None:
        return CheckpointTokenizer(args.tokenizer)
    if args.model is not None and (args.model / "tokenizer.json").is_file():
        return CheckpointTokenizer(str(args.model))
    return ByteTokenizer()


def _estimate(
    args: argparse.Namespace,
    model: EstimatedModel,
    source: Source,
    file: BinaryIO,
    sizes: list[int],
) -> dict[str, Any]:
    tokenizer = _tokenizer(args)
    blocks = PrefixBlocks(model.block_size)
    for count, request in enumerate(read_requests(source, file, tokenizer), 1):
        samples = args.samples * request.samples
        blocks.add(request.name, request.tokens, samples, request.is_text)
        if count == args.limit:
            break
    prompts = blocks.prompts
    orders = {"as ordered": prompts}
    known: dict[tuple[int, str], Totals] = {}

    def totals(size: int, order: str) -> Totals:
        key = min(size, len(prompts)), order
        if key not in known:
            found = known[key] = Totals(model, args.output_tokens)
            for group in decode_groups(
                orders[order], blocks, size, args.output_tokens, model.memory
            ):
                found.add(group)
        return known[key]

    if min(sizes) < len(prompts):
        order = blocks.depth_first_order()
        if order is not None and order != list(range(len(prompts))):
            orders["sorted by prefix"] = [prompts[i] for i in order]
    rows = []
    for size in sizes:
        for name in orders:
            if size < len(prompts) or name == "as ordered":
                rows.append(_row(totals(size, name), size, name))
    first = totals(sizes[0], "as ordered")
    too_long = len(prompts) - first.requests
    return _report(args, first, rows, tokenizer.description, too_long) | {
        "requests": len(prompts),
        "prefix_cache": _prefix_cache(blocks, tokenizer),
    }


def _row(totals: Totals, size: int, order: str) -> dict[str, Any]:
    """One batch size and order; tokens, microseconds and call_ms are the mean of the batches."""
    row: dict[str, Any] = {
        "batch": size,
        "order": order,
        "batches": totals.batches,
        "limited_by_memory": totals.is_limited,
        "kv_gb": round(totals.kv_bytes / 1e9, 3),
    }
    batches = totals.batches
    if not batches:
        return row
    row |= {
        "kv_tokens": round(totals.kv_tokens / batches),
        "kv_tokens_read": round(totals.kv_tokens_read / batches),
        "share_factor": round(totals.kv_tokens / totals.kv_tokens_read, 3),
        "attention_us_unshared": round(totals.unshared_us / batches, 2),
        "attention_us_shared": round(totals.shared_us / batches, 2),
        "attention_gain": round(totals.unshared_us / totals.shared_us, 3),
        "call_ms": {part: _sides(times / batches, 2) for part, times in totals.times.items()},
    }
    if "decode" in totals.times and totals.output_tokens:
        seconds = totals.times["sum"] / 1e3
        hours = seconds * (totals.model.num_gpus / 3600)
        decode = totals.times["decode"] / (batches * totals.output_tokens)
        row |= {
            "seconds": _sides(seconds, 3),
            "ms_per_token": _sides(decode, 3),
            "tokens_per_second": _sides(totals.requests * totals.output_tokens / seconds, 1),
            "gpu_hours": _sides(hours, 6),
        }
    return row


def _sides(values: FloatArray, digits: int) -> dict[str, float]:
    return {side: round(value, digits) for side, value in zip(SIDES, values.tolist(), strict=True)}


def _report(
    args: argparse.Namespace,
    totals: Totals,
    rows: list[dict[str, Any]],
    tokens: str,
    too_long: int,
) -> dict[str, Any]:
    """All that is found. The fields of the best row are repeated at the top.

    Args:
        totals: of any of the rows.
        tokens: what counts as a token.
        too_long: number of requests that memory cannot hold.
    """
    asked = [row for row in rows if row["order"] != "sorted by prefix"]
    best = max(asked, key=lambda row: row.get("tokens_per_second", {}).get("parts_on", 0.0))
    model, memory = totals.model, totals.model.memory
    return {
        "file": str(args.file),
        "tokens": tokens,
        "model": model.name,
        "gpu": args.gpu,
        "num_gpus": model.num_gpus,
        "output_tokens": args.output_tokens,
        "cost": model.cost_source,
        "host_cost": SOURCE,
        "layers": model.layers.total(),
        "layers_left_out": dict(model.left_out),
        "special_weights": model.special_weights,
        "memory": {
            "gpu_gb": model.gpu.memory_gb,
            "usable_gb": round(memory.total / 1e9, 2),
            "weights_gb": round(memory.weights / 1e9, 2),
            "kv_gb": round(max(0.0, memory.kv_room) / 1e9, 2),
            "too_long": too_long,
            "fits": too_long == 0,
        },
        **best,
        "estimates": rows,
    }


def _prefix_cache(blocks: PrefixBlocks, tokenizer: Tokenizer) -> dict[str, Any]:
    """What an unlimited prefix cache would reuse, and what breaks prefixes."""
    prompts = blocks.prompts
    total = sum(prompt.num_tokens for prompt in prompts)
    reusable = sum(prompt.num_known for prompt in prompts) * blocks.block_size
    return {
        "block_size": blocks.block_size,
        "prompt_tokens": total,
        "reusable_tokens": reusable,
        "reusable": round(reusable / total, 4),
        "breaks": [_break(one, blocks, tokenizer) for one in blocks.breaks()[:MAX_BREAKS]],
    }


def _break(one: Break, blocks: PrefixBlocks, tokenizer: Tokenizer) -> dict[str, Any]:
    texts = []
    for index in (one.first, one.other):
        ids = blocks.tokens_of(index)[one.token : one.token + SHOWN_TOKENS]
        can_decode = blocks.prompts[index].is_text or not isinstance(tokenizer, ByteTokenizer)
        texts.append(tokenizer.decode(ids) if can_decode else str(ids.tolist()))
    return {
        "block": one.block,
        "token": one.token,
        "shared_tokens": one.block * blocks.block_size,
        "requests": one.num_prompts,
        "first": blocks.prompts[one.first].name,
        "differs_from": blocks.prompts[one.other].name,
        "text": texts[0],
        "other_text": texts[1],
        "equal_after": round(one.equal_after),
    }
