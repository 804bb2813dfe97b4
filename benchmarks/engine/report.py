"""Rows of ``benchmarks.engine``: computed from measured batches, and printed."""

import statistics
from typing import Any, Literal

from tests.support.engine import PREFIX_SHARE, STOCK, Batch, divergences
from vllm_prefixshare import PrefixShareError

Row = dict[str, Any]


def decode_ms(batch: Batch) -> float:
    """Milliseconds per output token while all requests decode.

    Raises:
        PrefixShareError: the requests never decode all at once.
    """
    seconds = batch.full_batch_seconds_per_token
    if seconds is None:
        raise PrefixShareError(
            f"the {len(batch.answers)} requests never decoded all at once "
            f"({batch.preemptions} pre-emptions): raise --tokens, --max-num-seqs or --memory."
        )
    return seconds * 1e3


def mean_ms(batches: list[Batch]) -> float:
    """Mean milliseconds between the tokens of a request, over all tokens but first ones."""
    later = [b.num_tokens - len(b.answers) for b in batches]
    seconds = sum(b.mean_seconds_per_token * n for b, n in zip(batches, later, strict=True))
    return seconds / max(1, sum(later)) * 1e3


def make_row(
    title: str,
    num_reqs: int,
    tokens: int,
    found: dict[str, list[Batch]],
    kind: Literal["decode", "first step", "whole call"],
    steps: dict[str, list[float]] | None = None,
) -> Row:
    """A row of the table.

    Args:
        tokens: number of tokens of the longest answer.
        found: measured batches of each engine.
        kind: the batches repeat one measurement of decoding with all requests running, or of the
            step that gives each request its only token, or they hold all work of the engines,
            prefill included.
        steps: milliseconds of the first step in each batch of each engine.
    """
    sides: dict[str, Row] = {}
    for name, batches in found.items():
        times = [decode_ms(b) for b in batches] if kind == "decode" else []
        if steps is not None:
            times = steps[name]
        sides[name] = {
            "ms": statistics.median(times) if times else mean_ms(batches),
            "range_ms": [min(times), max(times)] if times else None,
            "tokens_per_second": sum(b.num_tokens for b in batches)
            / sum(b.seconds for b in batches),
            "cached_share": cached_share(batches),
            "preemptions": sum(b.preemptions for b in batches),
        }
    return {
        "workload": title,
        "requests": num_reqs,
        "tokens": tokens,
        "kind": kind,
        "ratio": sides[STOCK]["ms"] / sides[PREFIX_SHARE]["ms"],
        "throughput_ratio": sides[PREFIX_SHARE]["tokens_per_second"]
        / sides[STOCK]["tokens_per_second"],
        "floor_ms": None,
        "agreement": None,
        "metadata_us": None,
        "breakdown": None,
        "host": host_times(found[PREFIX_SHARE]),
        **sides,
    }


def agreement(ours: Batch, stock: Batch) -> Row:
    """How many requests have the same greedy tokens, and the largest lead of stock's token where
    they part, in nats.
    """
    parted = divergences(ours, stock)
    return {
        "same": 1 - len(parted) / len(stock.answers),
        "largest_gap": max((d.gap for d in parted), default=0.0),
    }


def cached_share(batches: list[Batch]) -> float:
    """Part of the prompt tokens that came from the prefix cache."""
    answers = [a for b in batches for a in b.answers]
    return sum(a.num_cached_tokens for a in answers) / sum(a.num_prompt_tokens for a in answers)


def host_times(batches: list[Batch]) -> Row:
    """PREFIX_SHARE's counters and host times over these calls."""
    names = "decode_steps", "shared_steps", "plans", "plan_seconds"
    names += "kv_tokens_read", "kv_tokens_stock"
    total = {name: sum(b.stats[name] for b in batches) for name in names}
    steps, plans = total["decode_steps"], total["plans"]
    return {
        "decode_steps": int(steps),
        "shared_steps": int(total["shared_steps"]),
        "plans": int(plans),
        "plan_ms": total["plan_seconds"] / plans * 1e3 if plans else 0.0,
        "share_factor": total["kv_tokens_stock"] / max(1, total["kv_tokens_read"]),
    }


def spread(times: list[float]) -> Row | None:
    if not times:
        return None
    mean, median = statistics.fmean(times), statistics.median(times)
    return {"mean": mean, "median": median, "steps": len(times)}


def steady_us(row: Row, separator: str) -> str:
    """Mean host time of a steady step in microseconds: stock's and ours."""
    sides = (row["metadata_us"] or {}).values()
    return separator.join(f"{m['mean']:.0f}" if m else "-" for m in sides) or "-"


def breakdown_line(row: Row) -> str:
    parts = []
    for engine, title in ((STOCK, "stock"), (PREFIX_SHARE, "ours")):
        found = row["breakdown"][engine]
        kinds = ", ".join(
            f"{kind} {ms:.2f} ({found['launches'][kind]:.0f})" for kind, ms in found["ms"].items()
        )
        parts.append(f"{title} {kinds}, idle {found['idle_ms']:.2f}")
    return f"{row['workload']}: GPU ms of a step (launches): {'; '.join(parts)}"


def in_common(agreement: Row) -> str:
    """How long answers agree with stock's: ours, and stock's own in other batches."""
    again = {"halves": "in half batches", "alone": "alone"}
    gaps = agreement.get("largest_gap_stock", {})
    stock = ", ".join(
        f"{again[name]} {tokens:.1f}" + (f", gap {gaps[name]:.3f}" if name in gaps else "")
        for name, tokens in agreement["tokens_in_common_stock"].items()
    )
    return f"{agreement['tokens_in_common']:.1f} tokens in common; the baseline's own {stock}"


def line(row: Row) -> str:
    """What is said of a row as soon as it is measured; the table of all rows comes at the end."""
    stock, ours = row[STOCK]["ms"], row[PREFIX_SHARE]["ms"]
    return f"{row['workload']}: stock {stock:.2f} ms a token, ours {ours:.2f} ({row['ratio']:.2f})"
