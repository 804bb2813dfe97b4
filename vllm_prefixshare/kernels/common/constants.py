"""Compile-time constants of several kernels."""

import triton.language as tl

import vllm_prefixshare.kernels.common.arrays as words

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1e30)
# where a row's running maximum starts: far above masked scores, so that a row that has seen no
# token has weights of exactly zero. (With MASKED itself, the fused multiply-add of the exponent and
# the rounded maximum would differ by 1e22, and the weights would be infinite.)
LOWEST = tl.constexpr(-1e20)

FAR = tl.constexpr(words.FAR)
FIRST_SLOT = tl.constexpr(words.FIRST_SLOT)
NUM_REQS = tl.constexpr(words.NUM_REQS)
FIRST_RUN = tl.constexpr(words.FIRST_RUN)
END_RUN = tl.constexpr(words.END_RUN)
FIRST_PART = tl.constexpr(words.FIRST_PART)
PLANNED_KV_TILES = tl.constexpr(words.PLANNED_KV_TILES)
NEW_KV_TILES = tl.constexpr(words.NEW_KV_TILES)
WORDS = tl.constexpr(words.WORDS)
