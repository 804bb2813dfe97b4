"""Cache write against torch: ``nan_to_num``, then the bits of each token into its slot."""

import pytest
import torch

from tests.support.portable_kernel import DEVICE
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cache_write import CacheWrite

BLOCKS, BLOCK_SIZE = 5, 16
#: of 7 tokens; two have no slot, one is the last of the cache
SLOTS = [37, -1, 0, BLOCKS * BLOCK_SIZE - 1, 15, -1, 16]
BF16, FP16 = torch.bfloat16, torch.float16


def every_number(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits: 1 in 128 (1 in 32) is NaN or an infinity, and so are the last four."""
    bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16)
    numbers = bits.view(dtype)
    special = [torch.nan, torch.inf, -torch.inf, -torch.nan]
    numbers[..., -4:] = torch.tensor(special, dtype=dtype)
    return numbers.to(DEVICE)


def paged_cache(layout: str, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """``[num_blocks, block_size, num_heads, width]`` with random bits, as vLLM lays it out."""
    if layout == "cross-layer":  # a block of all layers lies together
        return every_number(BLOCKS, 3, BLOCK_SIZE, heads, width, dtype=dtype)[:, 1]
    if layout == "HND":
        return every_number(BLOCKS, heads, BLOCK_SIZE, width, dtype=dtype).transpose(1, 2)
    cache = every_number(BLOCKS, BLOCK_SIZE * heads * width + 24, dtype=dtype)  # padded pages
    return cache[:, :-24].unflatten(1, (BLOCK_SIZE, heads, width))


def in_two_steps(key, value, k_cache, v_cache, slots) -> None:
    value = torch.nan_to_num(value)
    for token, slot in enumerate(slots):
        if slot >= 0:
            at = divmod(slot, BLOCK_SIZE)
            k_cache.view(torch.int16)[at] = key[token].view(torch.int16)
            v_cache.view(torch.int16)[at] = value[token].view(torch.int16)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND", "cross-layer"])
@pytest.mark.parametrize(
    ("heads", "dim"), [(8, 128), (1, 64), (3, 80), (2, 256), (32, 72), (1, 512)], ids=str
)
def test_the_bits_of_two_steps(heads, dim, layout, dtype):
    torch.manual_seed(0)
    # queries, keys and values of a token lie side by side, as a fused projection leaves them
    qkv = every_number(len(SLOTS), 4 * heads * dim, dtype=dtype)
    key, value = (x.unflatten(1, (heads, dim)) for x in qkv.split(heads * dim, 1)[2:])
    cache = paged_cache(layout, heads, 2 * dim, dtype)
    expected = torch.empty_strided(cache.shape, cache.stride(), dtype=dtype, device=DEVICE)
    expected.view(torch.int16).copy_(cache.view(torch.int16))
    in_two_steps(key, value, *expected.split(dim, -1), SLOTS)
    config = AttentionConfig(heads, heads, dim, BLOCK_SIZE, str(dtype).removeprefix("torch."))
    slots = torch.tensor(SLOTS, device=DEVICE)
    assert CacheWrite.of(config).write(key, value, *cache.split(dim, -1), slots)
    assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_number_becomes_what_torch_makes_of_it(dtype):
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    value = numbers.view(64, 8, 128).to(DEVICE)
    cache = torch.zeros(4, 16, 8, 256, dtype=dtype, device=DEVICE)
    write = CacheWrite.of(AttentionConfig(8, 8, 128, 16, str(dtype).removeprefix("torch.")))
    assert write.write(value, value, *cache.split(128, -1), torch.arange(64, device=DEVICE))
    k, v = (x.reshape(value.shape).view(torch.int16) for x in cache.split(128, -1))
    assert torch.equal(k, value.view(torch.int16))
    assert torch.equal(v, torch.nan_to_num(value).view(torch.int16))


def test_latents_and_their_rotated_parts():
    torch.manual_seed(0)
    value = every_number(len(SLOTS), 1, 512, dtype=BF16)
    key = every_number(len(SLOTS), 1, 600, dtype=BF16)[..., 536:]
    cache = every_number(BLOCKS, BLOCK_SIZE, 1, 576, dtype=BF16)
    expected = cache.view(torch.int16).clone().view(BF16)
    in_two_steps(key, value, expected[..., 512:], expected[..., :512], SLOTS)
    write = CacheWrite.of(AttentionConfig(16, 1, 576, BLOCK_SIZE, kv_lora_rank=512))
    slots = torch.tensor(SLOTS, device=DEVICE)
    assert write.write(key, value, cache[..., 512:], cache[..., :512], slots)
    assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("tokens", "slots"), [(7, 4), (4, 7), (7, 0), (0, 7)])
def test_as_many_tokens_as_both_have(tokens, slots):
    torch.manual_seed(0)
    key, value = every_number(2, tokens, 2, 64, dtype=BF16).unbind(0)
    cache = every_number(BLOCKS, BLOCK_SIZE, 2, 128, dtype=BF16)
    expected = cache.view(torch.int16).clone().view(BF16)
    both = SLOTS[: min(tokens, slots)]
    in_two_steps(key, value, *expected.split(64, -1), both)
    write = CacheWrite.of(AttentionConfig(2, 2, 64, BLOCK_SIZE))
    mapping = torch.tensor(SLOTS[:slots], dtype=torch.int64, device=DEVICE)
    assert write.write(key, value, *cache.split(64, -1), mapping)
    assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def test_heads_that_lie_further_apart_than_32_bits_count_are_not_written():
    def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    new, slots = numbers(7, 4, 64), numbers(7, dtype=torch.int64)
    cache = numbers(1 << 29, 128).as_strided((3, 16, 4, 128), (2048, 128, 1 << 29, 1))
    write = CacheWrite.of(AttentionConfig(4, 4, 64, BLOCK_SIZE))
    assert not write.write(new, new, *cache.split(64, -1), slots)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": FP16},
        {"cache": numbers(3, 16, 2, 128, dtype=torch.uint8)},
        {"cache": numbers(3, 32, 2, 128)},
        {"cache": numbers(3, 16, 2, 132)[..., :128]},  # places are no multiple of 16 bytes apart
        {"cache": numbers(3, 16, 2, 136)[..., 4:132]},  # it does not begin at one
        {"key": numbers(7, 2, 72)[..., :64]},  # heads lie apart
        {"key": numbers(7, 132)[:, :128].unflatten(1, (2, 64))},
        {"value": numbers(7, 4, 64)},
        {"slots": torch.zeros(7, dtype=torch.int32, device=DEVICE)},
        {"slots": torch.zeros(7, 1, dtype=torch.int64, device=DEVICE)},
    ],
    ids=range(10),
)
def test_what_would_take_another_binary_is_not_written(changes):
    dtype = changes.get("dtype", BF16)
    write = CacheWrite.of(AttentionConfig(2, 2, 64, BLOCK_SIZE))
    cache = changes.get("cache", numbers(3, 16, 2, 128, dtype=dtype)).fill_(1)
    k = changes.get("key", numbers(7, 2, 64, dtype=dtype))
    v = changes.get("value", numbers(7, 2, 64, dtype=dtype))
    slots = changes.get("slots", torch.zeros(7, dtype=torch.int64, device=DEVICE))
    assert not write.write(k, v, *cache.split(64, -1), slots)
    assert (cache == 1).all()
