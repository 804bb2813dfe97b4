"""Attention in float64, one request after the other: what every executor is measured by."""

import torch


def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Paged causal attention without sharing.

    Args:
        q: ``[num_tokens, num_qo_heads, head_dim]``.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        block_table: ``[num_reqs, max_blocks]`` physical block ids.
        seq_lens: ``[num_reqs]`` tokens of each request, its queries (the last ones) included.
        query_start_loc: ``[num_reqs + 1]`` token range of each request; one each if None.
        sm_scale: softmax scale; ``head_dim ** -0.5`` if None.

    Returns:
        float64 ``[num_tokens, num_qo_heads, head_dim]``.
    """
    return reference_attention_and_lse(
        q, k_cache, v_cache, block_table, seq_lens, query_start_loc, sm_scale
    )[0]


def reference_attention_and_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference_attention``, and the log-sum-exp of each query's scaled scores: float64
    ``[num_tokens, num_qo_heads]``, natural logarithm.
    """
    num_qo_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_qo_heads // num_kv_heads
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    starts = list(range(len(seq_lens) + 1)) if query_start_loc is None else query_start_loc.tolist()
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    for request, length in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        ids = block_table[request, : -(-length // block_size)].long()
        k = k_cache[ids].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
        v = v_cache[ids].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), k) * scale
        position = torch.arange(length - (last - first), length, device=q.device)
        hidden = torch.arange(length, device=q.device) > position[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        lse[first:last] = torch.logsumexp(scores, dim=-1).T
        weights = torch.softmax(scores, dim=-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
    return out, lse
