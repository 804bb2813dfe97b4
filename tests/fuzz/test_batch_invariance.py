"""The divider ``batch_invariant``: the output bits of a request do not depend on who shares with
it, in which order requests come, or when the plan was made.

Under Triton's interpreter for the portable kernel, on a GPU for both kernels at full size.
``tests/unit/planning/dividers/test_dividers.py`` has what the plans must be like.
"""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch

from tests.support import decode_paths as paths
from tests.support.gpu_layer import KERNELS, THERE
from tests.support.reference_attention import reference_attention
from tests.support.triton_interpreter import bfloat16_in_the_interpreter  # noqa: F401
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.kernels.extras import PLAIN, LayerExtras
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.planner import DecodePlanner

BLOCK = 16


@dataclass
class Requests:
    """Requests whose tokens are known by their texts, a KV cache that holds each text once, and a
    query for each request.

    texts: of each request the block ids of its whole length.
    extras: what the layer adds to plain attention.
    """

    attention: AttentionConfig
    texts: list[list[int]]
    lens: list[int]
    device: str
    extras: LayerExtras = PLAIN

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        a = self.attention
        blocks = 1 + max(max(text) for text in self.texts)

        def random(dtype: str, *shape: int) -> torch.Tensor:
            x = torch.randn(shape, generator=generator)
            return x.to(getattr(torch, dtype)).to(self.device)

        cache = a.of_cache, blocks, BLOCK, a.num_kv_heads, a.head_dim
        self.k, self.v = random(*cache), random(*cache)
        self.q = random(a.of_queries, len(self.texts), a.num_qo_heads, a.head_dim)

    def batch(self, chosen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Block table and lengths of these requests."""
        table = np.zeros((len(chosen), max(len(self.texts[i]) for i in chosen)), np.int32)
        for row, i in enumerate(chosen):
            table[row, : len(self.texts[i])] = self.texts[i]
        return table, np.array([self.lens[i] for i in chosen], np.int32)

    def check(self, chosen: list[int], outs: torch.Tensor, tolerance: float) -> None:
        """Compare with attention in float64."""
        table, lens = map(torch.from_numpy, self.batch(chosen))
        tensors = (x.cpu() for x in (self.q[chosen], self.k, self.v))
        sinks = self.extras.sinks
        extras = self.extras._replace(sinks=None if sinks is None else sinks.cpu())
        expected = reference_attention(*tensors, table, lens, extras=extras)
        error = (outs.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < tolerance


class Decoder:
    """An executor with its planner. ``piece``: tokens of a piece."""

    def __init__(
        self,
        requests: Requests,
        executor: GpuExecutor,
        piece: int,
        divider: str = "batch_invariant",
    ) -> None:
        self.requests, self.executor, self.piece = requests, executor, piece
        attention = requests.attention
        config = executor.planner_config(
            divider, null_block_id=0, kv_chunk_size=piece, check_plans=True
        )
        cost = analytic_cost(attention, "hopper")
        self.planner = DecodePlanner(config, cost, BLOCK, attention.gqa_group_size)

    def run(self, chosen: list[int], planned_shorter: int = 0) -> torch.Tensor:
        """Outputs of these requests as one batch, and behind them their log-sum-exps, in float32:
        under a plan made when each request was shorter by up to so many tokens, as far as its last
        piece reaches.
        """
        table, lens = self.requests.batch(chosen)
        first = (lens - 1) // self.piece * self.piece
        planned = np.maximum(lens - planned_shorter, first + 1).astype(np.int32)
        self.planner.forget()
        plan = self.planner.update(table, planned).plan
        if planned_shorter:
            assert self.planner.update(table, lens).plan is plan, "to the end of the last pieces"
        invariants.check(plan, table, lens)
        self.executor.prepare(plan)
        partials = self.executor.workspace.partials
        for buffer in (partials.out, partials.lse):
            buffer.fill_(torch.nan)
        q = self.requests.q[chosen]
        dtype = getattr(torch, self.requests.attention.dtype)
        out = torch.full_like(q, torch.nan, dtype=dtype)
        tensors = (torch.from_numpy(x).to(q.device) for x in (table, lens))
        scale = self.requests.attention.head_dim**-0.5
        lse = torch.full(q.shape[:2], torch.nan, device=q.device)
        caches, extras = (self.requests.k, self.requests.v), self.requests.extras
        self.executor.run(q, *caches, *tensors, out, scale, lse=lse, extras=extras)
        return torch.cat([out.float(), lse[..., None]], dim=-1)

    def shares(self) -> bool:
        """Whether the last plan shares anything. Where one request fills a tile, none can."""
        return bool(len(self.executor._plan.shared_rows))


def some_requests(
    attention: AttentionConfig,
    count: int,
    piece: int,
    longest: int,
    device: str,
    extras: LayerExtras = PLAIN,
) -> Requests:
    """Requests with up to three texts in common, of any length, and tokens of their own."""
    random = Random(0)
    fresh = iter(range(1, 1 << 30))
    common = [[next(fresh) for _ in range(2 * piece // BLOCK + i)] for i in (0, 1, 5)]
    texts, lens = [], []
    for i in range(count):
        text = common[i % 2][: None if i % 3 else random.randrange(1, 2 * piece // BLOCK)]
        text = [*text, *common[2]] if len(text) >= 2 * piece // BLOCK else text
        own = random.choice([1, BLOCK, piece - 1, piece, piece + 1, random.randint(1, longest)])
        length = len(text) * BLOCK + own
        texts.append([*text, *(next(fresh) for _ in range(-(-own // BLOCK)))])
        lens.append(length)
    return Requests(attention, texts, lens, device, extras)


def assert_other_bits_by_default(decoder: Decoder) -> None:
    """What is tested is no matter of course: with the default divider some bits differ."""
    everybody = list(range(len(decoder.requests.texts)))
    by_default = Decoder(decoder.requests, decoder.executor, decoder.piece, "depth_first")
    outs = by_default.run(everybody)
    assert not all(torch.equal(by_default.run([i])[0], outs[i]) for i in everybody)


def assert_the_same_bits(decoder: Decoder, tolerance: float, batches: int) -> None:
    """Each request gives the same bits alone, with all others, in other batches and orders, under
    plans made earlier.
    """
    requests, random = decoder.requests, Random(1)
    everybody = list(range(len(requests.texts)))
    outs = decoder.run(everybody)
    assert decoder.shares() == (decoder.executor.limits.max_tile_requests > 1)
    requests.check(everybody, outs[..., :-1], tolerance)
    chosen = [[i] for i in everybody[: 2 * batches]]
    chosen += [random.sample(everybody, random.randint(2, len(everybody))) for _ in range(batches)]
    for some in chosen:
        for shorter in (0, 3, decoder.piece):
            found = decoder.run(some, shorter)
            for row, i in enumerate(some):
                assert torch.equal(found[row], outs[i]), f"request {i} in {some}, {shorter} shorter"


@pytest.mark.skipif(THERE, reason="the test below has this at full size")
@pytest.mark.parametrize("piece", [64, 320])
def test_the_portable_kernel_under_the_interpreter(piece):
    attention = AttentionConfig(4, 1, 64, BLOCK)
    requests = some_requests(attention, 7, piece, 150, "cpu")
    with paths.as_on_a_gpu(3):
        executor = GpuExecutor(attention, paths.CPU, kernel="portable")
        decoder = Decoder(requests, executor, piece)
        assert_the_same_bits(decoder, 8e-3, batches=2)
        if piece > 64:  # prefixes of few tokens are not shared by default
            assert_other_bits_by_default(decoder)


@pytest.mark.gpu
@pytest.mark.skipif(not THERE, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((32, 8), 128), ((8, 8), 64), ((16, 2), 256), ((64, 1), 128)], ids=str
)
def test_on_a_gpu(kernel, dtype, heads, head_dim):
    attention = AttentionConfig(*heads, head_dim, BLOCK, dtype)
    requests = some_requests(attention, 100, 512, 3000, "cuda")
    decoder = Decoder(requests, GpuExecutor(attention, "cuda", kernel=kernel), 512)
    assert_the_same_bits(decoder, 8e-3, batches=12)
    if decoder.executor.limits.max_tile_requests > 1:
        assert_other_bits_by_default(decoder)


#: name -> how the layer differs, its extras, and the relative error that its types allow
EXTRAS = {
    "sinks": ({"features": ("sinks",)}, {"sinks": torch.linspace(-2.0, 4.0, 32)}, 8e-3),
    "soft cap": ({"features": ("soft_cap",)}, {"soft_cap": 20.0}, 8e-3),
    "fp8": (
        {"kv_dtype": FP8, "query_dtype": FP8},
        {"q_scale": 0.8, "k_scale": 1.3, "v_scale": 0.7},
        2e-2,
    ),
}


@pytest.mark.gpu
@pytest.mark.skipif(not THERE, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", EXTRAS)
def test_layers_with_extras_on_a_gpu(kernel, name):
    changes, values, tolerance = EXTRAS[name]
    attention = AttentionConfig(32, 8, 128, BLOCK, **changes)
    extras = LayerExtras(
        **{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    )
    requests = some_requests(attention, 60, 512, 3000, "cuda", extras)
    decoder = Decoder(requests, GpuExecutor(attention, "cuda", kernel=kernel), 512)
    assert_the_same_bits(decoder, tolerance, batches=6)
