"""The executor for every CPU, in torch operators.

Each shared KV range is gathered once and multiplied with the queries of all its readers; partial
results are merged by log-sum-exp (FlashForge, section 4.2: PAC and POR). Scores, weights and sums
are float32, whatever the cache holds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import IntArray
from vllm_prefixshare.kernels.cpu.base import CpuExecutor, CpuTensors
from vllm_prefixshare.kernels.cpu.partials import (
    PrivateRuns,
    merge_slots,
    positions_of,
    private_runs,
    shared_runs,
    tokens_of,
)
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.plan import DecodePlan

#: Scores of one piece of work, so that they stay in the caches of the CPU.
MAX_SCORES = 1 << 21
#: Hides a score. Finite, so that a fully hidden block gives no NaN; it weighs exp(-1e30) = 0.
HIDDEN = -1e30

BlockIds: TypeAlias = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class _SharedPiece:
    """Blocks read for several requests; but for a sliding window, every query sees every token."""

    num_runs: ClassVar[int] = 1
    width: ClassVar[None] = None
    hidden: ClassVar[None] = None
    beyond: ClassVar[None] = None
    tokens: torch.Tensor  # [num_tokens] query tokens
    blocks: BlockIds
    start: int  # position of the first token
    slot: int  # first partial result


@dataclass(frozen=True, slots=True)
class _PrivatePiece:
    """KV ranges of one request each, padded to one shape."""

    tokens: torch.Tensor  # [num_runs * query_len], padding repeats a token
    blocks: torch.Tensor  # [num_runs * num_blocks]
    start: torch.Tensor  # [num_runs] positions of the first tokens
    hidden: torch.Tensor  # bool [num_runs, num_blocks, 1, query_len, 1, width]
    beyond: torch.Tensor  # bool [num_runs, num_blocks, 1, width, 1], tokens past the range
    num_runs: int
    width: int  # tokens of a block that any run needs
    slot: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan prepared for the lengths of one step, for all layers.

    tokens: query tokens that are computed, or None for all of them.
    positions: ``[num_tokens]`` of all query tokens within their requests.
    merge_slots: ``[num_tokens, max_partials]`` partial results of each; slot
        ``num_slots`` is empty.
    some_see_nothing: whether a request has no tokens.
    """

    shared: tuple[_SharedPiece, ...]
    private: tuple[_PrivatePiece, ...]
    tokens: torch.Tensor | None
    positions: torch.Tensor
    merge_slots: torch.Tensor
    num_slots: int
    some_see_nothing: bool = False


class TorchExecutor(CpuExecutor):
    """Runs DecodePlans with torch on the CPU, in any dtype."""

    name = "torch"
    #: in all measurements, CPU_ATTN was at least as fast as sharing in torch operators
    trusts_estimates = False

    def __init__(self, attention: AttentionConfig, num_workers: int = 1) -> None:
        super().__init__(attention, num_workers)
        self.num_kv_heads = attention.num_kv_heads
        self.gqa_group_size = attention.gqa_group_size
        self._buffers = _Buffers()
        self._shared: tuple[tuple[DecodePlan, bytes], list[_SharedPiece]] | None = None
        nothing = self._nothing = torch.zeros(0, 1, dtype=torch.int64, device="cpu")
        self._step = _Step((), (), None, nothing[:, 0], nothing, 0)

    def prepare(self, plan: DecodePlan, batch: HostBatch) -> None:
        """As ``interface.Executor.prepare``."""
        super().prepare(plan, batch)
        block_table, seq_lens, query_start_loc, _, rows = batch
        if not len(seq_lens):
            return
        key = plan, query_start_loc.tobytes()
        if self._shared is None or self._shared[0] != key:
            self._shared = key, list(self._shared_pieces(plan, block_table, query_start_loc))
        shared = self._shared[1]
        slot = shared[-1].slot + len(shared[-1].tokens) if shared else 0

        rows_per_token = self.num_kv_heads * self.gqa_group_size
        longest = int(np.diff(query_start_loc).max())
        chunk = max(1, MAX_SCORES // (rows_per_token * longest * plan.block_size)) * plan.block_size
        runs = private_runs(plan, seq_lens, rows, chunk)
        private = list(
            self._private_pieces(
                runs, plan.block_size, block_table, seq_lens, query_start_loc, slot
            )
        )

        owners = [p.tokens for p in shared] + [p.tokens for p in private]
        tokens = torch.cat([self._nothing[:, 0], *owners]).numpy()
        wanted = tokens_of(rows, query_start_loc) if rows is not None else None
        total = int(query_start_loc[-1])
        merge = merge_slots(tokens, total, len(tokens), _padding(private, slot, len(tokens)))
        self._step = _Step(
            shared=tuple(shared),
            private=tuple(private),
            tokens=None if wanted is None else torch.from_numpy(wanted),
            positions=torch.from_numpy(positions_of(seq_lens, query_start_loc)),
            merge_slots=torch.from_numpy(merge if wanted is None else merge[wanted]),
            num_slots=len(tokens),
            some_see_nothing=bool((seq_lens == 0).any()),
        )

    def _shared_pieces(
        self, plan: DecodePlan, block_table: IntArray, starts: IntArray
    ) -> Iterator[_SharedPiece]:
        size = plan.block_size
        slot = 0
        for run in shared_runs(plan, starts):
            tokens = torch.from_numpy(run.tokens)
            ids = block_table[run.row, run.kv_start // size : run.kv_end // size]
            scores = self.num_kv_heads * self.gqa_group_size * len(tokens) * size
            step = max(1, MAX_SCORES // scores)
            for start in range(0, len(ids), step):
                blocks = _block_ids(ids[start : start + step])
                yield _SharedPiece(tokens, blocks, run.kv_start + start * size, slot)
                slot += len(tokens)

    def _private_pieces(
        self,
        runs: PrivateRuns,
        size: int,
        block_table: IntArray,
        seq_lens: IntArray,
        starts: IntArray,
        slot: int,
    ) -> Iterator[_PrivatePiece]:
        if not len(runs.row):
            return
        num_blocks = -(-runs.kv_len // size)
        bucket = np.ceil(np.log2(num_blocks)).astype(np.int64)  # padding at most doubles the work
        for b in np.unique(bucket).tolist():
            chosen = np.flatnonzero(bucket == b)
            depth = int(num_blocks[chosen].max())
            query_len = int(np.diff(starts)[runs.row[chosen]].max())
            scores = self.num_kv_heads * self.gqa_group_size * query_len * size * depth
            step = max(1, MAX_SCORES // scores)
            for at in range(0, len(chosen), step):
                part = PrivateRuns(*(x[chosen[at : at + step]] for x in runs))
                piece = self._private_piece(part, size, depth, block_table, seq_lens, starts, slot)
                yield piece
                slot += len(piece.tokens)

    @staticmethod
    def _private_piece(
        runs: PrivateRuns,
        size: int,
        depth: int,
        block_table: IntArray,
        seq_lens: IntArray,
        starts: IntArray,
        slot: int,
    ) -> _PrivatePiece:
        rows, kv_start, lengths = runs
        # whole multiples of 16 keep the vector units busy
        width = size if depth > 1 else min(size, -(-int(lengths.max()) // 16) * 16)
        columns = kv_start[:, None] // size + np.arange(depth)
        columns = np.minimum(columns, (kv_start + lengths - 1)[:, None] // size)
        query_lens = np.diff(starts)[rows]
        query = np.minimum(np.arange(query_lens.max()), query_lens[:, None] - 1)  # [runs, queries]
        # a query sees the tokens up to its own, within the run
        visible = np.minimum(
            kv_start[:, None] + lengths[:, None],
            seq_lens[rows][:, None] - query_lens[:, None] + query + 1,
        )
        offset = np.arange(depth)[:, None] * size + np.arange(width)
        position = kv_start[:, None, None, None] + offset[:, None]  # [runs, depth, 1, width]
        hidden = position >= visible[:, None, :, None]
        beyond = position >= (kv_start + lengths)[:, None, None, None]
        return _PrivatePiece(
            tokens=torch.from_numpy((starts[rows][:, None] + query).astype(np.int64).ravel()),
            blocks=torch.from_numpy(block_table[rows[:, None], columns].astype(np.int64).ravel()),
            start=torch.from_numpy(kv_start.astype(np.int64)),
            hidden=torch.from_numpy(hidden[:, :, None, :, None, :]),
            beyond=torch.from_numpy(beyond[..., None]),
            num_runs=len(rows),
            width=width,
            slot=slot,
        )

    @torch.no_grad()  # buffers are kept: one that autograd had seen would fail later calls
    def _compute(self, t: CpuTensors) -> None:
        # a K cache whose tokens are innermost is read without a transpose
        step = self._step
        num_heads = self.num_kv_heads * self.gqa_group_size
        v_dim = t.v_cache.shape[-1]
        partial_out = self._buffers.take("partial_out", (step.num_slots + 1, num_heads, v_dim))
        partial_lse = self._buffers.take("partial_lse", (step.num_slots + 1, num_heads))
        partial_out[-1] = 0.0
        partial_lse[-1] = float("-inf")
        q = self._unquantised_queries(t)
        pieces: tuple[_SharedPiece | _PrivatePiece, ...] = (*step.shared, *step.private)
        for piece in pieces:
            k, v = self._gather(t.k_cache, t.v_cache, piece.blocks, piece.num_runs, piece.width)
            if piece.beyond is not None:
                # values beyond the range may be anything; a weight of 0 does not undo a NaN
                v.masked_fill_(piece.beyond, 0.0)
            rows = self._rows(q, piece.tokens, piece.num_runs, t.sm_scale)
            bias, hidden = self._bias(piece, k, t), self._hidden(piece, k, t)
            o, lse = self._attend(rows, k, v, hidden, bias, t.extras.soft_cap)
            self._store(o, partial_out[piece.slot :])
            self._store(lse[..., None], partial_lse[piece.slot :, :, None])
        self._merge(partial_out, partial_lse, t)

    def _unquantised_queries(self, t: CpuTensors) -> torch.Tensor:
        """The queries, times the scales of queries and keys where those are quantised."""
        q = t.q.float() if t.q.element_size() == 1 else t.q
        for scale in (t.extras.q_scale, t.extras.k_scale):
            if isinstance(scale, torch.Tensor):
                q = q.float() * scale.repeat_interleave(self.gqa_group_size)[:, None]
        return q

    def _rows(
        self, q: torch.Tensor, tokens: torch.Tensor, num_runs: int, sm_scale: float
    ) -> torch.Tensor:
        """``[num_runs, heads, queries * group, head_dim]`` float32, scaled."""
        heads, dim = self.num_kv_heads, q.shape[-1]
        rows = q.index_select(0, tokens).float().mul_(sm_scale)
        rows = rows.view(num_runs, -1, heads, self.gqa_group_size, dim).transpose(1, 2)
        return rows.reshape(num_runs, heads, -1, dim)

    def _ahead(
        self, piece: _SharedPiece | _PrivatePiece, k: torch.Tensor, block_size: int
    ) -> torch.Tensor:
        """``[runs, blocks, 1, queries, 1, width]``: by how many tokens each key of a piece comes
        after each query, for K as ``_gather`` returns it.
        """
        runs, blocks, *_, width = k.shape
        offset = np.arange(blocks)[:, None] * block_size + np.arange(width)
        start = torch.as_tensor(piece.start, device="cpu").view(-1, 1, 1)
        key = start + torch.from_numpy(offset)
        query = self._step.positions[piece.tokens].view(runs, 1, -1, 1)
        return (key[:, :, None] - query)[:, :, None, :, None]

    def _bias(
        self, piece: _SharedPiece | _PrivatePiece, k: torch.Tensor, t: CpuTensors
    ) -> torch.Tensor | None:
        """ALiBi bias of a piece's scores; None without ALiBi."""
        if t.extras.alibi_slopes is None:
            return None
        slopes = t.extras.alibi_slopes.view(self.num_kv_heads, 1, self.gqa_group_size, 1)
        return (self._ahead(piece, k, t.k_cache.shape[1]) * slopes).flatten(3, 4)

    def _hidden(
        self, piece: _SharedPiece | _PrivatePiece, k: torch.Tensor, t: CpuTensors
    ) -> torch.Tensor | None:
        """Which keys of a piece each query does not see; None if it sees all."""
        window = self.attention.sliding_window
        if window is None:
            return piece.hidden
        before = self._ahead(piece, k, t.k_cache.shape[1]) <= -window
        return before if piece.hidden is None else piece.hidden | before

    def _store(self, o: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy ``[runs, heads, queries * group, width]`` to the first of ``slots``, by token."""
        runs, heads, rows, width = o.shape
        group = self.gqa_group_size
        view = slots[: rows // group * runs].view(runs, -1, heads, group, width)
        view.copy_(o.view(runs, heads, -1, group, width).transpose(1, 2))

    def _merge(self, partial_out: torch.Tensor, partial_lse: torch.Tensor, t: CpuTensors) -> None:
        """Write the output, and the log-sum-exp if asked for, of the prepared query tokens."""
        step = self._step
        slots = step.merge_slots  # index_select: much faster than indexing by a matrix
        lses = partial_lse.index_select(0, slots.flatten()).view(*slots.shape, -1)
        parts = partial_out.index_select(0, slots.flatten())
        parts = parts.view(*slots.shape, -1, partial_out.shape[-1])
        if t.extras.sinks is not None:  # one more partial result, whose output is zero
            lses = torch.cat([lses, t.extras.sinks.float().expand(len(lses), 1, -1)], dim=1)
        weights = torch.softmax(lses, dim=1)[:, : parts.shape[1], :, None]
        if step.some_see_nothing:
            weights = weights.masked_fill(lses.isneginf().all(1)[:, None, :, None], 0.0)
        merged = parts.mul_(weights).sum(dim=1)
        if isinstance(t.extras.v_scale, torch.Tensor):
            merged *= t.extras.v_scale.repeat_interleave(self.gqa_group_size)[:, None]
        results = [(t.out, merged)]
        if t.lse is not None:
            results.append((t.lse, lses.logsumexp(1)))
        for result, value in results:
            if step.tokens is None:
                result.copy_(value)
            else:
                result.index_copy_(0, step.tokens, value.to(result.dtype))

    def _gather(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: BlockIds,
        num_runs: int,
        width: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[num_runs, blocks, heads, head_dim, width]`` and V ``[num_runs, blocks, heads,
        width, head_dim]`` of the named blocks, float32.
        """

        def pick(name: str, cache: torch.Tensor, in_place: bool) -> torch.Tensor:
            if cache.element_size() == 1 and cache.dtype != torch.uint8:
                # torch cannot index every one-byte dtype
                return pick(name, cache.view(torch.uint8), in_place).view(cache.dtype)
            if isinstance(blocks, slice):
                return cache[blocks]
            if not in_place:
                return cache.index_select(0, blocks)
            out = self._buffers.take(name, (len(blocks), *cache.shape[1:]), cache.dtype)
            return torch.index_select(cache, 0, blocks, out=out)

        transposed = k_cache.stride(1) == 1  # tokens innermost: CPU_ATTN's layout
        k, v = k_cache.permute(0, 2, 3, 1), v_cache.transpose(1, 2)
        k = pick("k", k, True) if transposed else pick("k", k_cache, False).permute(0, 2, 3, 1)
        v = pick("v", v, transposed)
        if width is not None:
            k, v = k[..., :width], v[..., :width, :]
        k = self._buffers.take("k_float", k.shape).copy_(k)
        v = self._buffers.take("v_float", v.shape).copy_(v)
        return k.unflatten(0, (num_runs, -1)), v.unflatten(0, (num_runs, -1))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        soft_cap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial attention, block by block, then merged over the blocks.

        Block-sized products are as fast as one long one and need no transposed copy of the
        cache.

        Args:
            q: ``[runs, heads, rows, head_dim]``, scaled.
            k: ``[runs, blocks, heads, head_dim, width]``.
            v: ``[runs, blocks, heads, width, head_dim]``; it may have another width than K.
            hidden: bool ``[runs, blocks, 1, queries, 1, width]``; None where all is visible.
            bias: added to the scores ``[runs, blocks, heads, rows, width]`` after the soft cap.

        Returns:
            ``[runs, heads, rows, head_dim of V]`` and the log-sum-exp ``[runs, heads, rows]``.
        """
        take = self._buffers.take
        shape = (*k.shape[:3], q.shape[2], k.shape[4])
        spread = take("q", (*k.shape[:3], *q.shape[2:])).copy_(q[:, None])
        scores = take("scores", shape)
        torch.bmm(spread.flatten(0, 2), k.flatten(0, 2), out=scores.flatten(0, 2))
        if soft_cap:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if bias is not None:
            scores.add_(bias)
        if hidden is not None:
            scores.unflatten(3, (hidden.shape[3], -1)).masked_fill_(hidden, HIDDEN)
        largest = scores.amax(-1)
        weights = torch.softmax(scores, -1, out=take("weights", shape))
        # the largest weight is exp(largest - lse): cheaper than a second pass of exponentials
        lse = largest - weights.amax(-1).log()
        # `spread` is no longer needed; the output mostly has its shape
        o = spread if v.shape[4] == q.shape[3] else take("o", (*shape[:4], v.shape[4]))
        torch.bmm(weights.flatten(0, 2), v.flatten(0, 2), out=o.flatten(0, 2))
        total = torch.logsumexp(lse, dim=1)
        share = torch.exp(lse - total[:, None])
        return o.mul_(share[..., None]).sum(dim=1), total


class _Buffers:
    """Scratch tensors kept from layer to layer: fresh ones of this size would be returned to
    the system and faulted in again each time.
    """

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """An uninitialised tensor; it holds until ``name`` is taken again."""
        size, flat = math.prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            with torch.inference_mode(False):  # one made in that mode could not be used outside
                flat = self._flat[name] = torch.empty(size, dtype=dtype, device="cpu")
        return flat[:size].view(shape)


def _block_ids(ids: IntArray) -> BlockIds:
    """A slice where the ids are consecutive, so that they are read in place."""
    first = int(ids[0])
    if np.array_equal(ids, np.arange(first, first + len(ids))):
        return slice(first, first + len(ids))
    return torch.from_numpy(ids.astype(np.int64))


def _padding(private: list[_PrivatePiece], first: int, total: int) -> np.ndarray:
    """Bool ``[total]``: partial results that only pad a ragged batch of queries."""
    pad, at = np.zeros(total, bool), first
    for piece in private:
        tokens = piece.tokens.numpy().reshape(piece.num_runs, -1)
        pad[at : at + tokens.size].reshape(tokens.shape)[:, 1:] = tokens[:, 1:] == tokens[:, :-1]
        at += tokens.size
    return pad
