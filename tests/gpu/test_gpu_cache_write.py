"""The cache write on a GPU: captured in a CUDA graph it leaves the bits that two launches leave,
``torch.nan_to_num`` and vLLM's own operator; and an engine's graphs hold it.

    python -m pytest -m gpu tests/gpu/test_gpu_cache_write.py
"""

import pytest
import torch

from tests.support import gpu_engines as cases
from tests.support.engine_steps import drive
from tests.support.gpu_engines import engines, extension, greedy
from tests.support.gpu_layer import BF16, DEVICE, FP16, on_gpu_with
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.aot.compilation import load_cache_write
from vllm_prefixshare.profiling.gpu_timing import capture

pytestmark = on_gpu_with("vllm")
BLOCKS = 100


def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits: one number in 128 (one in 32) is an infinity or NaN."""
    low, high = -(1 << 15), 1 << 15
    return torch.randint(low, high, shape, dtype=torch.int16, device=DEVICE).view(dtype)


def slots_of(tokens: int, block_size: int) -> torch.Tensor:
    """A slot of its own for each token; the third and every tenth token after it have none."""
    slots = torch.randperm(BLOCKS * block_size, device=DEVICE)[:tokens]
    slots[2::10] = -1
    return slots


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("tokens", [1, 8, 1024])
@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "layout", "dtype"),
    [
        (8, 128, 16, "NHD", BF16),
        (8, 128, 16, "HND", FP16),
        (1, 64, 16, "NHD", FP16),
        (12, 80, 528, "NHD padded", BF16),
        (4, 256, 64, "HND padded", BF16),
        (32, 128, 16, "NHD padded", FP16),
        (2, 512, 16, "HND", BF16),
    ],
    ids=str,
)
def test_a_graph_leaves_the_bits_of_two_launches(heads, dim, block_size, layout, dtype, tokens):
    from vllm.v1.attention.backends.fa_utils import reshape_and_cache_flash

    torch.manual_seed(0)
    # a projection's result, of which queries are the first half; two rows are a graph's padding
    qkv = bits(tokens + 2, 4 * heads * dim, dtype=dtype)
    key, value = (x.unflatten(1, (heads, dim)) for x in qkv.split(heads * dim, 1)[2:])
    inner = (heads, block_size) if "HND" in layout else (block_size, heads)
    page = heads * block_size * 2 * dim + 64 * ("padded" in layout)
    caches = [bits(BLOCKS, page, dtype=dtype)]
    caches.append(caches[0].view(torch.int16).clone().view(dtype))
    ours, theirs = (
        x[:, : heads * block_size * 2 * dim].unflatten(1, (*inner, 2 * dim)) for x in caches
    )
    if "HND" in layout:
        ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
    slots = slots_of(tokens, block_size)
    name = str(dtype).removeprefix("torch.")
    config = AttentionConfig(heads, heads, dim, block_size, name)
    write = load_cache_write(config, torch.device(DEVICE))
    one = torch.ones(1, device=DEVICE)

    def two_launches() -> None:
        k_cache, v_cache = theirs.split(dim, dim=-1)
        finite = torch.nan_to_num(value)
        reshape_and_cache_flash(key, finite, k_cache, v_cache, slots, "auto", one, one)

    # no run before the capture: the kernel must be loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert write.write(key, value, *ours.split(dim, dim=-1), slots)
    wanted, _ = capture(two_launches)  # which also runs it
    graph.replay()
    assert same_bits(*caches)
    for _ in range(2):  # other tokens and slots in the tensors that were captured
        qkv.view(torch.int16).copy_(bits(*qkv.shape, dtype=dtype).view(torch.int16))
        slots.copy_(slots_of(tokens, block_size))
        graph.replay()
        wanted.replay()
        assert same_bits(*caches)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("tokens", [1, 100])
def test_a_graph_leaves_the_bits_of_two_launches_with_latents(tokens, dtype):
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    latents = bits(tokens, 512, dtype=dtype)
    rotated = bits(tokens, 576, dtype=dtype)[:, 512:]
    ours = bits(BLOCKS, 64, 576, dtype=dtype)
    theirs = ours.view(torch.int16).clone().view(dtype)
    slots, one = slots_of(tokens, 64), torch.ones(1, device=DEVICE)
    name = str(dtype).removeprefix("torch.")
    config = AttentionConfig(16, 1, 576, 64, name, kv_lora_rank=512)
    write, paged = load_cache_write(config, torch.device(DEVICE)), ours[:, :, None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        caches = paged[..., 512:], paged[..., :512]
        assert write.write(rotated[:, None], latents[:, None], *caches, slots)
    graph.replay()
    finite = torch.nan_to_num(latents)
    ops.concat_and_cache_mla(finite, rotated, theirs, slots, kv_cache_dtype="auto", scale=one)
    assert same_bits(ours, theirs)


def test_no_memory_is_not_laid_on_triton():
    whole = torch.cuda.mem_get_info()[1]
    config = AttentionConfig(8, 8, 128, block_size=whole // (8 * 256 * 2) + 1)
    with pytest.raises(torch.OutOfMemoryError):
        load_cache_write(config, torch.device(DEVICE))


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_the_graphs_of_an_engine_hold_it(random_model, runner):
    prompts = cases.Text(random_model).asking(300, [20, 9, 31])
    options = {**cases.QUICK, **extension(cases.KernelNames)}
    with engines(cases.ours(random_model, runner, **options)) as (engine,):
        engine.call(drive, prompts, greedy(4))
        engine.collective_rpc("trace_kernels")
        engine.call(drive, prompts, greedy(33))
        (launches,) = engine.collective_rpc("kernels_traced")
    ours = sum(n for name, n in launches.items() if "_cache_write" in name)
    theirs = sum(n for name, n in launches.items() if "reshape_and_cache" in name)
    print(f"{ours} launches of ours, {theirs} of vLLM's")
    # four layers; 32 steps are graphs, and there are few others
    assert ours >= 4 * 30 and 0 < theirs <= 4 * 4
