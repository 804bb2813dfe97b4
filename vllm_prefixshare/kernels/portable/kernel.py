"""Partial attention in plain Triton, for every NVIDIA GPU from compute capability 8.0 on.

A CTA belongs to one work queue and one KV head, and walks the queue's work tiles. In a tile it
reads the long KV ranges first, one KV tile after the other, then the KV tiles into which
``common.layout.walk_layout`` has packed the short ranges and the rest of the long ones. In
depth-first order the rows that read a range are one interval: two integers instead of DeFT's bit
mask (section 3.3).

Triton does not pipeline a load whose address is loaded in the same iteration, so block ids and the
place of the KV tile after the next are carried through the loops in registers.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined"
# Long signatures read better wrapped than with one name per line; kernels are not typed.

import triton
import triton.language as tl

from vllm_prefixshare.kernels.common.constants import (
    END_RUN,
    FAR,
    FIRST_PART,
    FIRST_RUN,
    FIRST_SLOT,
    LN2,
    LOG2E,
    NEW_KV_TILES,
    NUM_REQS,
    PLANNED_KV_TILES,
    WORDS,
)


@triton.jit
def _visible(pos, reads, query, first_query, mask_words, QUERY_LEN: tl.constexpr,
             TREE: tl.constexpr):
    """Which tokens of the KV tile each row sees, of those that its request reads.

    mask_words: each row's words of a token tree's mask.
    """
    ok = reads
    if QUERY_LEN > 1:
        key = pos[None, :] - first_query[:, None]  # among the request's own queries
        if TREE:
            word = mask_words[0][:, None]
            for i in tl.static_range(1, len(mask_words)):
                word = tl.where(key < 32 * i, word, mask_words[i][:, None])
            ok &= (key < 0) | (((word >> (key & 31)) & 1) != 0)
        else:
            ok &= key <= query[:, None]
    return ok


@triton.jit
def _queries_of(request, there, query, query_start_loc, QUERY_LEN: tl.constexpr,
                RAGGED: tl.constexpr):
    """Query token of each row, number of queries of its request, and whether the row has one."""
    queries = QUERY_LEN
    token = request * QUERY_LEN + query
    if RAGGED:
        begin = tl.load(query_start_loc + request, mask=there, other=0)
        queries = tl.load(query_start_loc + request + 1, mask=there, other=0) - begin
        token = begin + query
        there = there & (query < queries)
    return tl.where(there, token, 0), queries, there


@triton.jit
def _settled(x):
    """``x``, one element to a thread, passed through shared memory to whoever needs it. Otherwise
    Triton would repeat the loads behind it in each layout that needs them: a thread would look up
    four tokens to copy K and V, and every fourth one for the scores.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """``x`` in ``dtype`` if it is quantised (e4m3, or its bits where a GPU has no such type), else
    as it is. float16 and bfloat16 hold all of its values.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7  # the same number, less 8 in the exponent
        x = (bits.to(tl.float16, bitcast=True) * 256).to(dtype)
    elif x.dtype == tl.float8e4nv:
        x = x.to(dtype)
    return x


@triton.jit
def _load(rows, at, there, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """A head of each row from ``rows + at`` on, widened to ``dtype``, in pieces of ``COLUMNS``.

    rows, at: ``[n, 1]``. there: as they are, zeros are read where it is false; None for all.
    """
    pieces = ()
    for i in tl.static_range((HEAD_DIM + COLUMNS - 1) // COLUMNS):
        dim = i * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        if there is not None:
            x = tl.load(rows + dim + at, mask=there & (dim < HEAD_DIM), other=0.0)
        elif HEAD_DIM % COLUMNS != 0:
            x = tl.load(rows + dim + at, mask=dim < HEAD_DIM, other=0.0)
        else:
            x = tl.load(rows + dim + at)
        pieces += (_widened(x, dtype),)  # type: ignore[assignment]
    return pieces


@triton.jit
def _store(rows, at, there, acc, factor, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Write ``acc``, in pieces of ``COLUMNS``, times ``factor`` of each row, as ``_load`` reads."""
    for i in tl.static_range(len(acc)):
        dim = i * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        value = (acc[i] * factor[:, None]).to(rows.dtype.element_ty)
        tl.store(rows + at + dim, value, mask=there & (dim < HEAD_DIM))


@triton.jit
def _plus_weighted(acc, alpha, p, v):
    """``acc`` times ``alpha`` of each row, plus the values times their weights ``p``."""
    pieces = ()
    for i in tl.static_range(len(v)):
        product = tl.dot(p.to(v[i].dtype), v[i], acc[i] * alpha[:, None])
        pieces += (product,)  # type: ignore[assignment]
    return pieces


@triton.jit
def _scores(q, k, pos, slope, position, cap_rate):
    """Products of queries and keys; times the caller's scale they are exponents of two.

    cap_rate: None for no soft cap; else twice the softmax scale over the cap, times log2(e), and
        the result is the hyperbolic tangent, which the caller scales by the cap.
    slope, position: ALiBi slope and query position of each row; None where they are not needed.
    """
    s = tl.dot(q[0], tl.trans(k[0]))
    for i in tl.static_range(1, len(k)):
        s = tl.dot(q[i], tl.trans(k[i]), s)
    if cap_rate is not None:
        # absolute error: that of a float32 near 1; `tanh.approx` has 2**-11
        s = 1.0 - 2.0 / (tl.exp2(s * cap_rate) + 1.0)
    if slope is not None:
        s += slope[:, None] * (pos[None, :] - position[:, None]).to(tl.float32)
    return s


@triton.jit
def _in_blocks(begin, offset, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Number of the block, and place in it, of the tokens ``begin + offset`` of a batch row. With
    ``ALIGNED`` ``offset`` counts from the start of ``begin``'s block, so that the place is its own.
    """
    if ALIGNED:
        return begin // BLOCK_SIZE + offset // BLOCK_SIZE, offset % BLOCK_SIZE
    else:
        return (begin + offset) // BLOCK_SIZE, (begin + offset) % BLOCK_SIZE


@triton.jit
def _attend_run(state, q, start, end, reads, table_row, k_head, v_head, stride_block,
                stride_token, qk_scale, slope, position, cap_rate, SHAPE: tl.constexpr):
    """Online softmax over the tokens ``[start, end)`` of one batch row, whole KV tiles that the
    rows of ``reads`` see. The mask is per row, so it costs nothing per score: a row that does not
    read temporarily has an infinite maximum. Only a window hides single tokens.
    """
    m, total, acc = state
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    WINDOW: tl.constexpr = SHAPE.window
    KV_TILE_SIZE: tl.constexpr = SHAPE.kv_tile
    cols = tl.arange(0, KV_TILE_SIZE)
    ALIGNED: tl.constexpr = KV_TILE_SIZE % BLOCK_SIZE == 0  # then KV tiles begin as the run does
    # a run may begin within a block that is read in parts
    offset = cols + start % BLOCK_SIZE if ALIGNED and SHAPE.unit < BLOCK_SIZE else cols
    column, place = _in_blocks(start, offset, BLOCK_SIZE, ALIGNED)
    block = tl.load(table_row + column)
    for n in tl.range(start, end, KV_TILE_SIZE, num_stages=SHAPE.stages,
                      disable_licm=SHAPE.hoist < 1):
        pos = n + cols
        # what does not change in the loop comes first, and is added before it
        inside = (place * stride_token)[:, None]
        at = (block.to(tl.int64) * stride_block)[:, None]
        k = _load(k_head + inside, at, None, q[0].dtype, HEAD_DIM, COLUMNS)
        column, place = _in_blocks(n + KV_TILE_SIZE, offset, BLOCK_SIZE, ALIGNED)
        # a block, like the loads (see _parts_of)
        more = cols * 0 + (n + KV_TILE_SIZE) < end
        block = tl.load(table_row + column, mask=more, other=0)
        s = _scores(q, k, pos, slope, position, cap_rate)
        if WINDOW > 0:
            s = tl.where(pos[None, :] > (position - WINDOW)[:, None], s, float("-inf"))
        m_new = tl.where(reads, tl.maximum(m, tl.max(s, 1) * qk_scale), float("inf"))
        base = m_new
        if WINDOW > 0:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
        p = tl.exp2(s * qk_scale - base[:, None])
        alpha = tl.where(reads, tl.exp2(m - base), 1.0)
        m = tl.where(reads, m_new, m)
        total = total * alpha + tl.sum(p, 1)
        v = _load(v_head + inside, at, None, tl.float16, HEAD_DIM, COLUMNS)
        acc = _plus_weighted(acc, alpha, p, v)
    return m, total, acc


@triton.jit
def _parts_of(n, plan, part, first, packed, opened, new, steps, PARTS: tl.constexpr):
    """Location of KV tile ``n`` of ``steps``: how often the new parts came before it, and batch
    row, position and readers of each of its parts.
    """
    rounds = tl.maximum(n - packed, 0) // tl.maximum(new, 1)
    entry = tl.maximum(n - packed, 0) - rounds * new
    at = tl.where(n < packed, first + n * PARTS, opened + entry * PARTS) + part
    # a block, like the loads: Triton 3.9's interpreter turns a scalar mask into an int32 block
    more = part * 0 + n < steps
    kv_row = tl.load(plan.part_row + at, mask=more, other=0)
    start = tl.load(plan.part_pos + at, mask=more, other=0)
    return rounds, kv_row, start, tl.load(plan.part_readers + at, mask=more, other=0)


@triton.jit
def _attend_parts(state, q, first, packed, opened, new, steps, plan, block_table, stride_table,
                  seq_lens, k_head, v_head, stride_block, stride_token, qk_scale, row, query,
                  first_query, token, tree_mask, stride_mask, slope, position, cap_rate,
                  SHAPE: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr, TREE: tl.constexpr):
    """Online softmax over ``steps`` KV tiles of parts: ``packed`` ones listed from ``first`` on,
    then ``new`` ones from ``opened`` on, repeatedly, each time one unit further.
    """
    m, total, acc = state
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    UNIT: tl.constexpr = SHAPE.unit
    QUERY_LEN: tl.constexpr = SHAPE.query_len
    WINDOW: tl.constexpr = SHAPE.window
    KV_TILE_SIZE: tl.constexpr = SHAPE.kv_tile
    PARTS: tl.constexpr = KV_TILE_SIZE // UNIT
    part = tl.arange(0, KV_TILE_SIZE) // UNIT
    in_part = tl.arange(0, KV_TILE_SIZE) % UNIT
    at = first + part  # without planned parts, those for new tokens start here
    kv_row = tl.load(plan.part_row + at)
    start = tl.load(plan.part_pos + at)
    readers = tl.load(plan.part_readers + at)
    pos = start + in_part
    column, place = _in_blocks(start, in_part, BLOCK_SIZE, UNIT == BLOCK_SIZE)
    # the first and the end, 16 bits each, as in readers; inverted where they are equal: see below
    rows = readers * R if R > 1 else ~readers
    block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + column,
                    mask=column < stride_table, other=0)  # a full row has no block for new tokens
    length = tl.load(seq_lens + kv_row)
    mask_words = ()
    if TREE:  # here, because gathering them in the loop spills registers, or needs more stages
        for i in tl.static_range((QUERY_LEN + 31) // 32):
            word = _settled(tl.load(tree_mask + token * stride_mask + i))
            mask_words += (word,)  # type: ignore[assignment]
    n = 1  # the next KV tile
    rounds, kv_row, start, readers = _parts_of(n, plan, part, first, packed, opened, new, steps,
                                               PARTS)
    for _ in tl.range(0, steps, num_stages=SHAPE.stages, disable_licm=SHAPE.hoist < 1):
        span = tl.where(pos < length, rows if R > 1 else ~rows, 0)
        at_kv = block.to(tl.int64) * stride_block + place * stride_token
        # divided, so that Triton still knows by what it is divisible
        at_kv = _settled(tl.where(span != 0, at_kv // ALIGN, -1))[:, None] * ALIGN
        there = at_kv >= 0
        k = _load(k_head, at_kv, there, q[0].dtype, HEAD_DIM, COLUMNS)
        here = pos
        # Blocks of the next KV tile, and location of the one after it. Carried values have to
        # change: Triton does not pipeline a loop that passes a value on twice unchanged.
        pos = start + (in_part + rounds * UNIT)
        column, place = _in_blocks(start + rounds * UNIT, in_part, BLOCK_SIZE, UNIT == BLOCK_SIZE)
        rows = readers * R if R > 1 else ~readers
        block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + column,
                        mask=column < stride_table, other=0)
        length = tl.load(seq_lens + kv_row)
        n += 1
        rounds, kv_row, start, readers = _parts_of(n, plan, part, first, packed, opened, new,
                                                   steps, PARTS)
        if slope is not None or WINDOW > 0:
            here = _settled(here)
        s = _scores(q, k, here, slope, position, cap_rate)
        span = _settled(span)
        begin = span & 0xFFFF
        # one comparison: rows before the first wrap around
        reads = (row[:, None] - begin[None, :]).to(tl.uint32, bitcast=True)
        reads = reads < ((span >> 16) - begin).to(tl.uint32, bitcast=True)[None, :]
        here = _settled(here) if QUERY_LEN > 1 and slope is None and WINDOW == 0 else here
        ok = _visible(here, reads, query, first_query, mask_words, QUERY_LEN, TREE)
        if WINDOW > 0:
            ok &= here[None, :] > (position - WINDOW)[:, None]
        s = tl.where(ok, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
        p = tl.exp2(s * qk_scale - base[:, None])
        alpha = tl.exp2(m - base)
        m = m_new
        total = total * alpha + tl.sum(p, 1)
        v = _load(v_head, at_kv, there, tl.float16, HEAD_DIM, COLUMNS)
        acc = _plus_weighted(acc, alpha, p, v)
    return m, total, acc


# Not specialised: one binary serves every batch and block table. These are in no group, because
# Triton specialises the elements of a tuple in any case.
@triton.jit(do_not_specialize=[
    "block_table", "seq_lens", "query_start_loc", "tree_mask", "stride_table", "stride_mask",
    "q_scale_stride", "k_scale_stride", "v_scale_stride"])
def partial_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, tree_mask, plan,
                      outputs, strides, stride_table, stride_mask, qk_scale, cap_rate, extras,
                      q_scale_stride, k_scale_stride, v_scale_stride, SHAPE: tl.constexpr,
                      RAGGED: tl.constexpr, TREE: tl.constexpr):
    """Grid: a thread block for each work queue, chunk and KV head, heads fastest.

    plan: ``common.arrays.PlanArrays``. outputs, strides, SHAPE: ``common.groups``. extras:
    ``LayerExtras``, with the scales of KV head ``h`` at ``h * *_scale_stride``; its soft cap is
    passed as cap_rate, see ``_scores``, and qk_scale is then the cap times log2(e).
    """
    Q_HEADS: tl.constexpr = SHAPE.num_qo_heads
    KV_HEADS: tl.constexpr = SHAPE.num_kv_heads
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    COLUMNS: tl.constexpr = SHAPE.columns
    UNIT: tl.constexpr = SHAPE.unit
    QUERY_LEN: tl.constexpr = SHAPE.query_len
    WINDOW: tl.constexpr = SHAPE.window
    Q_TILE_SIZE: tl.constexpr = SHAPE.rows
    G: tl.constexpr = Q_HEADS // KV_HEADS
    R: tl.constexpr = QUERY_LEN * G  # rows of a request: query by query, head by head in each
    kv_head = tl.program_id(0) % KV_HEADS
    chunk = (tl.program_id(0) // KV_HEADS) % SHAPE.chunks
    worker = tl.program_id(0) // (KV_HEADS * SHAPE.chunks)
    # 16-byte loads where head_dim allows them: the launcher's caller has checked it
    ALIGN: tl.constexpr = 16 if extras.k_scale is not None and HEAD_DIM % 16 == 0 else 8  # type: ignore
    stride_block = tl.multiple_of(strides.block, ALIGN)
    stride_token = tl.multiple_of(strides.token, ALIGN)
    k_head = k_cache + tl.multiple_of(kv_head.to(tl.int64) * strides.head, ALIGN)
    v_head = v_cache + tl.multiple_of(kv_head.to(tl.int64) * strides.head, ALIGN)
    if extras.k_scale is not None:
        scale = tl.load(extras.k_scale + kv_head * k_scale_stride)
        if extras.q_scale is not None:
            scale *= tl.load(extras.q_scale + kv_head * q_scale_stride)
        if cap_rate is not None:
            cap_rate *= scale
        else:
            qk_scale *= scale
    row = chunk * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    query = row % R // G
    q_head = kv_head * G + row % G
    for tile in tl.range(tl.load(plan.work_indptr + worker), tl.load(plan.work_indptr + worker + 1),
                         disable_licm=SHAPE.hoist < 2):
        slots = tl.load(plan.tile_info + tile * WORDS + FIRST_SLOT)
        num_rows = tl.load(plan.tile_info + tile * WORDS + NUM_REQS) * R
        first_run = tl.load(plan.tile_info + tile * WORDS + FIRST_RUN)
        last_run = tl.load(plan.tile_info + tile * WORDS + END_RUN)
        first = tl.load(plan.tile_info + tile * WORDS + FIRST_PART)
        packed = tl.load(plan.tile_info + tile * WORDS + PLANNED_KV_TILES)
        new = tl.load(plan.tile_info + tile * WORDS + NEW_KV_TILES)
        there = row < num_rows
        request = tl.load(plan.slot_row + slots + row // R, mask=there, other=0)
        planned_end = tl.load(plan.slot_end + slots + row // R, mask=there, other=FAR)
        length = tl.load(seq_lens + request, mask=there, other=0)
        growth = tl.maximum(tl.max((length - planned_end + UNIT - 1) // UNIT, 0), 0)
        token = request
        first_query = request
        if QUERY_LEN > 1:
            token, queries, there = _queries_of(request, there, query, query_start_loc, QUERY_LEN,
                                                RAGGED)
            first_query = length - queries
        at = (token.to(tl.int64) * strides.q + q_head * HEAD_DIM)[:, None]
        q_tile = _load(q, at, there[:, None], tl.float16, HEAD_DIM, COLUMNS)

        m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
        total = tl.zeros([Q_TILE_SIZE], tl.float32)
        acc = ()
        for _ in tl.static_range(len(q_tile)):
            acc += (tl.zeros([Q_TILE_SIZE, COLUMNS], tl.float32),)  # type: ignore[assignment]
        if extras.sinks is not None:  # counts in outputs, not in partial results
            partial = tl.load(plan.slot_partial + slots + row // R, mask=there, other=-1)
            sink = tl.load(extras.sinks + q_head).to(tl.float32) * LOG2E
            m = tl.where(partial < 0, sink, m)
            total = tl.where(partial < 0, 1.0, total)
        slope = None
        position = None
        if extras.alibi_slopes is not None:
            slope = tl.load(extras.alibi_slopes + q_head) * (LOG2E / qk_scale)
        if extras.alibi_slopes is not None or WINDOW > 0:
            position = first_query + query if QUERY_LEN > 1 else length - 1
        for run in tl.range(first_run, last_run, disable_licm=SHAPE.hoist < 2):
            readers = tl.load(plan.run_readers + run)
            reads = (row >= (readers & 0xFFFF) * R) & (row < (readers >> 16) * R)
            table_row = block_table + tl.load(plan.run_row + run).to(tl.int64) * stride_table
            m, total, acc = _attend_run(
                (m, total, acc), q_tile, tl.load(plan.run_start + run), tl.load(plan.run_end + run),
                reads, table_row, k_head, v_head, stride_block, stride_token, qk_scale, slope,
                position, cap_rate, SHAPE)
        steps = packed + new * growth
        opened = first + packed * (SHAPE.kv_tile // UNIT)
        if steps > 0:
            m, total, acc = _attend_parts(
                (m, total, acc), q_tile, first, packed, opened, new, steps, plan, block_table,
                stride_table, seq_lens, k_head, v_head, stride_block, stride_token, qk_scale, row,
                query, first_query, token, tree_mask, stride_mask, slope, position, cap_rate,
                SHAPE, R, ALIGN, TREE)

        partial = tl.load(plan.slot_partial + slots + row // R, mask=there, other=-1)
        seen = total > 0
        factor = tl.where(seen, 1.0 / total, 0.0)
        if extras.v_scale is not None:
            factor *= tl.load(extras.v_scale + kv_head * v_scale_stride)
        to_out = there & (partial < 0)
        to_partial = there & (partial >= 0)
        if tl.max(to_out.to(tl.int32), 0) != 0:
            out_token = _settled(tl.where(to_out, token, -1))
            at = (out_token.to(tl.int64) * strides.out + q_head * HEAD_DIM)[:, None]
            _store(outputs.out, at, (out_token >= 0)[:, None], acc, factor, HEAD_DIM, COLUMNS)
            if outputs.out_lse is not None:
                lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf"))
                tl.store(outputs.out_lse + token.to(tl.int64) * Q_HEADS + q_head, lse, mask=to_out)
        if tl.max(to_partial.to(tl.int32), 0) != 0:
            at_lse = (partial * QUERY_LEN + query).to(tl.int64) * Q_HEADS + q_head
            at = _settled(tl.where(to_partial, at_lse, -1))[:, None] * HEAD_DIM
            _store(outputs.partial_out, at, at >= 0, acc, factor, HEAD_DIM, COLUMNS)
            lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf"))
            tl.store(outputs.partial_lse + at_lse, lse, mask=to_partial)
