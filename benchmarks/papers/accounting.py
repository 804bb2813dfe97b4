"""Bytes that one layer's attention moves under a plan, counted from the plan."""

from papers.methods import Method, layer_of, planned
from vllm_prefixshare.workloads.trees import Workload

#: bytes of an element of queries, KV cache and output; of a partial result; of a mask word
ITEM, PARTIAL, WORD = 2, 4, 4


def kv_token_bytes(heads: tuple[int, int], head_dim: int = 128) -> int:
    """Bytes of K and V of one token over all KV heads."""
    return 2 * heads[1] * head_dim * ITEM


def count(method: Method, w: Workload, heads: tuple[int, int]) -> dict[str, int]:
    """Bytes of one layer in one decode step under the method's plan on an H200.

    Returns:
        tiles, partials, row_tiles: of the plan; the last is how many thread blocks walk each run.
        kv: of K and V as the plan lists them, each run once. walked: as thread blocks load them,
            once for each tile of query rows; all but the first find them in the L2 cache.
        partial: partial outputs and log-sum-exps, written and read again.
        queries, outputs: read by every work tile that needs them; written.
        masks: positions of each run's readers, and words of token trees.
    """
    plan, row_tiles = planned(method, w, heads)
    attention = layer_of(w, heads)
    rows = w.query_len * attention.num_qo_heads
    kv = plan.kv_tokens_read(w.seq_lens) * kv_token_bytes(heads, attention.head_dim)
    words = 0 if w.query_parents is None else -(-w.query_len // 32)
    return {
        "tiles": plan.num_tiles,
        "partials": plan.num_partials,
        "row_tiles": row_tiles,
        "kv": kv,
        "walked": kv * row_tiles,
        "partial": 2 * plan.num_partials * rows * (attention.head_dim + 1) * PARTIAL,
        "queries": len(plan.tile_req_indices) * rows * attention.head_dim * ITEM,
        "outputs": w.num_reqs * rows * attention.head_dim * ITEM,
        "masks": heads[1] * WORD * (2 * plan.num_runs + w.num_reqs * w.query_len * words),
    }


def unshared_bytes(w: Workload, heads: tuple[int, int]) -> int:
    """KV bytes of flash-decoding: every request's own, each query token of a tree by itself."""
    return int(w.seq_lens.sum()) * w.query_len * kv_token_bytes(heads)


def distinct_bytes(w: Workload, heads: tuple[int, int]) -> int:
    """KV bytes of the batch, each token once: the least that memory must deliver."""
    return w.kv_tokens * kv_token_bytes(heads)
