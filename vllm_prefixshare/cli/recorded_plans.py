"""Plans in a trace, as an engine ran them."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from vllm_prefixshare.config import MAX_WORKERS, AttentionConfig
from vllm_prefixshare.core import OPEN_END, FloatArray, IntArray, PrefixShareError, WorkTiles
from vllm_prefixshare.planning.plan import DecodePlan, build_plan
from vllm_prefixshare.vllm_plugin.observability.tracing import (
    PLAN_ARRAYS,
    TracedEngine,
    TracedPlan,
)

#: Largest number of microseconds.
MAX_US = 1e12


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plan as an engine ran it."""

    engine: TracedEngine
    made: TracedPlan


def recorded(data: dict[str, Any], block_table: IntArray, seq_lens: IntArray) -> Recorded | None:
    """The engine and the plan in a line of a trace; None if it has none, as a file with block
    tables, or a trace of an earlier version.

    Args:
        data: the line, whose block tables and lengths are in order.
        block_table: ``[num_reqs, max_blocks]``. seq_lens: ``[num_reqs]``.

    Raises:
        ValueError: with what is wrong.
    """
    if "engine" not in data:
        return None
    engine, plan = data["engine"], data.get("plan")
    if not isinstance(engine, dict) or not isinstance(plan, dict):
        raise ValueError("engine and plan must be objects")
    query_len: Any = engine.get("query_len")
    if not is_count(query_len, 1 << 16) or query_len == 0:
        raise ValueError("query_len must be a number of tokens")
    for name in ("kv_tokens", "kv_tokens_read"):
        if not is_count(plan.get(name), 1 << 62) or plan[name] == 0:
            raise ValueError(f"{name} must be a number of tokens")
    reason = plan.get("unshared")
    return Recorded(
        TracedEngine(
            _attention(engine.get("attention"), data["block_size"]),
            query_len,
            device=_text(engine, "device"),
            kernel=_text(engine, "kernel"),
            divider=_text(plan, "divider"),
            default_divider=_text(plan, "default_divider"),
        ),
        TracedPlan(
            _decode_plan(plan, seq_lens, data["block_size"]),
            block_table,
            seq_lens,
            kv_tokens=plan["kv_tokens"],
            kv_tokens_read=plan["kv_tokens_read"],
            merge_us=_time(plan, "merge_us"),
            unshared_us=_time(plan, "unshared_us"),
            unshared=None if reason is None else _text(plan, "unshared"),
            seconds=_time(plan, "plan_ms") / 1e3,
        ),
    )


def _attention(shape: Any, block_size: int) -> AttentionConfig:
    names = {field.name for field in fields(AttentionConfig)} - {"block_size"}
    if not isinstance(shape, dict) or not shape.keys() <= names:
        raise ValueError(f"attention must be an object with some of {', '.join(sorted(names))}")
    try:
        features = tuple(shape.get("features", ()))
        return AttentionConfig(**{**shape, "features": features, "block_size": block_size})
    except (TypeError, PrefixShareError) as e:
        raise ValueError(f"attention is not the shape of a layer: {str(e).rstrip('.')}") from None


def _decode_plan(plan: dict[str, Any], seq_lens: IntArray, block_size: int) -> DecodePlan:
    """The plan of these arrays, with indices within their bounds."""
    arrays = {name: _integers(plan.get(name), name) for name in PLAN_ARRAYS}
    cost = _times(plan.get("tile_us"), "tile_us")
    requests, rows = arrays["tile_req_indices"], arrays["run_row"]
    starts, ends = arrays["run_kv_start"], arrays["run_kv_end"]
    readers = arrays["run_reader_start"], arrays["run_reader_end"]
    columns = (rows, starts, ends, *readers)
    _require(len({len(column) for column in columns}) == 1, "KV ranges")
    queues = _require_indptr(arrays, "work_indptr", len(cost))
    _require(len(queues) <= MAX_WORKERS, "work queues")
    sizes = _require_indptr(arrays, "tile_req_indptr", len(requests))
    runs = _require_indptr(arrays, "tile_run_indptr", len(rows))
    _require(len(sizes) == len(runs) == len(cost), "work tiles")
    for indices in (requests, rows):
        _require(((indices >= 0) & (indices < len(seq_lens))).all(), "requests")
    _require(len(np.unique(requests)) == len(seq_lens), "requests")
    _require(cost.any(), "tile_us")
    last = np.where(ends == OPEN_END, seq_lens[rows], ends)
    _require(((starts >= 0) & (starts <= last) & (last <= seq_lens[rows])).all(), "KV tokens")
    held = np.repeat(sizes, runs)
    _require(
        ((readers[0] >= 0) & (readers[0] < readers[1]) & (readers[1] <= held)).all(), "readers"
    )
    tiles = WorkTiles(
        arrays["tile_req_indptr"],
        requests,
        arrays["tile_run_indptr"],
        np.stack(columns, 1),
        cost,
        np.repeat(np.arange(len(queues), dtype=np.int32), queues),
    )
    return build_plan(tiles, len(queues), block_size, seq_lens)


def _require(condition: bool | np.bool_, what: str) -> None:
    if not condition:
        raise ValueError(f"its plan has {what} that do not fit together")


def _require_indptr(arrays: dict[str, IntArray], name: str, total: int) -> IntArray:
    """Sizes of the groups of an indptr."""
    indptr = arrays[name]
    sizes = np.diff(indptr.astype(np.int64))  # differences of 32 bits may overflow
    ok = len(indptr) > 1 and indptr[0] == 0 and indptr[-1] == total and (sizes >= 0).all()
    _require(ok, name)
    return sizes


def _integers(values: Any, name: str) -> IntArray:
    if not isinstance(values, list) or not all(
        type(x) is int and -(1 << 31) <= x < 1 << 31 for x in values
    ):
        raise ValueError(f"{name} must be a list of integers")
    return np.array(values, np.int32)


def _times(values: Any, name: str) -> FloatArray:
    if not isinstance(values, list) or not all(
        type(x) in (int, float) and 0 <= x <= MAX_US for x in values
    ):
        raise ValueError(f"{name} must be times, 0 or more")
    return np.array(values, np.float64)


def _time(record: dict[str, Any], name: str) -> float:
    return float(_times([record.get(name)], name)[0])


def _text(record: dict[str, Any], name: str) -> str:
    """A text of a trace, without codes for the terminal."""
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return ascii(value)[1:-1]


def is_count(value: Any, limit: int) -> bool:
    """Whether ``value`` is an integer from 0 to ``limit``."""
    return type(value) is int and 0 <= value <= limit
