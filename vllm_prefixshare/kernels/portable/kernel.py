"""Partial attention in plain Triton, for every NVIDIA GPU from compute capability 8.0 on.

The kernel is launched once for each size of Q tile. A thread block belongs to one worker and
one KV head, walks the worker's work tiles, and in each of them one list of KV tiles that
``layout.walk_layout`` has written: the whole KV tiles that all rows of the work tile see come
first and need no mask; then those of which each part is read by an interval of the rows (thanks
to depth-first order: DeFT's bit mask, section 3.3, in two integers), several short runs packed
into one; then the tokens that the requests have got since the plan was made.

The list of a work tile is one loop that Triton pipelines. A load whose address is itself loaded
in the same iteration would not be, so block ids are carried through the loop in registers, and
so is what the list says about the KV tile after the next one.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Signatures of many names read better in lines than one to a line; kernels are not typed.

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)


@triton.jit
def _visible(pos, reads, query, first_query, token, tree_mask, stride_mask,
             QUERY_LEN: tl.constexpr, TREE: tl.constexpr):
    """Which tokens of the KV tile each row sees, of those that its request reads."""
    ok = reads
    if QUERY_LEN > 1:
        key = pos[None, :] - first_query[:, None]  # among the request's own queries
        if TREE:
            at = tree_mask + (token * stride_mask)[:, None] + (key >> 5)
            words = tl.load(at, mask=ok & (key >= 0), other=-1)
            ok &= ((words >> (key & 31)) & 1) != 0
        else:
            ok &= key <= query[:, None]
    return ok


@triton.jit
def _parts(entry, lists, UNIT: tl.constexpr, KV_TILE_SIZE: tl.constexpr):
    """What an entry says about each token of its first KV tile: batch row, position of the
    part that it belongs to, packed readers."""
    entry_row, entry_pos, entry_readers = lists
    at = entry * (KV_TILE_SIZE // UNIT) + tl.arange(0, KV_TILE_SIZE) // UNIT
    return tl.load(entry_row + at), tl.load(entry_pos + at), tl.load(entry_readers + at)


@triton.jit
def _settled(x):
    """``x``, computed where it is. Otherwise Triton would repeat the loads that it comes from
    in the layout of the scores, where a thread holds a copy of every fourth token."""
    return tl.max(tl.broadcast_to(x[:, None], [x.shape[0], 2]), 1)


@triton.jit
def _attend(state, q, entry, last_entry, open_entry, steps, growth, entry_steps, lists,
            block_table, stride_table, seq_lens, k_head, v_head, stride_block, stride_token,
            qk_scale, row, query, first_query, token, tree_mask, stride_mask,
            MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, QUERY_LEN: tl.constexpr,
            TREE: tl.constexpr, KV_TILE_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Online softmax over ``steps`` KV tiles, those of the entries from ``entry`` to
    ``last_entry``. Without ``MASKED`` every row sees all of them."""
    m, total, acc = state
    dim = tl.arange(0, D)
    in_part = tl.arange(0, KV_TILE_SIZE) % UNIT
    kv_row, start, readers = _parts(entry, lists, UNIT, KV_TILE_SIZE)
    pos = start + in_part
    low, high = (readers & 0xFFFF) * R, (readers >> 16) * R
    block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + pos // BLOCK_SIZE)
    length = tl.load(seq_lens + kv_row)
    count = tl.where(entry < open_entry, tl.load(entry_steps + entry), growth)
    step = tl.where(count > 1, 1, 0)
    entry = tl.where(count > 1, entry, tl.minimum(entry + 1, last_entry))
    kv_row, start, readers = _parts(entry, lists, UNIT, KV_TILE_SIZE)
    count = tl.load(entry_steps + entry)
    # a gathered mask is not worth the shared memory that its stages would take
    for _ in tl.range(0, steps, num_stages=1 if MASKED and TREE else STAGES):
        at = (block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_token)[:, None]
        at += dim[None, :]
        span = tl.where(pos < length, low | high << 16, 0)
        there = (span != 0)[:, None] & (dim < HEAD_DIM)[None, :]
        if MASKED:
            k = tl.load(k_head + at, mask=there, other=0.0)
        elif HEAD_DIM < D:
            k = tl.load(k_head + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_head + at)
        here = pos
        # The next KV tile's blocks, and where the one after it lies. What was carried has to
        # change on its way: Triton does not pipeline a loop that hands a value on twice.
        pos = start + (in_part + step * tl.where(entry < open_entry, KV_TILE_SIZE, UNIT))
        block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + pos // BLOCK_SIZE)
        if MASKED:
            length = tl.load(seq_lens + kv_row)
            low, high = (readers & 0xFFFF) * R, (readers >> 16) * R
        step += 1
        goes_on = step < tl.where(entry < open_entry, count, growth)
        entry = tl.where(goes_on, entry, tl.minimum(entry + 1, last_entry))
        step = tl.where(goes_on, step, 0)
        count = tl.load(entry_steps + entry)
        kv_row, start, readers = _parts(entry, lists, UNIT, KV_TILE_SIZE)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            span = _settled(span)
            reads = row[:, None] >= (span & 0xFFFF)[None, :]
            reads &= row[:, None] < (span >> 16)[None, :]
            here = _settled(here) if QUERY_LEN > 1 else here
            ok = _visible(here, reads, query, first_query, token, tree_mask, stride_mask,
                          QUERY_LEN, TREE)
            s = tl.where(ok, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        base = m_new
        if MASKED:
            base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
        p = tl.exp2(s * qk_scale - base[:, None])
        alpha = tl.exp2(m - base)
        m = m_new
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if MASKED:
            v = tl.load(v_head + at, mask=there, other=0.0)
        elif HEAD_DIM < D:
            v = tl.load(v_head + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_head + at)
        acc = tl.dot(p.to(v.dtype), v, acc)
    return m, total, acc


@triton.jit
def partial_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, tree_mask,
                      work_indptr, tile_info, slot_row, slot_partial, slot_end, entry_steps,
                      entry_row, entry_pos, entry_readers, partial_out, partial_lse, out,
                      stride_block, stride_token, stride_head, stride_table, stride_q, stride_out,
                      stride_mask, qk_scale, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                      HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                      UNIT: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr,
                      TREE: tl.constexpr, CHUNKS: tl.constexpr, Q_TILE_SIZE: tl.constexpr,
                      KV_TILE_SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Grid: ``num_workers * CHUNKS * KV_HEADS`` thread blocks, heads fastest."""
    G: tl.constexpr = Q_HEADS // KV_HEADS
    R: tl.constexpr = QUERY_LEN * G  # rows of a request: query by query, head by head in each
    kv_head = tl.program_id(0) % KV_HEADS
    chunk = (tl.program_id(0) // KV_HEADS) % CHUNKS
    worker = tl.program_id(0) // (KV_HEADS * CHUNKS)
    # 16-byte loads for every head_dim: the launcher's caller has checked it
    stride_block = tl.multiple_of(stride_block, 8)
    stride_token = tl.multiple_of(stride_token, 8)
    k_head = k_cache + tl.multiple_of(kv_head.to(tl.int64) * stride_head, 8)
    v_head = v_cache + tl.multiple_of(kv_head.to(tl.int64) * stride_head, 8)
    row = chunk * Q_TILE_SIZE + tl.arange(0, Q_TILE_SIZE)
    query = row % R // G
    q_head = kv_head * G + row % G
    dim = tl.arange(0, D)
    lists = (entry_row, entry_pos, entry_readers)
    for tile in range(tl.load(work_indptr + worker), tl.load(work_indptr + worker + 1)):
        slots = tl.load(tile_info + tile * 8)
        num_rows = tl.load(tile_info + tile * 8 + 1) * R
        plain = tl.load(tile_info + tile * 8 + 2)
        masked = tl.load(tile_info + tile * 8 + 3)
        opened = tl.load(tile_info + tile * 8 + 4)
        end = tl.load(tile_info + tile * 8 + 5)
        plain_steps = tl.load(tile_info + tile * 8 + 6)
        masked_steps = tl.load(tile_info + tile * 8 + 7)
        there = row < num_rows
        request = tl.load(slot_row + slots + row // R, mask=there, other=0)
        planned_end = tl.load(slot_end + slots + row // R, mask=there, other=FAR)
        length = tl.load(seq_lens + request, mask=there, other=0)
        growth = tl.maximum(tl.max((length - planned_end + UNIT - 1) // UNIT, 0), 0)
        token = request
        first_query = request
        if QUERY_LEN > 1:
            token = request * QUERY_LEN + query
            first_query = length - QUERY_LEN
            if RAGGED:
                begin = tl.load(query_start_loc + request, mask=there, other=0)
                queries = tl.load(query_start_loc + request + 1, mask=there, other=0) - begin
                token = begin + query
                first_query += QUERY_LEN - queries
                there = there & (query < queries)
            token = tl.where(there, token, 0)
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        at = (token.to(tl.int64) * stride_q + q_head * HEAD_DIM)[:, None] + dim[None, :]
        q_tile = tl.load(q + at, mask=inside, other=0.0)

        m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
        total = tl.zeros([Q_TILE_SIZE], tl.float32)
        acc = tl.zeros([Q_TILE_SIZE, D], tl.float32)
        if plain_steps > 0:
            m, total, acc = _attend(
                (m, total, acc), q_tile, plain, masked - 1, end, plain_steps, 0, entry_steps,
                lists, block_table, stride_table, seq_lens, k_head, v_head, stride_block,
                stride_token, qk_scale, row, query, first_query, token, tree_mask, stride_mask,
                False, HEAD_DIM, D, R, BLOCK_SIZE, UNIT, QUERY_LEN, TREE, KV_TILE_SIZE, STAGES)
        steps = masked_steps + (end - opened) * growth
        if steps > 0:
            last = tl.where(growth > 0, end, opened) - 1
            m, total, acc = _attend(
                (m, total, acc), q_tile, masked, last, opened, steps, growth, entry_steps,
                lists, block_table, stride_table, seq_lens, k_head, v_head, stride_block,
                stride_token, qk_scale, row, query, first_query, token, tree_mask, stride_mask,
                True, HEAD_DIM, D, R, BLOCK_SIZE, UNIT, QUERY_LEN, TREE, KV_TILE_SIZE, STAGES)

        partial = tl.load(slot_partial + slots + row // R, mask=there, other=-1)
        seen = total > 0
        result = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
        to_out = there & (partial < 0)
        to_partial = there & (partial >= 0)
        if tl.max(to_out.to(tl.int32), 0) != 0:
            at = (token.to(tl.int64) * stride_out + q_head * HEAD_DIM)[:, None] + dim[None, :]
            value = result.to(out.dtype.element_ty)
            tl.store(out + at, value, mask=inside & to_out[:, None])
        if tl.max(to_partial.to(tl.int32), 0) != 0:
            at_lse = (partial * QUERY_LEN + query).to(tl.int64) * Q_HEADS + q_head
            at = (at_lse * HEAD_DIM)[:, None] + dim[None, :]
            tl.store(partial_out + at, result, mask=inside & to_partial[:, None])
            lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf"))
            tl.store(partial_lse + at_lse, lse, mask=to_partial)
