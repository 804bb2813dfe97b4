"""PAT (github.com/flashserve/PAT), from the user's own checkout with its extension built.

PAT launches on the default stream and on streams of its own. A CUDA graph cannot capture that, so
PAT is timed without one.
"""

import os

import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError, first_line
from benchmarks.peers.checkout import use_checkout

#: PAT's tiles (query rows, KV tokens, warps) without (16, 128, 1), which needs blocks of 32 tokens
#: or more; the first tile listed replaces it
SMALL_BLOCK_TILES = [
    [16, 64, 1],
    *([64, n, 4] for n in (128, 64, 32)),
    *([32, n, 2] for n in (128, 64, 32, 16)),
    *([16, n, 1] for n in (32, 16)),
]


class PAT:
    def __init__(self, options: Options) -> None:
        use_checkout(options, "pat", "prefix_attn/__init__.py")
        import prefix_attn

        self.pat = prefix_attn

    def prepare(self, case: Case) -> list[Launch]:
        w = case.workload
        group = case.num_qo_heads // case.num_kv_heads
        if group not in (1, 2, 4, 8) or case.head_dim not in (64, 128):
            raise UnavailableError("1, 2, 4 or 8 query heads a KV head and head_dim 64 or 128 only")
        table = torch.from_numpy(w.block_table).contiguous()
        tree = self.pat.PrefixTreeCPP(w.block_size)
        tree.build_radix_tree(w.seq_lens.tolist(), table)
        tiles = SMALL_BLOCK_TILES if w.block_size < 32 else None
        tree.pack_schedule(tiles, group, case.num_kv_heads)
        tree.kernel_info.to_gpu(case.q.device)
        torch.cuda.synchronize()  # the plan is copied from memory that the table may share
        q = case.q.unsqueeze(1)
        out = torch.empty_like(q)

        def launch(one_stream: bool) -> Launch:
            def call() -> torch.Tensor:
                os.environ["DISABLE_STREAM"] = str(int(one_stream))
                self.pat.prefix_attn_with_kvcache(
                    q=q,
                    k_cache_paged=case.k_cache,
                    v_cache_paged=case.v_cache,
                    tree=tree,
                    softmax_scale=case.sm_scale,
                    out=out,
                )
                return out

            try:
                call()
            except RuntimeError as e:  # unsupported cases are refused only there
                raise UnavailableError(first_line(e)) from e
            return Launch(call, "one stream" if one_stream else "streams", graph=False)

        return [launch(False), launch(True)]
