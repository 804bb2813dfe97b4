"""Attention in float64, one request after the other: the reference for every executor."""

from typing import Any

import torch

from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras


def reference_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The output of ``reference_attention_and_lse``, without the log-sum-exp."""
    return reference_attention_and_lse(*args, **kwargs)[0]


def reference_attention_and_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    sm_scale: float | None = None,
    extras: LayerExtras = PLAIN,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Paged causal attention without sharing.

    Args:
        q: ``[num_tokens, num_qo_heads, head_dim]``.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; V may have another
            width.
        block_table: ``[num_reqs, max_blocks]`` physical block ids.
        seq_lens: ``[num_reqs]`` tokens of each request, its queries (the last ones) included.
        query_start_loc: ``[num_reqs + 1]`` token range of each request; one token each if None.
        sm_scale: softmax scale; ``head_dim ** -0.5`` if None.
        extras: the layer's extras; scales may be numbers or ``[1]`` or ``[num_kv_heads]``.
        sliding_window: tokens that each query sees, its own included; all if None.

    Returns:
        float64 ``[num_tokens, num_qo_heads, head_dim of V]``, and the log-sum-exp of each query's
        scaled scores and its sink: float64 ``[num_tokens, num_qo_heads]``, natural logarithm.
    """
    head_dim = q.shape[-1]
    block_size, num_kv_heads = k_cache.shape[1:3]
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    starts = list(range(len(seq_lens) + 1)) if query_start_loc is None else query_start_loc.tolist()
    shape = *q.shape[:2], v_cache.shape[-1]
    out = torch.empty(shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    q_scale, k_scale, v_scale = (
        torch.as_tensor(1.0 if x is None else x, dtype=torch.float64, device=q.device)
        .reshape(-1)
        .expand(num_kv_heads)[:, None]
        for x in (extras.q_scale, extras.k_scale, extras.v_scale)
    )
    for request, length in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        ids = block_table[request, : -(-length // block_size)].long()
        k, v = (_blocks(cache, ids)[:length].double() for cache in (k_cache, v_cache))
        queries = q[first:last].double().unflatten(1, (num_kv_heads, -1)) * q_scale[:, None]
        scores = torch.einsum("qhgd,khd->hgqk", queries, k * k_scale).flatten(0, 1) * scale
        if extras.soft_cap:
            scores = torch.tanh(scores / extras.soft_cap) * extras.soft_cap
        position = torch.arange(length - (last - first), length, device=q.device)
        ahead = torch.arange(length, device=q.device) - position[:, None]
        if extras.alibi_slopes is not None:
            scores = scores + extras.alibi_slopes.double()[:, None, None] * ahead
        hidden = ahead > 0
        if sliding_window is not None:
            hidden |= ahead <= -sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if extras.sinks is not None:
            sinks = extras.sinks.double()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        lse[first:last] = torch.logsumexp(scores, dim=-1).T
        weights = torch.softmax(scores, dim=-1)[..., :length]
        weights = weights.unflatten(0, (num_kv_heads, -1))
        out[first:last] = torch.einsum("hgqk,khd->qhgd", weights, v * v_scale).flatten(1, 2)
    return out, lse


def _blocks(cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[tokens, num_kv_heads, head_dim]`` of the named blocks."""
    if cache.element_size() > 1:
        return cache[ids].flatten(0, 1)
    # as bytes: torch cannot index quantised numbers everywhere
    return cache.view(torch.uint8)[ids].view(cache.dtype).flatten(0, 1)
