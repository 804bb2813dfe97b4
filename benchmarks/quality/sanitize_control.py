"""Gluon kernels without a race: what racecheck says of them, it says of Triton or errs in."""
# mypy: allow-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vllm_prefixshare.kernels.common.gluon_names import barrier

ROWS = gl.constexpr(64)
# barriers, two of each
FREE = gl.constexpr(0)
WRITTEN = gl.constexpr(2)
READ = gl.constexpr(4)


@gluon.jit
def _write(out, number: gl.constexpr):
    gl.store(out + number, number)


@gluon.jit
def nothing_else(out):
    """Its warps do nothing but start."""
    gl.warp_specialize([(_write, (out, 0)), (_write, (out, 1))], [1], [24])


@gluon.jit
def _swap(HALF: gl.constexpr, out, numbers, bars, TURNS: gl.constexpr):
    OTHER: gl.constexpr = 1 - HALF
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    row = gl.arange(0, ROWS, ROW)
    number = (row + HALF * ROWS).to(gl.float32)
    for turn in range(TURNS):
        mbarrier.wait(bars.index(FREE + HALF), turn & 1)
        numbers.index(HALF).store(number)
        barrier()
        mbarrier.arrive(bars.index(WRITTEN + HALF), count=1)
        mbarrier.wait(bars.index(WRITTEN + OTHER), turn & 1)
        number += numbers.index(OTHER).load(ROW)
        barrier()
        mbarrier.arrive(bars.index(READ + OTHER), count=1)
    gl.store(out + HALF * ROWS + row, number)


@gluon.jit
def _release(bars, TURNS: gl.constexpr):
    for turn in range(TURNS):
        for half in gl.static_range(2):
            mbarrier.wait(bars.index(READ + half), (turn & 1) ^ 1)
            mbarrier.arrive(bars.index(FREE + half), count=1)


@gluon.jit
def handover(out, TURNS: gl.constexpr):
    """Two warpgroups add each other's numbers, ``TURNS`` times, as those of the kernel for latent
    KV caches hand over running maxima and sums.

    A barrier of the warpgroup lies between the writes and the arrival of one thread for all, and
    between the reads and another; a third warp says when numbers may be written again.
    out: ``[2, ROWS]``, the same from each program.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    numbers = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(6):
        mbarrier.init(bars.index(i), count=1)
    gl.warp_specialize(
        [
            (_swap, (0, out, numbers, bars, TURNS)),
            (_swap, (1, out, numbers, bars, TURNS)),
            (_release, (bars, TURNS)),
        ],
        [4, 1],
        [64, 24],
    )
