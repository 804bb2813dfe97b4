"""FlashInfer: batch decode with a paged cache, and the multi-level cascade.

FlashInfer compiles its kernels at the first plan, which takes some minutes with a cold cache.
"""

import numpy as np
import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError
from benchmarks.support.trees import Workload

WORKSPACE_BYTES = 1 << 30
#: requests [first, last), block-table columns [start, end)
Span = tuple[int, int, int, int]


def int32(values) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))


class _Peer:
    """The library and its workspace."""

    def __init__(self, options: Options) -> None:
        options.require_gpu()
        import flashinfer

        self.flashinfer = flashinfer
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


class FlashInfer(_Peer):
    """``BatchDecodeWithPagedKVCacheWrapper``, on tensor cores from 4 query heads per KV head on, as
    its documentation advises. Several queries per request, and token trees, run in
    ``BatchPrefillWithPagedKVCacheWrapper``.
    """

    serves = ("queries", "token trees")

    def prepare(self, case: Case) -> list[Launch]:
        w = case.workload
        group = case.num_qo_heads // case.num_kv_heads
        blocks = -(-w.seq_lens // w.block_size)
        used = np.arange(w.block_table.shape[1]) < blocks[:, None]
        paging = (
            int32(np.concatenate([[0], np.cumsum(blocks)])),
            int32(w.block_table[used]).cuda(),
            int32((w.seq_lens - 1) % w.block_size + 1),
        )
        shape = (case.num_qo_heads, case.num_kv_heads, case.head_dim, w.block_size)
        dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.q.dtype}
        if w.query_len == 1:
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=group >= 4
            )
            wrapper.plan(*paging, *shape, sm_scale=case.sm_scale, **dtypes)
        else:
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            mask = None if w.query_parents is None else token_tree_mask(case).cuda()
            wrapper.plan(
                case.query_start_loc(),
                *[array.cuda() for array in paging],  # the mask is packed on the device
                *shape,
                custom_mask=mask,
                causal=mask is None,
                sm_scale=case.sm_scale,
                **dtypes,
            )
        out = torch.empty_like(case.q)

        def call() -> torch.Tensor:
            return wrapper.run(case.q, (case.k_cache, case.v_cache), out=out)

        return [Launch(call)]


def token_tree_mask(case: Case) -> torch.Tensor:
    """Which KV token each query sees, flattened over requests, queries and KV tokens."""
    w = case.workload
    among_queries = case.seen_queries().numpy()
    parts = []
    for length in w.seq_lens.tolist():
        mask = np.ones((w.query_len, length), bool)
        mask[:, length - w.query_len :] = among_queries
        parts.append(mask.ravel())
    return torch.from_numpy(np.concatenate(parts))


class FlashInferCascade(_Peer):
    """``MultiLevelCascadeAttentionWrapper``: one level for each level of the forest, and the last
    one for the requests' private blocks. A request without a node on a level reads nothing there.
    """

    serves = ("queries",)

    def prepare(self, case: Case) -> list[Launch]:
        w = case.workload
        levels = [page_arrays(w, spans) for spans in levels_of(case)]
        if len(levels) < 2:
            raise UnavailableError("nothing shared")
        wrapper = self.flashinfer.MultiLevelCascadeAttentionWrapper(
            len(levels), self.workspace, "NHD"
        )
        wrapper.plan(
            *[list(arrays) for arrays in zip(*levels, strict=True)],
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            w.block_size,
            causal=w.query_len > 1,
            sm_scale=case.sm_scale,
            q_data_type=case.q.dtype,
            kv_data_type=case.q.dtype,
        )

        def call() -> torch.Tensor:
            return wrapper.run(case.q, (case.k_cache, case.v_cache))

        return [Launch(call, f"{len(levels)} levels")]


def page_arrays(w: Workload, spans: list[Span]) -> tuple[torch.Tensor, ...]:
    """One level's query and page index pointers, page ids, and tokens in each last page."""
    queries, pages, ids, fill = [0], [0], [], []
    for first, last, start, end in spans:
        queries.append(last * w.query_len)
        pages.append(pages[-1] + end - start)
        ids.append(w.block_table[first, start:end])
        tokens = min(end * w.block_size, int(w.seq_lens[first])) - start * w.block_size
        fill.append(tokens - (end - start - 1) * w.block_size if end > start else 0)
    return int32(queries), int32(pages), int32(np.concatenate(ids)), int32(fill)


def levels_of(case: Case) -> list[list[Span]]:
    """``(first, last, start, end)`` of the requests and columns of each level, top down. The spans
    of a level cover all requests in order; ``start == end`` where a request has no node.
    """
    w = case.workload
    depth: list[int] = []
    by_level: dict[int, list[Span]] = {}
    parents = {n.parent for n in w.nodes}
    deepest = 1 << 30
    for i, n in enumerate(w.nodes):
        depth.append(depth[n.parent] + 1 if n.parent >= 0 else 0)
        level = depth[i] if i in parents else deepest
        by_level.setdefault(level, []).append((n.first, n.last, n.start, n.end))
    levels = []
    for level in sorted(by_level):
        spans, at = [], 0
        for first, last, start, end in sorted(by_level[level]):
            if first > at:
                spans.append((at, first, 0, 0))
            spans.append((first, last, start, end))
            at = last
        if at < w.num_reqs:
            spans.append((at, w.num_reqs, 0, 0))
        levels.append(spans)
    return levels
