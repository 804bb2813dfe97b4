"""Bytes that one layer's attention moves under a plan, counted from the plan."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.papers.methods import Method, layer_of, planner_of
from benchmarks.support.trees import Workload

#: bytes of an element of queries, KV cache and output; of a partial result; of a mask word
ITEM, PARTIAL, WORD = 2, 4, 4
HEAD_DIM = 128


def kv_token_bytes(heads: tuple[int, int]) -> int:
    """Bytes of K and V of one token over all KV heads."""
    return 2 * heads[1] * HEAD_DIM * ITEM


def count(
    method: Method, w: Workload, heads: tuple[int, int], grown: Iterable[int] = (0,)
) -> dict[str, int]:
    """Bytes of one layer under the method's plans on an H200, summed over decode steps.

    Args:
        grown: for each step, by how many tokens the requests are longer than in ``w``.

    Returns:
        tiles, partials: of the plans. row_tiles: how many thread blocks walk each run.
        kv: of K and V as the plans list them, each run once. walked: as thread blocks load them,
            once for each tile of query rows; all but the first find them in the L2 cache.
        partial: partial outputs and log-sum-exps, written and read again.
        queries, outputs: read by every work tile that needs them; written.
        masks: positions of each run's readers, and words of token trees.
    """
    planner, row_tiles = planner_of(method, w, heads)
    attention = layer_of(w, heads)
    rows = w.query_len * attention.num_qo_heads
    words = 0 if w.query_parents is None else -(-w.query_len // 32)
    total: Counter[str] = Counter()
    for tokens in grown:
        lens = w.seq_lens + tokens
        plan = planner.update(w.block_table, lens, w.query_len).plan
        kv = plan.kv_tokens_read(lens) * kv_token_bytes(heads)
        total.update(
            tiles=plan.num_tiles,
            partials=plan.num_partials,
            kv=kv,
            walked=kv * row_tiles,
            partial=2 * plan.num_partials * rows * (HEAD_DIM + 1) * PARTIAL,
            queries=len(plan.tile_req_indices) * rows * HEAD_DIM * ITEM,
            outputs=w.num_reqs * rows * HEAD_DIM * ITEM,
            masks=heads[1] * WORD * (2 * plan.num_runs + w.num_reqs * w.query_len * words),
        )
    return {**total, "row_tiles": row_tiles}


def unshared_bytes(w: Workload, heads: tuple[int, int]) -> int:
    """KV bytes of flash-decoding: every request's own, each query token of a tree by itself."""
    return int(w.seq_lens.sum()) * w.query_len * kv_token_bytes(heads)


def distinct_bytes(w: Workload, heads: tuple[int, int]) -> int:
    """KV bytes of the batch, each token once: the least that memory must deliver."""
    return w.kv_tokens * kv_token_bytes(heads)


def with_room(w: Workload, tokens: int) -> Workload:
    """The workload with ``tokens`` fewer in each request, in whose blocks it can grow to ``w``."""
    return replace(w, seq_lens=w.seq_lens - tokens)
