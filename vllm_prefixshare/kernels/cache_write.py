"""Cache write: K and V of new tokens into their slots of a paged KV cache, every value made finite.

Requests share a work tile, where a weight of zero times NaN is NaN: values must be finite, keys
need not. ``torch.nan_to_num`` and an engine's own write are two launches, this is one.
"""
# fmt: off
# mypy: allow-untyped-defs, allow-incomplete-defs
# Long signatures read better wrapped than with one name per line; kernels are not typed.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.aot.dispatch import has_dependent_launch, launch, power_of_two

#: bits of infinity without its sign: those of NaN are larger, those of finite numbers smaller
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
#: maximum numbers of K, and of V, that a program writes: with 4 warps, 16 bytes of each in a thread
MAX_NUMBERS = 1024
#: bytes of a load or store, and the numbers in them
WIDE, STEP = 16, 8


@dataclass(frozen=True)
class CacheWrite:
    """The write of one shape of layers, whose launches are all of one binary.

    num_heads: KV heads. k_width, v_width: numbers of a head that are written as K and as V.
    dtype: bfloat16 or float16, of the new tokens and of the cache.
    """

    num_heads: int
    k_width: int
    v_width: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, attention: AttentionConfig) -> "CacheWrite":
        """The write for a layer whose cache is not quantised. With latents V is the latent, and K
        the rotated part, which lies behind it.
        """
        width = attention.head_dim
        if attention.kv_lora_rank is not None:
            width -= attention.kv_lora_rank
        dtype = getattr(torch, attention.dtype)
        heads, block_size = attention.num_kv_heads, attention.block_size
        return cls(heads, width, attention.v_head_dim, block_size, dtype)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> bool:
        """Write the tokens, unless a tensor is not as described here: that would take another
        binary, which may not be loaded within a capture. The launch depends on the shapes and
        strides of its arguments only.

        Args:
            key, value: ``[num_tokens, num_heads, width]``, the last two dimensions contiguous.
            k_cache, v_cache: ``[num_blocks, block_size, num_heads, width]``, NHD or HND in memory,
                with the same strides. All four begin at a multiple of 16 bytes, and their strides
                are multiples of 8 numbers.
            slot_mapping: int64 ``[num_tokens]``, ``block * block_size + place`` of each token, or a
                negative number for none. It may be shorter or longer than ``key``; the rest of the
                longer is left out.

        Returns:
            Whether they were written.
        """
        if not self._takes(key, value, k_cache, v_cache, slot_mapping):
            return False
        num_tokens = min(len(slot_mapping), len(key), len(value))
        numbers = self.num_heads * max(self.k_width, self.v_width)
        each = min(power_of_two(numbers), MAX_NUMBERS)
        if num_tokens:
            launch(
                _cache_write, (num_tokens, triton.cdiv(numbers, each)),
                # as bits, which a load or store cannot change
                *(x.view(torch.int16) for x in (key, value, k_cache, v_cache)), slot_mapping,
                key.stride(0), value.stride(0), *k_cache.stride()[:3],
                HEADS=self.num_heads, K_WIDTH=self.k_width, V_WIDTH=self.v_width,
                BLOCK_SIZE=self.block_size, INFINITY=INFINITY[self.dtype], NUMBERS=each,
                STARTS_NEXT=has_dependent_launch(_cache_write),
                num_warps=max(1, each // (32 * STEP)),
            )
        return True

    def write_nothing(self, device: torch.device | str) -> None:
        """Write no token, with the binary of every other write: compiles and loads it."""
        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device)

        cache = numbers(1, self.block_size, self.num_heads, self.k_width + self.v_width)
        written = self.write(
            numbers(1, self.num_heads, self.k_width), numbers(1, self.num_heads, self.v_width),
            cache[..., :self.k_width], cache[..., self.k_width:],
            torch.full((1,), -1, dtype=torch.int64, device=device),
        )
        assert written, self

    def _takes(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> bool:
        heads, block = self.num_heads, (self.block_size, self.num_heads)
        numbers = (
            (key, 3, (heads, self.k_width)), (value, 3, (heads, self.v_width)),
            (k_cache, 4, (*block, self.k_width)), (v_cache, 4, (*block, self.v_width)),
        )
        return (
            all(
                x.dtype == self.dtype
                and x.dim() == dims and x.shape[1:] == tail
                and x.stride(-1) == 1 and x.data_ptr() % WIDE == 0
                # the stride of a dimension of size 1 is unused, and may be any 32-bit number
                and all(s < 1 << 31 and (n == 1 or s % STEP == 0)
                        for s, n in zip(x.stride()[:-1], x.shape, strict=False))
                for x, dims, tail in numbers
            )
            and all(heads == 1 or x.stride(1) == x.shape[2] for x in (key, value))
            and k_cache.stride() == v_cache.stride()
            and heads * k_cache.stride(2) < 1 << 31  # the kernel multiplies them in 32 bits
            and slot_mapping.dtype == torch.int64
            and slot_mapping.dim() == 1 and slot_mapping.is_contiguous()
        )


# not specialised: one binary serves every batch and every layout
@triton.jit(do_not_specialize=["slot_mapping", "stride_key", "stride_value", "stride_block",
                               "stride_place", "stride_head"])
def _cache_write(key, value, k_cache, v_cache, slot_mapping, stride_key, stride_value,
                 stride_block, stride_place, stride_head,
                 HEADS: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, INFINITY: tl.constexpr, NUMBERS: tl.constexpr,
                 STARTS_NEXT: tl.constexpr):
    """Grid: token, numbers of the token. All tensors of numbers are int16.

    STARTS_NEXT: the next launch may begin, if it was launched so (``common.dependent_launch``).
    """
    if STARTS_NEXT:
        tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    in_k = at < HEADS * K_WIDTH
    in_v = at < HEADS * V_WIDTH
    # the three loads are in flight together: the numbers of a token without a slot are read, too
    slot = tl.load(slot_mapping + token)
    k = tl.load(key + tl.multiple_of(token * stride_key, 8) + at, mask=in_k)
    v = tl.load(value + tl.multiple_of(token * stride_value, 8) + at, mask=in_v)
    magnitude = v & 0x7FFF
    v = tl.where(magnitude > INFINITY, 0, tl.where(magnitude == INFINITY, v - 1, v))
    if slot >= 0:
        block = slot // BLOCK_SIZE
        place = slot - block * BLOCK_SIZE
        first = tl.multiple_of(block * stride_block + place * stride_place, 8)
        k_head = tl.multiple_of(at // K_WIDTH * stride_head, 8)
        v_head = tl.multiple_of(at // V_WIDTH * stride_head, 8)
        tl.store(k_cache + first + k_head + at % K_WIDTH, k, mask=in_k)
        tl.store(v_cache + first + v_head + at % V_WIDTH, v, mask=in_v)
