"""The compressed KV of a quantised KV tile as float16, in the MLA kernel.

The product of weights and values takes 8-bit operands in another order than the cache has them. So
three warps widen the values for both consumers, each warp some of the rows, without waiting for
each other.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vllm_prefixshare.kernels.common.gluon_names import barrier, reinterpret
from vllm_prefixshare.kernels.mla_hopper.producer import (
    COPIED,
    FREE,
    LEFT,
    NEEDS,
    READ,
    ZEROS,
    word,
)

WIDE_WARPS = gl.constexpr(3)
WIDE_HALVES = gl.constexpr(3)  # that there is room for


@gluon.jit
def widen(PART: gl.constexpr, work_indptr, raw_smem, wide_smem, notes, bars, SHAPE: gl.constexpr):
    """Latents of one of ``WIDE_WARPS`` parts of each KV tile as float16 from e4m3, in halves of
    columns, first that of the tile's consumer.
    """
    spans, words, _ = notes
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    # each thread writes 16 bytes of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    ROWS: gl.constexpr = 8  # 64 numbers a thread at a time
    # four numbers in one, because a choice between single ones takes eight times the instructions
    FOURS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2
    )
    fours = reinterpret(raw_smem, gl.int32, [4, KV_TILE, raw_smem.shape[2] // 4], WORDS)
    SHARE: gl.constexpr = -(-KV_TILE // (ROWS * WIDE_WARPS)) * ROWS
    BEGIN: gl.constexpr = PART * SHARE
    END: gl.constexpr = min(BEGIN + SHARE, KV_TILE)
    worker = gl.program_id(0) // SHAPE.chunks
    begin = gl.load(work_indptr + worker)
    end = gl.load(work_indptr + worker + 1)
    count = 0
    for _ in range(begin - 1, end):
        stage = 0
        left = 2
        while left > 1:
            copied = count % 2
            mbarrier.wait(bars.index(COPIED + copied), (count // 2) & 1)
            left = word(words, count % 4 * 32 + LEFT, 1)
            needs = word(words, count % 4 * 32 + NEEDS, 1)
            for h in range(2):  # not unrolled: shorter code is faster here
                number = 2 * count + h
                place = number % WIDE_HALVES
                mbarrier.wait(bars.index(FREE + place), ((number // WIDE_HALVES) & 1) ^ 1)
                half = 2 * copied + (stage + h) % 2
                # a weight of zero would not hide an unused slot that holds NaN
                if (needs & ZEROS) != 0:
                    for at in gl.static_range(BEGIN, END, ROWS):
                        some = fours.index(half).slice(at, ROWS, 0)
                        of = spans.index(count % 4).slice(at, ROWS, 0)
                        of = of.load(gl.SliceLayout(1, FOURS))
                        some.store(gl.where((of != 0)[:, None], some.load(FOURS), 0))
                raw, wide = raw_smem.index(half), wide_smem.index(place)
                for at in gl.static_range(BEGIN, END, ROWS):
                    rows = raw.slice(at, ROWS, 0).load(LAYOUT)
                    wide.slice(at, ROWS, 0).store(rows.to(gl.float16))
                fence_async_shared()
                barrier()
                mbarrier.arrive(bars.index(place), count=1)
            mbarrier.arrive(bars.index(READ + copied), count=1)
            stage = 1 - stage
            count += 1
