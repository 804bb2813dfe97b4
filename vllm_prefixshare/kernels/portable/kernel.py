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
def _parts(entry, step, open_entry, lists, UNIT: tl.constexpr, KV_TILE_SIZE: tl.constexpr):
    """Batch row, position and packed readers of each token of the ``step``-th KV tile of an
    entry. Entries of tokens since the plan go on by one unit a step, others by a KV tile."""
    entry_row, entry_pos, entry_readers = lists
    token = tl.arange(0, KV_TILE_SIZE)
    at = entry * (KV_TILE_SIZE // UNIT) + token // UNIT
    pos = tl.load(entry_pos + at) + token % UNIT
    pos += step * tl.where(entry < open_entry, KV_TILE_SIZE, UNIT)
    return tl.load(entry_row + at), pos, tl.load(entry_readers + at)


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
    kv_row, pos, readers = _parts(entry, 0, open_entry, lists, UNIT, KV_TILE_SIZE)
    block = tl.load(block_table + kv_row.to(tl.int64) * stride_table + pos // BLOCK_SIZE)
    length = tl.load(seq_lens + kv_row)
    left = tl.where(entry < open_entry, tl.load(entry_steps + entry), growth) - 1
    step = tl.where(left > 0, 1, 0)
    entry = tl.where(left > 0, entry, tl.minimum(entry + 1, last_entry))
    next_row, next_pos, next_readers = _parts(entry, step, open_entry, lists, UNIT, KV_TILE_SIZE)
    count = tl.where(entry < open_entry, tl.load(entry_steps + entry), growth)
    # a gathered mask is not worth the shared memory that its stages would take
    for _ in tl.range(0, steps, num_stages=1 if MASKED and TREE else STAGES):
        at = (block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_token)[:, None]
        at += dim[None, :]
        low = (readers & 0xFFFF) * R
        high = tl.where(pos < length, (readers >> 16) * R, 0)
        there = (low < high)[:, None] & (dim < HEAD_DIM)[None, :]
        if MASKED:
            k = tl.load(k_head + at, mask=there, other=0.0)
        elif HEAD_DIM < D:
            k = tl.load(k_head + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_head + at)
        here = pos
        # the next KV tile's blocks, and where the one after it lies
        pos, readers = next_pos, next_readers
        block = tl.load(block_table + next_row.to(tl.int64) * stride_table + pos // BLOCK_SIZE)
        if MASKED:
            length = tl.load(seq_lens + next_row)
        step += 1
        entry = tl.where(step < count, entry, tl.minimum(entry + 1, last_entry))
        step = tl.where(step < count, step, 0)
        count = tl.where(entry < open_entry, tl.load(entry_steps + entry), growth)
        next_row, next_pos, next_readers = _parts(entry, step, open_entry, lists, UNIT,
                                                  KV_TILE_SIZE)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            reads = (row[:, None] >= low[None, :]) & (row[:, None] < high[None, :])
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
        partial = tl.load(slot_partial + slots + row // R, mask=there, other=-1)
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
