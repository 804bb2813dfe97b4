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
