"""Partial attention over an MLA cache for Hopper, in Gluon.

A CTA belongs to one work queue and walks its work tiles. A tile holds 64 query rows, the heads of
its requests' query tokens, and a list of KV tiles of 64 tokens. A producer warp (``producer``)
copies each to shared memory once for both products: all of it as K, the compressed KV as V.

Two consumer warpgroups take turns: one makes scores and weights of the KV tiles with even numbers,
the other of those with odd numbers. Each holds one half of the output's columns, multiplies
its own weights from registers and gets the other's, with their running maximum, through shared
memory. So one is at its softmax while the other multiplies, and the queries are read once for 64
tokens: the "seesaw" schedule of FlashMLA.

The weights of a KV tile take the place of the rotated part of its keys.

A quantised (e4m3) cache is multiplied as it is with quantised queries, but as V, for which three
more warps widen the compressed KV to float16 (``wide_values``). There is room for two quantised KV
tiles and three wide halves; the weights are float16 then, and have separate shared memory.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_prefixshare.kernels.common.constants import LN2, LOWEST, MASKED, NUM_REQS, WORDS
from vllm_prefixshare.kernels.common.dependent_launch import launch_merging, wait_for_launch_before
from vllm_prefixshare.kernels.common.gluon_names import barrier, reinterpret
from vllm_prefixshare.kernels.mla_hopper.producer import (
    ADDED,
    BARRIERS,
    COPIED,
    FREE,
    LEFT,
    MASK,
    NEEDS,
    QUERIES,
    READ,
    SUMS,
    WEIGHTS,
    ZEROS,
    produce,
    query_of,
    word,
)
from vllm_prefixshare.kernels.mla_hopper.wide_values import WIDE_HALVES, WIDE_WARPS, widen


@gluon.jit
def _place_of_values(STAGE: gl.constexpr, HALF: gl.constexpr, uses, before, FP8: gl.constexpr):
    """Place of one half of the columns of a KV tile, and the parity of its use.

    uses, before: earlier KV tiles, of this stage and in all.
    """
    if FP8:
        number = 2 * before + (STAGE != HALF)  # of the half, in the order in which they are widened
        return number % WIDE_HALVES, (number // WIDE_HALVES) & 1
    else:
        return 2 * STAGE + HALF, uses & 1


@gluon.jit
def _start_scores(HALF: gl.constexpr, operands, bars, uses, before, zero, FP8: gl.constexpr):
    """Start the product of the queries and the KV tile of stage ``HALF``; the others as in
    ``_place_of_values``.
    """
    queries, keys, _, _ = operands
    q_smem, rope_q = queries
    k_smem, rope_k = keys
    # Zero, which the compiler must not know: it would compute the descriptors of all operands
    # before the loop, and spill them.
    z = uses >> 30
    tile = before % 2 if FP8 else HALF
    if FP8:
        mbarrier.wait(bars.index(COPIED + tile), (before // 2) & 1)
    else:
        mbarrier.wait(bars.index(2 * HALF + HALF), uses & 1)
    s = warpgroup_mma(q_smem.index(HALF + z), k_smem.index(2 * tile + HALF + z).permute((1, 0)),
                      zero, use_acc=False, is_async=True)
    if not FP8:
        mbarrier.wait(bars.index(2 * HALF + 1 - HALF), uses & 1)
    s = warpgroup_mma(rope_q.index(z), rope_k.index(tile + z).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_smem.index(1 - HALF + z),
                         k_smem.index(2 * tile + 1 - HALF + z).permute((1, 0)), s, is_async=True)


@gluon.jit
def _weigh(HALF: gl.constexpr, operands, notes, bars, uses, before, s, m, row_s, qk_scale,
           FP8: gl.constexpr, S: gl.constexpr):
    """Weights of the KV tile of stage ``HALF`` from its scores: handed to the other warpgroup, and
    returned with their sums, the running maximum and the factor of what was summed up before.
    """
    _, _, v_smem, p_smem = operands
    spans, words, maxima = notes
    noted = before % 4 if FP8 else HALF
    needs = word(words, noted * 32 + NEEDS)
    if FP8:
        barrier()  # every warp has read the keys
        mbarrier.arrive(bars.index(READ + before % 2), count=1)
    if (needs & MASK) != 0:
        seen_by = spans.index(noted).load(gl.SliceLayout(0, S))
        begin = seen_by & 0xFFFF
        # one comparison: rows before the first wrap around
        reads = (row_s[:, None] - begin[None, :]).to(gl.uint32, bitcast=True)
        reads = reads < ((seen_by >> 16) - begin).to(gl.uint32, bitcast=True)[None, :]
        s = gl.where(reads, s, MASKED)
    m_new = gl.maximum(m, gl.max(s, 1) * qk_scale)
    p = gl.exp2(s * qk_scale - m_new[:, None])
    weights = p.to(p_smem.dtype)
    if FP8:
        mbarrier.wait(bars.index(ADDED + HALF), (uses & 1) ^ 1)
    else:
        barrier()  # every warp has read the rotated part of the keys
    p_smem.index(HALF).store(weights)
    maxima.index(HALF).store(m_new)
    # a weight of zero would not hide an unused slot that holds NaN
    if not FP8 and (needs & ZEROS) != 0:
        ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        for i in gl.static_range(4):
            of = spans.index(HALF).slice(i * 16, 16, 0).load(gl.SliceLayout(1, ROW))
            for h in gl.static_range(2):
                rows = v_smem.index(2 * HALF + h).slice(i * 16, 16, 0)
                rows.store(gl.where((of != 0)[:, None], rows.load(ROW), 0.0))
    fence_async_shared()
    barrier()
    mbarrier.arrive(bars.index(WEIGHTS + HALF), count=1)
    return weights, gl.sum(p, 1), m_new, gl.exp2(m - m_new)


@gluon.jit
def _add_own(HALF: gl.constexpr, operands, bars, uses, before, weights, alpha, acc,
             FP8: gl.constexpr, O: gl.constexpr):  # noqa: E741
    """Scale the sums, and add the product of a warpgroup's own weights."""
    _, _, v_smem, _ = operands
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    place, parity = _place_of_values(HALF, HALF, uses, before, FP8)
    if FP8:
        mbarrier.wait(bars.index(place), parity)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
    acc = warpgroup_mma(gl.convert_layout(weights, P), v_smem.index(place + (uses >> 30)), acc,
                        is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    barrier()  # every warp has read its operands
    mbarrier.arrive(bars.index(FREE + place), count=1)
    return acc


@gluon.jit
def _start_adding_others(HALF: gl.constexpr, operands, notes, bars, uses, before, m, total, acc,
                         FP8: gl.constexpr, S: gl.constexpr, O: gl.constexpr):  # noqa: E741
    """Scale the sums, and start the product of the other warpgroup's weights."""
    _, _, v_smem, p_smem = operands
    _, _, maxima = notes
    OTHER: gl.constexpr = 1 - HALF
    z = uses >> 30
    place, parity = _place_of_values(OTHER, HALF, uses, before, FP8)
    mbarrier.wait(bars.index(WEIGHTS + OTHER), uses & 1)
    if FP8:
        mbarrier.wait(bars.index(place), parity)
    m_new = maxima.index(OTHER).load(gl.SliceLayout(1, S))
    alpha = gl.exp2(m - m_new)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
    acc = warpgroup_mma(p_smem.index(OTHER + z), v_smem.index(place + z), acc, is_async=True)
    return acc, m_new, total * alpha


@gluon.jit
def _added_others(HALF: gl.constexpr, bars, uses, before, acc, FP8: gl.constexpr):
    """Wait for that product, and release its half of the KV tile and its weights."""
    acc = warpgroup_mma_wait(0, [acc])
    barrier()  # every warp has read its operands
    place, _ = _place_of_values(1 - HALF, HALF, uses, before, FP8)
    mbarrier.arrive(bars.index(FREE + place), count=1)
    if FP8:
        mbarrier.arrive(bars.index(ADDED + 1 - HALF), count=1)
    return acc


@gluon.jit
def _consumer(HALF: gl.constexpr, io, plan, qk_scale, smem, SHAPE: gl.constexpr,
              FP8: gl.constexpr):
    """Scores of every second KV tile, and one half of the output's columns."""
    q, query_start_loc, outputs, stride_q, stride_out, v_scale = io
    operands, notes, sums, bars = smem
    queries, _, _, _ = operands
    q_smem, rope_q = queries
    _, words, _ = notes
    HEADS: gl.constexpr = SHAPE.num_heads
    QUERY_LEN: gl.constexpr = SHAPE.query_len
    LATENT: gl.constexpr = SHAPE.latent
    ROPE: gl.constexpr = SHAPE.rope
    ROWS: gl.constexpr = SHAPE.rows
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    D: gl.constexpr = LATENT // 2
    OTHER: gl.constexpr = 1 - HALF
    EACH: gl.constexpr = QUERY_LEN * HEADS  # rows of a request
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 32 if FP8 else 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(1, COPY)
    dtype: gl.constexpr = outputs.out.dtype.element_ty
    chunk = gl.program_id(0) % SHAPE.chunks
    worker = gl.program_id(0) // SHAPE.chunks
    dim_q = HALF * D + gl.arange(0, D, gl.SliceLayout(0, COPY))
    dim_o = HALF * D + gl.arange(0, D, gl.SliceLayout(0, O))
    row_q = chunk * ROWS + gl.arange(0, ROWS, LINE)
    row_s = chunk * ROWS + gl.arange(0, ROWS, S_ROW)
    row_o = chunk * ROWS + gl.arange(0, ROWS, O_ROW)
    zero = gl.zeros([ROWS, KV_TILE], gl.float32, S)
    own_uses = 0
    other_uses = 0
    begin = gl.load(plan.work_indptr + worker)
    end = gl.load(plan.work_indptr + worker + 1)
    for number in range(begin - 1, end):
        tile = gl.where(number < begin, worker, number)
        turn = number + 1 - begin
        slots = tile * SHAPE.max_tile_requests
        num_rows = gl.load(plan.tile_info + tile * WORDS + NUM_REQS) * EACH
        there = row_q < num_rows
        request = gl.load(plan.slot_row + slots + row_q // EACH, mask=there, other=0)
        query, token, there = query_of(row_q, request, there, query_start_loc, HEADS, QUERY_LEN)
        at_q = token.to(gl.int64) * stride_q + row_q % HEADS * (LATENT + ROPE)
        at_q = q + gl.multiple_of(at_q, 8)[:, None]
        # both have finished with the queries before: each waited for the other's sums
        q_smem.index(HALF).store(gl.load(at_q + dim_q[None, :], mask=there[:, None], other=0.0))
        if HALF == 0:
            NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            row_r = chunk * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
            dim_r = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, NARROW))
            there_r = row_r < num_rows
            of = gl.load(plan.slot_row + slots + row_r // EACH, mask=there_r, other=0)
            _query, of, there_r = query_of(row_r, of, there_r, query_start_loc, HEADS, QUERY_LEN)
            at_r = of.to(gl.int64) * stride_q + row_r % HEADS * (LATENT + ROPE)
            at_r = q + gl.multiple_of(at_r, 8)[:, None] + dim_r[None, :]
            rope_q.index(0).store(gl.load(at_r, mask=there_r[:, None], other=0.0))
        fence_async_shared()
        barrier()
        mbarrier.arrive(bars.index(QUERIES), count=1)
        mbarrier.wait(bars.index(QUERIES), turn & 1)

        acc = gl.zeros([ROWS, D], gl.float32, O)
        m = gl.full([ROWS], LOWEST, gl.float32, S_ROW)
        total = gl.zeros([ROWS], gl.float32, S_ROW)
        left = 3  # KV tiles from here on; two are walked at a time
        if HALF == 1 and FP8:  # later the KV tile two before says it
            place, parity = _place_of_values(0, 1, other_uses, own_uses + other_uses, FP8)
            mbarrier.wait(bars.index(place), parity)
            left = 2 + word(words, 32 * ((own_uses + other_uses) % 4) + LEFT)
        while left > 2:
            before = own_uses + other_uses
            if HALF == 0:
                s = _start_scores(HALF, operands, bars, own_uses, before, zero, FP8)
                left = word(words, 32 * (before % 4 if FP8 else 0) + LEFT)
                s = warpgroup_mma_wait(0, [s])
                p, total_p, m, alpha = _weigh(HALF, operands, notes, bars, own_uses, before, s, m,
                                              row_s, qk_scale, FP8, S)
                total = total * alpha + total_p
                acc = _add_own(HALF, operands, bars, own_uses, before, p, alpha, acc, FP8, O)
                own_uses += 1
                if left > 1:
                    acc, m, total = _start_adding_others(HALF, operands, notes, bars, other_uses,
                                                         before + 1, m, total, acc, FP8, S, O)
                    acc = _added_others(HALF, bars, other_uses, before + 1, acc, FP8)
                    other_uses += 1
            else:
                if FP8:
                    left -= 2
                else:
                    mbarrier.wait(bars.index(2 * OTHER + HALF), other_uses & 1)
                    left = word(words, 32 * OTHER + LEFT)
                if left > 1:
                    s = _start_scores(HALF, operands, bars, own_uses, before + 1, zero, FP8)
                    acc, m, total = _start_adding_others(HALF, operands, notes, bars, other_uses,
                                                         before, m, total, acc, FP8, S, O)
                    s = warpgroup_mma_wait(1, [s])
                    p, total_p, m, alpha = _weigh(HALF, operands, notes, bars, own_uses, before + 1,
                                                  s, m, row_s, qk_scale, FP8, S)
                    acc = _added_others(HALF, bars, other_uses, before, acc, FP8)
                    total = total * alpha + total_p
                    acc = _add_own(HALF, operands, bars, own_uses, before + 1, p, alpha, acc, FP8,
                                   O)
                    own_uses += 1
                else:
                    acc, m, total = _start_adding_others(HALF, operands, notes, bars, other_uses,
                                                         before, m, total, acc, FP8, S, O)
                    acc = _added_others(HALF, bars, other_uses, before, acc, FP8)
                other_uses += 1

        launch_merging(number + 1 == end)
        sums.index(HALF).store(total)
        barrier()
        mbarrier.arrive(bars.index(SUMS), count=1)
        mbarrier.wait(bars.index(SUMS), turn & 1)
        total += sums.index(OTHER).load(S_ROW)
        seen = total > 0
        lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
        inverse = 1.0 / total
        if FP8:
            inverse *= gl.load(v_scale)
        acc = acc * gl.convert_layout(gl.where(seen, inverse, 0.0), O_ROW)[:, None]
        # looked up again: loads cost less than registers
        there_o = row_o < num_rows
        request_o = gl.load(plan.slot_row + slots + row_o // EACH, mask=there_o, other=0)
        partial = gl.load(plan.slot_partial + slots + row_o // EACH, mask=there_o, other=0)
        query, token_o, there_o = query_of(row_o, request_o, there_o, query_start_loc, HEADS,
                                           QUERY_LEN)
        token_o = token_o.to(gl.int64)
        to_out = there_o & (partial < 0)
        to_partial = there_o & (partial >= 0)
        head = row_o % HEADS
        at_out = token_o * gl.multiple_of(stride_out, 8) + head * LATENT
        at_out = at_out[:, None] + dim_o[None, :]
        gl.store(outputs.out + at_out, acc.to(dtype), mask=to_out[:, None])
        at_lse = (partial.to(gl.int64) * QUERY_LEN + query) * HEADS + head
        if HALF == 0:
            lse = gl.convert_layout(lse, O_ROW)
            if outputs.out_lse is not None:
                gl.store(outputs.out_lse + token_o * HEADS + head, lse, mask=to_out)
            gl.store(outputs.partial_lse + at_lse, lse, mask=to_partial)
        at_partial = at_lse[:, None] * LATENT + dim_o[None, :]
        gl.store(outputs.partial_out + at_partial, acc, mask=to_partial[:, None])


# Not specialised: one binary serves every batch and block table. These are in no group, because
# Triton specialises the elements of a tuple in any case.
@gluon.jit(do_not_specialize=["block_table", "seq_lens", "query_start_loc", "stride_table",
                              "block_rows"])
def partial_attention(halves, rope, q, block_table, seq_lens, query_start_loc, plan, outputs,
                      block_rows, stride_table, stride_q, stride_out, qk_scale, extras,
                      SHAPE: gl.constexpr, CONSUMER_REGS: gl.constexpr,
                      PRODUCER_REGS: gl.constexpr):
    """Grid: ``num_workers * SHAPE.chunks`` thread blocks; more rows of a request than a tile has
    are walked in chunks.

    halves, rope: tensor descriptors of the cache, one row a token, with boxes of ``unit`` tokens
    and half of the compressed KV, or the rotated part.
    plan: ``common.arrays.PlanArrays``. outputs, SHAPE: ``common.groups``. extras:
    ``LayerExtras``, of which scales are read, ``[1]``.
    """
    wait_for_launch_before()
    FP8: gl.constexpr = extras.v_scale is not None
    dtype: gl.constexpr = q.dtype.element_ty
    ITEM: gl.constexpr = dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = SHAPE.rows
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    D: gl.constexpr = SHAPE.latent // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 * ITEM, rank=2
    )
    NARROW: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=SHAPE.rope * ITEM, element_bitwidth=8 * ITEM, rank=2
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], SHARED)
    rope_q = gl.allocate_shared_memory(dtype, [1, ROWS, SHAPE.rope], NARROW)
    k_smem = gl.allocate_shared_memory(dtype, [4, KV_TILE, D], SHARED)  # by stage and half
    rope_k = gl.allocate_shared_memory(dtype, [2, KV_TILE, SHAPE.rope], NARROW)
    v_smem = k_smem
    p_smem = rope_k
    if FP8:
        WIDE: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=16, rank=2
        )
        v_smem = gl.allocate_shared_memory(gl.float16, [WIDE_HALVES, KV_TILE, D], WIDE)
        p_smem = gl.allocate_shared_memory(gl.float16, [2, ROWS, KV_TILE], WIDE)
        qk_scale *= gl.load(extras.q_scale) * gl.load(extras.k_scale)
    NOTES: gl.constexpr = 4 if FP8 else 2  # KV tiles that are described
    spans_of = gl.allocate_shared_memory(gl.int32, [2 * NOTES, 32], PLAIN)
    spans = reinterpret(spans_of, gl.int32, [NOTES, KV_TILE], PLAIN)
    meta = gl.allocate_shared_memory(gl.int32, [NOTES, 32], PLAIN)
    words = reinterpret(meta, gl.int32, [NOTES * 32, 1], PLAIN)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERIES):
        mbarrier.init(bars.index(i), count=WIDE_WARPS if FP8 and i < FREE else 1)
    mbarrier.init(bars.index(QUERIES), count=2)
    mbarrier.init(bars.index(SUMS), count=2)
    if FP8:
        for i in gl.static_range(2):
            mbarrier.init(bars.index(COPIED + i), count=1)
            mbarrier.init(bars.index(ADDED + i), count=1)
            # by the tile's consumer and the warps that widen
            mbarrier.init(bars.index(READ + i), count=1 + WIDE_WARPS)
    fence_async_shared()
    io = (q, query_start_loc, outputs, stride_q, stride_out, extras.v_scale)
    notes = (spans, words, maxima)
    smem = (((q_smem, rope_q), (k_smem, rope_k), v_smem, p_smem), notes, sums, bars)
    WORKERS: gl.constexpr = 2 + WIDE_WARPS if FP8 else 2  # partitions after the first
    gl.warp_specialize(
        [
            (_consumer, (0, io, plan, qk_scale, smem, SHAPE, FP8)),
            (_consumer, (1, io, plan, qk_scale, smem, SHAPE, FP8)),
            (produce, (halves, rope, block_table, seq_lens, query_start_loc, plan, stride_table,
                       block_rows, k_smem, rope_k, spans_of, meta, bars, SHAPE, FP8)),
            (widen, (0, plan.work_indptr, k_smem, v_smem, notes, bars, SHAPE)),
            (widen, (1, plan.work_indptr, k_smem, v_smem, notes, bars, SHAPE)),
            (widen, (2, plan.work_indptr, k_smem, v_smem, notes, bars, SHAPE)),
        ][: 1 + WORKERS],
        [4, 1, 1, 1, 1][:WORKERS],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS, PRODUCER_REGS,
         PRODUCER_REGS][:WORKERS],
    )
