"""Decode context parallelism: the KV of each request in shards across ranks.

Where ``decode_context_parallel_size`` is above 1, a rank holds every ``size``-th run of
``interleave`` tokens of each request, packed in blocks of its own. Requests that share blocks share
them on every rank, so each rank plans for its shard as for any batch. One layer:

    queries of all the group's heads -> GpuExecutor.run on the shard -> out, log-sum-exp
                                     -> vLLM's combine -> output of the rank's own heads

A request with one query sees all tokens before it, so the order of tokens does not matter, and its
newest token is read from the cache like the others: vLLM has written it there. FLASH_ATTN reads the
newest token separately, because its path also takes prefills; prefills keep that path.
"""

from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.worker.workspace import current_workspace_manager

from vllm_prefixshare.core import PrefixShareError


class Gathered(NamedTuple):
    """Queries of all heads of the group, and where the rank's partial results go.

    query, out: ``[num_tokens, size * num_heads, head_size]``.
    lse: float32 ``[num_tokens, size * num_heads]``, natural logarithm.
    """

    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def check_collectives(config: Any) -> None:
    """Refuse a combine that would leave garbage.

    Where NCCL lacks a function that vLLM asks for (0.33 wants 2.29.7), vLLM silently disables its
    NCCL wrapper, and its reduce-scatter returns unwritten memory.

    Raises:
        PrefixShareError: vLLM's NCCL wrapper is disabled, and reduce-scatter would be used.
    """
    communicator = getattr(get_dcp_group(), "device_communicator", None)
    nccl = getattr(communicator, "pynccl_comm", None)
    asked = config.parallel_config.dcp_comm_backend  # none: ag_rs
    if nccl is not None and nccl.disabled and asked != "a2a":
        raise PrefixShareError(
            "decode context parallelism needs dcp_comm_backend='a2a' here: vLLM does not use this "
            "NCCL (too old for it, or VLLM_DISABLE_PYNCCL is set), and its reduce-scatter then "
            "leaves the output unwritten."
        )


def gather(impl: Any, query: torch.Tensor) -> Gathered:
    """The queries of all ranks; every rank of the group must call it.

    The output lies in vLLM's workspace, in as much of it as FLASH_ATTN takes: once graphs are
    captured the workspace does not grow, and a later prefill would find too little.

    Args:
        impl: a ``FlashAttentionImpl``.
        query: ``[num_tokens, num_heads, head_size]``.
    """
    query = get_dcp_group().all_gather(query.contiguous(), dim=1)
    num_tokens, *heads = query.shape
    most = max(num_tokens, impl._dcp_max_num_tokens)
    (out,) = current_workspace_manager().get_simultaneous(((most, *heads), impl._dcp_dtype))
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    return Gathered(query, out[:num_tokens], lse)


def combine(impl: Any, partial: Gathered) -> torch.Tensor:
    """Attention of the rank's own heads over the shards of all ranks, by the collective that vLLM
    is set to; every rank of the group must call it.

    Returns:
        ``[num_tokens, num_heads, head_size]``.
    """
    combined: torch.Tensor = impl.dcp_combine(partial.out, partial.lse, get_dcp_group())
    return combined
