"""Latent KV caches (MLA) through the operator on a GPU at full size, against float64."""

import numpy as np
import pytest
import torch

from benchmarks.support.trees import Workload, tree
from tests.support.gpu_layer import (
    BF16,
    DEVICE,
    FP16,
    HOPPER,
    ON_GPU,
    TOLERANCE,
    at_boundaries,
    check_in_a_graph,
    newest_slots,
    poison,
)
from tests.support.latent_batches import RANK, SCALE, SCALES, WIDTH, let_scores_rise
from tests.support.reference_attention import reference_attention_and_lse
from vllm_prefixshare import PrefixShareDecodeWrapper
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.aot.compilation import load_cache_write
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras
from vllm_prefixshare.profiling.gpu_timing import capture

FP8 = torch.float8_e4m3fn
#: tensor cores add up products of eight bits with about 14 bits; of one query token, a head whose
#: scores are large may be wrong by 0.6%
FP8_TOLERANCE = {BF16: 6e-3, FP16: 5e-3}
pytestmark = [*ON_GPU, pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")]


class LatentLayer:
    """The tensors of a workload in one layer with a latent KV cache.

    interleaved: blocks lie as far apart as in a cache that holds two layers.
    queries: most query tokens of a request; some have fewer.
    fp8: queries and latents are quantised.
    """

    def __init__(
        self,
        work: Workload,
        heads: int = 16,
        dtype: torch.dtype = BF16,
        interleaved: bool = False,
        fp8: bool = False,
        queries: int = 1,
    ) -> None:
        torch.manual_seed(0)
        self.work, self.heads, self.dtype, self.queries = work, heads, dtype, queries
        self.quantised, self.extras = None, PLAIN
        counts = queries - np.arange(work.num_reqs) % queries  # as many, one less, ...
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.q = torch.randn(int(self.starts[-1]), heads, WIDTH, device=DEVICE).to(dtype)
        shape = work.num_blocks, 1 + interleaved, work.block_size, WIDTH
        self.cache = torch.randn(shape, device=DEVICE).to(dtype)[:, 0]
        self.table = torch.from_numpy(work.block_table).to(DEVICE)
        self.lens = torch.from_numpy(work.seq_lens).to(DEVICE)
        if fp8:
            self.quantise()

    def quantise(self) -> None:
        self.quantised, self.extras = FP8, LayerExtras(**SCALES)
        shape, strides = self.cache.shape, self.cache.stride()
        self.q, kept = self.q.to(FP8), self.cache.to(FP8)
        self.cache = torch.empty_strided(shape, strides, dtype=FP8, device=DEVICE)
        self.cache.copy_(kept)

    def planned(self, **options) -> PrefixShareDecodeWrapper:
        wrapper = PrefixShareDecodeWrapper(
            num_qo_heads=self.heads, num_kv_heads=1, head_dim=WIDTH, kv_lora_rank=RANK,
            block_size=self.work.block_size, dtype=self.dtype, device=DEVICE, sm_scale=SCALE,
            kv_dtype=self.quantised, query_dtype=self.quantised, max_query_len=self.queries,
            **options,
        )  # fmt: skip
        wrapper.plan(self.work.block_table, self.work.seq_lens, self.starts)
        return wrapper

    def run(self, wrapper: PrefixShareDecodeWrapper) -> tuple[torch.Tensor, torch.Tensor]:
        poison(wrapper._executor)
        out = torch.full((len(self.q), self.heads, RANK), torch.nan, dtype=self.dtype,
                         device=DEVICE)  # fmt: skip
        tensors = self.q, self.cache, None, self.table, self.lens, out
        return wrapper.run(*tensors, return_lse=True, extras=self.extras)

    def check(self, out: torch.Tensor, lse: torch.Tensor, tolerance: float = 0.0) -> None:
        assert out.isfinite().all() and lse.isfinite().all()
        rows = np.unique(np.linspace(0, self.work.num_reqs - 1, 12).astype(int)).tolist()
        caches = self.cache[:, :, None], self.cache[:, :, None, :RANK]
        of_rows = [np.arange(*self.starts[row : row + 2]) for row in rows]
        starts = np.cumsum([0, *map(len, of_rows)])
        tokens = np.concatenate(of_rows).tolist()
        batch = self.table[rows], self.lens[rows], torch.from_numpy(starts).to(DEVICE)
        wanted, wanted_lse = reference_attention_and_lse(
            _numbers(self.q)[tokens], *map(_numbers, caches), *batch, sm_scale=SCALE,
            extras=self.extras,
        )  # fmt: skip
        error = (out[tokens] - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert error.max() < (
            tolerance or (FP8_TOLERANCE if self.quantised else TOLERANCE)[self.dtype]
        )
        torch.testing.assert_close(lse[tokens].double(), wanted_lse, rtol=0, atol=2e-2)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits: torch cannot index the narrower type."""
    return x.half() if x.element_size() == 1 else x


FP8_TOO = pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])


@FP8_TOO
@pytest.mark.parametrize("heads", [8, 16, 24, 64, 128])
@pytest.mark.parametrize("spec", ["1,64_4096,128", "1,8,64_1024,200,128", "9_17", "3_4096"])
def test_matches_float64(heads, spec, fp8):
    layer = LatentLayer(tree(spec, 64), heads, fp8=fp8)
    layer.check(*layer.run(layer.planned()))


@FP8_TOO
@pytest.mark.parametrize(("heads", "queries"), [(8, 2), (8, 4), (16, 2), (24, 3), (16, 6)])
@pytest.mark.parametrize("spec", ["1,64_4096,128", "1,8,64_1024,200,128", "9_17"])
def test_several_query_tokens(heads, queries, spec, fp8):
    layer = LatentLayer(tree(spec, 64), heads, fp8=fp8, queries=queries)
    layer.check(*layer.run(layer.planned()))


@FP8_TOO
@pytest.mark.parametrize("heads", [8, 16, 24])
def test_maxima_that_rise_late(heads, fp8):
    layer = LatentLayer(tree("1,64_4096,128", 64), heads)
    let_scores_rise(layer.q, layer.cache, layer.table, layer.lens)
    if fp8:
        layer.q[..., -1] /= 16
        layer.quantise()
    # the scores are larger, up to 20
    layer.check(*layer.run(layer.planned()), tolerance=1e-2 if fp8 else 0.0)


@pytest.mark.parametrize(("block_size", "dtype"), [(16, FP16), (32, BF16), (128, FP16)])
@pytest.mark.parametrize("interleaved", [False, True])
@FP8_TOO
def test_block_sizes_types_and_strides(block_size, dtype, interleaved, fp8):
    layer = LatentLayer(tree("1,4,16_1024,256,150", block_size), 8, dtype, interleaved, fp8)
    layer.check(*layer.run(layer.planned()))


@pytest.mark.parametrize(("heads", "queries"), [(8, 1), (16, 1), (8, 3)])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@FP8_TOO
def test_every_length_at_a_boundary(block_size, heads, queries, fp8):
    layer = LatentLayer(at_boundaries(block_size, queries), heads, fp8=fp8, queries=queries)
    wrapper = layer.planned(divider="deft_node")
    assert wrapper.stats().share_factor > 1
    layer.check(*layer.run(wrapper))


@pytest.mark.parametrize("divider", ["flashforge", "deft_flatten", "per_request"])
def test_the_plans_of_other_dividers(divider):
    layer = LatentLayer(tree("4,16,60_1024,256,100", 64))
    layer.check(*layer.run(layer.planned(divider=divider)))


@pytest.mark.parametrize("queries", [1, 2])
@FP8_TOO
def test_one_graph_serves_sequences_that_grow(fp8, queries):
    tree_of = tree("1,8,64_1024,256,250", 64, spare=128)
    layer = LatentLayer(tree_of, fp8=fp8, queries=queries)
    wrapper = layer.planned()
    graph, result = capture(lambda: layer.run(wrapper))
    for _ in range(3):
        layer.lens += 30
        graph.replay()
        layer.check(*result)


def test_a_graph_attends_to_what_the_launch_before_writes():
    # the kernel is launched while it still runs
    layer = LatentLayer(tree("1,40_512,33", 64))
    wrapper = layer.planned()
    config = AttentionConfig(16, 1, WIDTH, 64, kv_lora_rank=RANK)
    write = load_cache_write(config, torch.device(DEVICE))
    slots = newest_slots(layer.table, layer.lens, 64)
    latents = layer.cache[:, :, None]
    caches = latents[..., RANK:], latents[..., :RANK]
    tokens = torch.randn(20, 40, 1, WIDTH, device=DEVICE).to(BF16)

    def layers(in_order) -> torch.Tensor:
        outs = []
        for token in tokens:
            assert write.write(token[..., RANK:], token[..., :RANK], *caches, slots)
            in_order()
            outs.append(wrapper.run(layer.q, layer.cache, None, layer.table, layer.lens))
            in_order()
        return torch.stack(outs)

    check_in_a_graph(layers)


def test_the_same_plan_gives_the_same_bits():
    layer = LatentLayer(tree("1,64_16384,40", 64))
    wrapper = layer.planned()
    out, lse = layer.run(wrapper)
    assert wrapper.last_plan.num_partials > 0
    again, lse_again = layer.run(wrapper)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
