"""Engine chaos: more requests than an engine has room for, aborted and pre-empted at random.

The KV cache holds little more than the longest request and a step computes few tokens, so the
scheduler pre-empts all the time. The expected output is known: each greedy request is one of a
small number of cases, and stock vLLM has answered each case alone.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

from tests.support.engine import PREFIX_SHARE, Answer, Batch, EngineProcess, divergences
from tests.support.engine_steps import Completion, Run, drive
from tests.support.processes import Held, held_by

MAX_LEN, BLOCK_SIZE = 256, 32
#: float32, so that a differing token is a fault and not a rounding of bfloat16 logits. 9 blocks
#: beside the null block, where the longest request needs 8: two requests with a document and some
#: tokens of their own need more.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 10,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "enforce_eager": True,
}
#: Over ``SETTINGS`` on a GPU, whose kernels have no float32. Several engines may share it. The
#: default divider shares nothing of fewer than eight requests there, because workers are idle that
#: read for each alone. So more requests run at once, in a cache that is still too small for them.
GPU_SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "max_num_seqs": 24,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 26,
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
}
ENVIRONMENT = {
    "VLLM_PREFIXSHARE_SHARE": "always",
    "VLLM_PREFIXSHARE_CHECK_PLANS": "1",
    "VLLM_PREFIXSHARE_STRICT": "1",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
#: Features that may be switched on, as arguments of the engine.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_config": NGRAM},
    "lora": {"enable_lora": True, "max_lora_rank": 8},
    "eagle": {},  # with the caller's drafter, whose layer keeps vLLM's own kernel
}
#: Nats by which stock's best token may lead where an answer differs, and by which the
#: log-probability of a token may: in float32, and in float16 on a GPU. See ``docs/fidelity.md``.
MAX_GAP, GPU_MAX_GAP = 0.005, 0.05
#: Records of resources, in the last three fifths of a run, below which no growth is reported.
MIN_RECORDS = 3
#: Probability of each event before a step.
ABORT, RESET = 0.02, 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and stock's answer to the prompt alone, up to the greatest length.

    lora: folder of the adapter that answers, or None.
    gaps: lead of stock's best token over its second best, per token, in nats.
    logprobs: log-probability of each token, in nats.
    """

    prompt: tuple[int, ...]
    lora: str | None = None
    tokens: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()

    def expected(self, max_tokens: int, stop: Sequence[int]) -> Answer:
        """Stock's answer, cut at ``max_tokens`` and after the first of the ``stop`` tokens."""
        end = next((i + 1 for i, t in enumerate(self.tokens) if t in stop), max_tokens)
        end = min(end, max_tokens)
        return Answer("", self.tokens[:end], len(self.prompt), 0, self.gaps[:end])


def prompts(text: Sequence[int], count: int, random: Random) -> list[tuple[int, ...]]:
    """Prompts with nested documents in front and a few tokens of their own. Added to these: one
    prompt of a single token, one as long as an engine accepts, one whose answer may reach that
    length, and two equal prompts.

    Args:
        text: token ids to build the prompts from.
        count: number of all prompts, at least 5.
    """
    shared = text[: 4 * BLOCK_SIZE]
    long = [tuple(text[: MAX_LEN - room]) for room in (1, 20)]
    fixed = [tuple(text[-1:]), *long, *2 * [tuple(shared)]]
    found = list(fixed)
    while len(found) < count:
        document = shared[: random.choice((BLOCK_SIZE, 2 * BLOCK_SIZE, 100, 4 * BLOCK_SIZE))]
        at = random.randrange(len(text) - 60)
        found.append((*document, *text[at : at + random.randint(1, 60)]))
    return found


def answered_alone(engine: EngineProcess, cases: Sequence[Case], longest: int) -> list[Case]:
    """The cases with the answers that ``engine`` gives to each alone.

    Args:
        longest: most tokens of an answer.
    """
    found = []
    for case in cases:
        engine.reset_prefix_cache()
        length = min(longest, MAX_LEN - len(case.prompt))
        run: Run = engine.call(
            drive, [case.prompt], {"max_tokens": length, "ignore_eos": True}, None, [case.lora]
        )
        (answer,) = run.completions
        of_tokens = answer.token_ids, answer.top2_gaps, answer.logprobs
        found.append(Case(case.prompt, case.lora, *of_tokens))
    return found


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a case. sampling: its ``SamplingParams``."""

    case: Case
    sampling: dict[str, Any]

    @property
    def greedy(self) -> bool:
        """Whether stock's answer is the expected output."""
        return self.sampling.get("temperature", 0.0) == 0.0

    def expected(self, eos: int) -> Answer:
        """Stock's answer to the case alone."""
        stop = set(self.sampling.get("stop_token_ids", ()))
        if not self.sampling.get("ignore_eos", False):
            stop.add(eos)
        return self.case.expected(self.sampling["max_tokens"], sorted(stop))


def requests(
    cases: Sequence[Case], count: int, random: Random, sampled: Sequence[dict[str, Any]]
) -> list[Request]:
    """Requests of random cases: two in three are greedy, or all if ``sampled`` is empty."""
    found = []
    for _ in range(count):
        case = random.choice(cases)
        most = len(case.tokens)
        length = min(most, random.choice((1, 2, 5, 16, 16, 30, most)))
        sampling: dict[str, Any] = {"max_tokens": length, "ignore_eos": random.random() < 0.7}
        if random.random() < 0.3:
            sampling["stop_token_ids"] = [random.choice(case.tokens)]
        if sampled and random.random() < 1 / 3:
            sampling |= random.choice(sampled)
        found.append(Request(case, sampling))
    return found


#: Sampling parameters for which only the number and the length of the answers are known.
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5, "n": 2},
    {"temperature": 1.0, "top_k": 20, "n": 3},
    {"temperature": 0.3, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
)


class Disturber:
    """A hook for ``drive``: before some steps it aborts a request, or resets the prefix cache, with
    or without pre-empting all running requests.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def __call__(self, llm: Any, step: int, ids: Sequence[str]) -> None:
        """Arguments as for ``StepHook``."""
        drawn = self._random.random()
        if drawn < ABORT:
            llm.llm_engine.abort_request([self._random.choice(ids)])
        elif drawn < ABORT + RESET:
            llm.reset_prefix_cache(reset_running_requests=self._random.random() < 0.5)


@dataclass
class Report:
    """Everything tried so far, with the results.

    finished, aborted: answers, of which a request may have several.
    equal: greedy answers that equal stock's. ties: greedy answers that differ where stock's two
        best tokens are at most ``max_gap`` apart; widest_tie: the largest such gap, in nats.
    compared: greedy tokens before the texts part. total_error, largest_error: of their
        log-probabilities, against stock's, in nats.
    wrong: the faults, in words.
    held: resources of the engine's processes between batches, with seconds since the start.
    """

    max_gap: float = MAX_GAP
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    greedy: int = 0
    equal: int = 0
    ties: int = 0
    widest_tie: float = 0.0
    compared: int = 0
    total_error: float = 0.0
    largest_error: float = 0.0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    shared_steps: int = 0
    plans: int = 0
    wrong: list[str] = field(default_factory=list)
    held: list[tuple[float, Held]] = field(default_factory=list)

    def add(self, run: Run, batch: Sequence[Request], eos: int, seed: int) -> None:
        """Judge the answers of ``drive`` to ``batch``."""
        self.requests += len(batch)
        self.steps += run.steps
        self.preemptions += run.preemptions
        if run.stats:  # stock has no counters
            self.shared_steps += int(run.stats["shared_steps"])
            self.plans += int(run.stats["plans"])
            if run.stats["fallbacks"]:
                self.wrong.append(f"seed {seed}: fallbacks {run.stats['fallbacks']}")
        finished = [answer for answer in run.completions if answer.finished]
        for answer in finished:
            request, where = batch[answer.request], f"seed {seed}, request {answer.request}"
            self._judge(request, answer, eos, where)
        self.finished += len(finished)
        self.aborted += sum(r.sampling.get("n", 1) for r in batch) - len(finished)

    def _judge(self, request: Request, answer: Completion, eos: int, where: str) -> None:
        self.tokens += len(answer.token_ids)
        if not 1 <= len(answer.token_ids) <= request.sampling["max_tokens"]:
            self.wrong.append(f"{where}: {len(answer.token_ids)} tokens for {request.sampling}")
        if not request.greedy:
            return
        self.greedy += 1
        ours = Answer("", answer.token_ids, len(answer.prompt_ids), 0)
        parted = divergences(*(Batch((a,), 0, 0) for a in (ours, request.expected(eos))))
        same = parted[0].position if parted else len(answer.token_ids)
        pairs = zip(answer.logprobs[:same], request.case.logprobs[:same], strict=True)
        errors = [abs(a - b) for a, b in pairs]
        self.compared += same
        self.total_error += sum(errors)
        self.largest_error = max(self.largest_error, *errors, 0.0)
        if max(errors, default=0.0) > self.max_gap:
            self.wrong.append(
                f"{where}: a token of {request.sampling} has a log-probability {max(errors):.3f} "
                "nats from stock's"
            )
        if not parted:
            self.equal += 1
        elif parted[0].gap <= self.max_gap:
            self.ties += 1
            self.widest_tie = max(self.widest_tie, parted[0].gap)
        else:
            self.wrong.append(
                f"{where}: token {parted[0].position} of {request.sampling} is not stock's, which "
                f"leads by {parted[0].gap:.3f} nats"
            )


def endure(
    engine: EngineProcess,
    cases: Sequence[Case],
    eos: int,
    seed: int,
    *,
    batch: int = 32,
    max_gap: float = MAX_GAP,
    sampled: Sequence[dict[str, Any]] = SAMPLED,
) -> Iterator[Report]:
    """Run batches of requests without end and judge each. After each batch the engine must hold no
    block, and its memory and open files are recorded.

    Raises:
        RuntimeError: the engine failed, or holds a block that no request uses.
    """
    report, began = Report(max_gap), time.monotonic()
    while True:
        random = Random(seed)
        asked = requests(cases, batch, random, sampled)
        run: Run = engine.call(
            drive,
            [r.case.prompt for r in asked],
            [r.sampling for r in asked],
            Disturber(seed),
            [r.case.lora for r in asked],
        )
        report.add(run, asked, eos, seed)
        engine.reset_prefix_cache()  # refused while a block is in use
        report.held.append((time.monotonic() - began, held_by(engine.pid)))
        yield report
        seed += 1


@dataclass(frozen=True, slots=True)
class Growth:
    """How much ``more`` of each resource was held, after how many ``seconds``."""

    seconds: float
    more: Held

    def per_minute(self, what: str) -> float:
        """Bytes of a resource a minute."""
        return 60 * float(getattr(self.more, what)) / self.seconds


def grown(held: Sequence[tuple[float, Held]]) -> Growth | None:
    """The growth within the last three fifths of the time, because caches and pools fill before.
    The least values of the first half of these records and of the second are compared, at the mean
    of their times. None where there are too few records to tell.

    Args:
        held: resources, with seconds since the start.
    """
    end = held[-1][0] if held else 0.0
    late = [(at, h) for at, h in held if at >= 0.4 * end]
    if len(late) < MIN_RECORDS:
        return None
    halves = late[: len(late) // 2], late[len(late) // 2 :]
    before, after = (sum(at for at, _ in half) / len(half) for half in halves)

    def least(half: Sequence[tuple[float, Held]], name: str) -> int:
        return min(getattr(h, name) for _, h in half)

    more = (least(halves[1], f.name) - least(halves[0], f.name) for f in fields(Held))
    return Growth(after - before, Held(*more))


def spec(
    backend: str,
    model: Path,
    variant: str = "plain",
    alone: bool = False,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of ``EngineProcess``.

    Args:
        alone: make an engine for ``answered_alone``, with room for the longest request, without
            drafts.
        environment: further variables of the engine.
        options: over ``SETTINGS``.
    """
    variables = {**(ENVIRONMENT if backend == PREFIX_SHARE else {}), **(environment or {})}
    settings = {**SETTINGS, **VARIANTS[variant], **options}
    if alone:
        settings.pop("speculative_config", None)
        settings["num_gpu_blocks_override"] = 20
    return {"backend": backend, "model": model, "environment": variables, **settings}
