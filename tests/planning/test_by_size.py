"""The divider for two sizes of tile: every token once, within the room that is reserved."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_prefixshare.costs.cost_table import analytic_cost
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.dividers import by_size
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.workloads.trees import Workload, tree

from .strategies import LLAMA, make_planner, quick
from .test_depth_first import forests

ROWS_PER_REQUEST = 4


def plan_of(work: Workload, **config: object) -> DecodePlan:
    settings = {
        "divider": "by_size",
        "num_workers": 16,
        "max_tile_requests": 32,
        "num_small_workers": 66,
        "small_tile_requests": 4,
        **config,
    }
    cost = analytic_cost(LLAMA, "portable")
    planner = make_planner(work.block_size, cost, ROWS_PER_REQUEST, **settings)
    plan = planner.update(work.block_table, work.seq_lens)
    invariants.check(plan, work.block_table, work.seq_lens)
    return plan


def tile_sizes(plan: DecodePlan) -> np.ndarray:
    return np.diff(plan.tile_req_indptr)


@quick(150)
@given(
    work=forests(),
    workers=st.sampled_from([(1, 1), (2, 9), (16, 66)]),
    requests=st.sampled_from([(1, 1), (2, 1), (8, 2), (32, 4)]),
    apart=st.booleans(),
)
def test_every_token_is_read_once_within_the_reserved_room(work, workers, requests, apart):
    (large, small), (most, few) = workers, requests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_size, "choose", lambda problem, rates: apart)
        plan = plan_of(
            work,
            num_workers=large,
            num_small_workers=small,
            max_tile_requests=most,
            small_tile_requests=few,
        )
    n = work.num_reqs
    assert tile_sizes(plan).max() <= most
    assert plan.num_tiles <= 2 * (n + large + small)
    assert plan.num_partials <= 2 * (n + large * most + small * few)
    assert plan.num_runs <= 4 * n + plan.num_tiles


def test_long_private_parts_go_into_small_tiles():
    plan = plan_of(tree("1,8,512_32,2048,256"))
    private = tile_sizes(plan) <= 4
    assert private.sum() >= 128
    assert plan.num_partials >= 2 * 512


def test_short_private_parts_stay_with_what_is_shared():
    plan = plan_of(tree("1,1024_2048,32"))
    assert (tile_sizes(plan) == 32).all()
    assert plan.num_partials == 0


def test_a_batch_that_shares_nothing_has_small_tiles_only():
    plan = plan_of(tree("256_1024"))
    assert tile_sizes(plan).max() <= 4
    assert plan.num_partials == 0
