"""The producer warp of the MLA kernel: it copies KV tiles and describes them.

A work tile is a list of parts of ``UNIT`` tokens, which fill its KV tiles. Each lane looks up one
part, so that a batch of KV tiles is known before it is copied.

A KV tile is copied by TMA in two halves of columns, each of which has its own barriers. The
rotated part of the keys comes with the half that the other consumer multiplies with its weights,
because the weights take its place.

A KV tile of a quantised cache is copied as a whole, to one of two places.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_prefixshare.kernels.common.constants import (
    FAR,
    FIRST_PART,
    NEW_KV_TILES,
    NUM_REQS,
    PLANNED_KV_TILES,
    WORDS,
)
from vllm_prefixshare.kernels.common.gluon_names import async_load

# barriers: halves of a KV tile that are filled and that are free, by stage and half; weights by
# stage; queries; sums
FREE = gl.constexpr(4)
WEIGHTS = gl.constexpr(8)
QUERIES = gl.constexpr(10)
SUMS = gl.constexpr(11)
# Of a quantised cache halves that are filled have wide numbers, and come in the order in which they
# are widened. A KV tile was copied, and was read; weights were added by the other consumer, by
# stage.
COPIED = gl.constexpr(12)
READ = gl.constexpr(14)
ADDED = gl.constexpr(16)
BARRIERS = gl.constexpr(18)
# words that describe a KV tile: how many the work tile has from here on, and what it needs
LEFT = gl.constexpr(0)
NEEDS = gl.constexpr(1)
MASK = gl.constexpr(1)  # some row does not read some token
ZEROS = gl.constexpr(2)  # some token is past the end of its request


@gluon.jit
def word(words, i, WARPS: gl.constexpr = 4):
    """Word ``i`` of what describes the KV tiles of both stages."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(words.index(i).load(ONE), 0)


@gluon.jit
def query_of(row, request, there, query_start_loc, HEADS: gl.constexpr, QUERY_LEN: gl.constexpr):
    """Query token of each row, among its request's and in the batch, and whether there is one:
    requests may have fewer than ``QUERY_LEN``.
    """
    if QUERY_LEN == 1:
        return 0, request, there
    else:
        query = row % (QUERY_LEN * HEADS) // HEADS
        token = gl.load(query_start_loc + request, mask=there, other=0) + query
        after = gl.load(query_start_loc + request + 1, mask=there, other=0)
        return query, token, there & (token < after)


@gluon.jit
def _work_tile(tile, r, plan, SHAPE: gl.constexpr):
    """Number of requests, first part, KV tiles of planned and of new parts; of each request its
    batch row and the token at which its part for new tokens begins.
    """
    ROOM: gl.constexpr = SHAPE.max_tile_requests
    num_reqs = gl.load(plan.tile_info + tile * WORDS + NUM_REQS)
    first = gl.load(plan.tile_info + tile * WORDS + FIRST_PART)
    packed = gl.load(plan.tile_info + tile * WORDS + PLANNED_KV_TILES)
    new = gl.load(plan.tile_info + tile * WORDS + NEW_KV_TILES)
    request = gl.load(plan.slot_row + tile * ROOM + r, mask=r < ROOM, other=0)
    planned_end = gl.load(plan.slot_end + tile * ROOM + r, mask=r < ROOM, other=FAR)
    return num_reqs, first, packed, new, request, planned_end


@gluon.jit
def _parts(n, first, packed, new, lane, plan, SHAPE: gl.constexpr):
    """Batch row, first token and readers of 32 parts, those of KV tile ``n`` in each lane."""
    PARTS: gl.constexpr = SHAPE.kv_tile // SHAPE.unit
    late = gl.maximum(n - packed, 0)
    rounds = late // gl.maximum(new, 1)
    at = first + gl.where(n < packed, n, packed + late - rounds * new) * PARTS + lane % PARTS
    there = (n < packed) | (new > 0)
    row = gl.load(plan.part_row + at, mask=there, other=0)
    pos = gl.load(plan.part_pos + at, mask=there, other=0) + rounds * SHAPE.unit
    return row, pos, gl.load(plan.part_readers + at, mask=there, other=0)


@gluon.jit
def _places(inside, row, pos, readers, table, stride_table, seq_lens, query_start_loc, block_rows,
            SHAPE: gl.constexpr):
    """Row in the cache, number of tokens, interval of reading rows of parts, and how many of the
    tokens all queries of the readers see: none of those that share a part has a query in it.
    """
    length = gl.load(seq_lens + row, mask=readers != 0, other=0)
    tokens = gl.where(inside, gl.minimum(gl.maximum(length - pos, 0), SHAPE.unit), 0)
    seen = tokens
    if SHAPE.query_len > 1:
        after = gl.load(query_start_loc + row + 1, mask=readers != 0, other=0)
        seen = length - pos + 1 - after
        seen += gl.load(query_start_loc + row, mask=readers != 0, other=0)
    at_block = table + row.to(gl.int64) * stride_table + pos // SHAPE.block_size
    block = gl.load(at_block, mask=tokens > 0, other=0)
    cache_row = block * block_rows + gl.where(tokens > 0, pos % SHAPE.block_size, 0)
    ROWS: gl.constexpr = SHAPE.query_len * SHAPE.num_heads
    span = (readers & 0xFFFF) * ROWS | (readers >> 16) * ROWS << 16
    return cache_row, tokens, gl.where(tokens > 0, span, 0), seen


@gluon.jit
def produce(halves, rope, table, seq_lens, query_start_loc, plan, stride_table, block_rows,
            kv_smem, rope_smem, spans, meta, bars, SHAPE: gl.constexpr, FP8: gl.constexpr):
    """Copy the KV tiles of the worker's work tiles."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    SLOTS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    HEADS: gl.constexpr = SHAPE.num_heads
    QUERY_LEN: gl.constexpr = SHAPE.query_len
    LATENT: gl.constexpr = SHAPE.latent
    ROPE: gl.constexpr = SHAPE.rope
    UNIT: gl.constexpr = SHAPE.unit
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    PARTS: gl.constexpr = KV_TILE // UNIT
    BATCH: gl.constexpr = 32 // PARTS
    HALF: gl.constexpr = LATENT // 2
    lane = gl.arange(0, 32, WARP)
    r = gl.arange(0, 64, SLOTS)
    worker = gl.program_id(0) // SHAPE.chunks
    # The first tile has the worker's number. It is looked up with as few loads after each other
    # as can be, because the CTA waits for it.
    num_reqs, first, packed, new, request, planned_end = _work_tile(worker, r, plan, SHAPE)
    begin = gl.load(plan.work_indptr + worker)
    end = gl.load(plan.work_indptr + worker + 1)
    uses_0 = 0  # of either stage by the work tiles before
    uses_1 = 0
    for number in range(begin - 1, end):
        batch_row, pos, readers = _parts(lane // PARTS, first, packed, new, lane, plan, SHAPE)
        length = gl.load(seq_lens + request, mask=r < num_reqs, other=0)
        growth = gl.maximum(gl.max((length - planned_end + UNIT - 1) // UNIT, 0), 0)
        steps = packed + new * growth
        everyone = num_reqs * QUERY_LEN * HEADS << 16
        tiles = gl.maximum(steps, 1)  # consumers wait for one even if nothing is read

        cache_row, tokens, span, seen = _places(
            lane // PARTS < steps, batch_row, pos, readers, table, stride_table, seq_lens,
            query_start_loc, block_rows, SHAPE)
        for batch in range((tiles + BATCH - 1) // BATCH):
            next_cache_row = cache_row
            next_tokens = tokens
            next_span = span
            next_seen = seen
            for k in range(gl.minimum(BATCH, tiles - batch * BATCH)):
                n = batch * BATCH + k
                stage = n % 2
                phase = (gl.where(stage == 0, uses_0, uses_1) + n // 2) & 1
                # the half that the stage's own consumer multiplies is free first
                own = 2 * stage + stage
                other = 2 * stage + 1 - stage
                before = uses_0 + uses_1 + n  # KV tiles in all
                place = before % 2
                if FP8:
                    mbarrier.wait(bars.index(READ + place), ((before // 2) & 1) ^ 1)
                else:
                    mbarrier.wait(bars.index(FREE + own), phase ^ 1)
                    mbarrier.expect(bars.index(own), KV_TILE * HALF * 2)
                    for j in gl.static_range(PARTS):
                        row = gl.sum(gl.where(lane == k * PARTS + j, cache_row, 0), 0)
                        async_load(halves, [row, stage * HALF], bars.index(own),
                                   kv_smem.index(own).slice(j * UNIT, UNIT, 0))
                    mbarrier.wait(bars.index(FREE + other), phase ^ 1)
                mine = lane // PARTS == k
                short = gl.max((mine & (tokens < UNIT)).to(gl.int32), 0)
                uneven = gl.max((mine & ((span != everyone) | (seen < tokens))).to(gl.int32), 0)
                needs = gl.where(short != 0, ZEROS | MASK, gl.where(uneven != 0, MASK, 0))
                # all have done with the KV tile four before, if two before was widened
                noted = before % 4 if FP8 else stage
                meta.index(noted).store(gl.where(lane == LEFT, tiles - n, needs))
                for h in gl.static_range(2):
                    token = h * 32 + lane
                    part = k * PARTS + token // UNIT
                    inside = token % UNIT < gl.gather(tokens, part, 0)
                    by = gl.gather(span, part, 0)
                    if QUERY_LEN > 1:  # not by queries before the token
                        late = token % UNIT + 1 - gl.gather(seen, part, 0)
                        by += gl.maximum(late, 0) * HEADS
                    spans.index(2 * noted + h).store(gl.where(inside, by, 0))
                if FP8:
                    mbarrier.expect(bars.index(COPIED + place), KV_TILE * (LATENT + ROPE))
                    for j in gl.static_range(PARTS):
                        row = gl.sum(gl.where(lane == k * PARTS + j, cache_row, 0), 0)
                        for h in gl.static_range(2):
                            async_load(halves, [row, h * HALF], bars.index(COPIED + place),
                                       kv_smem.index(2 * place + h).slice(j * UNIT, UNIT, 0))
                        async_load(rope, [row, LATENT], bars.index(COPIED + place),
                                   rope_smem.index(place).slice(j * UNIT, UNIT, 0))
                else:
                    mbarrier.expect(bars.index(other), KV_TILE * (HALF + ROPE) * 2)
                    for j in gl.static_range(PARTS):
                        row = gl.sum(gl.where(lane == k * PARTS + j, cache_row, 0), 0)
                        async_load(rope, [row, LATENT], bars.index(other),
                                   rope_smem.index(stage).slice(j * UNIT, UNIT, 0))
                        async_load(halves, [row, (1 - stage) * HALF], bars.index(other),
                                   kv_smem.index(other).slice(j * UNIT, UNIT, 0))
                if k == 0:  # early enough that no copy waits for the block table
                    ahead = (batch + 1) * BATCH + lane // PARTS
                    batch_row, pos, readers = _parts(ahead, first, packed, new, lane, plan,
                                                     SHAPE)
                    next_cache_row, next_tokens, next_span, next_seen = _places(
                        ahead < steps, batch_row, pos, readers, table, stride_table, seq_lens,
                        query_start_loc, block_rows, SHAPE)
            cache_row = next_cache_row
            tokens = next_tokens
            span = next_span
            seen = next_seen
        uses_0 += (tiles + 1) // 2
        uses_1 += tiles // 2
        # of the next tile; after the last one of any that is there
        num_reqs, first, packed, new, request, planned_end = _work_tile(
            gl.where(number + 1 < end, number + 1, worker), r, plan, SHAPE)
