"""Sliding windows: where the tokens that a request sees begin."""

import numpy as np

from vllm_prefixshare.core import IntArray


def first_in_window(seq_lens: IntArray, sliding_window: int | None, query_len: int = 1) -> IntArray:
    """``[num_reqs]`` first token that any of a request's ``query_len`` queries sees."""
    if sliding_window is None:
        return np.zeros_like(seq_lens)
    return np.maximum(seq_lens - (query_len - 1) - sliding_window, 0)


def tokens_seen(seq_lens: IntArray, sliding_window: int | None, query_len: int = 1) -> int:
    """Tokens of all requests that any of their queries sees."""
    return int(np.add.reduce(seq_lens - first_in_window(seq_lens, sliding_window, query_len)))
