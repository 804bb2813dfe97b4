"""Extra features of a layer, on a GPU at full size, against attention in float64."""

from itertools import product

import pytest
import torch

from benchmarks.support.trees import tree
from tests.support.gpu_layer import BF16, DEVICE, KERNELS, ON_GPU, Layer, at_boundaries, poison
from tests.support.paged_batches import relative_error
from tests.support.reference_attention import reference_attention_and_lse
from vllm_prefixshare import LayerExtras, PrefixShareError
from vllm_prefixshare.kernels.extras import PLAIN
from vllm_prefixshare.profiling.gpu_timing import capture

pytestmark = ON_GPU
FP8 = torch.float8_e4m3fn
HEADS = (16, 4)
#: Relative error of a request's output. On Hopper, quantised queries and keys are multiplied as
#: 8-bit numbers, and the sums of their products keep about 14 bits.
TOLERANCE, FP8_TOLERANCE = 4e-3, 8e-3
SPECS = ["1,8,64_1024,200,128", "1,4,16_64,32,1", "5_17", "3_4096"]


def extras_of(name: str) -> tuple[dict, LayerExtras]:
    """Options of the wrapper, and the extras of the layer."""

    def numbers(first: float, last: float, count: int = HEADS[0]) -> torch.Tensor:
        return torch.linspace(first, last, count, device=DEVICE)

    sinks, slopes = numbers(-2, 6), 2.0 ** -numbers(1, 8)
    scales = {f"{x}_scale": numbers(0.5, 1.5, HEADS[1]) for x in "qkv"}
    fp8 = {"kv_dtype": FP8, "query_dtype": FP8}
    del (plain_queries := dict(scales))["q_scale"]
    return {
        "sinks": ({"features": ["sinks"]}, LayerExtras(sinks=sinks.to(BF16))),
        "soft_cap": ({"features": ["soft_cap"]}, LayerExtras(soft_cap=3.0)),
        "alibi": ({"features": ["alibi"]}, LayerExtras(alibi_slopes=slopes)),
        "fp8": (fp8, LayerExtras(**scales)),
        "fp8, plain queries": ({"kv_dtype": FP8}, LayerExtras(**plain_queries)),
        "fp8, sinks, soft_cap": (
            {**fp8, "features": ["sinks", "soft_cap"]},
            LayerExtras(sinks=sinks, soft_cap=20.0, **scales),
        ),
    }[name]


NAMES = ["sinks", "soft_cap", "alibi", "fp8", "fp8, plain queries", "fp8, sinks, soft_cap"]
#: extras that only the portable kernel serves
PORTABLE_ONLY = {"alibi", "fp8, plain queries"}
RUNS = [(k, n) for k, n in product(KERNELS, NAMES) if k == "portable" or n not in PORTABLE_ONLY]


def prepared(layer: Layer, options: dict) -> Layer:
    if "kv_dtype" in options:
        layer.k_cache, layer.v_cache = layer.k_cache.to(FP8), layer.v_cache.to(FP8)
    if "query_dtype" in options:
        layer.q = layer.q.to(FP8)
    return layer


def check(
    layer: Layer,
    out: torch.Tensor,
    lse: torch.Tensor,
    extras: LayerExtras = PLAIN,
    window: int | None = None,
) -> None:
    starts = torch.from_numpy(layer.starts)
    wanted, wanted_lse = reference_attention_and_lse(
        *layer.tensors.values(), starts, extras=extras, sliding_window=window
    )
    tolerance = TOLERANCE if layer.q.element_size() > 1 else FP8_TOLERANCE
    assert out.isfinite().all()
    assert relative_error(out, wanted) < tolerance
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize(("kernel", "name"), RUNS)
@pytest.mark.parametrize("counts", [[1], [1, 4, 2, 3]], ids=["one", "ragged"])
@pytest.mark.parametrize(("block_size", "layout"), [(16, "NHD"), (32, "HND")])
def test_matches_float64(kernel, name, counts, block_size, layout):
    options, extras = extras_of(name)
    for spec in SPECS:
        layer = prepared(Layer.repeating(tree(spec, block_size), counts, layout=layout), options)
        wrapper = layer.planned(kernel, max_query_len=max(counts), **options)
        poison(wrapper._executor)
        check(layer, *wrapper.run(**layer.tensors, extras=extras, return_lse=True), extras)


@pytest.mark.parametrize(("kernel", "name"), RUNS)
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 528])
def test_every_length_at_a_boundary(kernel, name, block_size, layout, queries):
    options, extras = extras_of(name)
    work = at_boundaries(block_size, queries)
    layer = Layer(work, HEADS, counts=[queries] * work.num_reqs, layout=layout)
    wrapper = prepared(layer, options).planned(kernel, divider="deft_node", **options)
    assert wrapper.stats().share_factor > 1
    poison(wrapper._executor)
    check(layer, *wrapper.run(**layer.tensors, extras=extras, return_lse=True), extras)


@pytest.mark.parametrize("name", ["fp8", "sinks"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "head_dim"), [((64, 8), 64), ((32, 8), 128), ((16, 4), 256)])
def test_other_shapes(kernel, heads, head_dim, name):
    extras = {
        "fp8": LayerExtras(q_scale=0.5, k_scale=1.5, v_scale=0.75),
        "sinks": LayerExtras(sinks=torch.linspace(-2, 6, heads[0], device=DEVICE)),
    }[name]
    fp8 = {"kv_dtype": FP8, "query_dtype": FP8}
    options = fp8 if name == "fp8" else {"features": ["sinks"]}
    layer = prepared(Layer(tree(SPECS[0]), heads, head_dim), options)
    wrapper = layer.planned(kernel, **options)
    check(layer, *wrapper.run(**layer.tensors, extras=extras, return_lse=True), extras)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 528])
def test_wide_heads_at_every_boundary(block_size, layout, queries):
    work = at_boundaries(block_size, queries)
    counts = [queries] * work.num_reqs
    layer = Layer(work, (16, 2), head_dim=512, counts=counts, layout=layout)
    wrapper = layer.planned("portable", divider="deft_node")
    poison(wrapper._executor)
    check(layer, *wrapper.run(**layer.tensors, return_lse=True), LayerExtras())


@pytest.mark.parametrize("counts", [1, 4])
def test_wide_heads(counts):
    layer = Layer(tree(SPECS[0]), (16, 2), head_dim=512, counts=[counts] * 64)
    wrapper = layer.planned("portable")
    check(layer, *wrapper.run(**layer.tensors, return_lse=True), LayerExtras())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_reads_scales_where_they_lie(kernel):
    options, extras = extras_of("fp8")
    layer = prepared(Layer(tree(SPECS[0]), HEADS), options)
    wrapper = layer.planned(kernel, **options)
    out = torch.empty(layer.q.shape, dtype=BF16, device=DEVICE)
    wrapper.run(**layer.tensors, out=out, extras=extras)  # the first run checks the scales
    graph, _ = capture(lambda: wrapper.run(**layer.tensors, out=out, extras=extras))
    extras.v_scale.mul_(2)
    first = out.clone()
    graph.replay()
    torch.testing.assert_close(out.float(), 2 * first.float(), rtol=1e-2, atol=1e-3)


def test_scales_that_are_no_numbers_are_refused():
    options, extras = extras_of("fp8")
    layer = prepared(Layer(tree(SPECS[1]), HEADS), options)
    wrapper = layer.planned("auto", **options)
    bad = extras._replace(k_scale=torch.full((1,), torch.nan, device=DEVICE))
    with pytest.raises(PrefixShareError, match="k_scale must be positive and finite"):
        wrapper.run(**layer.tensors, extras=bad)
