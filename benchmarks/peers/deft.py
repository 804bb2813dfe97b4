"""DeFT (github.com/LINs-lab/DeFT), from the user's own checkout.

DeFT adds up its output atomically, so each run starts from zeros; the output is float32 here.
"""

from types import SimpleNamespace

import torch

from benchmarks.peers import Case, Launch, Options, UnavailableError
from benchmarks.peers.checkout import use_checkout


class DeFT:
    """DeFT-Flatten and DeFT-Node-Chunk; the faster one counts."""

    def __init__(self, options: Options) -> None:
        use_checkout(options, "deft", "deft/layers/attention/tree_attention.py")
        from deft.layers.attention import tree_attention
        from deft.tree_decoding import tree_cache

        self.kernels, self.cache = tree_attention, tree_cache

    def prepare(self, case: Case) -> list[Launch]:
        if case.head_dim not in (16, 32, 64, 128):
            raise UnavailableError("head_dim 16, 32, 64 or 128 only")
        block = self.cache.BLOCK_CONFIG["BLOCK_LEN"]
        plan = self.cache.TreeMetadata.from_tree_cache(self.tree(case), max_block_len=block)
        k, v = (cache.flatten(0, 1) for cache in (case.k_cache, case.v_cache))
        out = torch.zeros(case.q.shape, dtype=torch.float32, device=case.q.device)

        def flatten() -> torch.Tensor:
            out.zero_()
            self.kernels.tree_attention_subtree_fwd(
                case.q,
                k,
                v,
                out,
                plan.block_len,
                plan.block_q,
                plan.block_q_cnts,
                plan.block_q_offset,
                plan.block_bitmasks,
                plan.block_kv,
                plan.block_lens,
            )
            return out

        def node_chunk() -> torch.Tensor:
            out.zero_()
            self.kernels.tree_attention_fwd(
                case.q,
                k,
                v,
                out,
                plan.node_kv,
                plan.node_kv_offset,
                plan.node_kv_len,
                plan.node_q,
                plan.node_q_offset,
                plan.node_q_len,
            )
            return out

        return [Launch(flatten, "flatten"), Launch(node_chunk, "node chunk")]

    def tree(self, case: Case) -> SimpleNamespace:
        """The parts of a tree cache that DeFT's planner reads: nodes with token slots, and the
        leaves below them. Leaves are numbered by request; the trees of a forest are children of an
        empty root.
        """
        w = case.workload
        inner = {n.parent for n in w.nodes}
        made = []
        for i, n in enumerate(w.nodes):
            # the number of a leaf is that of its request
            node = self.cache.TreeNode(n.first if i not in inner else w.num_reqs + i)
            node.kv_indices = case.node_slots(n).tolist()
            node.token_ids = [0] * len(node.kv_indices)
            if n.parent >= 0:
                made[n.parent].children[node.id] = node
            made.append(node)
        leaves = {node.id: node for i, node in enumerate(made) if i not in inner}
        for node, n in zip(made, w.nodes, strict=True):
            node.refs = {leaves[r] for r in range(n.first, n.last)}
        roots = [node for node, n in zip(made, w.nodes, strict=True) if n.parent < 0]
        root = roots[0]
        if len(roots) > 1:
            root = self.cache.TreeNode(2 * w.num_reqs + len(made))
            root.token_ids, root.refs = [0], set(leaves.values())
            root.children = {node.id: node for node in roots}
        return SimpleNamespace(root=root, leaves=leaves, use_paged_memory=True)
