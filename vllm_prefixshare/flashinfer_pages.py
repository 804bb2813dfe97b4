"""Batches and KV caches as FlashInfer describes them, for ``PrefixShareDecodeWrapper``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from vllm_prefixshare.core import IntArray, PrefixShareError, host_integers

LAYOUTS = ("NHD", "HND")


def flashinfer_batch(
    paged_kv_indptr: ArrayLike | torch.Tensor,
    paged_kv_indices: ArrayLike | torch.Tensor,
    paged_kv_last_page_len: ArrayLike | torch.Tensor,
    page_size: int,
) -> tuple[IntArray, IntArray]:
    """Block table and lengths of a batch, from the first three arguments of FlashInfer's
    ``BatchDecodeWithPagedKVCacheWrapper.plan`` in their order. A tensor on a GPU is copied to the
    host.

    Args:
        paged_kv_indptr: ``[num_reqs + 1]`` where the pages of each request begin in
            ``paged_kv_indices``.
        paged_kv_indices: ``[at least paged_kv_indptr[-1]]`` page ids, 0 or more.
        paged_kv_last_page_len: ``[num_reqs]`` tokens in the last page of each request, from 1 to
            ``page_size``. It is ignored for a request without pages, which has 0 tokens.
        page_size: tokens of a page, the wrapper's ``block_size``.

    Returns:
        ``block_table``, int32 ``[num_reqs, max_pages]``, and ``seq_lens``, int32 ``[num_reqs]``, on
        the host, as ``PrefixShareDecodeWrapper.plan`` takes them.

    Raises:
        PrefixShareError: arguments that are not integers, disagree in their lengths, or are out of
            range.
    """
    if not isinstance(page_size, int | np.integer) or page_size < 1:
        raise PrefixShareError(f"page_size must be an integer of at least 1, got {page_size!r}.")
    indptr = _on_host(paged_kv_indptr, "paged_kv_indptr")
    indices = _on_host(paged_kv_indices, "paged_kv_indices")
    last = _on_host(paged_kv_last_page_len, "paged_kv_last_page_len")
    counts = np.diff(indptr)
    if not len(indptr) or indptr[0] != 0 or (counts < 0).any():
        raise PrefixShareError("paged_kv_indptr must rise from 0 over num_reqs + 1 entries.")
    if len(last) != len(counts):
        raise PrefixShareError(
            f"paged_kv_last_page_len must have an entry for each of {len(counts)} requests, got "
            f"{len(last)}."
        )
    if len(indices) < indptr[-1]:
        raise PrefixShareError(
            f"paged_kv_indices has {len(indices)} entries, but paged_kv_indptr ends at "
            f"{indptr[-1]}: pass the indices of all requests."
        )
    negative = np.flatnonzero(indices[: indptr[-1]] < 0)
    if len(negative):
        raise PrefixShareError(
            f"paged_kv_indices[{negative[0]}] must be 0 or more, got {indices[negative[0]]}."
        )
    wrong = np.flatnonzero((counts > 0) & ((last < 1) | (last > page_size)))
    if len(wrong):
        raise PrefixShareError(
            f"paged_kv_last_page_len[{wrong[0]}] must be from 1 to {page_size}, got "
            f"{last[wrong[0]]}."
        )
    seq_lens = np.where(counts > 0, (counts.astype(np.int64) - 1) * page_size + last, 0)
    block_table = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
    used = np.arange(block_table.shape[1]) < counts[:, None]
    block_table[used] = indices[: indptr[-1]]
    return block_table, host_integers(seq_lens, "the lengths", 1)


def flashinfer_cache(
    paged_kv_cache: torch.Tensor | Sequence[torch.Tensor], kv_layout: str = "NHD"
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of FlashInfer's paged KV cache, as views: nothing is copied.

    Args:
        paged_kv_cache: one tensor ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]``, or a
            pair of K and V ``[max_num_pages, page_size, num_kv_heads, head_dim]``; with the layout
            HND ``num_kv_heads`` comes before ``page_size``.
        kv_layout: "NHD" or "HND".

    Returns:
        ``k_cache`` and ``v_cache``, ``[max_num_pages, page_size, num_kv_heads, head_dim]``, as
        ``PrefixShareDecodeWrapper.run`` takes them.

    Raises:
        PrefixShareError: another layout, or tensors of another shape.
    """
    if kv_layout not in LAYOUTS:
        raise PrefixShareError(f"kv_layout must be NHD or HND, got {kv_layout!r}.")
    pair: Any = paged_kv_cache
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
            raise PrefixShareError(
                "paged_kv_cache must be [max_num_pages, 2, ...] with 5 dimensions, or a pair of K "
                f"and V, got {list(paged_kv_cache.shape)}."
            )
        pair = paged_kv_cache.unbind(1)
    if (
        not isinstance(pair, Sequence)
        or len(pair) != 2
        or not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in pair)
        or pair[0].shape != pair[1].shape
    ):
        raise PrefixShareError(
            "paged_kv_cache must be one tensor, or a pair of K and V with 4 dimensions and one "
            "shape."
        )
    k_cache, v_cache = pair
    if kv_layout == "HND":
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return k_cache, v_cache


def _on_host(values: ArrayLike | torch.Tensor, name: str) -> IntArray:
    if isinstance(values, torch.Tensor) and values.is_cuda:
        values = values.cpu()
    return host_integers(values, name, 1)
