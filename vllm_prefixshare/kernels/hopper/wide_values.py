"""V of a quantised cache as float16, in the Hopper kernel.

V's product takes operands of eight bits in another order than the cache has them. So two warps
widen V, into a ring of two KV tiles that both consumers read.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vllm_prefixshare.kernels.common.gluon_names import barrier
from vllm_prefixshare.kernels.hopper.metadata import word
from vllm_prefixshare.kernels.hopper.producer import (
    KIND,
    LAST_TILE,
    NEXT_TILE,
    NUM_RUNS,
    WORDS,
    place_of_block,
)

WIDE_TILES = gl.constexpr(2)  # KV tiles of V in float16
WIDE_WARPS = gl.constexpr(2)  # that widen V; with the two producers they are a warpgroup


@gluon.jit
def widen(tile_info, v_smem, widening, bars, meta, SHAPE: gl.constexpr):
    """V of each KV tile as float16 from e4m3, for both consumers.

    wide: ring of ``WIDE_TILES`` tiles of KV. wide_bars: the first ``WIDE_TILES``
    barriers say that a tile of it is filled, the others that both consumers have done with it.
    """
    _, wide, wide_bars = widening
    D: gl.constexpr = SHAPE.padded_dim
    # each thread writes 16 bytes of a row: the eight that write at once then use every bank once
    ACROSS: gl.constexpr = D // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WIDE_WARPS, 1], [1, 0])
    ROWS: gl.constexpr = 64 * 32 * WIDE_WARPS // D  # 64 numbers a thread at a time
    count = 0
    tile, _, _ = place_of_block(SHAPE)
    while tile >= 0:
        num_runs = gl.load(tile_info + tile * WORDS + NUM_RUNS)
        next_tile = gl.load(tile_info + tile * WORDS + NEXT_TILE) - 1
        kind = gl.where(num_runs > 0, 0, LAST_TILE)
        while (kind & LAST_TILE) == 0:
            stage = count % SHAPE.stages
            place = count % WIDE_TILES
            mbarrier.wait(bars.index(stage), (count // SHAPE.stages) & 1)
            kind = word(meta, stage * 32 + KIND, WIDE_WARPS)
            mbarrier.wait(wide_bars.index(WIDE_TILES + place), ((count // WIDE_TILES) & 1) ^ 1)
            for i in gl.static_range(SHAPE.kv_tile // ROWS):
                numbers = v_smem.index(stage).slice(i * ROWS, ROWS, 0).load(LAYOUT)
                wide.index(place).slice(i * ROWS, ROWS, 0).store(numbers.to(gl.float16))
            fence_async_shared()
            barrier()
            mbarrier.arrive(wide_bars.index(place), count=1)
            mbarrier.arrive(bars.index(SHAPE.stages + stage), count=1)
            count += 1
        tile = next_tile
