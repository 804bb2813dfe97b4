"""Partial attention over a latent KV cache (MLA) for Hopper, in Gluon.

A thread block belongs to one worker and walks the worker's work tiles. A tile holds 64 query rows,
the heads of its requests, and a list of KV tiles of 64 tokens. Each is copied to shared memory
once, while the one before is multiplied, and serves both products from there: all of it as K, the
latent as V. Two warpgroups share each product by columns: half of the tokens each for the scores,
half of the latent each for the sum.

The halves exchange their weights and row maxima through shared memory. The sums of the
weights stay in the threads that made them until the tile is finished.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_prefixshare.kernels.hopper.gluon_names import barrier
from vllm_prefixshare.kernels.portable.kernel import (
    FAR,
    FIRST_PART,
    FIRST_SLOT,
    LN2,
    NEW_KV_TILES,
    NUM_REQS,
    PLANNED_KV_TILES,
    WORDS,
)

MASKED = gl.constexpr(-1e30)
# where a row's running maximum starts: far above masked scores, so that a row that saw no token
# yet has weights of exactly zero
LOWEST = gl.constexpr(-1e20)


@gluon.jit
def _tile(tile_info, tile):
    """Slots, number of requests, first part, planned and new KV tiles of a work tile."""
    slots = gl.load(tile_info + tile * WORDS + FIRST_SLOT)
    num_reqs = gl.load(tile_info + tile * WORDS + NUM_REQS)
    first = gl.load(tile_info + tile * WORDS + FIRST_PART)
    packed = gl.load(tile_info + tile * WORDS + PLANNED_KV_TILES)
    return slots, num_reqs, first, packed, gl.load(tile_info + tile * WORDS + NEW_KV_TILES)


@gluon.jit
def _parts_of(n, first, packed, opened, new, steps, part, part_row, part_pos, part_readers,
              PARTS: gl.constexpr):
    """Batch row, first token, readers of the parts of the ``n``-th KV tile, and how many rounds
    of new tokens lie before it.
    """
    more = part * 0 + n < steps
    rounds = gl.maximum(n - packed, 0) // gl.maximum(new, 1)
    entry = gl.maximum(n - packed, 0) - rounds * new
    at = gl.where(n < packed, first + n * PARTS, opened + entry * PARTS) + part
    row = gl.load(part_row + at, mask=more, other=0)
    start = gl.load(part_pos + at, mask=more, other=0)
    readers = gl.load(part_readers + at, mask=more, other=0)
    return row, start, readers, rounds


@gluon.jit
def _tokens_of(row, start, readers, rounds, in_part, block_table, stride_table, seq_lens,
               HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, UNIT: gl.constexpr):
    """Block, position in it, and interval of reading rows of each token of a KV tile."""
    pos = start + (in_part + rounds * UNIT)
    block = gl.load(block_table + row.to(gl.int64) * stride_table + pos // BLOCK_SIZE)
    length = gl.load(seq_lens + row)
    span = (readers & 0xFFFF) * HEADS | (readers >> 16) * HEADS << 16
    return block, pos % BLOCK_SIZE, pos, length, span


@gluon.jit
def _fetch(latent, rope, spans, cache, block, slot, pos, length, span, stride_block, stride_token,
           dim, rope_dim):
    """Start copying a KV tile; tokens past the end of their request become zeros."""
    span = gl.where(pos < length, span, 0)
    there = (span != 0)[:, None]
    at = (block.to(gl.int64) * stride_block + slot * stride_token)[:, None]
    async_copy.async_copy_global_to_shared(latent, cache + (at + dim[None, :]), mask=there)
    async_copy.async_copy_global_to_shared(rope, cache + (at + rope_dim[None, :]), mask=there)
    async_copy.commit_group()
    spans.store(span)


# not specialised: one binary serves every batch and block table
@gluon.jit(do_not_specialize=["block_table", "seq_lens", "stride_table"])
def partial_attention(q, cache, block_table, seq_lens, work_indptr, tile_info, slot_row,
                      slot_partial, slot_end, part_row, part_pos, part_readers, partial_out,
                      partial_lse, out, out_lse, stride_block, stride_token, stride_table,
                      stride_q, stride_out, qk_scale, HEADS: gl.constexpr, LATENT: gl.constexpr,
                      ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, UNIT: gl.constexpr,
                      CHUNKS: gl.constexpr, ROWS: gl.constexpr, KV_TILE: gl.constexpr):
    """Grid: ``num_workers * CHUNKS`` thread blocks of 8 warps; more heads than a tile has rows are
    walked in chunks.

    out_lse: as ``out`` without its last dimension; without it Triton makes another binary.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KV_TILE // 2, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])  # noqa: E741
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O)
    LINE: gl.constexpr = gl.SliceLayout(1, COPY)  # tokens of a KV tile, rows of the queries
    SHARED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    PARTS: gl.constexpr = KV_TILE // UNIT
    dtype: gl.constexpr = q.dtype.element_ty
    q_latent = gl.allocate_shared_memory(dtype, [ROWS, LATENT], SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [ROWS, ROPE], SHARED)
    latents = gl.allocate_shared_memory(dtype, [2, KV_TILE, LATENT], SHARED)
    ropes = gl.allocate_shared_memory(dtype, [2, KV_TILE, ROPE], SHARED)
    weights = gl.allocate_shared_memory(dtype, [ROWS, KV_TILE], SHARED)
    spans = gl.allocate_shared_memory(gl.int32, [2, KV_TILE], PLAIN)

    chunk = gl.program_id(0) % CHUNKS
    worker = gl.program_id(0) // CHUNKS
    stride_block = gl.multiple_of(stride_block, 8)
    stride_token = gl.multiple_of(stride_token, 8)
    dim = gl.arange(0, LATENT, gl.SliceLayout(0, COPY))
    rope_dim = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, COPY))
    dim_o = gl.arange(0, LATENT, gl.SliceLayout(0, O))
    row_q = chunk * ROWS + gl.arange(0, ROWS, LINE)
    row_s = chunk * ROWS + gl.arange(0, ROWS, S_ROW)
    row_o = chunk * ROWS + gl.arange(0, ROWS, O_ROW)
    part = gl.arange(0, KV_TILE, LINE) // UNIT
    in_part = gl.arange(0, KV_TILE, LINE) % UNIT
    zero = gl.zeros([ROWS, KV_TILE], gl.float32, S)
    for tile in range(gl.load(work_indptr + worker), gl.load(work_indptr + worker + 1)):
        slots, num_reqs, first, packed, new = _tile(tile_info, tile)
        num_rows = num_reqs * HEADS
        there = row_q < num_rows
        request = gl.load(slot_row + slots + row_q // HEADS, mask=there, other=0)
        planned_end = gl.load(slot_end + slots + row_q // HEADS, mask=there, other=FAR)
        length = gl.load(seq_lens + request, mask=there, other=0)
        growth = gl.maximum(gl.max((length - planned_end + UNIT - 1) // UNIT, 0), 0)
        steps = packed + new * growth
        opened = first + packed * PARTS

        kv_row, start, readers, rounds = _parts_of(
            0, first, packed, opened, new, steps, part, part_row, part_pos, part_readers, PARTS)
        block, slot, pos, kv_len, span = _tokens_of(
            kv_row, start, readers, rounds, in_part, block_table, stride_table, seq_lens, HEADS,
            BLOCK_SIZE, UNIT)
        kv_row, start, readers, rounds = _parts_of(
            1, first, packed, opened, new, steps, part, part_row, part_pos, part_readers, PARTS)
        barrier()  # every warp is done with the tile before
        _fetch(latents.index(0), ropes.index(0), spans.index(0), cache, block, slot, pos, kv_len,
               span, stride_block, stride_token, dim, rope_dim)
        at_q = request.to(gl.int64) * gl.multiple_of(stride_q, 8) + row_q % HEADS * (LATENT + ROPE)
        at_q = q + at_q[:, None]
        q_latent.store(gl.load(at_q + dim[None, :], mask=there[:, None], other=0.0))
        q_rope.store(gl.load(at_q + rope_dim[None, :], mask=there[:, None], other=0.0))
        block, slot, pos, kv_len, span = _tokens_of(
            kv_row, start, readers, rounds, in_part, block_table, stride_table, seq_lens, HEADS,
            BLOCK_SIZE, UNIT)
        kv_row, start, readers, rounds = _parts_of(
            2, first, packed, opened, new, steps, part, part_row, part_pos, part_readers, PARTS)

        acc = gl.zeros([ROWS, LATENT], gl.float32, O)
        m = gl.full([ROWS], LOWEST, gl.float32, S_ROW)
        sums = zero
        for n in range(0, steps):
            stage = n % 2
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()  # the KV tile is there, and every warp is done with the one before
            s = warpgroup_mma(q_rope, ropes.index(stage).permute((1, 0)), zero, use_acc=False,
                              is_async=True)
            s = warpgroup_mma(q_latent, latents.index(stage).permute((1, 0)), s, is_async=True)
            # no branch: a copy past the last KV tile is not read
            _fetch(latents.index(1 - stage), ropes.index(1 - stage), spans.index(1 - stage), cache,
                   block, slot, pos, kv_len, span, stride_block, stride_token, dim, rope_dim)
            block, slot, pos, kv_len, span = _tokens_of(
                kv_row, start, readers, rounds, in_part, block_table, stride_table, seq_lens,
                HEADS, BLOCK_SIZE, UNIT)
            kv_row, start, readers, rounds = _parts_of(
                n + 3, first, packed, opened, new, steps, part, part_row, part_pos, part_readers,
                PARTS)
            seen_by = spans.index(stage).load(gl.SliceLayout(0, S))
            begin = seen_by & 0xFFFF
            s = warpgroup_mma_wait(0, [s])
            # one comparison: rows before the first wrap around
            reads = (row_s[:, None] - begin[None, :]).to(gl.uint32, bitcast=True)
            reads = reads < ((seen_by >> 16) - begin).to(gl.uint32, bitcast=True)[None, :]
            s = gl.where(reads, s, MASKED)
            m_new = gl.maximum(m, gl.max(s, 1) * qk_scale)
            p = gl.exp2(s * qk_scale - m_new[:, None])
            weights.store(p.to(dtype))
            fence_async_shared()
            alpha = gl.exp2(m - m_new)
            m = m_new
            sums = sums * alpha[:, None] + p
            acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
            barrier()  # both halves of the weights are there
            acc = warpgroup_mma(weights, latents.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
        async_copy.wait_group(0)

        total = gl.sum(sums, 1)
        seen = total > 0
        lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
        acc = acc * gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), O_ROW)[:, None]
        # looked up again: loads cost less than registers
        there_o = row_o < num_rows
        request_o = gl.load(slot_row + slots + row_o // HEADS, mask=there_o, other=0).to(gl.int64)
        partial = gl.load(slot_partial + slots + row_o // HEADS, mask=there_o, other=0)
        to_out = there_o & (partial < 0)
        to_partial = there_o & (partial >= 0)
        head = row_o % HEADS
        lse = gl.convert_layout(lse, O_ROW)
        at_out = request_o * gl.multiple_of(stride_out, 8) + head * LATENT
        gl.store(out + (at_out[:, None] + dim_o[None, :]), acc.to(dtype), mask=to_out[:, None])
        if out_lse is not None:
            gl.store(out_lse + request_o * HEADS + head, lse, mask=to_out)
        at_lse = partial.to(gl.int64) * HEADS + head
        gl.store(partial_lse + at_lse, lse, mask=to_partial)
        at_partial = at_lse[:, None] * LATENT + dim_o[None, :]
        gl.store(partial_out + at_partial, acc, mask=to_partial[:, None])
