"""What the K producer writes about each KV tile of the Hopper kernel, as the consumers read it."""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_prefixshare.kernels.hopper.producer import POSITIONS


@gluon.jit
def word(meta, i, WARPS: gl.constexpr = 4):
    """Word ``i`` of the metadata of all stages."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(meta.index(i).load(ONE), 0)


@gluon.jit
def visible(meta, stage, tile_row, query, mask_words, cols, SHAPE: gl.constexpr,
            TREE: gl.constexpr, S: gl.constexpr):
    """Which tokens of the KV tile each row reads. query: its position, in the request if there is a
    window, else among the queries. mask_words: each row's words of a token tree's mask.
    """
    PIECE: gl.constexpr = SHAPE.piece
    KV_TILE: gl.constexpr = SHAPE.kv_tile
    NB: gl.constexpr = KV_TILE // PIECE
    rows = gl.zeros([KV_TILE], gl.int32, gl.SliceLayout(0, S))
    for j in gl.static_range(NB):
        rows = gl.where(cols // PIECE == j, word(meta, stage * 32 + j), rows)
    ok = (tile_row[:, None] >= (rows & 255)[None, :]) & (
        tile_row[:, None] < ((rows >> 8) & 255)[None, :]
    )
    ok &= (cols % PIECE < (rows >> 16))[None, :]
    if SHAPE.query_len > 1 or SHAPE.window > 0:
        key = gl.zeros([KV_TILE], gl.int32, gl.SliceLayout(0, S))
        for j in gl.static_range(NB):
            key = gl.where(cols // PIECE == j, word(meta, stage * 32 + POSITIONS + j), key)
        key += cols % PIECE
        if TREE:
            seen = mask_words[0][:, None]
            for i in gl.static_range(1, len(mask_words)):
                seen = gl.where((key < 32 * i)[None, :], seen, mask_words[i][:, None])
            ok &= (key < 0)[None, :] | (((seen >> (key & 31)[None, :]) & 1) != 0)
        elif SHAPE.query_len > 1:
            ok &= key[None, :] <= query[:, None]
        if SHAPE.window > 0:
            ok &= key[None, :] > (query - SHAPE.window)[:, None]
    return ok
