"""Batches for a command: a tree such as ``1,4,16_1024,256,64``, or a file with block tables."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vllm_prefixshare.cli.recorded_plans import Recorded, is_count, recorded
from vllm_prefixshare.core import IntArray, PrefixShareError
from vllm_prefixshare.utils.trusted_files import read_text
from vllm_prefixshare.vllm_plugin.observability.tracing import MAX_BYTES

#: Largest batch that is read or made; a file is at most ``MAX_BYTES``, as a trace.
MAX_REQUESTS = 16384
MAX_ENTRIES = 1 << 24
#: Longest request; planning counts tokens in 32 bits, with some to spare.
MAX_TOKENS = 1 << 28
#: vLLM pads its block tables with block 0, which no request holds.
NULL_BLOCK_ID = 0


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
        PrefixShareError: the file is empty, not of that form, or too large, or has no such line.
    """
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, ValueError) as e:
        raise PrefixShareError(f"{path} cannot be read ({e}).") from None
    if not text.strip():
        raise PrefixShareError(
            f"{path} is empty: name a file with block tables, or trace a server that decodes with "
            "PREFIX_SHARE."
        )
    lines = _objects(text)
    if step is not None and not -len(lines) <= step < len(lines):
        raise PrefixShareError(
            f"--step must be from {-len(lines)} to {len(lines) - 1} for {path}, got {step}."
        )
    try:
        if step is None:
            step = max(range(len(lines)), key=lambda i: (_num_requests(lines[i]), i))
        step %= len(lines)
        name = path.name if len(lines) == 1 else f"{path.name}, step {step} of {len(lines)}"
        return _batch(name, json.loads(lines[step]))
    except (ValueError, RecursionError) as e:
        raise PrefixShareError(f"{path} is not a block-table file: {e}.") from None


def _num_requests(line: str) -> int:
    data = json.loads(line)
    lens = data.get("kv_lens") if isinstance(data, dict) else None
    return len(lens) if isinstance(lens, list) else 0


def _objects(text: str) -> list[str]:
    """The texts of the objects, one on each line, or a single one over several lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines if lines[0].rstrip().endswith("}") else [text]


def _batch(name: str, data: Any) -> Batch:
    """The batch that ``data`` describes. Raises ValueError with what is wrong."""
    keys = ("block_size", "block_tables", "kv_lens")
    if not isinstance(data, dict) or any(key not in data for key in keys):
        raise ValueError(f"it must be an object with {', '.join(keys)}")
    size, tables, lens = (data[key] for key in keys)
    if not is_count(size, 1 << 16) or size == 0:
        raise ValueError("block_size must be an integer from 1 to 65536")
    if not isinstance(tables, list) or not isinstance(lens, list) or len(tables) != len(lens):
        raise ValueError("block_tables and kv_lens must be lists, one entry for each request")
    if not 1 <= len(lens) <= MAX_REQUESTS:
        raise ValueError(f"it must have from 1 to {MAX_REQUESTS} requests, not {len(lens)}")
    for i, (row, length) in enumerate(zip(tables, lens, strict=True)):
        if not is_count(length, MAX_TOKENS) or length == 0:
            raise ValueError(f"kv_lens[{i}] must be an integer from 1 to {MAX_TOKENS}")
        if not isinstance(row, list) or not all(is_count(n, (1 << 31) - 1) for n in row):
            raise ValueError(f"block_tables[{i}] must be a list of integers, 0 or more")
        if len(row) < -(-length // size):
            raise ValueError(
                f"block_tables[{i}] has {len(row)} blocks of {size} tokens, too few for the "
                f"{length} of kv_lens[{i}]"
            )
    width = max(map(len, tables))
    if len(lens) * width > MAX_ENTRIES:
        raise ValueError(
            f"{len(lens)} requests with up to {width} blocks are more than {MAX_ENTRIES} entries"
        )
    table = np.full((len(lens), width), NULL_BLOCK_ID, np.int32)
    for i, row in enumerate(tables):
        table[i, : len(row)] = row
    seq_lens = np.array(lens, np.int32)
    return Batch(name, table, seq_lens, size, recorded(data, table, seq_lens))
