"""FastTree (github.com/PanZaifeng/FastTree-Artifact), from the user's own checkout.

FastTree's preparation takes nodes of contiguous tokens; the token slots that it lists are replaced
by those of the paged cache. The trees of a forest are children of an empty root.
"""

import io
from contextlib import redirect_stdout
from itertools import accumulate

import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError
from benchmarks.peers.checkout import use_checkout

# The settings of the artifact's run_benchmark.sh, whose query tiles hold 64 and 16 rows.
Q_TILE_ROWS = (64, 16)
KV_TILES = (32, 32)
KV_SPLITS = (1024, 128)
THRESHOLDS = ((132, 528), (132, 132))
COSTS = (0.66, 0.33, 0.1)


class FastTree:
    def __init__(self, options: Options) -> None:
        use_checkout(options, "fasttree", "kv_tree_simple.py")
        import fasttree
        import kv_tree_simple

        self.fasttree, self.new_node = fasttree, kv_tree_simple.KVTreeNode

    def prepare(self, case: Case) -> list[Launch]:
        w = case.workload
        group = case.num_qo_heads // case.num_kv_heads
        tiles = [rows // group for rows in Q_TILE_ROWS]
        if min(tiles) < 1 or group & (group - 1):
            raise UnavailableError("its tiles need 1, 2, 4, 8 or 16 query heads a KV head")
        if w.num_reqs < 2:
            raise UnavailableError("a tree of one request has no root of its own")
        if case.k_cache.numel() >= 1 << 31:
            raise UnavailableError("its 32-bit offsets do not reach over this cache")
        nodes, slots = self.tree(case)
        lengths = [0, *accumulate(node.seqlen for node in nodes)]
        params = self.fasttree.FastTreeParams()
        params.set_values(*COSTS)
        params.set_q_tile_sizes(tiles)
        params.set_kv_tile_sizes(list(KV_TILES))
        params.set_kv_group_num(group)
        with redirect_stdout(io.StringIO()):
            (entries, *aux), _ = self.fasttree.fasttree_preparation(
                nodes,
                lengths,
                w.num_reqs,
                case.num_qo_heads,
                case.num_kv_heads,
                case.head_dim,
                list(KV_SPLITS),
                *map(list, THRESHOLDS),
                params,
            )
        real = entries >= 0
        entries[real] = slots[entries[real].long()]
        k, v = (cache.flatten(0, 1) for cache in (case.k_cache, case.v_cache))
        out = torch.empty_like(case.q)

        def call() -> torch.Tensor:
            # the preparation may have changed the tile sizes for which the plan was made
            self.fasttree.fasttree_decode(
                case.q, k, v, out, entries, *aux, params.TSQs, params.TSKs, case.sm_scale
            )
            return out

        return [Launch(call)]

    def tree(self, case: Case) -> tuple[list, torch.Tensor]:
        """FastTree's nodes, the root first, and the cache slots of the nodes' tokens in order."""
        w = case.workload
        single = w.nodes[0].last - w.nodes[0].first == w.num_reqs
        nodes, slots = [], []
        if not single:
            nodes.append(self.new_node())
            nodes[0].id, nodes[0].requests = 0, list(range(w.num_reqs))
        for n in w.nodes:
            node = self.new_node()
            node.id = len(nodes)
            node.parent = n.parent if single else n.parent + 1
            node.requests = list(range(n.first, n.last))
            if node.parent >= 0:
                nodes[node.parent].num_children += 1
            slots.append(case.node_slots(n))
            node.seqlen = len(slots[-1])
            nodes.append(node)
        return nodes, torch.cat(slots).to(case.q.device, torch.int32)
