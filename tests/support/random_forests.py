"""Random forests of requests with adversarial keys and values, for the kernels, and the float64
result to compare with.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support import fuzz_scale as scale
from tests.support.planning_cases import LinearCost, make_batch
from tests.support.reference_attention import reference_attention
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.gpu_executor import GpuExecutor
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import DecodePlanner

#: distributions of keys and queries
VALUES = ("plain", "large", "equal", "one key beats all", "overflow", "tiny")
#: rounding the attention weights and the result, for one query token
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class ForestCase:
    """A batch as planned, and the change of each request's length until the kernel runs: longer, or
    shorter where ``slack`` allows it.

    prefixes: numbers of each request's blocks that other requests may hold too.
    tails: tokens after the prefixes.
    grown: tokens by which each request has grown since the plan.
    """

    heads: tuple[int, int]
    head_dim: int
    block_size: int
    dtype: torch.dtype
    query_lens: list[int]
    prefixes: list[list[int]]
    tails: list[int]
    grown: list[int]
    slack: int
    values: str
    cost: str
    seed: int

    @property
    def query_len(self) -> int:
        return max(self.query_lens)

    @property
    def attention(self) -> AttentionConfig:
        dtype = str(self.dtype).removeprefix("torch.")
        return AttentionConfig(*self.heads, self.head_dim, self.block_size, dtype)

    @property
    def planned_lens(self) -> np.ndarray:
        lens = [
            len(p) * self.block_size + t for p, t in zip(self.prefixes, self.tails, strict=True)
        ]
        return np.array(lens, np.int32)

    @property
    def true_lens(self) -> np.ndarray:
        return self.planned_lens - self.slack + np.array(self.grown, np.int32)

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    def block_table(self) -> np.ndarray:
        """The block table: prefix blocks have the first ids, and every other block belongs to one
        request.
        """
        longest = np.maximum(self.planned_lens, self.true_lens).tolist()
        filled = [len(prefix) * self.block_size for prefix in self.prefixes]
        tails = [length - tokens for length, tokens in zip(longest, filled, strict=True)]
        return make_batch(self.prefixes, tails, self.block_size).block_table

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """q, k_cache, v_cache, and the row whose results overflow (-1: none). Blocks that no
        request holds are full of NaN and infinities.
        """
        generator = torch.Generator().manual_seed(self.seed)
        table = self.block_table()
        num_blocks = int(table.max()) + 3
        shape = num_blocks, self.block_size, self.heads[1], self.head_dim
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        q = torch.randn(
            (int(self.query_start_loc[-1]), self.heads[0], self.head_dim), generator=generator
        )
        spoiled = -1
        if self.values == "large":
            q *= 300
        elif self.values == "tiny":
            q, k, v = q * 1e-6, k * 1e-6, v * 1e-3
        elif self.values == "equal":
            k[:] = 1.0
        elif self.values == "one key beats all":
            k[int(table[-1, 0]), 0] = 60.0
            q = q.abs()
        elif self.values == "overflow":
            # finite, as the backend keeps the values that it writes, but too large for the products
            spoiled = self.seed % len(table)
            own = int(table[spoiled, (int(self.true_lens[spoiled]) - 1) // self.block_size])
            k[own] = v[own] = torch.finfo(self.dtype).max
        held = np.unique(table)
        nobody = torch.ones(num_blocks, dtype=torch.bool)
        nobody[torch.from_numpy(held[held > 0]).long()] = False
        for cache, value in ((k, torch.nan), (v, torch.inf)):
            cache[nobody] = value
        k[0] = v[0] = 0.0  # vLLM zeroes the null block
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype), spoiled

    def batch(self) -> list[torch.Tensor]:
        """Block table, lengths and query starts, as the kernel gets them."""
        return [
            torch.from_numpy(x) for x in (self.block_table(), self.true_lens, self.query_start_loc)
        ]

    def expected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention in float64 from blocks that a request holds; other blocks must not matter."""
        return reference_attention(q, k, v, *self.batch())

    def check(
        self, out: torch.Tensor, expected: torch.Tensor, spoiled: int, tolerance: float
    ) -> None:
        """Compare per query token and head, so that one wrong row cannot hide. Numbers below the
        normal ones of a type are rounded to the nearest of equal steps.

        Args:
            out: of the batch's query tokens. spoiled: a row that is not compared, or -1.
        """
        numbers = torch.finfo(out.dtype)
        steps = numbers.smallest_normal * numbers.eps / 2 * self.head_dim**0.5
        starts = self.query_start_loc
        compared = torch.ones(len(out), dtype=torch.bool)
        if spoiled >= 0:
            compared[starts[spoiled] : starts[spoiled + 1]] = False
        out, expected = out.double()[compared], expected[compared]
        assert torch.isfinite(out).all()
        norm = expected.norm(dim=-1).clamp_min(1e-30)
        error = ((out - expected).norm(dim=-1) - steps) / norm
        assert (error < tolerance).all(), float(error.max())

    def plan(self, executor: GpuExecutor) -> DecodePlan:
        """The plan of ``executor`` for this batch, the same when it is made again, and right."""
        cost = {
            "estimate": analytic_cost(self.attention, "hopper"),
            "bytes": LinearCost(launch=0.001),
            "launch": LinearCost(launch=100.0, per_row_token=0.01, unshared_launch=100.0),
        }[self.cost]
        config = executor.planner_config(None, "always", null_block_id=0)
        arguments = config, cost, self.block_size, self.attention.gqa_group_size
        batch = self.block_table(), self.planned_lens, executor.query_len
        plan, again = (
            DecodePlanner(*arguments).update(*batch, slack=self.slack).plan for _ in range(2)
        )
        for name in DecodePlan.__slots__:
            np.testing.assert_array_equal(getattr(plan, name), getattr(again, name))
        invariants.check(plan, batch[0], self.true_lens)
        return plan


@st.composite
def forest_cases(
    draw: st.DrawFn,
    heads: list[tuple[int, int]],
    head_dims: list[int],
    block_sizes: list[int],
    kv_tile: int,
    max_reqs: int,
    longest_tail: int,
    longest_piece: int = 0,
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16),
    query_lens: tuple[int, ...] = (1, 1, 1, 2, 5),
) -> ForestCase:
    """Random cases. Lengths are at the borders of blocks, KV tiles and pieces of the walk, or
    anywhere.

    Args:
        longest_piece: tokens; a prefix is made of up to three equally long pieces, of which each
            case has three.
    """
    block = draw(st.sampled_from(block_sizes))
    borders = sorted(
        {
            n + d
            for n in (0, block, 2 * block, kv_tile, 2 * kv_tile, 4 * kv_tile)
            for d in (-1, 0, 1)
            if 1 <= n + d <= longest_tail
        }
    )
    lengths = st.sampled_from(borders) | st.integers(1, longest_tail)
    num_reqs = draw(st.integers(1, max_reqs))
    stretch = draw(st.sampled_from([1, 2, 3, max(1, max(kv_tile, longest_piece) // block)]))
    words = st.lists(st.integers(0, 2), unique=True, min_size=1, max_size=3)
    prefixes = [
        [1 + word * stretch + i for word in draw(words) for i in range(stretch)]
        for _ in range(num_reqs)
    ]
    query_len = draw(st.sampled_from(query_lens))
    slack = draw(st.sampled_from([0, query_len - 1, 2 * (query_len - 1)]))
    # a request has its query tokens even if all drafts are rejected
    tails = [draw(lengths) + query_len + slack for _ in range(num_reqs)]
    some_queries = st.integers(1, query_len)
    return ForestCase(
        heads=draw(st.sampled_from(heads)),
        head_dim=draw(st.sampled_from(head_dims)),
        block_size=block,
        dtype=draw(st.sampled_from(dtypes)),
        query_lens=[query_len, *(draw(some_queries) for _ in range(num_reqs - 1))],
        prefixes=prefixes,
        tails=tails,
        grown=[draw(st.sampled_from([0, 0, 1, block, kv_tile, 35])) for _ in range(num_reqs)],
        slack=slack,
        values=draw(st.sampled_from(VALUES)),
        cost=draw(st.sampled_from(["estimate", "bytes", "launch"])),
        seed=draw(st.integers(0, 1000)),
    )


def on_forests(
    cases: st.SearchStrategy[ForestCase], count: int
) -> Callable[[Callable[[ForestCase], None]], Callable[[], None]]:
    """Run a function on random cases: others with another FUZZ_SEED."""

    def decorate(function: Callable[[ForestCase], None]) -> Callable[[], None]:
        limits = settings(
            database=None,
            deadline=None,
            max_examples=count,
            phases=[Phase.generate],  # making a failure smaller takes minutes
            suppress_health_check=list(HealthCheck),
        )
        return limits(seed(scale.SEED)(given(cases)(function)))

    return decorate


def note(tried: Counter[str], case: ForestCase, plan: DecodePlan) -> None:
    """Count a case that passed."""
    tried["forests"] += 1
    tried["shared"] += bool(len(plan.shared_rows))
    tried["merged"] += plan.num_partials > 0
    tried[case.values] += 1
