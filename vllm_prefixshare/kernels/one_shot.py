"""Merge the states of several GPUs in one launch, through memory that all of them can write.

Each GPU writes its output and log-sum-exp into its own place in every other GPU's memory, then a
round number; then it merges what the others have written here. As a collective this is a one-shot
all-gather followed by merge states.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

import torch
import triton
import triton.language as tl

from vllm_prefixshare.kernels.aot.dispatch import launch, power_of_two
from vllm_prefixshare.kernels.common.constants import LN2, LOG2E

#: programs of a launch. All must run at once, because each waits for the one of its number on the
#: other GPUs; the smallest GPU that the kernels serve holds several times as many.
PROGRAMS = 128
ROWS = 16  # that a program sends and merges at once
#: rounds count from 0 to here, and start again
LAST_ROUND = tl.constexpr((1 << 30) - 1)
GAVE_UP = tl.constexpr(-1)
POLLS = 256  # between two looks at the clock


def place_bytes(rows: int, head_dim: int, item: int) -> int:
    """Bytes of one GPU's place, a multiple of 16: outputs, then log-sum-exps."""
    return -(-rows * (head_dim * item + 4) // 16) * 16


def one_shot_bytes(size: int, rows: int, head_dim: int, item: int) -> int:
    """Bytes that each of ``size`` GPUs keeps for ``one_shot``: for every GPU two places, which are
    used in turns, and a number for each program.
    """
    return size * (2 * place_bytes(rows, head_dim, item) + 4 * PROGRAMS)


def one_shot(
    out: torch.Tensor,
    lse: torch.Tensor,
    memories: torch.Tensor,
    rounds: torch.Tensor,
    gave_up: torch.Tensor,
    rank: int,
    max_rows: int,
    patience: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the states of all GPUs, in the order of their ranks, so that all have the same bits.
    Every GPU makes the same launches; they depend on the shapes of the arguments only.

    Args:
        out: ``[num_tokens, num_heads, head_dim]``, contiguous; not read where ``lse`` is ``-inf``.
        lse: float32 ``[num_tokens, num_heads]``, contiguous, natural logarithm.
        memories: int64 ``[size]`` addresses of ``one_shot_bytes`` for ``max_rows``, each on one
            of the GPUs, zero before the first launch.
        rounds: int32 ``[PROGRAMS]`` on this GPU, zero before the first launch; a program that gave
            up leaves ``GAVE_UP`` here, and returns at once from then on.
        gave_up: int32 ``[1]``, in memory of the host that this GPU can write: set to 1 by a
            program that another GPU kept waiting for longer than ``patience`` seconds.
        rank: of this GPU, its place in ``memories``.
        max_rows: that the memories hold, the same in all launches: a row is at the same address in
            each, whatever their number, so that only its own program ever uses it.
        patience: seconds.

    Returns:
        The output ``[num_tokens, num_heads, head_dim]`` in the dtype of ``out`` and its
        log-sum-exp, float32; 0 and ``-inf`` where no state saw a token. Not written after giving
        up.
    """
    num_tokens, num_heads, head_dim = out.shape
    rows = num_tokens * num_heads
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    launch(
        _one_shot, (min(PROGRAMS, triton.cdiv(rows, ROWS)),),
        out, lse, merged, merged_lse, memories, rounds, gave_up, rank, rows, max_rows,
        place_bytes(max_rows, head_dim, out.element_size()), int(patience * 1e9),
        SIZE=len(memories), HEAD_DIM=head_dim, D=power_of_two(head_dim), ROWS=ROWS,
        PROGRAMS=PROGRAMS, POLLS=POLLS, num_warps=4,
    )
    return merged, merged_lse


@triton.jit
def _nanoseconds():
    """The clock, equal in all threads of a program."""
    threads = tl.arange(0, 128)
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer; // $1", "=l,r", [threads],
                                    dtype=tl.int64, is_pure=False, pack=1)
    return tl.max(now, 0)


# not specialised: one binary serves every batch
@triton.jit(do_not_specialize=["rank", "rows", "max_rows", "place", "patience"])
def _one_shot(out, lse, merged, merged_lse, memories, rounds, gave_up, rank, rows, max_rows, place,
              patience, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
              ROWS: tl.constexpr, PROGRAMS: tl.constexpr, POLLS: tl.constexpr):
    """Grid: at most ``PROGRAMS``. A memory holds a number for each GPU and program, then two places
    for each GPU.
    """
    program = tl.program_id(0)
    dtype = out.dtype.element_ty
    dim = tl.arange(0, D)
    is_dim = (dim < HEAD_DIM)[None, :]
    lses_at = max_rows.to(tl.int64) * HEAD_DIM * (dtype.primitive_bitwidth // 8)
    last = tl.load(rounds + program)
    if last != GAVE_UP:
        this_round = (last + 1) & LAST_ROUND
        # Two places in turns: another GPU's program of this number writes the same one again two
        # rounds later, after it waited for the round between. This GPU's was in it, so done with
        # this round.
        first_place = 4 * SIZE * PROGRAMS + (this_round & 1) * SIZE * place.to(tl.int64)
        for first in range(program * ROWS, rows, PROGRAMS * ROWS):
            row = first + tl.arange(0, ROWS)
            is_row = row < rows
            at = row[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
            inside = is_row[:, None] & is_dim
            own = tl.load(out + at, mask=inside, other=0.0)
            own_lse = tl.load(lse + row, mask=is_row, other=0.0)
            for other in tl.static_range(SIZE):
                if other != rank:
                    here = tl.load(memories + other) + first_place + rank * place.to(tl.int64)
                    there = here + lses_at
                    outs = tl.multiple_of(here.to(tl.pointer_type(dtype)), 16)
                    tl.store(outs + at, own, mask=inside)
                    tl.store(there.to(tl.pointer_type(tl.float32)) + row, own_lse, mask=is_row)
        tl.debug_barrier()  # all threads have written
        for other in tl.static_range(SIZE):
            if other != rank:
                numbers = tl.load(memories + other).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(numbers + rank * PROGRAMS + program, this_round, sem="release",
                               scope="sys")
        own_memory = tl.load(memories + rank)
        numbers = own_memory.to(tl.pointer_type(tl.int32))
        began = _nanoseconds()
        late = 0
        for other in tl.static_range(SIZE):
            if other != rank:
                waits = 1
                while waits != 0:
                    said = tl.atomic_add(numbers + other * PROGRAMS + program, 0, sem="acquire",
                                         scope="sys")
                    # that GPU may be one round ahead
                    if ((said - this_round) & LAST_ROUND) <= 1:
                        waits = 0
                    elif waits % POLLS == 0:  # type: ignore[operator]
                        if _nanoseconds() - began > patience:
                            late = 1
                            waits = 0
                        else:
                            waits = 1
                    else:
                        waits += 1
        if late != 0:
            tl.store(rounds + program, GAVE_UP)
            tl.store(gave_up, 1)
        else:
            tl.store(rounds + program, this_round)
            for first in range(program * ROWS, rows, PROGRAMS * ROWS):
                row = first + tl.arange(0, ROWS)
                is_row = row < rows
                at = row[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
                inside = is_row[:, None] & is_dim
                m = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, D], tl.float32)
                for other in tl.static_range(SIZE):
                    here = own_memory + first_place + other * place.to(tl.int64)
                    there = here + lses_at
                    outs = tl.where(other == rank, out.to(tl.int64), here)
                    lses = tl.where(other == rank, lse.to(tl.int64), there)
                    outs = tl.multiple_of(outs.to(tl.pointer_type(dtype)), 16)
                    lses = lses.to(tl.pointer_type(tl.float32))
                    state = tl.load(lses + row, mask=is_row, other=float("-inf"),
                                    cache_modifier=".cg") * LOG2E
                    m_new = tl.maximum(m, state)
                    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
                    alpha = tl.exp2(m - base)
                    weight = tl.exp2(state - base)
                    m = m_new
                    seen = inside & (weight > 0)[:, None]
                    value = tl.load(outs + at, mask=seen, other=0.0, cache_modifier=".cg")
                    total = total * alpha + weight
                    acc = acc * alpha[:, None] + value.to(tl.float32) * weight[:, None]
                result = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
                tl.store(merged + at, result.to(dtype), mask=inside)
                result_lse = tl.where(total > 0, (m + tl.log2(total)) * LN2, float("-inf"))
                tl.store(merged_lse + row, result_lse, mask=is_row)
