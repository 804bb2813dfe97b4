"""This project's kernels."""

import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError
from vllm_prefixshare import PrefixShareDecodeWrapper


class Ours:
    """The wrapper's choice for the device: the Hopper kernel, or the CPU executor."""

    kernel = "auto"
    divider: str | None = None
    serves = ("sinks", "soft_cap", "alibi", "fp8", "mla", "windows", "queries", "token trees")

    def __init__(self, options: Options) -> None:
        self.options = options

    def as_planned(self, case: Case) -> Case:
        """The batch as the wrapper sees it."""
        return case

    def prepare(self, case: Case) -> list[Launch]:
        kv_tokens = case.workload.kv_tokens
        case = self.as_planned(case)
        w = case.workload
        cuda = case.q.is_cuda
        if w.query_parents is not None and not cuda:
            raise UnavailableError("token trees need a GPU")
        wrapper = PrefixShareDecodeWrapper(
            **wrapper_arguments(case, self.kernel, self.divider or self.options.divider)
        )
        starts = case.query_start_loc().tolist()
        parents = None
        if w.query_parents is not None:
            parents = w.query_parents.tolist() * w.num_reqs
        batch = w.block_table, w.seq_lens, starts if w.query_len > 1 else None, parents
        seconds = [plan_seconds(wrapper, batch) for _ in range(5)]
        stats = wrapper.stats()
        table, lens = (case.block_table, case.seq_lens) if cuda else (w.block_table, w.seq_lens)
        out = case.q.new_empty((*case.q.shape[:2], case.v_head_dim), dtype=case.out_dtype)
        caches = (
            (case.k_cache[:, :, 0], None) if case.kv_lora_rank else (case.k_cache, case.v_cache)
        )
        tensors = case.q, *caches, table, lens, out
        wrapper.run(*tensors, extras=case.extras)  # reads the scales, as a capture cannot

        def call():
            return wrapper.run(*tensors, extras=case.extras)

        note = (
            f"{stats.work_tiles} tiles, {stats.partials} partials, "
            f"KV read {stats.kv_tokens_read / kv_tokens:.2f}x"
            + (f", by {stats.row_tiles} tiles of rows" if stats.row_tiles > 1 else "")
        )
        return [Launch(call, note, graph=cuda, plan_ms=float(np.median(seconds)) * 1e3)]


def wrapper_arguments(case: Case, kernel: str, divider: str | None) -> dict[str, object]:
    """What ``PrefixShareDecodeWrapper`` takes for a case; ``kernel`` counts on a GPU."""
    w, cuda = case.workload, case.q.is_cuda
    return {
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "block_size": w.block_size,
        "dtype": case.out_dtype,
        "kv_dtype": case.k_cache.dtype if case.k_cache.element_size() == 1 else None,
        "query_dtype": case.q.dtype if case.q.element_size() == 1 else None,
        "features": case.features,
        "kv_lora_rank": case.kv_lora_rank,
        "sliding_window": case.sliding_window,
        "sm_scale": case.sm_scale,
        "device": case.q.device,
        "divider": divider,
        **({"kernel": kernel, "max_query_len": w.query_len} if cuda else {}),
    }


def plan_seconds(wrapper: PrefixShareDecodeWrapper, batch: tuple) -> float:
    """Host time of a new plan for ``batch``, the arguments of ``wrapper.plan``."""
    wrapper.plan(np.zeros((0, 0), np.int32), np.zeros(0, np.int32))  # the kept plan goes
    began = time.perf_counter()
    wrapper.plan(*batch)
    return time.perf_counter() - began


class Tokens(Ours):
    """Each query token as a request of its own, which ends with that token: what causal order is
    for a chain of queries. Work tiles then fill up whatever the number of a request's queries.
    """

    serves = tuple(name for name in Ours.serves if name != "token trees")

    def as_planned(self, case: Case) -> Case:
        w = case.workload
        rows = np.repeat(np.arange(w.num_reqs), w.query_len)
        later = w.query_len - 1 - np.arange(len(rows)) % w.query_len
        seq_lens = (w.seq_lens[rows] - later).astype(np.int32)
        one_each = replace(w, block_table=w.block_table[rows], seq_lens=seq_lens, query_len=1)
        return replace(
            case,
            workload=one_each,
            block_table=case.block_table[torch.from_numpy(rows).to(case.q.device)],
            seq_lens=torch.from_numpy(seq_lens).to(case.q.device),
        )


class Portable(Ours):
    """The Triton kernel for every NVIDIA GPU from compute capability 8.0 on."""

    kernel = "portable"

    def __init__(self, options: Options) -> None:
        options.require_gpu()
        super().__init__(options)


class Invariant(Ours):
    """The same bits for a request, whoever shares with it."""

    divider = "batch_invariant"


class PortableInvariant(Portable):
    """As ``Invariant``, by the Triton kernel."""

    divider = "batch_invariant"
