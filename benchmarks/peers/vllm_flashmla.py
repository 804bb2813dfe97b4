"""vLLM's FlashMLA, as its FLASHMLA backend calls it for decode.

Its wheel has the extension; a vLLM that was built or packed without it does not.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError

#: the only block size of the dense kernel
BLOCK_SIZE = 64


class FlashMLA:
    """Attention over a latent KV cache, which reads the latents of each request separately."""

    serves = ("mla", "fp8", "queries")

    def __init__(self, options: Options) -> None:
        options.require_gpu()
        from vllm.v1.attention.ops.flashmla import is_flashmla_dense_supported

        there, reason = is_flashmla_dense_supported()
        if not there:
            raise UnavailableError(reason or "no FlashMLA")

    def prepare(self, case: Case) -> list[Launch]:
        rank = case.kv_lora_rank
        if rank is None:
            raise UnavailableError("latent KV caches only")
        if case.workload.block_size != BLOCK_SIZE:
            raise UnavailableError(f"blocks of {BLOCK_SIZE} tokens only")
        call = attention(case, rank)
        call()  # makes the schedule, as vLLM does once per step
        return [Launch(call)]


def attention(case: Case, rank: int) -> Callable[[], torch.Tensor]:
    """The call with 16 bits, or with queries and latents in e4m3."""
    flashmla = import_module("vllm.v1.attention.ops.flashmla")
    queries = case.workload.query_len
    rows = queries * case.num_qo_heads
    options: dict[str, Any] = {
        "head_dim_v": rank,
        "softmax_scale": case.sm_scale,
        "causal": True,
    }
    if case.q.element_size() == 1:
        kernel = flashmla.flash_mla_with_kvcache_fp8
        schedule, splits = flashmla.get_mla_metadata_dense_fp8(case.seq_lens, rows, 1)
        scales = {"descale_q": case.extras.q_scale, "descale_k": case.extras.k_scale}
        options |= {"num_splits": splits, **scales}
    else:
        kernel = flashmla.flash_mla_with_kvcache
        schedule, _ = flashmla.get_mla_metadata(case.seq_lens, rows, 1, is_fp8_kvcache=False)
        options["is_fp8_kvcache"] = False

    def call() -> torch.Tensor:
        out, _ = kernel(
            q=case.q.unflatten(0, (-1, queries)),
            k_cache=case.k_cache,
            block_table=case.block_table,
            cache_seqlens=case.seq_lens,
            tile_scheduler_metadata=schedule,
            **options,
        )
        return out.flatten(0, 1)

    return call
