"""Tree-structured queries: which draft tokens of a request see each other.

Speculative decoding verifies a tree of draft tokens at once (DeFT, section 3.1; Medusa). A
token sees the whole context, itself and its ancestors in the tree, one bit each.
"""

import numpy as np

from vllm_prefixshare.core import IntArray, PrefixShareError


def ancestor_masks(parents: IntArray, query_start_loc: IntArray) -> IntArray:
    """Bit masks of token trees.

    Args:
        parents: ``[num_tokens]`` index of each query token's parent among the query tokens of
            its own request, -1 for a root; parents come before their children.
        query_start_loc: ``[num_reqs + 1]`` query tokens of each request.

    Returns:
        int32 ``[num_tokens, words]``: bit ``j % 32`` of word ``j // 32`` says that the token
        sees query token ``j`` of its request.

    Raises:
        PrefixShareError: a parent that does not come before its child in the same request.
    """
    counts = np.diff(query_start_loc)
    starts = np.repeat(query_start_loc[:-1], counts)
    own = np.arange(len(starts)) - starts
    if len(parents) != len(starts):
        raise PrefixShareError(
            f"query_parents has {len(parents)} entries, the batch {len(starts)} query tokens."
        )
    wrong = np.flatnonzero((parents < -1) | (parents >= own))
    if len(wrong):
        raise PrefixShareError(
            f"query_parents[{wrong[0]}] = {parents[wrong[0]]}: a parent must come before its "
            f"child in the same request, here among 0 to {own[wrong[0]] - 1}, or be -1."
        )
    words = max(1, -(-int(counts.max(initial=1)) // 32))
    masks = np.zeros((len(starts), words), np.uint32)
    masks[np.arange(len(starts)), own // 32] = np.uint32(1) << (own % 32).astype(np.uint32)
    # pointer jumping: after k rounds a mask holds 2**k generations
    above = np.where(parents >= 0, parents + starts, -1)
    while np.any(above >= 0):
        has = above >= 0
        masks[has] |= masks[above[has]]
        above[has] = above[above[has]]
    return masks.view(np.int32)
