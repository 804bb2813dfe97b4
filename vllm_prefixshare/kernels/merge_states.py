"""Merge states: combine the partial results of each query into its output.

A partial result is an output over some of the tokens with the logarithm of its sum of
exponentials. The average of the outputs, weighted by the sums, is the attention over all the tokens
(FlashForge's POR, section 4.2; flash-decoding's reduction).
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

import torch
import triton
import triton.language as tl

from vllm_prefixshare.kernels.aot.dispatch import launch, power_of_two
from vllm_prefixshare.kernels.common.constants import LN2, LOG2E

#: partial results that are loaded at once; the same for all launches, or the bits would depend on
#: the size of the batch
UNROLL = 8


def merge_states(
    merge_indptr: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    query_len: int = 1,
    out_lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Merge in the order of the partial results, so that the bits are the same every time.

    The launch depends on the shapes of its arguments only: it may be captured in a CUDA graph.
    Requests without partial results keep the output that they have.

    Args:
        merge_indptr: int32 ``[num_reqs + 1 or more]`` partial results of each request; entries
            past the batch must not rise (repeat the last one).
        partial_out: float32 ``[num_partials * query_len, num_qo_heads, head_dim]``: row
            ``p * query_len + t`` belongs to query token ``t`` of the request of ``p``.
        partial_lse: float32 ``[num_partials * query_len, num_qo_heads]``, natural logarithm;
            ``-inf`` where the query saw none of the tokens.
        out: ``[num_tokens, num_qo_heads, head_dim]``, heads and head_dim contiguous, tokens a
            multiple of 8 elements apart where head_dim is one.
        query_start_loc: int32 ``[num_reqs + 1 or more]`` query tokens of each request, at most
            ``query_len``; ``query_len`` each if None. Not read if ``query_len`` is 1.
        out_lse: float32 ``[num_tokens, num_qo_heads]``, contiguous: the log-sum-exp over all
            partial results, natural logarithm. Not written if None, by a binary without it.
        sinks: ``[num_qo_heads]``: merged as a state whose output is zero. None: not in the binary.
        dependent: the launch before this one lets it begin early (programmatic dependent launch,
            compute capability 9.0): only ``merge_indptr`` and ``query_start_loc`` are read before
            that launch has ended.
    """
    num_tokens, num_heads, head_dim = out.shape
    ragged = query_len > 1 and query_start_loc is not None
    num_reqs = min(len(merge_indptr) - 1, num_tokens if ragged else num_tokens // query_len)
    if query_start_loc is not None and ragged:
        num_reqs = min(num_reqs, len(query_start_loc) - 1)
    if num_reqs == 0:
        return
    padded_dim = power_of_two(head_dim)
    # a program for each head of a small batch, to fill the GPU; fewer and wider ones for a large
    # one, because each takes about a nanosecond to launch
    heads_each, warps = 1, 1
    if num_tokens * num_heads > 1024:
        heads_each, warps = min(power_of_two(num_heads), 4096 // padded_dim, 32), 8
    launch(
        _merge_states, (num_reqs, query_len, triton.cdiv(num_heads, heads_each)),
        merge_indptr, partial_out, partial_lse, out, out_lse, sinks,
        query_start_loc if ragged else merge_indptr,
        out.stride(0),
        QUERY_LEN=query_len, RAGGED=ragged, HEADS=num_heads, HEAD_DIM=head_dim,
        D=padded_dim, HEADS_EACH=heads_each, UNROLL=UNROLL, DEPENDENT=dependent,
        num_warps=warps, launch_pdl=dependent,
    )


# not specialised: one binary serves every batch
@triton.jit(do_not_specialize=["merge_indptr", "query_start_loc", "stride_out"])
def _merge_states(merge_indptr, partial_out, partial_lse, out, out_lse, sinks, query_start_loc,
                  stride_out, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr,
                  HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
                  HEADS_EACH: tl.constexpr, UNROLL: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid: request, query token of the request, group of heads."""
    request = tl.program_id(0)
    query = tl.program_id(1)
    first = tl.load(merge_indptr + request)
    last = tl.load(merge_indptr + request + 1)
    token = request * QUERY_LEN + query
    there = first < last
    if RAGGED:
        token = tl.load(query_start_loc + request) + query
        there = there & (token < tl.load(query_start_loc + request + 1))
    if DEPENDENT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32,
                                  is_pure=False, pack=1)
    if there:
        head = tl.program_id(2) * HEADS_EACH + tl.arange(0, HEADS_EACH)
        dim = tl.arange(0, D)
        is_head = head < HEADS
        inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
        end = tl.where(is_head, last, first)  # heads past the last one have no partial results
        m = tl.full([HEADS_EACH], float("-inf"), tl.float32)
        total = tl.zeros([HEADS_EACH], tl.float32)
        acc = tl.zeros([HEADS_EACH, D], tl.float32)
        if sinks is not None:
            m = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
        for start in range(first, last, UNROLL):
            m_new = m
            for i in tl.static_range(UNROLL):
                row = ((start + i) * QUERY_LEN + query).to(tl.int64) * HEADS + head
                lse = tl.load(partial_lse + row, mask=start + i < end, other=float("-inf"))
                m_new = tl.maximum(m_new, lse * LOG2E)
            base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
            alpha = tl.exp2(m - base)
            m = m_new
            total = total * alpha
            acc = acc * alpha[:, None]
            for i in tl.static_range(UNROLL):  # UNROLL loads in flight
                here = start + i < end
                row = ((start + i) * QUERY_LEN + query).to(tl.int64) * HEADS + head
                lse = tl.load(partial_lse + row, mask=here, other=float("-inf"))
                at = row[:, None] * HEAD_DIM + dim[None, :]
                value = tl.load(partial_out + at, mask=inside & here[:, None], other=0.0)
                weight = tl.exp2(lse * LOG2E - base)
                total += weight
                acc += value * weight[:, None]
        merged = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
        start_out = tl.multiple_of(token.to(tl.int64) * stride_out, 8)  # 16-byte stores
        at = start_out + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
        if out_lse is not None:
            lse = tl.where(total > 0, (m + tl.log2(total)) * LN2, float("-inf"))
            tl.store(out_lse + token.to(tl.int64) * HEADS + head, lse, mask=is_head)


def merge_stacked(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge whole states, which all requests have, in the order given. The launch depends on the
    shapes of its arguments only.

    Args:
        outs: ``[num_states, num_tokens, num_heads, head_dim]``; a state that is not contiguous is
            copied, states may lie anywhere apart. Not read where ``lses`` is ``-inf``.
        lses: float32 ``[num_states, num_tokens, num_heads]``, natural logarithm; likewise.

    Returns:
        The output ``[num_tokens, num_heads, head_dim]`` in the dtype of ``outs`` and its
        log-sum-exp, float32; 0 and ``-inf`` where no state saw a token.
    """
    num_states, num_tokens, num_heads, head_dim = outs.shape
    if not outs[0].is_contiguous():
        outs = outs.contiguous()
    if not lses[0].is_contiguous():
        lses = lses.contiguous()
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    heads_each = min(power_of_two(num_heads), 4)
    if num_tokens and num_heads:
        launch(
            _merge_stacked, (num_tokens, triton.cdiv(num_heads, heads_each)),
            outs, lses, out, lse, num_states, outs.stride(0), lses.stride(0),
            HEADS=num_heads, HEAD_DIM=head_dim, D=power_of_two(head_dim),
            HEADS_EACH=heads_each, num_warps=4,
        )
    return out, lse


# not specialised: one binary serves every batch
@triton.jit(do_not_specialize=["outs", "lses", "num_states", "stride_outs", "stride_lses"])
def _merge_stacked(outs, lses, out, out_lse, num_states, stride_outs, stride_lses,
                   HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
                   HEADS_EACH: tl.constexpr):
    """Grid: token, group of heads."""
    head = tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH)
    dim = tl.arange(0, D)
    is_head = head < HEADS
    inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    row = tl.program_id(0).to(tl.int64) * HEADS + head
    at = row[:, None] * HEAD_DIM + dim[None, :]
    m = tl.full([HEADS_EACH], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_EACH], tl.float32)
    acc = tl.zeros([HEADS_EACH, D], tl.float32)
    for i in range(num_states):
        state = tl.cast(i, tl.int64)
        lse = tl.load(lses + state * stride_lses + row, mask=is_head, other=float("-inf")) * LOG2E
        m_new = tl.maximum(m, lse)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
        alpha = tl.exp2(m - base)
        weight = tl.exp2(lse - base)
        m = m_new
        seen = inside & (weight > 0)[:, None]
        value = tl.load(outs + state * stride_outs + at, mask=seen, other=0.0).to(tl.float32)
        total = total * alpha + weight
        acc = acc * alpha[:, None] + value * weight[:, None]
    merged = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
    merged_lse = tl.where(total > 0, (m + tl.log2(total)) * LN2, float("-inf"))
    tl.store(out_lse + row, merged_lse, mask=is_head)
