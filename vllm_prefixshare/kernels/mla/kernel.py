"""Partial attention over a latent KV cache (MLA) in plain Triton, for every NVIDIA GPU from
compute capability 8.0 on.

There is one vector for each token, the latent with the rotated part of the key behind it. All
query heads read it, so the rows of a tile are the heads of all its requests, and a KV tile is
read once for both products: all of it as K, the latent as V.

A thread block belongs to one worker, and walks the worker's work tiles in the arrays of
``portable.layout.walk_layout``, as the portable kernel does: first the long runs, then the KV tiles
into which short runs are packed. Each request has one query token.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Signatures of many names read better in lines than one to a line; kernels are not typed.

import triton
import triton.language as tl

import vllm_prefixshare.kernels.portable.arrays as words

FIRST_SLOT = tl.constexpr(words.FIRST_SLOT)
NUM_REQS = tl.constexpr(words.NUM_REQS)
FIRST_RUN = tl.constexpr(words.FIRST_RUN)
END_RUN = tl.constexpr(words.END_RUN)
FIRST_PART = tl.constexpr(words.FIRST_PART)
PLANNED_KV_TILES = tl.constexpr(words.PLANNED_KV_TILES)
NEW_KV_TILES = tl.constexpr(words.NEW_KV_TILES)
WORDS = tl.constexpr(words.WORDS)

LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)


@triton.jit
def _settled(x):
    """``x``, computed where it is: otherwise Triton repeats the loads that it comes from in the
    layout of the scores.
    """
    return tl.max(tl.broadcast_to(x[:, None], [x.shape[0], 2]), 1)


@triton.jit
def _scores(q_latent, q_rope, latent, rope):
    """``[Q_TILE_SIZE, KV_TILE_SIZE]`` before the softmax scale."""
    s = tl.dot(q_rope, tl.trans(rope))
    return tl.dot(q_latent, tl.trans(latent), s)


@triton.jit
def _attend_run(state, q_latent, q_rope, start, end, reads, table_row, cache, stride_block,
                stride_token, qk_scale, LATENT: tl.constexpr, ROPE: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, KV_TILE_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Online softmax over the tokens ``[start, end)`` of one batch row, whole KV tiles that the
    rows of ``reads`` see. A row that does not read has an infinite maximum for the time being.
    """
    m, total, acc = state
    cols = tl.arange(0, KV_TILE_SIZE)
    dim = tl.arange(0, LATENT)
    rope_dim = LATENT + tl.arange(0, ROPE)
    block = tl.load(table_row + (start + cols) // BLOCK_SIZE)
    for n in tl.range(start, end, KV_TILE_SIZE, num_stages=STAGES):
        pos = n + cols
        at = block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_token
        latent = tl.load(cache + (at[:, None] + dim[None, :]))
        rope = tl.load(cache + (at[:, None] + rope_dim[None, :]))
        ahead = pos + KV_TILE_SIZE
        block = tl.load(table_row + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        s = _scores(q_latent, q_rope, latent, rope)
        m_new = tl.where(reads, tl.maximum(m, tl.max(s, 1) * qk_scale), float("inf"))
        p = tl.exp2(s * qk_scale - m_new[:, None])
        alpha = tl.where(reads, tl.exp2(m - m_new), 1.0)
        m = tl.where(reads, m_new, m)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(latent.dtype), latent, acc)
    return m, total, acc


@triton.jit
def _attend_parts(state, q_latent, q_rope, first, packed, opened, new, steps, part_row, part_pos,
                  part_readers, block_table, stride_table, seq_lens, cache, stride_block,
                  stride_token, qk_scale, row, LATENT: tl.constexpr, ROPE: tl.constexpr,
                  HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr,
                  KV_TILE_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Online softmax over ``steps`` KV tiles made of parts: the ``packed`` ones that are listed
    from ``first`` on, then the ``new`` ones from ``opened`` on, again and again, each time a
    unit further.
    """
    m, total, acc = state
    PARTS: tl.constexpr = KV_TILE_SIZE // UNIT
    part = tl.arange(0, KV_TILE_SIZE) // UNIT
    in_part = tl.arange(0, KV_TILE_SIZE) % UNIT
    dim = tl.arange(0, LATENT)
    rope_dim = LATENT + tl.arange(0, ROPE)
    at = first + part  # those for new tokens follow, where there are no others
    kv_row = tl.load(part_row + at)
    start = tl.load(part_pos + at)
    readers = tl.load(part_readers + at)
    pos = start + in_part
    low, high = (readers & 0xFFFF) * HEADS, (readers >> 16) * HEADS
    block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + pos // BLOCK_SIZE)
    length = tl.load(seq_lens + kv_row)
    n = 1  # the KV tile after the one at hand
    rounds = tl.maximum(n - packed, 0) // tl.maximum(new, 1)
    entry = tl.maximum(n - packed, 0) - rounds * new
    at = tl.where(n < packed, first + n * PARTS, opened + entry * PARTS) + part
    # as many as they mask: the interpreter of Triton 3.9 makes a block of a scalar mask int32
    more = part * 0 + n < steps
    kv_row = tl.load(part_row + at, mask=more, other=0)
    start = tl.load(part_pos + at, mask=more, other=0)
    readers = tl.load(part_readers + at, mask=more, other=0)
    for _ in tl.range(0, steps, num_stages=STAGES):
        span = tl.where(pos < length, low | high << 16, 0)
        there = (span != 0)[:, None]
        at_kv = block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_token
        latent = tl.load(cache + (at_kv[:, None] + dim[None, :]), mask=there, other=0.0)
        rope = tl.load(cache + (at_kv[:, None] + rope_dim[None, :]), mask=there, other=0.0)
        # the next KV tile's blocks, and where the one after it lies: what was carried has to
        # change on its way, or the loop is not pipelined
        pos = start + (in_part + rounds * UNIT)
        low, high = (readers & 0xFFFF) * HEADS, (readers >> 16) * HEADS
        block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + pos // BLOCK_SIZE)
        length = tl.load(seq_lens + kv_row)
        n += 1
        rounds = tl.maximum(n - packed, 0) // tl.maximum(new, 1)
        entry = tl.maximum(n - packed, 0) - rounds * new
        at = tl.where(n < packed, first + n * PARTS, opened + entry * PARTS) + part
        more = part * 0 + n < steps
        kv_row = tl.load(part_row + at, mask=more, other=0)
        start = tl.load(part_pos + at, mask=more, other=0)
        readers = tl.load(part_readers + at, mask=more, other=0)
        s = _scores(q_latent, q_rope, latent, rope)
        span = _settled(span)
        begin = span & 0xFFFF
        # one comparison: rows before the first wrap around
        reads = (row[:, None] - begin[None, :]).to(tl.uint32, bitcast=True)
        reads = reads < ((span >> 16) - begin).to(tl.uint32, bitcast=True)[None, :]
        s = tl.where(reads, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
        p = tl.exp2(s * qk_scale - base[:, None])
        alpha = tl.exp2(m - base)
        m = m_new
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(latent.dtype), latent, acc)
    return m, total, acc


# not specialised: one binary serves every batch and block table
@triton.jit(do_not_specialize=["block_table", "seq_lens", "stride_table"])
def partial_attention(q, cache, block_table, seq_lens, work_indptr, tile_info, slot_row,
                      slot_partial, slot_end, run_row, run_start, run_end, run_readers, part_row,
                      part_pos, part_readers, partial_out, partial_lse, out, out_lse, stride_block,
                      stride_token, stride_table, stride_q, stride_out, qk_scale,
                      HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
                      BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr,
                      Q_TILE_SIZE: tl.constexpr, KV_TILE_SIZE: tl.constexpr,
                      STAGES: tl.constexpr):
    """Grid: ``num_workers * CHUNKS`` thread blocks; more heads than a tile has rows are walked in
    chunks.

    out_lse: as ``out`` without its last dimension; without it Triton makes another binary.
    """
    chunk = tl.program_id(0) % CHUNKS
    worker = tl.program_id(0) // CHUNKS
    stride_block = tl.multiple_of(stride_block, 8)
    stride_token = tl.multiple_of(stride_token, 8)
    row = chunk * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    head = row % HEADS
    dim = tl.arange(0, LATENT)
    rope_dim = LATENT + tl.arange(0, ROPE)
    for tile in range(tl.load(work_indptr + worker), tl.load(work_indptr + worker + 1)):
        slots = tl.load(tile_info + tile * WORDS + FIRST_SLOT)
        num_rows = tl.load(tile_info + tile * WORDS + NUM_REQS) * HEADS
        first_run = tl.load(tile_info + tile * WORDS + FIRST_RUN)
        last_run = tl.load(tile_info + tile * WORDS + END_RUN)
        first = tl.load(tile_info + tile * WORDS + FIRST_PART)
        packed = tl.load(tile_info + tile * WORDS + PLANNED_KV_TILES)
        new = tl.load(tile_info + tile * WORDS + NEW_KV_TILES)
        there = row < num_rows
        request = tl.load(slot_row + slots + row // HEADS, mask=there, other=0)
        planned_end = tl.load(slot_end + slots + row // HEADS, mask=there, other=FAR)
        length = tl.load(seq_lens + request, mask=there, other=0)
        growth = tl.maximum(tl.max((length - planned_end + UNIT - 1) // UNIT, 0), 0)
        at_q = request.to(tl.int64) * tl.multiple_of(stride_q, 8) + head * (LATENT + ROPE)
        q_latent = tl.load(q + (at_q[:, None] + dim[None, :]), mask=there[:, None], other=0.0)
        q_rope = tl.load(q + (at_q[:, None] + rope_dim[None, :]), mask=there[:, None], other=0.0)

        m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
        total = tl.zeros([Q_TILE_SIZE], tl.float32)
        acc = tl.zeros([Q_TILE_SIZE, LATENT], tl.float32)
        for run in range(first_run, last_run):
            readers = tl.load(run_readers + run)
            reads = (row >= (readers & 0xFFFF) * HEADS) & (row < (readers >> 16) * HEADS)
            table_row = block_table + tl.load(run_row + run).to(tl.int64) * stride_table
            m, total, acc = _attend_run(
                (m, total, acc), q_latent, q_rope, tl.load(run_start + run), tl.load(run_end + run),
                reads, table_row, cache, stride_block, stride_token, qk_scale, LATENT, ROPE,
                BLOCK_SIZE, KV_TILE_SIZE, STAGES)
        steps = packed + new * growth
        opened = first + packed * (KV_TILE_SIZE // UNIT)
        if steps > 0:
            m, total, acc = _attend_parts(
                (m, total, acc), q_latent, q_rope, first, packed, opened, new, steps, part_row,
                part_pos, part_readers, block_table, stride_table, seq_lens, cache, stride_block,
                stride_token, qk_scale, row, LATENT, ROPE, HEADS, BLOCK_SIZE, UNIT, KV_TILE_SIZE,
                STAGES)

        partial = tl.load(slot_partial + slots + row // HEADS, mask=there, other=-1)
        seen = total > 0
        result = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
        lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf"))
        to_out = there & (partial < 0)
        to_partial = there & (partial >= 0)
        if tl.max(to_out.to(tl.int32), 0) != 0:
            at_out = request.to(tl.int64) * tl.multiple_of(stride_out, 8) + head * LATENT
            value = result.to(out.dtype.element_ty)
            tl.store(out + (at_out[:, None] + dim[None, :]), value, mask=to_out[:, None])
            if out_lse is not None:
                tl.store(out_lse + request.to(tl.int64) * HEADS + head, lse, mask=to_out)
        if tl.max(to_partial.to(tl.int32), 0) != 0:
            at_lse = partial.to(tl.int64) * HEADS + head
            at_partial = at_lse[:, None] * LATENT + dim[None, :]
            tl.store(partial_out + at_partial, result, mask=to_partial[:, None])
            tl.store(partial_lse + at_lse, lse, mask=to_partial)
