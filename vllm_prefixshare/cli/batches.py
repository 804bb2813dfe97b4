"""Batches for a command: a tree such as ``1,4,16_1024,256,64``, or a file with block tables."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.vllm_plugin.observability.tracing import (
    PLAN_ARRAYS,
    TracedEngine,
    TracedPlan,
)

#: Largest batch that is made.
MAX_REQUESTS = 16384
MAX_ENTRIES = 1 << 24
#: Longest request; planning counts tokens in 32 bits, with some to spare.
MAX_TOKENS = 1 << 28
#: vLLM pads its block tables with block 0, which no request holds.
NULL_BLOCK_ID = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plan as an engine ran it."""

    engine: TracedEngine
    made: TracedPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that decode together.

    block_table: int32 ``[num_reqs, max_blocks]`` physical block ids.
    seq_lens: int32 ``[num_reqs]`` tokens, the one to be computed included.
    recorded: the plan that an engine made for it; None if it is no batch of a trace.
    """

    name: str
    block_table: IntArray
    seq_lens: IntArray
    block_size: int
    recorded: Recorded | None = None


def tree_batch(spec: str, block_size: int) -> Batch:
    """The requests of a tree such as ``1,4,16_1024,256,64``: nodes per level, then tokens per node
    of that level. The nodes of the last level are the requests. Blocks lie scattered over a cache.

    Raises:
        PrefixShareError: not a tree, or one that is too large.
    """
    levels = tree_levels(spec)
    num_reqs = levels[-1][0]
    tokens = sum(length for _, length in levels)
    entries = num_reqs * (tokens // block_size)
    if num_reqs > MAX_REQUESTS or tokens > MAX_TOKENS or entries > MAX_ENTRIES:
        raise PrefixShareError(
            f"the tree has more than {MAX_REQUESTS} requests, requests of more than "
            f"{MAX_TOKENS} tokens, or a block table of more than {MAX_ENTRIES} entries: describe "
            "a smaller one."
        )
    counts, lengths = np.array(levels).T
    ends = lengths.cumsum()
    columns = np.arange(-(-ends[-1] // block_size))
    # a block belongs to a node of the first level that has all of its tokens
    level = np.searchsorted(ends[:-1], (columns + 1) * block_size)
    node_of = [np.arange(num_reqs)]  # on each level, the node above each request
    for below, above in pairwise(counts[::-1]):
        node_of.insert(0, node_of[0] * above // below)
    first = counts[level].cumsum() - counts[level]
    ids = np.random.default_rng(0).permutation(counts[level].sum()).astype(np.int32) + 1
    table = np.ascontiguousarray(ids[first + np.array(node_of)[level].T])
    return Batch(f"tree {spec}", table, np.full(num_reqs, ends[-1], np.int32), block_size)


def tree_levels(spec: str) -> list[tuple[int, int]]:
    """Nodes, and tokens of each node, of the levels of a tree.

    Raises:
        PrefixShareError: with the rule that the description breaks.
    """
    parts = [part.split(",") for part in spec.split("_")]
    if len(parts) != 2 or not all(x.isdecimal() for part in parts for x in part):
        rule = "write nodes per level, '_', tokens per node, such as 1,4,16_1024,256,64"
        raise PrefixShareError(f"tree {spec!r} is not valid: {rule}.")
    # int() refuses thousands of digits; a number that is cut off here is too large as well
    counts, lengths = ([int(x[:20]) for x in part] for part in parts)
    if len(counts) != len(lengths):
        rule = "name as many levels before '_' as after it"
    elif min(counts + lengths) < 1:
        rule = "each level needs at least 1 node, and each node 1 token"
    elif counts != sorted(counts):
        rule = "no level can have fewer nodes than the one above it"
    else:
        return list(zip(counts, lengths, strict=True))
    raise PrefixShareError(f"tree {spec!r} is not valid: {rule}.")


def read_batch(path: Path, step: int | None = None) -> Batch:
    """One of the batches of a file: an object of the form that docs/cli.md describes, or a line
    with one for each batch.

    Args:
        step: which line; counted from the last if negative. None: the one with the most requests,
            the last of them.

    Raises:
        PrefixShareError: the file is empty, or not of that form, or has no such line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise PrefixShareError(f"{path} cannot be read ({e}).") from None
    if not text.strip():
        raise PrefixShareError(
            f"{path} is empty: name a file with block tables, or trace a server that decodes with "
            "PREFIX_SHARE."
        )
    try:
        found = _objects(text)
        sizes = [len(data["kv_lens"]) for data in found]
        if step is None:
            step = max(range(len(found)), key=lambda i: (sizes[i], i))
        elif not -len(found) <= step < len(found):
            raise PrefixShareError(
                f"--step must be from {-len(found)} to {len(found) - 1} for {path}, got {step}."
            )
        step %= len(found)
        name = path.name if len(found) == 1 else f"{path.name}, step {step} of {len(found)}"
        return _batch(name, found[step])
    except PrefixShareError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as e:
        reason = f"it has no {e}" if isinstance(e, KeyError) else str(e)
        raise PrefixShareError(f"{path} is not a block-table file: {reason}.") from None


def _objects(text: str) -> list[dict[str, Any]]:
    """The objects, one on each line, or a single one over several lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [json.loads(x) for x in (lines if lines[0].rstrip().endswith("}") else [text])]


def _batch(name: str, data: dict[str, Any]) -> Batch:
    """The batch that ``data`` describes. Raises ValueError with what is wrong."""
    size, tables = data["block_size"], data["block_tables"]
    seq_lens = np.array(data["kv_lens"], np.int32)
    if not len(seq_lens) or len(tables) != len(seq_lens):
        raise ValueError("block_tables and kv_lens must be lists, one entry for each request")
    table = np.full((len(tables), max(map(len, tables))), NULL_BLOCK_ID, np.int32)
    for i, row in enumerate(tables):
        table[i, : len(row)] = row
        if not 1 <= seq_lens[i] <= len(row) * size:
            raise ValueError(
                f"block_tables[{i}] has {len(row)} blocks of {size} tokens, and kv_lens[{i}] is "
                f"{seq_lens[i]}"
            )
    return Batch(name, table, seq_lens, size, _recorded(data, table, seq_lens))


def _recorded(data: dict[str, Any], table: IntArray, seq_lens: IntArray) -> Recorded | None:
    """The engine and the plan that ``Trace.record`` wrote; None in a file with block tables."""
    if "engine" not in data:
        return None
    engine, plan, size = data["engine"], data["plan"], data["block_size"]
    shape = {"features": (), **engine["attention"], "block_size": size}
    arrays = {name: np.array(plan[name], np.int32) for name in PLAN_ARRAYS}
    tile_us = np.array(plan["tile_us"], np.float64)
    return Recorded(
        TracedEngine(
            AttentionConfig(**shape | {"features": tuple(shape["features"])}),
            engine["query_len"],
            _printable(engine["device"]),
            _printable(engine["kernel"]),
            _printable(plan["divider"]),
            _printable(plan["default_divider"]),
        ),
        TracedPlan(
            DecodePlan(
                num_reqs=len(seq_lens),
                block_size=size,
                tile_cost=tile_us,
                planned_seq_lens=seq_lens,
                **arrays,
            ),
            table,
            seq_lens,
            plan["kv_tokens"],
            plan["kv_tokens_read"],
            plan["merge_us"],
            plan["unshared_us"],
            plan["unshared"] and _printable(plan["unshared"]),
            plan["plan_ms"] / 1e3,
        ),
    )


def _printable(text: str) -> str:
    """A text of a file, without codes for the terminal."""
    return ascii(text)[1:-1]
