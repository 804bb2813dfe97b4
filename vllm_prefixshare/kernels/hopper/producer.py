"""The producer warps of the Hopper kernel: order of the KV blocks, and the rows that read them.

A work tile is a list of KV ranges. One TMA fetches a piece: a block, or a part of a large block
(``config.part_size``). The pieces are laid end to end; every slot of a KV tile finds its range by a
search in registers, and its block through the block table.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import vllm_prefixshare.kernels.hopper.arrays as tile_info_words
from vllm_prefixshare.kernels.common.gluon_names import async_load

NUM_REQS = gl.constexpr(tile_info_words.NUM_REQS)
NUM_RUNS = gl.constexpr(tile_info_words.NUM_RUNS)
WIDE_RUNS = gl.constexpr(tile_info_words.WIDE_RUNS)
LOW_RUNS = gl.constexpr(tile_info_words.LOW_RUNS)
NEXT_TILE = gl.constexpr(tile_info_words.NEXT_TILE)
LOW_REQS = gl.constexpr(tile_info_words.LOW_REQS)
RESULTS = gl.constexpr(tile_info_words.RESULTS)
WORDS = gl.constexpr(tile_info_words.WORDS)

HALF_ROWS = gl.constexpr(64)  # query rows of one consumer warpgroup: wgmma's M
TILE_ROWS = gl.constexpr(128)
OPEN_END = gl.constexpr(-1)
# bits of RESULTS
PARTIAL = gl.constexpr(tile_info_words.PARTIAL)
OUTPUT = gl.constexpr(tile_info_words.OUTPUT)
PLAIN_START = gl.constexpr(tile_info_words.PLAIN_START)
# words of a stage's metadata, after the slots and the slots' positions
POSITIONS = gl.constexpr(8)
KIND = gl.constexpr(16)
FIRST_ROW = gl.constexpr(17)
LAST_ROW = gl.constexpr(18)
# bits of KIND
LAST_TILE = gl.constexpr(1)
NEEDS_MASK = gl.constexpr(2)


@gluon.jit
def place_of_block(SHAPE: gl.constexpr):
    """Worker, KV head and chunk of this thread block.

    Thread blocks with neighbouring numbers run on neighbouring multiprocessors, whose requests for
    the same bytes L2 answers together. So the chunks of a tile have neighbouring numbers, and so
    have two workers, of which plans make neighbours read the same tokens at the same time. With
    one query head each, most of the time is memory's: then neighbours read a token's heads, which
    lie side by side.
    """
    KV_HEADS: gl.constexpr = SHAPE.num_kv_heads
    CHUNKS: gl.constexpr = SHAPE.chunks
    chunk = gl.program_id(0) % CHUNKS
    block = gl.program_id(0) // CHUNKS
    worker = block // KV_HEADS
    head = block % KV_HEADS
    if SHAPE.num_qo_heads > KV_HEADS:
        paired = gl.num_programs(0) // (CHUNKS * KV_HEADS) // 2 * 2  # an odd worker comes last
        of_pair = block < paired * KV_HEADS
        worker = gl.where(of_pair, block // (2 * KV_HEADS) * 2 + block % 2, worker)
        head = gl.where(of_pair, block // 2 % KV_HEADS, head)
    return worker, head, chunk


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tile_row(reader, is_end, half, R: gl.constexpr, chunk):
    """Row of a tile at which the queries of its n-th request begin (end, if ``is_end``)."""
    if R > HALF_ROWS:  # one request, piece ``chunk`` of its rows
        row = gl.minimum(gl.maximum(reader * R - chunk * TILE_ROWS, 0), TILE_ROWS)
    else:  # the first ``half`` requests in the low half, the others in the high one
        row = gl.where(reader < half + is_end, reader * R, HALF_ROWS + (reader - half) * R)
    return row


@gluon.jit
def _prefetch(address, wanted):
    """Prefetch the cache lines of the addresses that are wanted into L2, to be read once the
    lengths are loaded. Each costs some ten cycles, one after the other, whatever its line is.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [address, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def _by_lane(x, RUNS: gl.constexpr):
    """Numbers of all runs, a row for each lane: ``[32, RUNS / 32]``."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, RUNS // 32], [32, 1], [1, 1], [1, 0])
    return gl.convert_layout(x.reshape([32, RUNS // 32]), ROWS)


@gluon.jit
def _find(slot, starts, RUNS: gl.constexpr):
    """The run of each of 32 slots, the last one that starts there or before: the lane that holds
    it, by binary search, and which of that lane's it is, both as ``[32, RUNS / 32]``.
    """
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    EACH: gl.constexpr = RUNS // 32
    ROWS: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [1, 1], [1, 0])
    starts = _by_lane(starts, RUNS)
    first = gl.convert_layout(gl.min(starts, 1), WARP)
    holder = gl.zeros_like(slot)
    step = 16
    while step > 0:
        holder = gl.where(gl.gather(first, holder + step, 0) <= slot, holder + step, holder)
        step //= 2
    holder = gl.convert_layout(holder, gl.SliceLayout(1, ROWS))[:, None]
    holder += gl.zeros([32, EACH], gl.int32, ROWS)
    slot = gl.convert_layout(slot, gl.SliceLayout(1, ROWS))[:, None]
    begun = gl.sum((gl.gather(starts, holder, 0) <= slot).to(gl.int32), 1)[:, None]
    return holder, gl.arange(0, EACH, gl.SliceLayout(0, ROWS))[None, :] == begun - 1


@gluon.jit
def _of_run(x, holder, found, RUNS: gl.constexpr):
    """The number of each slot's run, which ``_find`` has found."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    x = gl.gather(_by_lane(x, RUNS), holder, 0)
    return gl.convert_layout(gl.sum(gl.where(found, x, 0), 1), WARP)


@gluon.jit
def _slots(batch, tiles, wide, low, high, starts, runs, half, chunk, lane, table, stride_table,
           block_rows, SHAPE: gl.constexpr):
    """First row in the cache of head 0, rows and token count, and position, of 32 slots. The
    position is that in the request if there is a window, else that among the queries.

    wide, low, high: KV tiles of each kind. starts: slot at which each run begins. runs: per run
    (row, position that slot 0 would have, kv_end, readers, first query position). half: requests
    in the low half.
    """
    RUNS: gl.constexpr = SHAPE.max_tile_runs
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    PIECE: gl.constexpr = SHAPE.piece
    NB: gl.constexpr = SHAPE.kv_tile // PIECE
    tile = batch * (32 // NB) + lane // NB
    # Narrow tiles go in pairs, one for each half, and the pairs are spread evenly between the
    # pairs of wide tiles; the rest of either comes last.
    pairs = (low + high) // 2
    all_pairs = gl.maximum(pairs + wide // 2, 1)
    pair = tile // 2
    done = (pair * pairs) // all_pairs
    in_pair = pair < pairs + wide // 2
    in_narrow = ((pair + 1) * pairs) // all_pairs > done
    is_narrow = gl.where(in_pair, in_narrow, tile < wide // 2 * 2 + low + high)
    before = 2 * gl.where(in_pair, done, pairs)  # narrow tiles before this pair
    n = before + tile % 2
    both = gl.minimum(low, high)
    paired = n < 2 * both
    is_high = gl.where(paired, (n & 1) != 0, high > low)
    of_half = gl.where(paired, n >> 1, n - both)
    of_wide = tile - before - gl.where(in_pair, 0, (low + high) % 2)
    index = gl.where(is_narrow, wide + gl.where(is_high, low, 0) + of_half, of_wide)
    slot = index * NB + lane % NB

    row, origin, kv_end, readers, first_query = runs
    holder, found = _find(slot, starts, RUNS)
    start = _of_run(origin, holder, found, RUNS) + slot * PIECE
    tokens = gl.minimum(_of_run(kv_end, holder, found, RUNS) - start, PIECE)
    filled = (tokens > 0) & (tile < tiles)
    row = _of_run(row, holder, found, RUNS).to(gl.int64)
    at = table + row * stride_table + start // BLOCK_SIZE
    first = gl.load(at, mask=filled, other=0) * block_rows
    if PIECE < BLOCK_SIZE:
        first += start % BLOCK_SIZE
    # slots past the end of a list repeat their tile's first piece: their tokens are masked, but
    # shared memory must hold finite values
    first = gl.where(filled, first, gl.gather(first, lane - lane % NB, 0))
    readers = _of_run(readers, holder, found, RUNS)
    span = _tile_row(readers & 0xFFFF, 0, half, SHAPE.rows, chunk)
    span |= _tile_row(readers >> 16, 1, half, SHAPE.rows, chunk) << 8
    span |= gl.where(filled, tokens, 0) << 16
    if SHAPE.window == 0:
        start = gl.maximum(start - _of_run(first_query, holder, found, RUNS), -PIECE)
    return first, span, start


@gluon.jit
def _copy(cache, cache_row, k, lane, head, where, bar, tile_smem, SHAPE: gl.constexpr):
    """Copy KV tile ``k`` of a batch into its stage; the lanes hold the first rows of its pieces."""
    _, head_rows, head_cols = where
    PIECE: gl.constexpr = SHAPE.piece
    NB: gl.constexpr = SHAPE.kv_tile // PIECE
    for j in gl.static_range(NB):
        first = gl.sum(gl.where(lane == k * NB + j, cache_row, 0), 0)
        async_load(
            cache,
            [first + head * head_rows, head * head_cols],
            bar,
            tile_smem.slice(j * PIECE, PIECE, 0),
        )


@gluon.jit
def produce(IS_K: gl.constexpr, cache, table, seq_lens, query_start, plan, stride_table, where,
            tiles_smem, bars, meta, SHAPE: gl.constexpr, ITEM: gl.constexpr):
    """Fetch the K (or V) pieces of every KV tile; the K producer also describes the tile.

    ITEM: bytes of an element of the cache.
    """
    block_rows, _, _ = where
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    QUERY_LEN: gl.constexpr = SHAPE.query_len
    BLOCK_SIZE: gl.constexpr = SHAPE.block_size
    WINDOW: gl.constexpr = SHAPE.window
    PIECE: gl.constexpr = SHAPE.piece
    STAGES: gl.constexpr = SHAPE.stages
    RUNS: gl.constexpr = SHAPE.max_tile_runs
    BYTES: gl.constexpr = SHAPE.kv_tile * SHAPE.padded_dim * ITEM
    NB: gl.constexpr = SHAPE.kv_tile // PIECE
    BATCH: gl.constexpr = 32 // NB
    LOOK_AHEAD: gl.constexpr = (STAGES if STAGES < BATCH else BATCH) - 1
    lane = gl.arange(0, 32, WARP)
    r = gl.arange(0, RUNS, gl.BlockedLayout([RUNS // 32], [32], [1], [0]))
    worker, head, chunk = place_of_block(SHAPE)
    count = 0
    tile = worker
    while tile >= 0:
        num_runs = gl.load(plan.tile_info + tile * WORDS + NUM_RUNS)
        wide_runs = gl.load(plan.tile_info + tile * WORDS + WIDE_RUNS)
        low_runs = gl.load(plan.tile_info + tile * WORDS + LOW_RUNS)
        next_tile = gl.load(plan.tile_info + tile * WORDS + NEXT_TILE) - 1
        half = gl.load(plan.tile_info + tile * WORDS + LOW_REQS)
        results = gl.load(plan.tile_info + tile * WORDS + RESULTS)
        # not masked by num_runs: one round trip to memory for all of the tile. The words of places
        # without a run are zero: nothing of request 0.
        row = gl.load(plan.run_row + tile * RUNS + r)
        kv_start = gl.load(plan.run_kv_start + tile * RUNS + r)
        kv_end = gl.load(plan.run_kv_end + tile * RUNS + r)
        readers = gl.load(plan.run_readers + tile * RUNS + r)
        # of 32 bits, which is enough: a wrong address is no error of a prefetch
        _prefetch(table + row * stride_table + kv_start.to(gl.uint32) // BLOCK_SIZE, kv_end != 0)
        length = gl.load(seq_lens + row)
        first_query = gl.zeros_like(length)
        if QUERY_LEN > 1:
            queries = gl.load(query_start + row + 1) - gl.load(query_start + row)
            first_query = length - queries
        # the worker's first KV tile is copied before the lengths are there and its slots are found
        copied = gl.where(count == 0, results & PLAIN_START, 0)
        guess = lane
        if copied != 0:
            start = gl.load(plan.run_kv_start + tile * RUNS) + lane % NB * PIECE
            at = table + gl.load(plan.run_row + tile * RUNS).to(gl.int64) * stride_table
            guess = gl.load(at + start // BLOCK_SIZE, mask=lane < NB, other=0) * block_rows
            if PIECE < BLOCK_SIZE:
                guess += start % BLOCK_SIZE
            _copy(cache, guess, 0, lane, head, where, bars.index(0), tiles_smem.index(0),
                  SHAPE)
        kv_end = gl.where(kv_end == OPEN_END, length, kv_end)
        tokens = gl.maximum(kv_end - kv_start, 0).to(gl.uint32)
        num_pieces = ((tokens + PIECE - 1) // PIECE).to(gl.int32)
        narrow = r >= wide_runs
        of_high = r >= wide_runs + low_runs
        n_narrow = gl.sum(gl.where(narrow, num_pieces, 0), 0)
        n_high = gl.sum(gl.where(of_high, num_pieces, 0), 0)
        n_wide = gl.sum(num_pieces, 0) - n_narrow
        n_low = n_narrow - n_high
        wide = (n_wide + NB - 1) // NB
        low = (n_low + NB - 1) // NB
        high = (n_high + NB - 1) // NB
        starts = gl.associative_scan(num_pieces, 0, _add) - num_pieces
        starts += gl.where(narrow, wide * NB - n_wide, 0)
        starts += gl.where(of_high, low * NB - n_low, 0)
        runs = (row, kv_start - starts * PIECE, kv_end, readers, first_query)
        # at least one: consumers wait for a last tile even if all requests are shorter than planned
        tiles = gl.maximum(wide + low + high, gl.minimum(num_runs, 1))

        # positions from which on all requests of the tile see a token, and from which on some
        # query of the tile does not
        seen_from = 0
        seen_until = 0
        if IS_K and WINDOW > 0:
            num_reqs = gl.load(plan.tile_info + tile * WORDS + NUM_REQS)
            slot = tile * SHAPE.max_tile_requests + r
            request = gl.load(plan.slot_row + slot, mask=r < num_reqs, other=0)
            length = gl.load(seq_lens + request, mask=r < num_reqs, other=0)
            seen_from = gl.max(length, 0) - WINDOW
            seen_until = gl.min(gl.where(r < num_reqs, length, 1 << 30), 0) - QUERY_LEN
        cache_row, rows, position = _slots(0, tiles, wide, low, high, starts, runs, half, chunk,
                                           lane, table, stride_table, block_rows, SHAPE)
        wrong = (copied != 0) & (lane < NB) & (guess != cache_row)
        if gl.max(wrong.to(gl.int32), 0) != 0:
            # the range is shorter than planned: the copy is discarded
            if IS_K:
                meta.index(0).store(gl.where(lane == FIRST_ROW, TILE_ROWS, 0))
            mbarrier.expect(bars.index(0), BYTES)
            count += 1
            copied = 0
        for batch in range((tiles + BATCH - 1) // BATCH):
            next_cache_row = cache_row
            next_rows = rows
            next_position = position
            for k in range(gl.minimum(BATCH, tiles - batch * BATCH)):
                stage = count % STAGES
                mbarrier.wait(bars.index(STAGES + stage), ((count // STAGES) & 1) ^ 1)
                if copied == 0:
                    _copy(cache, cache_row, k, lane, head, where, bars.index(stage),
                          tiles_smem.index(stage), SHAPE)
                copied = 0
                if IS_K:
                    mine = lane // NB == k
                    used = mine & (rows >= 65536)
                    first = gl.min(gl.where(used, rows & 255, 255), 0)
                    last = gl.max(gl.where(used, (rows >> 8) & 255, 0), 0)
                    uneven = mine & (rows != (first | (last << 8) | (PIECE << 16)))
                    if WINDOW > 0:
                        uneven = uneven | (mine & (position < seen_from))
                        if QUERY_LEN > 1:
                            uneven = uneven | (mine & (position + PIECE > seen_until))
                    elif QUERY_LEN > 1:
                        uneven = uneven | (mine & (position + PIECE > 0))
                    kind = gl.where(batch * BATCH + k == tiles - 1, LAST_TILE, 0)
                    kind |= gl.where(gl.max(uneven.to(gl.int32), 0) != 0, NEEDS_MASK, 0)
                    word = gl.where(lane == KIND, kind, gl.where(lane == FIRST_ROW, first, last))
                    own = gl.minimum(k * NB + lane % 8, 31)
                    word = gl.where(lane < NB, gl.gather(rows, own, 0), word)
                    if QUERY_LEN > 1 or WINDOW > 0:
                        is_position = (lane >= POSITIONS) & (lane < POSITIONS + NB)
                        word = gl.where(is_position, gl.gather(position, own, 0), word)
                    meta.index(stage).store(word)
                # only now, because consumers read the metadata after this barrier
                mbarrier.expect(bars.index(stage), BYTES)
                count += 1
                # once all stages are being filled, and early enough that no TMA waits for the
                # block table
                if (k == LOOK_AHEAD) & ((batch + 1) * BATCH < tiles):
                    next_cache_row, next_rows, next_position = _slots(
                        batch + 1, tiles, wide, low, high, starts, runs, half, chunk, lane, table,
                        stride_table, block_rows, SHAPE)
            cache_row = next_cache_row
            rows = next_rows
            position = next_position
        tile = next_tile
