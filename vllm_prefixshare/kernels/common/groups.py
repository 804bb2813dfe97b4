"""Groups of arguments that a launch passes, and a kernel takes, as one.

Triton treats each element of a named tuple as an argument, and for one that is None makes a binary
without it. Not in a group are tensor descriptors, which its launcher takes only singly before
Triton 3.8, and arguments that are not specialised: Triton's ``do_not_specialize`` has no effect on
the elements of a tuple.
"""

from typing import Any, NamedTuple


class Outputs(NamedTuple):
    """What partial attention writes: see ``interface.Tensors``."""

    partial_out: Any
    partial_lse: Any
    out: Any
    out_lse: Any


class Strides(NamedTuple):
    """Elements between blocks, tokens and heads of the KV cache, and between tokens of ``q`` and
    ``out``.
    """

    block: Any
    token: Any
    head: Any
    q: Any
    out: Any


class MlaKernelShape(NamedTuple):
    """Compile-time shape of the MLA kernel, see ``catalog.HopperShape``.

    latent, rope: columns of the compressed KV, and of the rotated part of keys.
    unit: tokens that TMA fetches at once.
    chunks: CTAs for the rows of a request. rows: query rows of a work tile, ``max_tile_requests``
        its requests.
    """

    num_heads: int
    query_len: int
    latent: int
    rope: int
    block_size: int
    unit: int
    chunks: int
    rows: int
    kv_tile: int
    max_tile_requests: int


class PortableShape(NamedTuple):
    """Compile-time shape of the portable kernel, see ``catalog.HopperShape``.

    unit: tokens of a part of a KV tile.
    columns, rows, kv_tile, stages, hoist: see ``catalog.QTile``. chunks: Q tiles of a request.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    columns: int
    block_size: int
    unit: int
    query_len: int
    window: int
    chunks: int
    rows: int
    kv_tile: int
    stages: int
    hoist: int
