"""Measurements inside an engine's process, through ``EngineProcess.call``."""

import hashlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.whole_call.rows import PROMPTS
from benchmarks.whole_call.workloads import Call, Run
from vllm_prefixshare.settings import VARIABLES


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers of one run, one entry per answer (per prompt for properties of prompts).

    seconds: wall time of the timed calls.
    executor_seconds: part of it inside the model executor, or None where it was not measured.
    part_seconds: host time of each part of VLLM_PREFIXSHARE_PROMPTS, where it was measured.
    first_token_seconds: from the start of the call to each request's first token; empty for beams.
    prompt_digests: hashes of the prompts' token ids.
    num_cached_tokens: prompt tokens found in the prefix cache, per prompt; empty for beams.
    """

    seconds: float
    prompt_digests: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    num_prompt_tokens: tuple[int, ...]
    num_cached_tokens: tuple[int, ...] = ()
    first_token_seconds: tuple[float, ...] = ()
    executor_seconds: float | None = None
    part_seconds: Mapping[str, float] = field(default_factory=dict)


def digest(token_ids: Sequence[int]) -> str:
    """A hash of token ids."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:16]


def measure(llm: Any, run: Run) -> Outcome:
    """Run a workload once.

    Raises:
        RuntimeError: the prefix cache cannot be emptied.
    """
    _prepare(llm, run)
    return joined([_call(llm, call) for call in run.timed])


def measure_host(llm: Any, run: Run) -> Outcome:
    """As ``measure``, in an engine that has one process, with the time inside the executor."""
    _prepare(llm, run)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    spent = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent += time.perf_counter() - began

        return wrapper

    names = ("execute_model", "sample_tokens")
    for name in names:
        setattr(executor, name, timed(getattr(executor, name)))  # for this instance only
    before = _part_seconds()
    try:
        outcome = joined([_call(llm, call) for call in run.timed])
    finally:
        for name in names:
            delattr(executor, name)
    parts = {part: seconds - before[part] for part, seconds in _part_seconds().items()}
    return replace(outcome, executor_seconds=spent, part_seconds=parts)


def _part_seconds() -> dict[str, float]:
    """Host time in this process by part of VLLM_PREFIXSHARE_PROMPTS, in seconds; empty without
    that setting.
    """
    if PROMPTS not in VARIABLES:
        return {}
    from vllm_prefixshare.vllm_plugin.prompts.parts import COUNTERS

    return {part: counters.seconds for part, counters in COUNTERS.items()}


def _prepare(llm: Any, run: Run) -> None:
    if run.reset and not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache is in use")
    for call in run.warm_up:
        _call(llm, call)


def _call(llm: Any, call: Call) -> Outcome:
    if call.kind == "beams":
        return _beams(llm, call)
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=call.max_tokens, ignore_eos=True)
    asked: Any = call.prompts
    if not isinstance(asked[0], str) and call.kind == "generate":
        asked = [{"prompt_token_ids": ids} for ids in asked]
    method = llm.chat if call.kind == "chat" else llm.generate
    began, began_monotonic = time.perf_counter(), time.monotonic()
    outputs = method(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return Outcome(
        seconds=seconds,
        prompt_digests=tuple(digest(o.prompt_token_ids) for o in outputs),
        token_ids=tuple(tuple(o.outputs[0].token_ids) for o in outputs),
        texts=tuple(o.outputs[0].text for o in outputs),
        num_prompt_tokens=tuple(len(o.prompt_token_ids) for o in outputs),
        num_cached_tokens=tuple(o.num_cached_tokens or 0 for o in outputs),
        # the engine core's clock is the monotonic one of this machine
        first_token_seconds=tuple(o.metrics.first_token_ts - began_monotonic for o in outputs),
    )


def _beams(llm: Any, call: Call) -> Outcome:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(
        beam_width=call.beam_width, max_tokens=call.max_tokens, ignore_eos=True
    )
    asked: Any = [{"prompt": text} for text in call.prompts]
    began = time.perf_counter()
    outputs = llm.beam_search(asked, params)
    seconds = time.perf_counter() - began
    sequences = [sequence for output in outputs for sequence in output.sequences]
    prompts = [o.sequences[0].tokens[: -call.max_tokens] for o in outputs]
    return Outcome(
        seconds=seconds,
        prompt_digests=tuple(map(digest, prompts)),
        token_ids=tuple(tuple(s.tokens[-call.max_tokens :]) for s in sequences),
        texts=tuple(s.text for s in sequences),
        num_prompt_tokens=tuple(map(len, prompts)),
    )


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of calls that ran one after the other; times to first tokens stay relative to
    the start of each call.
    """

    def all_of(field: str) -> tuple[Any, ...]:
        return tuple(value for outcome in outcomes for value in getattr(outcome, field))

    return Outcome(
        seconds=sum(outcome.seconds for outcome in outcomes),
        prompt_digests=all_of("prompt_digests"),
        token_ids=all_of("token_ids"),
        texts=all_of("texts"),
        num_prompt_tokens=all_of("num_prompt_tokens"),
        num_cached_tokens=all_of("num_cached_tokens"),
        first_token_seconds=all_of("first_token_seconds"),
    )
