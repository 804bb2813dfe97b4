"""The executor for every CPU, in torch operators.

Each shared KV run is gathered once and multiplied with the queries of all its readers; partial
results are merged by log-sum-exp (FlashForge, section 4.2: PAC and POR). Scores, weights and sums
are float32, whatever the cache holds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

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

    tokens: torch.Tensor  # [num_tokens] query tokens
    blocks: BlockIds
    start: int  # position of the first token
    slot: int  # first partial result


@dataclass(frozen=True, slots=True)
class _PrivatePiece:
    """Runs of one request each, padded to one shape."""

    tokens: torch.Tensor  # [num_runs * query_len], padding repeats a token
    blocks: torch.Tensor  # [num_runs * num_blocks]
    start: torch.Tensor  # [num_runs] positions of the first tokens
    hidden: torch.Tensor  # bool [num_runs, num_blocks, 1, query_len, 1, width]
    beyond: torch.Tensor  # bool [num_runs, num_blocks, 1, width, 1], tokens not of the run
    num_runs: int
    width: int  # tokens of a block that any run needs
    slot: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan made ready for the lengths of one step; serves every layer of it.

    tokens: query tokens that are computed, or None for all of them.
    positions: ``[num_tokens]`` of all query tokens within their requests.
    merge_slots: ``[num_tokens, most partials]`` partial results of each; the slot
        ``num_slots`` stands for none.
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
        self._static: tuple[DecodePlan, bytes, list[_SharedPiece]] | None = None
        nothing = self._nothing = torch.zeros(0, 1, dtype=torch.int64, device="cpu")
        self._step = _Step((), (), None, nothing[:, 0], nothing, 0)

    def prepare(self, plan: DecodePlan, batch: HostBatch) -> None:
        """As ``contract.Executor.prepare``."""
        super().prepare(plan, batch)
        block_table, seq_lens, query_start_loc, _, rows = batch
        if not len(seq_lens):
            return
        several = (plan.run_reader_end - plan.run_reader_start) > 1
        key = query_start_loc.tobytes()
        if self._static is None or self._static[0] is not plan or self._static[1] != key:
            pieces = list(
                self._shared_pieces(plan, np.flatnonzero(several), block_table, query_start_loc)
            )
            self._static = plan, key, pieces
        shared = self._static[2]
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
        self, plan: DecodePlan, runs: IntArray, block_table: IntArray, starts: IntArray
    ) -> Iterator[_SharedPiece]:
        tile_of_run = np.repeat(np.arange(plan.num_tiles), np.diff(plan.tile_run_indptr))
        slot = 0
        for run in runs.tolist():
            base = int(plan.tile_req_indptr[tile_of_run[run]])
            readers = plan.tile_req_indices[
                base + plan.run_reader_start[run] : base + plan.run_reader_end[run]
            ]
            tokens = torch.from_numpy(tokens_of(readers, starts))
            first, last = plan.run_kv_start[run], plan.run_kv_end[run]
            ids = block_table[plan.run_row[run], first // plan.block_size : last // plan.block_size]
            scores = self.num_kv_heads * self.gqa_group_size * len(tokens) * plan.block_size
            step = max(1, MAX_SCORES // scores)
            for start in range(0, len(ids), step):
                blocks = _block_ids(ids[start : start + step])
                yield _SharedPiece(tokens, blocks, int(first) + start * plan.block_size, slot)
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
        q, k_cache, v_cache, out, lse, sm_scale, x = t
        step = self._step
        heads, group, dim = self.num_kv_heads, self.gqa_group_size, q.shape[-1]
        v_dim = v_cache.shape[-1]
        partial_out = self._buffers.take("partial_out", (step.num_slots + 1, heads * group, v_dim))
        partial_lse = self._buffers.take("partial_lse", (step.num_slots + 1, heads * group))
        partial_out[-1] = 0.0
        partial_lse[-1] = float("-inf")

        if q.element_size() == 1:
            q = q.float()
        for scale in (x.q_scale, x.k_scale):
            if isinstance(scale, torch.Tensor):
                q = q.float() * scale.repeat_interleave(group)[:, None]

        def queries(tokens: torch.Tensor, num_runs: int) -> torch.Tensor:
            """``[num_runs, heads, queries * group, head_dim]`` float32, scaled."""
            rows = q.index_select(0, tokens).float().mul_(sm_scale)
            rows = rows.view(num_runs, -1, heads, group, dim).transpose(1, 2)
            return rows.reshape(num_runs, heads, -1, dim)

        def ahead(piece: _SharedPiece | _PrivatePiece, k: torch.Tensor) -> torch.Tensor:
            """``[runs, blocks, 1, queries, 1, width]``: by how many tokens each key of a piece
            comes after each query, for K as ``_gather`` returns it.
            """
            runs, blocks, *_, width = k.shape
            offset = np.arange(blocks)[:, None] * k_cache.shape[1] + np.arange(width)
            start = torch.as_tensor(piece.start, device="cpu").view(-1, 1, 1)
            key = start + torch.from_numpy(offset)
            query = step.positions[piece.tokens].view(runs, 1, -1, 1)
            return (key[:, :, None] - query)[:, :, None, :, None]

        def bias(piece: _SharedPiece | _PrivatePiece, k: torch.Tensor) -> torch.Tensor | None:
            """ALiBi bias of a piece's scores."""
            if x.alibi_slopes is None:
                return None
            return (ahead(piece, k) * x.alibi_slopes.view(heads, 1, group, 1)).flatten(3, 4)

        def passed(piece: _SharedPiece | _PrivatePiece, k: torch.Tensor) -> torch.Tensor | None:
            """Whether each key of a piece lies before each query's window."""
            window = self.attention.sliding_window
            return None if window is None else ahead(piece, k) <= -window

        def store(slot: int, o: torch.Tensor, lse: torch.Tensor) -> None:
            """From ``[num_runs, heads, queries * group, ...]`` to token-major slots."""
            runs = o.shape[0]
            n = o.shape[2] // group * runs
            view = partial_out[slot : slot + n].view(runs, -1, heads, group, v_dim)
            view.copy_(o.view(runs, heads, -1, group, v_dim).transpose(1, 2))
            view = partial_lse[slot : slot + n].view(runs, -1, heads, group)
            view.copy_(lse.view(runs, heads, -1, group).transpose(1, 2))

        for piece in step.shared:
            k, v = self._gather(k_cache, v_cache, piece.blocks, 1)
            rows = queries(piece.tokens, 1)
            added, hidden = bias(piece, k), passed(piece, k)
            store(piece.slot, *self._attend(rows, k, v, hidden, added, x.soft_cap))
        for batch in step.private:
            k, v = self._gather(k_cache, v_cache, batch.blocks, batch.num_runs, batch.width)
            # values beyond the run may be anything; a weight of 0 does not undo a NaN
            v.masked_fill_(batch.beyond, 0.0)
            rows = queries(batch.tokens, batch.num_runs)
            added, hidden = bias(batch, k), passed(batch, k)
            hidden = batch.hidden if hidden is None else batch.hidden | hidden
            store(batch.slot, *self._attend(rows, k, v, hidden, added, x.soft_cap))

        slots = step.merge_slots  # index_select: much faster than indexing by a matrix
        lses = partial_lse.index_select(0, slots.flatten()).view(*slots.shape, -1)
        parts = partial_out.index_select(0, slots.flatten()).view(*slots.shape, -1, v_dim)
        if x.sinks is not None:  # one more partial result, whose output is zero
            lses = torch.cat([lses, x.sinks.float().expand(len(lses), 1, -1)], dim=1)
        weights = torch.softmax(lses, dim=1)[:, : parts.shape[1], :, None]
        if step.some_see_nothing:
            weights = weights.masked_fill(lses.isneginf().all(1)[:, None, :, None], 0.0)
        merged = parts.mul_(weights).sum(dim=1)
        if isinstance(x.v_scale, torch.Tensor):
            merged *= x.v_scale.repeat_interleave(group)[:, None]
        for result, value in ((out, merged), (lse, None if lse is None else lses.logsumexp(1))):
            if result is None or value is None:
                continue
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
