"""Partial attention for Hopper: one persistent, warp-specialised kernel in Gluon.

A CTA belongs to one work queue and one KV head and walks the queue's tiles. A tile holds up to 128
query rows in two halves of 64, one for each consumer warpgroup, and a list of KV ranges. Two
producer warps (``hopper.producer``) fetch the blocks by TMA, one K, the other V. The consumers
multiply with wgmma and skip KV tiles that none of their rows reads.

Because depth-first order makes the readers of a KV range neighbours, its mask is one interval of
rows: DeFT's bit mask (section 3.3) in two bytes. Ranges that only one half reads alternate between
the halves, evenly interleaved with the ranges that both read: the arithmetic of shared KV then
hides the memory traffic of private KV.

A quantised (e4m3) cache is multiplied as it is with quantised queries, but V, which two more warps
widen to float16 (``hopper.wide_values``). The weights are float16 then.
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

from vllm_prefixshare.kernels.common.constants import LN2, LOG2E, LOWEST, MASKED
from vllm_prefixshare.kernels.common.dependent_launch import launch_merging, wait_for_launch_before
from vllm_prefixshare.kernels.common.gluon_names import barrier, reinterpret
from vllm_prefixshare.kernels.hopper.metadata import visible, word
from vllm_prefixshare.kernels.hopper.producer import (
    FIRST_ROW,
    HALF_ROWS,
    KIND,
    LAST_ROW,
    LAST_TILE,
    LOW_REQS,
    NEEDS_MASK,
    NEXT_TILE,
    NUM_REQS,
    NUM_RUNS,
    OUTPUT,
    PARTIAL,
    RESULTS,
    TILE_ROWS,
    WORDS,
    place_of_block,
    produce,
)
from vllm_prefixshare.kernels.hopper.wide_values import WIDE_TILES, WIDE_WARPS, widen


@gluon.jit
def _add_values(acc, weights, v_tile, START: gl.constexpr, SIZE: gl.constexpr,
                PARTS: gl.constexpr, P: gl.constexpr):
    """Start the products of weights ``[HALF_ROWS, SIZE]`` and the values from ``START`` on, in
    parts: each runs while the weights of the next are computed. A single one starts behind all of
    them, and as Triton 3.8 orders the additions, behind their sums.
    """
    if PARTS == 1:
        acc = warpgroup_mma(gl.convert_layout(weights, P), v_tile.slice(START, SIZE, 0), acc,
                            is_async=True)
    else:
        HALF_SIZE: gl.constexpr = SIZE // 2
        halves = weights.reshape([HALF_ROWS, 2, HALF_SIZE]).permute((0, 2, 1))
        first, second = gl.split(halves)
        acc = _add_values(acc, first, v_tile, START, HALF_SIZE, PARTS // 2, P)
        acc = _add_values(acc, second, v_tile, START + HALF_SIZE, HALF_SIZE, PARTS // 2, P)
    return acc


@gluon.jit
def _exponent(s, m, qk_scale, cap_rate):
    """Exponents of two of weights under the maximum ``m``.

    s: scores; with a soft cap ``exp(2 score / cap)``, whose hyperbolic tangent ``1 - 2 / (s + 1)``
        the cap scales, and -1 for a masked one. It grows with the score, so that a row's maximum
        can be taken of it, and the tangents come in the parts in which the weights do.
    """
    if cap_rate is None:
        return s * qk_scale - m
    else:
        # a division would take care of a range that s + 1 never leaves. The absolute error is that
        # of a float32 near 1, times the cap; `tanh.approx` has 2**-11.
        inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [s + 1.0],
                                            dtype=gl.float32, is_pure=True, pack=1)
        return (qk_scale - m) - 2.0 * qk_scale * inverse


@gluon.jit
def _consumer(HALF: gl.constexpr, io, plan, qk_scale, q_smem, k_smem, v_smem, bars, meta,
              SHAPE: gl.constexpr, TREE: gl.constexpr):
    """Attention of 64 rows over the KV tiles that any of them reads."""
    (q, seq_lens, query_start, outputs, sinks, tree_mask, tree_words, stride_q, stride_out,
     cap_rate, widening) = io
    v_scale, wide, wide_bars = widening
    G: gl.constexpr = SHAPE.num_qo_heads // SHAPE.num_kv_heads
    R: gl.constexpr = SHAPE.rows
    SLOTS: gl.constexpr = SHAPE.max_tile_requests
    D: gl.constexpr = SHAPE.padded_dim
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    # of V's product, see docs/notes/softmax-and-products.md
    PARTS: gl.constexpr = 4 if D == 128 else 2
    FP8: gl.constexpr = v_scale is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 32 if FP8 else 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O)
    # four lanes share a row of S
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [HALF_ROWS, 4]
    )
    L_ROW: gl.constexpr = gl.SliceLayout(1, LANES)
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    Q_ROW: gl.constexpr = gl.SliceLayout(1, Q)
    dtype: gl.constexpr = outputs.out.dtype.element_ty
    weights: gl.constexpr = gl.float16 if FP8 else dtype
    worker, head, chunk = place_of_block(SHAPE)
    low = HALF * HALF_ROWS
    high = low + HALF_ROWS
    q_tile = q_smem.index(HALF)
    out_tile = q_tile  # staging buffer for the results
    if FP8:
        q_tile = q_smem.index(HALF).slice(0, HALF_ROWS, 0)
        OUT: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=16, rank=2
        )
        out_tile = reinterpret(q_smem.index(HALF), dtype, [HALF_ROWS, D], OUT)
    # rows count from the half's first request, or from the start of a request in several chunks
    base = gl.where(R > HALF_ROWS, chunk * TILE_ROWS + low, 0)
    row_q = base + gl.arange(0, HALF_ROWS, Q_ROW)
    row_s = low + gl.arange(0, HALF_ROWS, S_ROW)  # within the tile
    dim_q = gl.arange(0, D, gl.SliceLayout(0, Q))
    dim_o = gl.arange(0, D, gl.SliceLayout(0, O))
    cols = gl.arange(0, KV_TILE, gl.SliceLayout(0, S))
    zero = gl.zeros([HALF_ROWS, KV_TILE], gl.float32, S)
    count = 0
    stage = 0
    phase = 0
    tile = worker
    while tile >= 0:
        num_reqs = gl.load(plan.tile_info + tile * WORDS + NUM_REQS)
        num_runs = gl.load(plan.tile_info + tile * WORDS + NUM_RUNS)
        next_tile = gl.load(plan.tile_info + tile * WORDS + NEXT_TILE) - 1
        half = gl.load(plan.tile_info + tile * WORDS + LOW_REQS)
        results = gl.load(plan.tile_info + tile * WORDS + RESULTS)
        # this half holds the requests [begin, end) of the tile
        if R > HALF_ROWS:
            begin = 0
            end = num_reqs
            used_rows = gl.minimum(R - chunk * TILE_ROWS - low, HALF_ROWS) * num_reqs
        else:
            begin = half * HALF
            end = half + (num_reqs - half) * HALF
            used_rows = (end - begin) * R
        slot = tile * SLOTS + gl.minimum(begin + row_q // R, SLOTS - 1)
        request = gl.load(plan.slot_row + slot)
        partial = gl.load(plan.slot_partial + slot)
        there = row_q // R < end - begin
        token = request
        if SHAPE.query_len > 1:
            token = gl.load(query_start + request, mask=there, other=0) + (row_q % R) // G
            there = there & (token < gl.load(query_start + request + 1, mask=there, other=0))
        head_q = head * G + row_q % R % G
        # 16-byte loads and stores: the caller has checked it
        at = gl.multiple_of(token.to(gl.int64) * stride_q + head_q * SHAPE.head_dim, 8)
        inside = there[:, None] & (dim_q < SHAPE.head_dim)[None, :]
        q_regs = gl.load(q + at[:, None] + dim_q[None, :], mask=inside, other=0.0)
        barrier()
        q_tile.store(q_regs)
        fence_async_shared()
        barrier()
        query = row_s * 0
        if SHAPE.query_len > 1:
            query = (base - low + row_s) % R // G
        mask_words = ()
        if TREE:  # here, because in the loop it would be a load for each score
            mask_at = tree_mask + gl.convert_layout(gl.where(there, token, 0), S_ROW) * tree_words
            for i in gl.static_range((SHAPE.query_len + 31) // 32):
                mask_words += (gl.load(mask_at + i),)  # type: ignore[assignment]
        if SHAPE.window > 0:
            position = gl.load(seq_lens + request, mask=there, other=0) - 1
            if SHAPE.query_len > 1:
                end_token = gl.load(query_start + request + 1, mask=there, other=0)
                position += gl.where(there, token + 1 - end_token, 0)
            query = gl.convert_layout(position, S_ROW)

        acc = gl.zeros([HALF_ROWS, D], gl.float32, O)
        m = gl.full([HALF_ROWS], LOWEST, gl.float32, S_ROW)
        # each lane adds up its own columns, and the lanes are added at the end of the tile
        sums = gl.zeros([HALF_ROWS, 4], gl.float32, LANES)
        if sinks is not None:  # counts in outputs, not in partial results
            sink = gl.load(sinks + head_q).to(gl.float32) * LOG2E
            m = gl.convert_layout(gl.where(there & (partial < 0), sink, LOWEST), S_ROW)
            m = gl.maximum(m, LOWEST)
            sums += gl.convert_layout(gl.where(m > LOWEST, 0.25, 0.0), L_ROW)[:, None]
        kind = gl.where(num_runs > 0, 0, LAST_TILE)
        while (kind & LAST_TILE) == 0:
            mbarrier.wait(bars.index(stage), phase)
            kind = word(meta, stage * 32 + KIND)
            first = word(meta, stage * 32 + FIRST_ROW)
            last = word(meta, stage * 32 + LAST_ROW)
            if (last > low) & (first < high):
                s = warpgroup_mma(q_tile, k_smem.index(stage).permute((1, 0)), zero,
                                  use_acc=False, is_async=True)
                if FP8:
                    # A wait ends a basic block. Here, while the scores are multiplied, so that the
                    # assembler can order the softmax and V's products as one.
                    mbarrier.wait(wide_bars.index(count % WIDE_TILES), (count // WIDE_TILES) & 1)
                s = warpgroup_mma_wait(0, [s])
                if cap_rate is not None:
                    s = gl.exp2(s * cap_rate)
                uneven = (kind & NEEDS_MASK) != 0
                if not FP8:
                    uneven = uneven | (first > low) | (last < low + used_rows)
                if uneven:
                    ok = visible(meta, stage, row_s, query, mask_words, cols, SHAPE, TREE, S)
                    s = gl.where(ok, s, MASKED if cap_rate is None else -1.0)
                top = _exponent(gl.max(s, 1), 0.0, qk_scale, cap_rate)
                if FP8:
                    # a row outside the interval has an infinite maximum in this KV tile
                    reads = (row_s >= first) & (row_s < last)
                    m_new = gl.maximum(m, gl.where(reads, top, LOWEST))
                    beyond = gl.where(reads, m_new, -MASKED)
                else:
                    m_new = gl.maximum(m, top)
                    beyond = m_new
                p = gl.exp2(_exponent(s, beyond[:, None], qk_scale, cap_rate))
                alpha = gl.exp2(m - m_new)
                m = m_new
                columns = gl.sum(gl.sum(p.reshape([HALF_ROWS, KV_TILE // 8, 4, 2]), 3), 1)
                sums = sums * gl.convert_layout(alpha, L_ROW)[:, None]
                sums += gl.convert_layout(columns, LANES, assert_trivial=True)
                acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
                v_tile = wide.index(count % WIDE_TILES) if FP8 else v_smem.index(stage)
                acc = _add_values(acc, p.to(weights), v_tile, 0, KV_TILE, PARTS, P)
                acc = warpgroup_mma_wait(0, [acc])
            elif FP8:
                # else this half could arrive for a later KV tile before the other does for this
                mbarrier.wait(wide_bars.index(count % WIDE_TILES), (count // WIDE_TILES) & 1)
            if FP8:
                mbarrier.arrive(wide_bars.index(WIDE_TILES + count % WIDE_TILES), count=1)
            mbarrier.arrive(bars.index(SHAPE.stages + stage), count=1)
            count += 1
            stage += 1
            phase = gl.where(stage == SHAPE.stages, phase ^ 1, phase)
            stage = gl.where(stage == SHAPE.stages, 0, stage)

        if R <= HALF_ROWS:
            launch_merging(next_tile < 0)
        if used_rows > 0:
            # a row that saw no token at all has weight zero in the merge
            seen = m > LOWEST
            total = gl.convert_layout(gl.sum(sums, 1), S_ROW)
            acc = acc * gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), O_ROW)[:, None]
            if FP8:
                acc *= v_scale
            # A branch on a reduction over `partial` would cost every iteration of the loop above:
            # from Triton 3.8 on a reduction ends in a shuffle, ptxas then considers the warps
            # divergent, and builds the descriptors of wgmma in vector registers.
            if (results & OUTPUT) != 0:
                barrier()
                out_tile.store(acc.to(dtype))
                barrier()
                at = gl.multiple_of(token.to(gl.int64) * stride_out + head_q * SHAPE.head_dim, 8)
                direct = inside & (partial < 0)[:, None]
                gl.store(outputs.out + at[:, None] + dim_q[None, :], out_tile.load(Q), mask=direct)
            if outputs.out_lse is not None:
                lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
                gl.store(outputs.out_lse + token.to(gl.int64) * SHAPE.num_qo_heads + head_q,
                         gl.convert_layout(lse, Q_ROW), mask=there & (partial < 0))
            merged = there & (partial >= 0)
            if (results & PARTIAL) != 0:
                lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
                lse_at = (partial * SHAPE.query_len + row_q % R // G) * SHAPE.num_qo_heads + head_q
                gl.store(outputs.partial_lse + lse_at, gl.convert_layout(lse, Q_ROW), mask=merged)
                row_at = gl.convert_layout(gl.where(merged, lse_at, -1), O_ROW)
                inside_o = (row_at >= 0)[:, None] & (dim_o < SHAPE.head_dim)[None, :]
                row_at = row_at.to(gl.int64)[:, None] * SHAPE.head_dim
                gl.store(outputs.partial_out + row_at + dim_o[None, :], acc, mask=inside_o)
            if R > HALF_ROWS:  # many rows take long to store and to merge
                launch_merging(next_tile < 0)
        tile = next_tile


# Not specialised: one binary serves every batch, block table and KV cache. These are in no group,
# because Triton specialises the elements of a tuple in any case.
@gluon.jit(do_not_specialize=[
    "table", "seq_lens", "query_start", "tree_mask", "tree_words", "stride_table", "stride_q",
    "stride_out", "block_rows", "head_rows", "head_cols", "q_scale_stride", "k_scale_stride",
    "v_scale_stride"])
def partial_attention(k_cache, v_cache, q, table, seq_lens, query_start, plan, outputs, tree_mask,
                      tree_words, stride_table, stride_q, stride_out, block_rows, head_rows,
                      head_cols, qk_scale, cap_rate, extras, q_scale_stride, k_scale_stride,
                      v_scale_stride, SHAPE: gl.constexpr, TREE: gl.constexpr,
                      CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):
    """Grid: a thread block for each work queue, chunk and KV head, in ``place_of_block``'s order.

    k_cache, v_cache: 2-D tensor descriptors, one row a token of one or all heads; the block of
    a head starts at ``[block * block_rows + head * head_rows, head * head_cols]``.
    plan: ``hopper.arrays.PlanArrays``. outputs: ``common.groups.Outputs``. extras: ``LayerExtras``,
    with the scales of KV head ``h`` at ``h * *_scale_stride``; its soft cap is passed as cap_rate,
    twice the softmax scale over the cap, times log2(e), or None, and qk_scale is then the cap times
    log2(e). SHAPE: ``catalog.HopperShape``.
    """
    wait_for_launch_before()
    D: gl.constexpr = SHAPE.padded_dim
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    STAGES: gl.constexpr = SHAPE.stages
    dtype: gl.constexpr = q.dtype.element_ty
    ITEM: gl.constexpr = dtype.primitive_bitwidth // 8
    KV: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, D * ITEM), element_bitwidth=8 * ITEM, rank=2
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KV_TILE, D], KV)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KV_TILE, D], KV)
    FP8: gl.constexpr = extras.v_scale is not None
    # the results, of 16 bits each, are staged where the queries were
    q_smem = gl.allocate_shared_memory(dtype, [2, 2 * HALF_ROWS if FP8 else HALF_ROWS, D], KV)
    widening = (extras.v_scale, extras.v_scale, extras.v_scale)  # None: nothing to widen
    if FP8:
        WIDE: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=16, rank=2
        )
        wide = gl.allocate_shared_memory(gl.float16, [WIDE_TILES, KV_TILE, D], WIDE)
        wide_bars = gl.allocate_shared_memory(
            gl.int64, [2 * WIDE_TILES, 1], mbarrier.MBarrierLayout()
        )
        for i in gl.static_range(WIDE_TILES):
            mbarrier.init(wide_bars.index(i), count=1)
            mbarrier.init(wide_bars.index(WIDE_TILES + i), count=2)
        _, head, _ = place_of_block(SHAPE)
        scale = gl.load(extras.q_scale + head * q_scale_stride)
        scale *= gl.load(extras.k_scale + head * k_scale_stride)
        widening = (gl.load(extras.v_scale + head * v_scale_stride), wide, wide_bars)
        if cap_rate is not None:
            cap_rate *= scale
        else:
            qk_scale *= scale
    meta = gl.allocate_shared_memory(gl.int32, [STAGES, 32], PLAIN)
    words = reinterpret(meta, gl.int32, [STAGES * 32, 1], PLAIN)
    # the first STAGES barriers say that a stage is filled, the others that it is free
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        # two producers fill a stage; both consumers, and the warps that widen, free it
        mbarrier.init(bars.index(i), count=3 if FP8 and i >= STAGES else 2)
    fence_async_shared()
    io = (q, seq_lens, query_start, outputs, extras.sinks, tree_mask, tree_words, stride_q,
          stride_out, cap_rate, widening)
    where = (block_rows, head_rows, head_cols)
    WORKERS: gl.constexpr = 4 if FP8 else 3  # partitions after the first
    gl.warp_specialize(
        [
            (_consumer, (0, io, plan, qk_scale, q_smem, k_smem, v_smem, bars, words, SHAPE, TREE)),
            (_consumer, (1, io, plan, qk_scale, q_smem, k_smem, v_smem, bars, words, SHAPE, TREE)),
            (produce, (True, k_cache, table, seq_lens, query_start, plan, stride_table, where,
                       k_smem, bars, meta, SHAPE, ITEM)),
            (produce, (False, v_cache, table, seq_lens, query_start, plan, stride_table, where,
                       v_smem, bars, meta, SHAPE, ITEM)),
            (widen, (plan.tile_info, v_smem, widening, bars, words, SHAPE)),
        ][: 1 + WORKERS],
        [4, 1, 1, WIDE_WARPS][:WORKERS],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS, PRODUCER_REGS][:WORKERS],
    )
