"""Eligibility that depends on this GPU: whether a kernel compiles, and the minimum window."""

from functools import cache

import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.catalog import CATALOG
from vllm_prefixshare.kernels.registry import kernels_that_may_serve
from vllm_prefixshare.planning.costs.lookup import cost_model
from vllm_prefixshare.planning.sharing import min_window
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.observability.log import logger


def this_device() -> torch.device:
    """The current CUDA device, with its index."""
    return torch.device("cuda", torch.cuda.current_device())


@cache
def shortest_window(attention: AttentionConfig) -> int | None:
    """Minimum sliding window that is served, in tokens: any where the kernel is as fast as
    FlashAttention without sharing, else from where the cost table expects a gain by sharing. None
    if no window is.

    Raises:
        PrefixShareError: no kernel serves the shape, or a cost table does not fit.
    """
    kernel = kernels_that_may_serve(attention, this_device(), settings().kernel, 1)[0]
    if CATALOG[kernel.name].fast_windows:
        return 1
    limits = kernel.limits
    cost = cost_model(attention, kernel.name, logger().info_once)
    return min_window(cost, attention.gqa_group_size, limits.max_tile_requests, limits.geometry)


@cache
def kernel_failure(attention: AttentionConfig, query_len: int) -> str | None:
    """Why no kernel serves this shape, or None."""
    try:
        kernels_that_may_serve(attention, this_device(), settings().kernel, query_len)
    except PrefixShareError as e:
        return str(e)
    return None
