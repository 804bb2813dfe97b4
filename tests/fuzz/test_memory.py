"""The largest batch in practice: planning it takes a known amount of memory."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import decode_paths as paths
from tests.support import fuzz_scale as scale
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PieceLimits
from vllm_prefixshare.planning.planner import PLANNING_FAILED, DecodePlanner

NUM_REQS, BLOCK_SIZE, BLOCKS = 4096, 16, 8192  # BLOCKS of each request: 128k tokens
MIB = 1 << 20
#: tokens of a piece under batch invariance, of which a request has 64 at most
PIECE = BLOCKS * BLOCK_SIZE // 64


def table_of(kind: str) -> np.ndarray:
    """``[4096, 8192]`` block ids.

    one prefix: all requests share 96k tokens. a deep tree: each block is shared by half of the
    requests that share the block 16 before it, down to pairs. a comb: request ``i`` leaves the
    others after ``2 * i`` blocks, so there are as many nodes as requests, each below the one
    before. nothing: no block is shared.
    """
    table = np.arange(1, 1 + NUM_REQS * BLOCKS, dtype=np.int32).reshape(NUM_REQS, BLOCKS)
    rows = np.arange(NUM_REQS)
    if kind == "one prefix":
        table[:, :6144] = table[0, :6144]
    elif kind == "a deep tree":
        for level in range(12):
            group = rows >> (12 - level) << (12 - level)
            span = slice(16 * level, 16 * level + 16)
            table[:, span] = table[group, span]
    elif kind == "a comb":
        for i in range(1, NUM_REQS):
            table[i:, 2 * i - 2 : 2 * i] = table[0, 2 * i - 2 : 2 * i]
    return table


def resident(name: str) -> int:
    """Bytes of ``VmRSS`` or of ``VmHWM``, the highest value since its last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self")
@pytest.mark.parametrize("kind", ["one prefix", "a deep tree", "a comb", "nothing"])
@pytest.mark.parametrize("path", [*paths.PATHS, "batch_invariant"])
def test_4096_requests_of_128k_tokens_in_bounded_memory(path, kind):
    """Planning keeps a copy of the block table, to compare later tables with: 128 MiB, and 200 MiB
    when it is full, because it has room for a quarter more requests and blocks. (Batch invariance
    plans no more than the first block of a request's last piece, and keeps no more.) Beside this
    copy, planning takes less than 64 MiB at any time (80 MiB for the 262,144 pieces of batch
    invariance): nothing else grows with the tokens. Planning again takes no more.
    """
    attention = AttentionConfig(32, 8, 128, BLOCK_SIZE)
    table, lens = table_of(kind), np.full(NUM_REQS, BLOCKS * BLOCK_SIZE, np.int32)
    most, known = 64 * MIB, BLOCKS
    if path == "batch_invariant":
        most, known = 80 * MIB, BLOCKS - PIECE // BLOCK_SIZE + 1
        path, pieces = "hopper", PieceLimits(per_request=64, in_cache=64 * NUM_REQS)
        config = paths.planner_config(
            path, attention, 1, NUM_REQS, pieces=pieces, kv_chunk_size=PIECE
        )
    else:
        config = paths.planner_config(path, attention, 1, NUM_REQS)
    cost = paths.default_cost(path, attention)
    planner = DecodePlanner(config, cost, BLOCK_SIZE, attention.gqa_group_size)
    planner.warm_up()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest value
    before = resident("VmRSS")
    update = planner.update(table, lens)
    plan = update.plan
    copy = planner._known[0]._block_ids.nbytes
    beside = resident("VmHWM") - before - NUM_REQS * BLOCKS * 4
    scale.report(
        f"{path}, {config.divider}, 4096 requests x 128k tokens, {kind}: {plan.num_tiles} tiles, "
        f"{plan.num_runs} runs, {update.seconds:.2f} s, at most {beside / MIB:.0f} MiB "
        f"beside a table copy of {copy / MIB:.0f} MiB"
    )
    assert planner.counters.fallbacks[PLANNING_FAILED] == 0
    assert (plan.kv_tokens_read(lens) == lens.sum(dtype=np.int64)) == (kind == "nothing")
    assert copy == NUM_REQS * 5 // 4 * (known * 5 // 4) * 4 <= 200 * MIB
    assert beside < most
    del plan, update  # only the planner's own counts
    after = resident("VmRSS")
    for _ in range(scale.PLANS_AGAIN):
        planner.forget()
        planner.update(table, lens)
    assert resident("VmRSS") - after < 16 * MIB
