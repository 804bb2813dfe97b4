"""Random event sequences of an engine. After every event the plan reads each token of each request
once, from memory that holds that token, and shares all that the prefix tree by definition has in
common.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support import decode_paths as paths
from tests.support import fuzz_scale as scale
from tests.support.engine_model import Engine, V1Rows, V2Slots
from tests.support.plan_oracle import assert_forest, assert_reads_what_was_written, filled_blocks
from tests.support.planning_cases import LinearCost
from vllm_prefixshare.config import LATENT_SHAPE, AttentionConfig
from vllm_prefixshare.core import Forest, PieceLimits
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs.roofline import analytic_cost
from vllm_prefixshare.planning.plan import DecodePlan
from vllm_prefixshare.planning.planner import PLANNING_FAILED, DecodePlanner
from vllm_prefixshare.planning.window import tokens_seen

SEEDS = st.integers(0, 2**16)
MAX_LEN = 480
SLICE = 250  # sequences
#: (query heads, KV heads): 32, 8, 4 and 128 requests in a tile of the Hopper kernel
HEADS = [(32, 8), (32, 2), (64, 2), (8, 8)]


@dataclass(frozen=True)
class Mode:
    """A way of planning in vLLM.

    path: see ``decode_paths``. invariant: as with VLLM_BATCH_INVARIANT=1. windows: layers have a
    sliding window. latent: layers have latents in place of keys and values.
    """

    path: str
    invariant: bool = False
    windows: bool = False
    latent: bool = False


MODES = {
    **{path: Mode(path) for path in paths.PATHS},
    "batch_invariant": Mode("hopper", invariant=True),
    "windows": Mode("hopper", windows=True),
    "latent": Mode("mla_hopper", latent=True),
}


#: digests of the event sequences so far, of all modes: options and events with their arguments
SCRIPTS: set[bytes] = set()


class InjectedError(RuntimeError):
    """An error raised on purpose during planning."""


class PlannerMachine(RuleBasedStateMachine):
    """One engine and one planner. Subclasses set the mode."""

    mode: Mode
    tried: Counter[str]

    @initialize(
        heads=st.sampled_from(HEADS),
        multiprocessors=st.sampled_from([132, 16, 8]),  # small parts of a GPU, too
        block_size=st.sampled_from([16, 32]),
        runner=st.sampled_from(["v1", "v2", "v2 with divided blocks"]),
        spare_blocks=st.sampled_from([0, 4, 12, 40, 80]),
        drafts=st.sampled_from([0, 0, 1, 3]),
        steps_in_flight=st.integers(1, 2),
        turns=st.sampled_from([1, 1, 2, 3]),
        cost=st.sampled_from(["default", "default", "estimate", "bytes", "launch"]),
        stretch=st.sampled_from([32, 40, 64]),
        window=st.sampled_from([24, 100, 128, 300]),
        piece=st.sampled_from([32, 64, 128]),
    )
    def start(
        self,
        heads,
        multiprocessors,
        block_size,
        runner,
        spare_blocks,
        drafts,
        steps_in_flight,
        turns,
        cost,
        stretch,
        window,
        piece,
    ):
        mode = self.mode
        options = heads, multiprocessors, block_size, runner, spare_blocks, drafts
        options += steps_in_flight, turns, cost, stretch, window, piece
        self.script = hashlib.sha256(repr(options).encode())
        window = window if mode.windows else None
        if mode.invariant or mode.windows:
            drafts = 0  # with drafts these layers keep vLLM's own backend
        if mode.latent:
            wide, rank = LATENT_SHAPE
            attention = AttentionConfig(heads[1], 1, wide, block_size, kv_lora_rank=rank)
        else:
            attention = AttentionConfig(*heads, 128, block_size, sliding_window=window)
        width = MAX_LEN // block_size
        rows = {
            "v1": lambda: V1Rows(Engine.MAX_REQS, width),
            "v2": lambda: V2Slots(Engine.MAX_REQS, width, 1),
            "v2 with divided blocks": lambda: V2Slots(Engine.MAX_REQS, width, 2),
        }[runner]()
        # a CPU has no drafts in flight: its lengths are exact
        slack = 0 if mode.path == "cpu" else drafts * steps_in_flight
        query_len, self.stretch = drafts + 1, stretch
        # one request of the greatest length must fit, or it would never run
        blocks = 2 + width // rows.blocks_per_id + spare_blocks
        self.engine = Engine(rows, block_size, blocks, MAX_LEN, query_len, slack, turns, window)
        costs = {
            "default": paths.default_cost(mode.path, attention),
            "estimate": analytic_cost(attention, "hopper"),
            "bytes": LinearCost(launch=0.001),
            "launch": LinearCost(launch=100.0, per_row_token=0.01, unshared_launch=100.0),
        }
        self.messages: list[str] = []
        self.piece, pieces = piece, None
        if mode.invariant:
            in_cache = blocks * self.engine.pool_block // piece
            pieces = PieceLimits(per_request=-(-MAX_LEN // piece), in_cache=in_cache)
        options = mode.path, attention, query_len, Engine.MAX_REQS, multiprocessors, pieces
        config = paths.planner_config(*options, kept_plans=turns, kv_chunk_size=piece)
        # where only bytes cost anything, so that a tree that is missing shows
        share = "always" if cost == "bytes" else config.share
        self.planner = DecodePlanner(
            replace(config, share=share),
            costs[cost],
            block_size,
            attention.gqa_group_size,
            on_failure=self.messages.append,
        )
        self.executor = None if mode.path == "cpu" else paths.executor(*options)
        self.forest: Forest | None = None
        #: by the id of a plan: the plan, its forest, and the lengths that it was made for
        self.planned: dict[int, tuple[DecodePlan, Forest, np.ndarray]] = {}
        self.fails = self.failed = False
        divider = self.planner.divider

        def noted(problem):
            if self.fails:
                raise InjectedError("planted")
            self.forest = problem.forest
            return divider.divide(problem)

        self.planner.divider = replace(divider, divide=noted)
        self.tried["sequences"] += 1
        for copy in range(6):  # the first requests: two groups of three
            engine = self.engine
            engine.arrive([100 * (1 + copy % 2) + i for i in range(stretch)] + [copy] * 9)
            engine.admit()

    def teardown(self):
        if hasattr(self, "planner"):
            assert len(self.messages) == min(1, self.planner.counters.fallbacks[PLANNING_FAILED])
            digest = self.script.digest()
            self.tried["new sequences"] += digest not in SCRIPTS
            SCRIPTS.add(digest)

    def event(self, seed, *arguments) -> Random:
        """Note an event with its arguments, of which ``seed`` decides what they leave open."""
        self.script.update(repr((*arguments, seed)).encode())
        return Random(seed)

    @rule(
        words=st.lists(st.integers(1, 2), min_size=1, max_size=4),
        tail=st.sampled_from([1, 2, 3, 5, 9, 16, 17, 18, 40]),
        seed=SEEDS,
        copies=st.integers(1, 4),
    )
    def arrive(self, words, tail, seed, copies):
        """Requests that begin with a few common texts; some copies are equal to the last token."""
        random = self.event(seed, "arrive", words, tail, copies)
        for copy in range(copies):
            text = [100 * word + i for word in words for i in range(self.stretch)]
            own = random.choice((0, copy + 1))
            self.engine.arrive(text + [1000 + own * 100 + i for i in range(tail)])
            self.engine.admit()
        self.decode_once(random)

    @precondition(lambda self: self.engine.running)
    @rule(seed=SEEDS, tail=st.integers(1, 40))
    def go_on_from_another(self, seed, tail):
        """A request whose prompt begins with the tokens of another request so far."""
        random = self.event(seed, "go on", tail)
        other = random.choice(self.engine.running)
        prefix = other.tokens[: random.randint(1, len(other.tokens))]
        self.engine.arrive(prefix + [2000 + i for i in range(tail)])
        self.engine.admit()
        self.decode_once(random)

    @precondition(lambda self: self.engine.running)
    @rule(seed=SEEDS)
    def finish(self, seed):
        random = self.event(seed, "finish")
        self.engine.finish(random.choice(self.engine.running))
        self.decode_once(random)

    @precondition(lambda self: self.engine.running)
    @rule(seed=SEEDS, alike=st.booleans())
    def finish_and_hand_over(self, seed, alike):
        """One request leaves, and one as long or a little longer arrives in the same step. It gets
        the same blocks if its text is ``alike``, else other blocks, maybe in the same row or slot.
        """
        random = self.event(seed, "hand over", alike)
        last = [r for r in self.engine.runner.order() if r in self.engine.running][-1:]
        leaver = random.choice(last + last + self.engine.running)
        self.engine.finish(leaver)
        text = leaver.tokens if alike else [3000 + i for i in range(len(leaver.tokens))]
        self.engine.arrive(text + [4000] * random.randint(0, 6))
        self.engine.admit()
        self.decode_once(random)

    @precondition(lambda self: self.engine.running)
    @rule(seed=SEEDS, several=st.booleans())
    def preempt(self, seed, several):
        random = self.event(seed, "preempt", several)
        for request in random.sample(
            self.engine.running, 1 + several * len(self.engine.running) // 3
        ):
            self.engine.preempt(request)
        self.decode_once(random)

    @precondition(lambda self: self.engine.waiting)
    @rule(seed=SEEDS)
    def resume(self, seed):
        for _ in range(len(self.engine.waiting)):
            self.engine.admit()
        self.decode_once(self.event(seed, "resume"))

    @rule(seed=SEEDS, preempt_all=st.booleans())
    def reset_the_cache(self, seed, preempt_all):
        """As after new weights: no cached block can be found, and block ids are used again."""
        if preempt_all:
            for request in list(self.engine.running):
                self.engine.preempt(request)
        self.engine.pool.reset_cache()
        for _ in range(len(self.engine.waiting)):
            self.engine.admit()
        self.decode_once(self.event(seed, "reset", preempt_all))

    @rule(seed=SEEDS)
    def reorder(self, seed):
        self.decode_once(self.event(seed, "reorder"), reorder=True)

    @rule(seed=SEEDS, steps=st.integers(1, 10))
    def decode(self, seed, steps):
        random = self.event(seed, "decode", steps)
        for _ in range(steps):
            self.decode_once(random)

    @rule(seed=SEEDS)
    def planning_fails(self, seed):
        """The next plan fails."""
        self.fails = True
        self.decode_once(self.event(seed, "fail"))

    @rule()
    def forget(self):
        """As after a sleep."""
        self.event(0, "forget")
        self.planner.forget()

    def decode_once(self, random: Random, reorder: bool = False) -> None:
        engine, planner = self.engine, self.planner
        step = engine.schedule(random, reorder)
        table, rows = engine.runner.arguments()
        before, failures = planner.counters.plans, planner.counters.fallbacks[PLANNING_FAILED]
        self.forest = None
        plan = planner.update(
            table, step.host_lens, engine.query_len, slack=engine.slack, **rows
        ).plan
        total = assert_reads_what_was_written(
            plan, step, engine.memory, engine.block_size, engine.window
        )
        several = plan.run_reader_end - plan.run_reader_start > 1
        if self.failed and engine.turns == 1 and len(step.queries):
            assert planner.counters.plans == before + 1, "a failed plan must be made again"
        self.failed = planner.counters.fallbacks[PLANNING_FAILED] > failures
        if self.failed:
            assert self.fails, "planning failed by itself"
            assert not several.any(), "a step without a plan shares nothing"
            self.fails = False
            self.tried["failures"] += 1
        elif self.mode.invariant:
            assert (plan.run_kv_start % self.piece == 0).all(), "cut at another place"
        if self.forest is not None:
            lens = np.maximum(step.host_lens - engine.slack, 1)
            self.planned[id(plan)] = plan, self.forest, lens
            self.tried["nodes of trees"] += self.forest.num_nodes
        is_new = planner.counters.plans > before
        # with batch_invariant a plan holds whatever the blocks behind the start of the last pieces
        same_blocks = not self.mode.windows and (is_new or not self.mode.invariant)
        if same_blocks and id(plan) in self.planned:
            # a block is filled if no query of the step that made the plan could write to it; its
            # queries have left it since, but a new plan would not pay
            _, forest, lens = self.planned[id(plan)]
            size = engine.block_size
            filled = filled_blocks(step.block_table, lens, size, engine.query_len)
            assert_forest(forest, filled, size, may_drop=planner.config.share == "auto")
        if is_new:
            batch = step.block_table, step.true_lens
            invariants.check(plan, *batch, engine.window, engine.query_len)
            if self.executor is not None:
                self.executor.prepare(plan)  # raises where the workspace has no room
        self.tried["steps"] += 1
        self.tried["plans"] += planner.counters.plans - before
        self.tried["rows"] += len(step.queries)
        seen = tokens_seen(step.true_lens, engine.window, engine.query_len)
        self.tried["tokens"] += seen
        self.tried["tokens saved"] += seen - total
        self.tried["steps that share"] += bool(several.any())
        engine.accept(step, random)


@pytest.mark.parametrize("name", MODES)
def test_every_event_leaves_a_plan_that_is_right(name):
    tried: Counter[str] = Counter()
    machine = type("Machine", (PlannerMachine,), {"mode": MODES[name], "tried": tried})
    left, part = -(-scale.SEQUENCES // len(MODES)), 0
    try:
        while left > 0:  # in parts, because Hypothesis keeps every case in memory
            run_state_machine_as_test(
                seed(scale.seed_of(name, part))(machine),
                settings=settings(
                    deadline=None,
                    database=None,
                    max_examples=min(left, SLICE),
                    stateful_step_count=40,
                    suppress_health_check=list(HealthCheck),
                ),
            )
            left, part = left - SLICE, part + 1
            scale.progress(f"planner, {name}: {dict(tried)}")
    finally:
        scale.report(f"planner, {name}: {dict(tried)}")
    # Hypothesis tries some twice; a mode that tries what another one has tried must not be counted
    assert tried["new sequences"] >= 0.7 * tried["sequences"]
    # how much is shared differs from run to run, because Hypothesis takes constants out of whatever
    # modules are loaded: from 4% of the steps and 2% of the tokens on were seen
    assert tried["failures"] and tried["steps that share"]
    # windows are shorter than some blocks, and blocks are read from their first token
    assert MODES[name].windows or tried["tokens saved"] > 0


def test_every_part_of_a_run_has_a_seed_of_its_own(monkeypatch):
    def seeds(own: int, parts: int) -> set[int]:
        monkeypatch.setattr(scale, "SEED", own)
        return {scale.seed_of(name, part) for name in MODES for part in range(parts)}

    assert len(set().union(*(seeds(own, 14) for own in range(30)))) == 30 * 14 * len(MODES)
    # the same in every process, whatever PYTHONHASHSEED is
    monkeypatch.setattr(scale, "SEED", 0)
    assert scale.seed_of("hopper", 0) == 9807024925485696755
