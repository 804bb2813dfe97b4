"""Medusa's tree attention, as DeFT times it: products over all tokens of the batch with a dense
mask, in PyTorch.

DeFT gathers keys, values and mask outside of what it times (``medusa_unpaged_forward``), so they
are made in ``prepare`` here.
"""

import torch

from benchmarks.peers import Case, Launch, Options


class Medusa:
    """One launch for each of the products, the scaled and masked scores, and the softmax."""

    serves = ("queries", "token trees")

    def __init__(self, options: Options) -> None:
        self.device = options.device

    def prepare(self, case: Case) -> list[Launch]:
        slots, mask = self.tokens(case)
        group = case.num_qo_heads // case.num_kv_heads
        k, v = (
            cache.flatten(0, 1)[slots].transpose(0, 1).repeat_interleave(group, 0)
            for cache in (case.k_cache, case.v_cache)
        )
        k, q = k.transpose(1, 2).contiguous(), case.q.transpose(0, 1)

        def call() -> torch.Tensor:
            scores = torch.matmul(q, k) * case.sm_scale + mask
            weights = torch.softmax(scores, dim=2, dtype=torch.float32).to(q.dtype)
            return torch.matmul(weights, v).transpose(0, 1)

        return [Launch(call, f"{len(slots)} tokens", graph=case.q.is_cuda)]

    def tokens(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the batch's tokens, each once, and the mask ``[num_tokens of q, num_slots]``:
        0 where a query sees a token, else minus infinity.
        """
        w = case.workload
        slots, seen = [], []
        for node in w.nodes:
            slots.append(case.node_slots(node))
            end = node.start * w.block_size + len(slots[-1])
            rows = torch.zeros(w.num_reqs, w.query_len, len(slots[-1]), dtype=torch.bool)
            rows[node.first : node.last] = True
            if node.last - node.first == 1 and w.query_len > 1 and end == w.seq_lens[node.first]:
                rows[node.first, :, -w.query_len :] = case.seen_queries()
            seen.append(rows.flatten(0, 1))
        mask = torch.zeros(len(case.q), sum(map(len, slots)), dtype=case.q.dtype)
        mask.masked_fill_(~torch.cat(seen, 1), -torch.inf)
        return torch.cat(slots).to(self.device), mask.to(self.device)
