"""Estimated times of decode attention, with and without sharing."""

import numpy as np

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import Forest
from vllm_prefixshare.planning.plan import DecodePlan

#: Microseconds of a layer in addition to its busiest work queue: launches, start and merging.
#: On an H200, in 28 published cells, 4 to 26 and 10 in the median; taken for both sides.
LAYER_US = 10.0
#: Time without sharing of a token that another request reads as well, over that of a token from
#: memory: 0.60 to 0.67 with FlashAttention-3 on an H200, where documents of 2k tokens and more are
#: read again from the L2 cache.
READ_AGAIN = 0.63
#: The same for MLA caches, where arithmetic decides: with it gains are 0.88 to 1.02 of the measured
#: ones on an H200, in 16 published cells with 8 to 32 heads.
LATENT_AGAIN = 0.85


def plan_time(plan: DecodePlan, reading: float) -> float:
    """Microseconds of a layer's attention by a plan on a GPU.

    Args:
        reading: the batch's ``reading_time``, which also applies to a plan that shares nothing.
    """
    return LAYER_US + float(plan.worker_us.max()) * (1.0 if plan.shares else reading)


def reading_time(forest: Forest, kv_tokens: int, attention: AttentionConfig) -> float:
    """Time to read ``kv_tokens`` request by request on a GPU, over that of as many tokens that all
    come from memory.
    """
    read_again = READ_AGAIN if attention.kv_lora_rank is None else LATENT_AGAIN
    readers = forest.node_reader_end - forest.node_reader_start
    tokens = (forest.node_end - forest.node_start).astype(np.int64) @ (readers - 1)
    return 1 - (1 - read_again) * min(1.0, int(tokens) / kv_tokens)
