"""vLLM's FlashAttention 2 and 3, as its FLASH_ATTN backend calls them for decode, and the cascade
that vLLM had up to 0.29.

vLLM makes the scheduler metadata once per step, so it is made in ``prepare`` here.
"""

import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError

#: vLLM's bound on splits inside a full CUDA graph, and FA3's own choice
SPLITS = (32, 0)


def require_fa(version: int, options: Options) -> None:
    """Import vLLM's FlashAttention of this version or raise ``UnavailableError``."""
    options.require_gpu()
    from vllm.vllm_flash_attn import fa_version_unsupported_reason, is_fa_version_supported

    if not is_fa_version_supported(version):
        reason = fa_version_unsupported_reason(version)
        raise UnavailableError(reason or f"no FlashAttention {version}")


def schedule(
    case: Case,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqlens: torch.Tensor,
    max_seqlen_k: int,
    causal: bool,
    splits: int,
) -> torch.Tensor:
    """FA3's scheduler metadata, with the arguments of vLLM's metadata builder."""
    from vllm.vllm_flash_attn import get_scheduler_metadata

    return get_scheduler_metadata(
        batch_size=len(seqlens),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_heads_q=case.num_qo_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_dim - (case.kv_lora_rank or 0),
        headdim_v=case.v_head_dim,
        cache_seqlens=seqlens,
        qkv_dtype=case.q.dtype,
        cu_seqlens_q=cu_seqlens_q,
        page_size=case.workload.block_size,
        causal=causal,
        window_size=window_of(case),
        num_splits=splits,
    )


def window_of(case: Case) -> tuple[int, int]:
    """FlashAttention's window: tokens seen before and after a query's own, -1 for all."""
    window = case.sliding_window
    return (-1, -1) if window is None else (window - 1, 0)


class FA3:
    """Paged attention with variable lengths, which reads the KV of each request separately."""

    serves = ("sinks", "soft_cap", "fp8", "mla", "windows", "queries")
    version = 3
    splits = SPLITS

    def __init__(self, options: Options) -> None:
        require_fa(self.version, options)

    def prepare(self, case: Case) -> list[Launch]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        w = case.workload
        starts, longest = case.query_start_loc(), int(w.seq_lens.max())
        out = case.q.new_empty((*case.q.shape[:2], case.v_head_dim), dtype=case.out_dtype)
        q, k, q_v = case.q, case.k_cache, {}
        if rank := case.kv_lora_rank:  # as vLLM's FLASH_ATTN_MLA passes them
            q, k, q_v = q[..., rank:], k[..., rank:], {"q_v": q[..., :rank]}
        # as vLLM's backend passes them: one view per request
        sinks = case.extras.sinks
        sinks = None if sinks is None else sinks.to(torch.bfloat16)  # the only dtype it takes
        scales = {
            f"{x}_descale": None if scale is None else scale.expand(w.num_reqs, case.num_kv_heads)
            for x, scale in zip("qkv", case.extras[3:], strict=True)
        }

        def launch(splits: int) -> Launch:
            metadata = None
            if self.version > 2:
                metadata = schedule(case, starts, w.query_len, case.seq_lens, longest, True, splits)

            def call() -> torch.Tensor:
                flash_attn_varlen_func(
                    q=q,
                    k=k,
                    v=case.v_cache,
                    out=out,
                    cu_seqlens_q=starts,
                    max_seqlen_q=w.query_len,
                    seqused_k=case.seq_lens,
                    max_seqlen_k=longest,
                    softmax_scale=case.sm_scale,
                    causal=True,
                    window_size=list(window_of(case)),
                    block_table=case.block_table,
                    scheduler_metadata=metadata,
                    fa_version=self.version,
                    num_splits=splits,
                    softcap=case.extras.soft_cap,
                    s_aux=sinks,
                    **q_v,
                    **scales,
                )
                return out

            return Launch(call, f"num_splits={splits}")

        return [launch(splits) for splits in self.splits]


class FA3Invariant(FA3):
    """As under vLLM's VLLM_BATCH_INVARIANT=1: no request is split."""

    splits = (1,)


class FA2(FA3):
    """FlashAttention 2, which chooses its splits itself."""

    serves = ("soft_cap", "windows", "queries")
    version = 2
    splits = (0,)


class FA3Cascade:
    """The cascade of vLLM 0.29 to 0.31 (``cascade_attention``; 0.32 has none): one pass over the
    prefix that the whole batch shares, one over the rest of each request, and a merge. Used
    wherever there is such a prefix, without vLLM's heuristic.
    """

    serves = ("queries",)

    def __init__(self, options: Options) -> None:
        require_fa(3, options)

    def prepare(self, case: Case) -> list[Launch]:
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        w = case.workload
        root = w.nodes[0]
        if w.num_reqs < 2 or (root.first, root.last) != (0, w.num_reqs):
            raise UnavailableError("no prefix common to all requests")
        prefix = root.end * w.block_size
        device = case.q.device
        starts = case.query_start_loc()
        prefix_starts = torch.tensor([0, len(case.q)], dtype=torch.int32, device=device)
        prefix_lens = torch.tensor([prefix], dtype=torch.int32, device=device)
        suffix_lens = case.seq_lens - prefix
        rest = int(w.seq_lens.max()) - prefix
        out = torch.empty_like(case.q)

        def attend(starts, queries, lens, longest, table, causal, splits, metadata) -> tuple:
            """Output and log-sum-exp of one pass."""
            return flash_attn_varlen_func(
                q=case.q,
                k=case.k_cache,
                v=case.v_cache,
                cu_seqlens_q=starts,
                max_seqlen_q=queries,
                seqused_k=lens,
                max_seqlen_k=longest,
                softmax_scale=case.sm_scale,
                causal=causal,
                window_size=[-1, -1],
                block_table=table,
                return_softmax_lse=True,
                scheduler_metadata=metadata,
                fa_version=3,
                num_splits=splits,
            )

        def launch(splits: int) -> Launch:
            n = len(case.q)
            shared = prefix_starts, n, prefix_lens, prefix
            own = starts, w.query_len, suffix_lens, rest
            tables = case.block_table[:1], case.block_table[:, root.end :]
            of_prefix = schedule(case, *shared, False, splits)
            of_suffix = schedule(case, *own, True, splits)

            def call() -> torch.Tensor:
                first = attend(*shared, tables[0], False, splits, of_prefix)
                second = attend(*own, tables[1], True, splits, of_suffix)
                merge_attn_states(out, *first, *second)
                return out

            return Launch(call, f"num_splits={splits}")

        return [launch(splits) for splits in SPLITS]
