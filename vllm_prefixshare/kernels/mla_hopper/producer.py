"""The producer warp of the kernel for latent KV caches: it copies KV tiles and describes them.

A work tile is a list of parts of ``UNIT`` tokens, which fill its KV tiles. Each lane looks up one
part, so that a batch of KV tiles is known before it is copied.

A KV tile is copied by TMA in two halves of columns, each of which has barriers of its own. The
rotated part of the keys comes with the half that the other consumer multiplies with its weights,
because the weights take its place.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_prefixshare.kernels.hopper.gluon_names import async_load
from vllm_prefixshare.kernels.portable.kernel import (
    FAR,
    FIRST_PART,
    FIRST_SLOT,
    NEW_KV_TILES,
    NUM_REQS,
    PLANNED_KV_TILES,
    WORDS,
)

# barriers: halves of a KV tile that are filled and that are free, by stage and half; weights by
# stage; queries; sums
FREE = gl.constexpr(4)
WEIGHTS = gl.constexpr(8)
QUERIES = gl.constexpr(10)
SUMS = gl.constexpr(11)
BARRIERS = gl.constexpr(12)
# words that describe a KV tile: how many the work tile has from here on, and what it needs
LEFT = gl.constexpr(0)
NEEDS = gl.constexpr(1)
MASK = gl.constexpr(1)  # some row does not read some token
ZEROS = gl.constexpr(2)  # some token is past the end of its request


@gluon.jit
def _look_up(batch, first, packed, opened, new, steps, lane, part_row, part_pos, part_readers,
             table, stride_table, seq_lens, block_rows, HEADS: gl.constexpr,
             BLOCK_SIZE: gl.constexpr, UNIT: gl.constexpr, PARTS: gl.constexpr):
    """Row in the cache, number of tokens, interval of reading rows of 32 parts."""
    n = batch * (32 // PARTS) + lane // PARTS
    late = gl.maximum(n - packed, 0)
    rounds = late // gl.maximum(new, 1)
    entry = late - rounds * new
    at = gl.where(n < packed, first + n * PARTS, opened + entry * PARTS) + lane % PARTS
    row = gl.load(part_row + at, mask=n < steps, other=0)
    start = gl.load(part_pos + at, mask=n < steps, other=0)
    readers = gl.load(part_readers + at, mask=n < steps, other=0)
    pos = start + rounds * UNIT
    length = gl.load(seq_lens + row, mask=readers != 0, other=0)
    tokens = gl.minimum(gl.maximum(length - pos, 0), UNIT)
    at_block = table + row.to(gl.int64) * stride_table + pos // BLOCK_SIZE
    block = gl.load(at_block, mask=tokens > 0, other=0)
    cache_row = block * block_rows + gl.where(tokens > 0, pos % BLOCK_SIZE, 0)
    span = (readers & 0xFFFF) * HEADS | (readers >> 16) * HEADS << 16
    return cache_row, tokens, gl.where(tokens > 0, span, 0)


@gluon.jit
def produce(halves, rope, table, seq_lens, work_indptr, tile_info, slot_row, slot_end, part_row,
            part_pos, part_readers, stride_table, block_rows, kv_smem, rope_smem, spans, meta, bars,
            HEADS: gl.constexpr, CHUNKS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr,
            BLOCK_SIZE: gl.constexpr, UNIT: gl.constexpr, KV_TILE: gl.constexpr):
    """Copy the KV tiles of the worker's work tiles."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    SLOTS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    PARTS: gl.constexpr = KV_TILE // UNIT
    BATCH: gl.constexpr = 32 // PARTS
    HALF: gl.constexpr = LATENT // 2
    lane = gl.arange(0, 32, WARP)
    r = gl.arange(0, 64, SLOTS)
    worker = gl.program_id(0) // CHUNKS
    uses_0 = 0  # of either stage by the work tiles before
    uses_1 = 0
    for tile in range(gl.load(work_indptr + worker), gl.load(work_indptr + worker + 1)):
        slots = gl.load(tile_info + tile * WORDS + FIRST_SLOT)
        num_reqs = gl.load(tile_info + tile * WORDS + NUM_REQS)
        first = gl.load(tile_info + tile * WORDS + FIRST_PART)
        packed = gl.load(tile_info + tile * WORDS + PLANNED_KV_TILES)
        new = gl.load(tile_info + tile * WORDS + NEW_KV_TILES)
        there = r < num_reqs
        request = gl.load(slot_row + slots + r, mask=there, other=0)
        planned_end = gl.load(slot_end + slots + r, mask=there, other=FAR)
        length = gl.load(seq_lens + request, mask=there, other=0)
        growth = gl.maximum(gl.max((length - planned_end + UNIT - 1) // UNIT, 0), 0)
        steps = packed + new * growth
        opened = first + packed * PARTS
        everyone = num_reqs * HEADS << 16
        tiles = gl.maximum(steps, 1)  # consumers wait for one even if nothing is read

        cache_row, tokens, span = _look_up(
            0, first, packed, opened, new, steps, lane, part_row, part_pos, part_readers, table,
            stride_table, seq_lens, block_rows, HEADS, BLOCK_SIZE, UNIT, PARTS)
        for batch in range((tiles + BATCH - 1) // BATCH):
            next_cache_row = cache_row
            next_tokens = tokens
            next_span = span
            for k in range(gl.minimum(BATCH, tiles - batch * BATCH)):
                n = batch * BATCH + k
                stage = n % 2
                phase = (gl.where(stage == 0, uses_0, uses_1) + n // 2) & 1
                # the half that the stage's own consumer multiplies is free first
                own = 2 * stage + stage
                other = 2 * stage + 1 - stage
                mbarrier.wait(bars.index(FREE + own), phase ^ 1)
                mbarrier.expect(bars.index(own), KV_TILE * HALF * 2)
                for j in gl.static_range(PARTS):
                    row = gl.sum(gl.where(lane == k * PARTS + j, cache_row, 0), 0)
                    async_load(halves, [row, stage * HALF], bars.index(own),
                               kv_smem.index(own).slice(j * UNIT, UNIT, 0))
                mbarrier.wait(bars.index(FREE + other), phase ^ 1)
                mine = lane // PARTS == k
                short = gl.max((mine & (tokens < UNIT)).to(gl.int32), 0)
                uneven = gl.max((mine & (span != everyone)).to(gl.int32), 0)
                needs = gl.where(short != 0, ZEROS | MASK, gl.where(uneven != 0, MASK, 0))
                meta.index(stage).store(gl.where(lane == LEFT, tiles - n, needs))
                for h in gl.static_range(2):
                    token = h * 32 + lane
                    part = k * PARTS + token // UNIT
                    inside = token % UNIT < gl.gather(tokens, part, 0)
                    spans.index(2 * stage + h).store(
                        gl.where(inside, gl.gather(span, part, 0), 0))
                mbarrier.expect(bars.index(other), KV_TILE * (HALF + ROPE) * 2)
                for j in gl.static_range(PARTS):
                    row = gl.sum(gl.where(lane == k * PARTS + j, cache_row, 0), 0)
                    async_load(rope, [row, LATENT], bars.index(other),
                               rope_smem.index(stage).slice(j * UNIT, UNIT, 0))
                    async_load(halves, [row, (1 - stage) * HALF], bars.index(other),
                               kv_smem.index(other).slice(j * UNIT, UNIT, 0))
                if k == 0:  # early enough that no copy waits for the block table
                    next_cache_row, next_tokens, next_span = _look_up(
                        batch + 1, first, packed, opened, new, steps, lane, part_row, part_pos,
                        part_readers, table, stride_table, seq_lens, block_rows, HEADS,
                        BLOCK_SIZE, UNIT, PARTS)
            cache_row = next_cache_row
            tokens = next_tokens
            span = next_span
        uses_0 += (tiles + 1) // 2
        uses_1 += tiles // 2
