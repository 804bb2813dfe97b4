"""A Gluon kernel whose warps do nothing but start: what racecheck says of it, it says of Triton."""
# mypy: allow-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write(out, number: gl.constexpr):
    gl.store(out + number, number)


@gluon.jit
def nothing_else(out):
    gl.warp_specialize([(_write, (out, 0)), (_write, (out, 1))], [1], [24])
