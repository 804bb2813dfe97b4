"""Estimated times of decode attention, with and without sharing."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_prefixshare.cli.batches import NULL_BLOCK_ID, Batch
from vllm_prefixshare.cli.gpus import GpuPlanning
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


class LayerTimes(NamedTuple):
    """Attention of one layer in a decode step.

    kv_tokens_read: with sharing. unshared_us, shared_us: microseconds.
    """

    kv_tokens_read: int
    unshared_us: float
    shared_us: float


def estimator(gpu: GpuPlanning, attention: AttentionConfig) -> Callable[[Batch], LayerTimes]:
    """A function that estimates a layer's attention in a decode step of a batch.

    Without sharing every request reads its own KV tokens, balanced over the workers; a token that
    several read comes from memory once, and from the cache for all others.
    """
    from vllm_prefixshare.planning.planner import DecodePlanner
    from vllm_prefixshare.planning.sharing import shareable_forest

    planner = DecodePlanner(gpu.config, gpu.cost, attention.block_size, attention.gqa_group_size)

    def estimate(batch: Batch) -> LayerTimes:
        lens = batch.seq_lens
        plan = planner.update(batch.block_table, lens).plan
        forest = shareable_forest(
            batch.block_table, lens, batch.block_size, null_block_id=NULL_BLOCK_ID
        )
        reading = reading_time(forest, int(lens.sum()), attention)
        return LayerTimes(
            plan.kv_tokens_read(lens),
            LAYER_US + reading * planner.unshared_us(lens),
            plan_time(plan, reading),
        )

    return estimate


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
