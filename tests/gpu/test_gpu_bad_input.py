"""Bad input to the operator on a GPU: what is refused, and the messages."""

import pytest
import torch

from benchmarks.support.trees import tree
from tests.support.gpu_layer import BF16, DEVICE, HOPPER, KERNELS, ON_GPU, Layer
from vllm_prefixshare import PrefixShareDecodeWrapper, PrefixShareError
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor

pytestmark = ON_GPU
SMALL = "1,4_64,32"


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


def other_strides(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


TENSORS = [
    ("q", lambda t: t.float(), r"q must be torch\.bfloat16 on cuda:\d+, got torch\.float32"),
    ("q", lambda t: t.cpu(), r"q must be torch\.bfloat16 on cuda:\d+, got .* on cpu"),
    ("q", lambda t: t[:, :4], r"q must be \[\.\.\., 32, 128\], got \[4, 4, 128\]"),
    ("q", lambda t: t.flatten(), r"q must be \[\.\.\., 32, 128\]"),
    ("q", lambda t: t[:3], "q has 3 rows, the batch needs 4"),
    ("q", other_strides, "q has strides"),
    ("out", lambda t: t.half(), r"out must be torch\.bfloat16"),
    ("out", lambda t: t[:3], "out has 3 rows, the batch needs 4"),
    ("out", other_strides, "out has strides"),
    ("k_cache", lambda t: t.half(), r"k_cache must be torch\.bfloat16"),
    ("k_cache", lambda t: t.transpose(1, 2), r"k_cache must be \[\.\.\., 16, 8, 128\]"),
    ("k_cache", other_strides, "k_cache has strides"),
    ("v_cache", lambda t: t.flatten(0, 1), r"v_cache must be \[\.\.\., 16, 8, 128\]"),
    (
        "v_cache",
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "k_cache and v_cache have strides .* they must be the same",
    ),
    ("block_table", lambda t: t.long(), r"block_table must be torch\.int32"),
    ("block_table", lambda t: t.cpu(), r"block_table must be torch\.int32 on cuda"),
    ("block_table", lambda t: t.cpu().numpy(), "block_table must be"),
    ("block_table", lambda t: t[0], r"block_table must be \[\.\.\., \.\.\.\]"),
    ("block_table", lambda t: t[:3], "block_table has 3 rows, the batch needs 4"),
    ("block_table", other_strides, "block_table has strides"),
    ("seq_lens", lambda t: t.float(), r"seq_lens must be torch\.int32"),
    ("seq_lens", lambda t: t[:3], "seq_lens has 3 rows, the batch needs 4"),
    ("seq_lens", lambda t: t[:, None], r"seq_lens must be \[\.\.\.\]"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), TENSORS)
def test_refuses_tensors_of_another_kind(kernel, name, change, sentence):
    """Runs after a valid call, so that cached checks of that call would show."""
    layer = Layer(tree(SMALL))
    wrapper = layer.planned(kernel)
    good = layer.tensors | {"out": layer.run(wrapper)}
    with pytest.raises(PrefixShareError, match=sentence):
        wrapper.run(**good | {name: change(good[name])})
    layer.check(layer.run(wrapper))


def test_refuses_strides_that_16_byte_loads_cannot_follow(kernel):
    layer = Layer(tree(SMALL))
    wrapper = layer.planned(kernel)
    blocks, tokens, heads, dim = layer.k_cache.shape
    token = heads * dim + 4
    k, v = torch.zeros(2, blocks * tokens * token, dtype=BF16, device=DEVICE)
    shape, strides = layer.k_cache.shape, (tokens * token, token, dim, 1)
    tensors = layer.tensors | {
        "k_cache": k.as_strided(shape, strides),
        "v_cache": v.as_strided(shape, strides),
    }
    with pytest.raises(PrefixShareError, match="in multiples of 8 elements"):
        wrapper.run(**tensors)


@pytest.mark.parametrize("name", ["q", "out"])
def test_refuses_fewer_rows_than_query_tokens(kernel, name):
    layer = Layer(tree("1,4,16_1024,256,160"), counts=[4] * 16)
    wrapper = layer.planned(kernel)
    good = layer.tensors | {"out": torch.empty_like(layer.q)}
    with pytest.raises(PrefixShareError, match=f"{name} has 63 rows, the batch needs 64"):
        wrapper.run(**good | {name: good[name][:63]})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kernel": "best"}, "kernel must be one of auto, hopper, portable, got 'best'"),
        ({"dtype": torch.float32}, "dtype must be bfloat16 or float16 on a GPU, got float32"),
        ({"max_query_len": 0}, "max_query_len must be at least 1, got 0"),
        ({"divider": "best"}, "divider 'best' is unknown"),
        ({"kernel": "hopper", "block_size": 24}, "kernel 'hopper' needs compute capability 9.0"),
    ],
)
def test_refuses_layers_without_a_kernel(options, sentence):
    shape = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    with pytest.raises(PrefixShareError, match=sentence):
        PrefixShareDecodeWrapper(**shape | {"device": DEVICE} | options)


def test_refuses_more_queries_than_it_was_made_for(kernel):
    layer = Layer(tree("1,4,16_1024,256,160"), counts=[3] * 16)
    with pytest.raises(PrefixShareError, match="make the wrapper with max_query_len=3"):
        layer.planned(kernel, max_query_len=2)


def test_refuses_a_plan_for_other_workers(kernel):
    layer = Layer(tree(SMALL))
    plan = layer.planned(kernel).last_plan
    one = GpuExecutor(AttentionConfig(1024, 1024, 128, 16), DEVICE, kernel=kernel)
    assert one.limits.num_workers != plan.num_workers
    with pytest.raises(PrefixShareError, match=f"plan with num_workers={one.limits.num_workers}"):
        one.prepare(plan)


def test_auto_picks_the_hopper_kernel_where_it_can_serve():
    layer = Layer(tree("1,4_240,24", 24))
    wrapper = layer.planned("auto")
    assert wrapper._executor.name == "portable", "blocks of 24 tokens"
    layer.check(layer.run(wrapper))
    other = Layer(tree(SMALL)).wrapper("auto")
    assert other._executor.name == ("hopper" if HOPPER else "portable")
