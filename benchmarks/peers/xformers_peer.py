"""xformers' memory-efficient attention over a paged cache."""

import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError, first_line


class XFormers:
    """Every operator of xformers that takes this cache; the fastest one counts."""

    serves = ("queries",)

    def __init__(self, options: Options) -> None:
        options.require_gpu()
        from xformers.ops import fmha

        self.fmha = fmha

    def prepare(self, case: Case) -> list[Launch]:
        w = case.workload
        masks = self.fmha.attn_bias
        columns = -(-int(w.seq_lens.max()) // w.block_size)
        bias = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[w.query_len] * w.num_reqs,
            kv_padding=columns * w.block_size,
            kv_seqlen=w.seq_lens.tolist(),
            device=case.q.device,
        ).make_paged(
            block_tables=case.block_table[:, :columns].contiguous(),
            page_size=w.block_size,
            paged_type=masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        )
        kv_heads, group = case.num_kv_heads, case.num_qo_heads // case.num_kv_heads
        q = case.q.view(1, -1, kv_heads, group, case.head_dim)
        shape = (1, -1, kv_heads, group, case.head_dim)
        k, v = (
            cache.view(1, -1, kv_heads, 1, case.head_dim).expand(shape)
            for cache in (case.k_cache, case.v_cache)
        )

        def launch(op, name: str) -> Launch:
            def call() -> torch.Tensor:
                out = self.fmha.memory_efficient_attention_forward(q, k, v, bias, op=op)
                return out.view(case.q.shape)

            call()
            return Launch(call, name)

        split_k = self.fmha.triton_splitk.FwOp
        # its tiles must fit into a page: the default of 64 tokens is more than vLLM's 16
        tile = min(split_k.BLOCK_N, w.block_size)
        operators = {
            "triton_splitk": split_k.get_operator(None, block_n=tile),
            "flash": self.fmha.flash.FwOp,
            "flash3": self.fmha.flash3.FwOp,
        }
        found, reasons = [], []
        for name, op in operators.items():
            try:
                found.append(launch(op, name))
            except Exception as e:  # operators report unsupported cases with many exception types
                reasons.append(f"{name}: {why(e)}")
        if not found:
            raise UnavailableError("; ".join(reasons))
        return found


def why(error: Exception) -> str:
    """The first reason that xformers gives for an unsupported case, or the error's first line."""
    _, said, reasons = str(error).partition("is not supported because:")
    return reasons.strip().splitlines()[0] if said else first_line(error)
