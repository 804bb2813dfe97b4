"""Attention over parts of the KV tokens, merged into attention over all of them."""

from collections.abc import Sequence

import torch

from vllm_prefixshare.core import PrefixShareError


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention of the same queries over parts of their KV tokens into attention over all
    of them: the average of the outputs, weighted by their sums of exponentials (FlashForge
    section 4.2, POR). States are merged in the order given, in float32, on a GPU in one launch that
    a CUDA graph may capture. The first call there compiles: make it before a capture.

    Args:
        outs: ``[num_states, num_tokens, num_qo_heads, head_dim]``, or a sequence of states.
        lses: float32 ``[num_states, num_tokens, num_qo_heads]``, natural logarithm, as ``run``
            returns them; ``-inf`` where a query saw no token: its output is not read there.

    Returns:
        The output ``[num_tokens, num_qo_heads, head_dim]`` in the dtype of ``outs``, and its
        log-sum-exp, float32; the pair can be merged further. Where no state saw a token the
        output is 0 and the log-sum-exp ``-inf``.

    Raises:
        PrefixShareError: shapes or dtypes that disagree, no states, outputs that are not floating
            point, or logarithms that are not float32.
    """
    states, weights = (_stacked(name, x) for name, x in (("outs", outs), ("lses", lses)))
    if states.dim() != 4 or states.shape[:3] != weights.shape or not len(states):
        raise PrefixShareError(
            "outs and lses must be [num_states, num_tokens, num_qo_heads, head_dim] and its first "
            f"three dimensions, got {list(states.shape)} and {list(weights.shape)}."
        )
    if weights.dtype != torch.float32 or states.device != weights.device:
        raise PrefixShareError(
            f"lses must be float32 on {states.device}, got {weights.dtype} on {weights.device}."
        )
    if not states.is_floating_point():
        raise PrefixShareError(f"outs must be floating point, got {states.dtype}.")
    if states.is_cuda and states.dtype in (torch.bfloat16, torch.float16, torch.float32):
        from vllm_prefixshare.kernels.merge_states import merge_stacked  # needs triton

        return merge_stacked(states, weights)
    lse = torch.logsumexp(weights, 0)
    share = torch.exp(weights - lse.masked_fill(lse == -torch.inf, 0.0))[..., None]
    merged = torch.where(share == 0, 0.0, states.float() * share).sum(0)
    return merged.to(states.dtype), lse


def _stacked(name: str, states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(states, torch.Tensor):
        return states
    try:
        several = list(states)
        dtypes = dict.fromkeys(str(x.dtype) for x in several)
        stacked = torch.stack(several)
    except (AttributeError, TypeError, RuntimeError) as e:
        raise PrefixShareError(f"{name} must be tensors of one shape and device ({e}).") from None
    if len(dtypes) > 1:  # of which torch has taken the widest
        raise PrefixShareError(f"{name} must be tensors of one dtype, got {', '.join(dtypes)}.")
    return stacked
