"""Partial attention in plain Triton, for every NVIDIA GPU from compute capability 8.0 on.

The kernel is launched once for each size of Q tile, from 16 query rows (a request's private
part: memory-bound, many small thread blocks) to 128 (a shared prefix: bound by the matrix
units). A thread block belongs to one worker and one KV head, walks the worker's work tiles,
and for each of them the runs of KV tokens (FlashForge's PAC, section 4.1). Which rows read a
run is one interval, thanks to depth-first order: DeFT's bit mask (section 3.3) in two integers.

The block id of the next KV tile is carried through the loop in registers: a load whose address
is itself loaded in the same iteration is not pipelined by Triton.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Signatures of many names read better in lines than one to a line; kernels are not typed.

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
OPEN_END = tl.constexpr(-1)
FAR = tl.constexpr(1 << 30)


@triton.jit
def _load_run(run, last_run, runs):
    """Batch row, first and last token, and packed readers of a run; no tokens past the end."""
    row, kv_start, kv_end, readers = runs
    there = run < last_run
    return (
        tl.load(row + run, mask=there, other=0),
        tl.load(kv_start + run, mask=there, other=0),
        tl.load(kv_end + run, mask=there, other=0),
        tl.load(readers + run, mask=there, other=0),
    )


@triton.jit
def _visible(pos, end, reads, query, first_query, token, tree_mask, stride_mask,
             QUERY_LEN: tl.constexpr, TREE: tl.constexpr):
    """Which tokens of the KV tile each row sees."""
    ok = reads[:, None] & (pos < end)[None, :]
    if QUERY_LEN > 1:
        key = pos[None, :] - first_query[:, None]  # among the request's own queries
        if TREE:
            # a word of each row at a time: gathering the words of all rows and tokens at once
            # takes a layout of its own, which from Triton 3.7 on spills registers
            seen = key < 0
            for word in range((QUERY_LEN + 31) // 32):
                bits = tl.load(tree_mask + token * stride_mask + word)
                seen |= (key >> 5 == word) & (((bits[:, None] >> (key & 31)) & 1) != 0)
            ok &= seen
        else:
            ok &= key <= query[:, None]
    return ok


@triton.jit
def _attend(state, q, start, end, table_row, k_head, v_head, stride_block, stride_token, qk_scale,
            reads, query, first_query, token, tree_mask, stride_mask, MASKED: tl.constexpr,
            HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
            QUERY_LEN: tl.constexpr, TREE: tl.constexpr, KV_TILE_SIZE: tl.constexpr,
            STAGES: tl.constexpr):
    """Online softmax over the tokens ``[start, end)``. Without ``MASKED`` these are whole KV
    tiles that every row sees."""
    m, total, acc = state
    cols = tl.arange(0, KV_TILE_SIZE)
    dim = tl.arange(0, D)
    pos = start + cols
    block = tl.load(table_row + pos // BLOCK_SIZE, mask=pos < end, other=0)
    # a gathered mask is not worth the shared memory that its stages would take
    for n in tl.range(start, end, KV_TILE_SIZE, num_stages=1 if MASKED and TREE else STAGES):
        pos = n + cols
        at = (block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * stride_token)[:, None]
        at += dim[None, :]
        there = (pos < end)[:, None] if MASKED else tl.full([KV_TILE_SIZE, 1], 1, tl.int1)
        there = there & (dim < HEAD_DIM)[None, :]
        if MASKED or HEAD_DIM < D:
            k = tl.load(k_head + at, mask=there, other=0.0)
        else:
            k = tl.load(k_head + at)
        ahead = pos + KV_TILE_SIZE
        block = tl.load(table_row + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            ok = _visible(pos, end, reads, query, first_query, token, tree_mask, stride_mask,
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
        if MASKED or HEAD_DIM < D:
            v = tl.load(v_head + at, mask=there, other=0.0)
        else:
            v = tl.load(v_head + at)
        acc = tl.dot(p.to(v.dtype), v, acc)
    return m, total, acc


# not specialised: one binary serves every batch and block table
@triton.jit(do_not_specialize=[
    "block_table", "seq_lens", "query_start_loc", "tree_mask", "stride_table", "stride_mask"])
def partial_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, tree_mask,
                       work_indptr, tile_info, slot_row, slot_partial, run_row, run_kv_start,
                       run_kv_end, run_readers, partial_out, partial_lse, out, stride_block,
                       stride_token, stride_head, stride_table, stride_q, stride_out, stride_mask,
                       qk_scale, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                       HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                       QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, TREE: tl.constexpr,
                       CHUNKS: tl.constexpr, Q_TILE_SIZE: tl.constexpr,
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
    first_row = chunk * Q_TILE_SIZE
    row = first_row + tl.arange(0, Q_TILE_SIZE)
    query = row % R // G
    q_head = kv_head * G + row % G
    dim = tl.arange(0, D)
    first_tile = tl.load(work_indptr + worker)
    last_tile = tl.load(work_indptr + worker + 1)
    busy = first_tile < last_tile
    # the runs of a worker's tiles follow one another
    run = tl.load(tile_info + first_tile * 8 + 2, mask=busy, other=0)
    last_info = tile_info + (last_tile - 1) * 8
    last_run = tl.load(last_info + 2, mask=busy, other=0)
    last_run += tl.load(last_info + 3, mask=busy, other=0)
    runs = (run_row, run_kv_start, run_kv_end, run_readers)
    kv_row, kv_start, kv_end, readers = _load_run(run, last_run, runs)
    for tile in range(first_tile, last_tile):
        slots = tl.load(tile_info + tile * 8)
        num_rows = tl.load(tile_info + tile * 8 + 1) * R
        num_runs = tl.load(tile_info + tile * 8 + 3)
        last_row = tl.minimum(num_rows, first_row + Q_TILE_SIZE)
        there = row < num_rows
        request = tl.load(slot_row + slots + row // R, mask=there, other=0)
        partial = tl.load(slot_partial + slots + row // R, mask=there, other=-1)
        token = request
        first_query = request
        if QUERY_LEN > 1:
            token = request * QUERY_LEN + query
            first_query = tl.load(seq_lens + request, mask=there, other=FAR) - QUERY_LEN
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
        for _ in range(num_runs):
            length = tl.load(seq_lens + kv_row, mask=kv_end == OPEN_END, other=0)
            end = tl.where(kv_end == OPEN_END, length, kv_end)
            table_row = block_table + kv_row.to(tl.int64) * stride_table
            start = kv_start
            low = (readers & 0xFFFF) * R
            high = (readers >> 16) * R
            run += 1
            # the next run, of this tile or the next one, while this one is being read
            kv_row, kv_start, kv_end, readers = _load_run(run, last_run, runs)
            if (low >= last_row) | (high <= first_row):
                end = start
            reads = (row >= low) & (row < high)
            # whole KV tiles that every row sees need no mask
            plain = tl.where((low <= first_row) & (high >= last_row), end - start, 0)
            if QUERY_LEN > 1:
                plain = tl.minimum(plain, tl.min(tl.where(reads, first_query, FAR), 0) - start)
            middle = start + tl.maximum(plain, 0) // KV_TILE_SIZE * KV_TILE_SIZE
            m, total, acc = _attend(
                (m, total, acc), q_tile, start, middle, table_row, k_head, v_head, stride_block,
                stride_token, qk_scale, reads, query, first_query, token, tree_mask, stride_mask,
                False, HEAD_DIM, D, BLOCK_SIZE, QUERY_LEN, TREE, KV_TILE_SIZE, STAGES)
            m, total, acc = _attend(
                (m, total, acc), q_tile, middle, end, table_row, k_head, v_head, stride_block,
                stride_token, qk_scale, reads, query, first_query, token, tree_mask, stride_mask,
                True, HEAD_DIM, D, BLOCK_SIZE, QUERY_LEN, TREE, KV_TILE_SIZE, STAGES)

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
