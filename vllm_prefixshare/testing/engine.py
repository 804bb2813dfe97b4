"""A real vLLM engine in a process of its own, for the example, the tests and the benchmarks.

Its own process, because two engines that are compared must not share hooks, environment or
memory, and because vLLM's CPU settings are read at import.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_prefixshare.types import PrefixShareError

STOCK = "stock"
PREFIX_SHARE = "PREFIX_SHARE"

#: What a machine without network, and with few cores, needs; whatever is set already wins.
DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion. top2_gaps: per token, log-probability of the best token minus
    that of the second best, in nats (empty unless asked for)."""

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    top2_gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions of one ``generate`` call.

    seconds_per_token: decode time per output token, from the moment all requests had their
        first one; exact where the answers are equally long.
    stats: ``BackendStats`` of this call (empty for stock).
    preemptions: requests that the scheduler pre-empted during it.
    """

    answers: tuple[Answer, ...]
    seconds: float
    seconds_per_token: float
    stats: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0


class EngineProcess:
    """``vllm.LLM`` behind a pipe. Use as a context manager.

    Args:
        backend: ``PREFIX_SHARE`` or ``STOCK``.
        model: checkpoint folder.
        environment: variables for this engine alone.
        pause: stop its processes between calls: even an idle engine polls, and on few cores
            that slows the engine it is compared with.
        engine_args: further arguments of ``vllm.LLM``.

    Raises:
        PrefixShareError: the engine refused its configuration.
        RuntimeError: it failed otherwise; carries the traceback.
    """

    def __init__(
        self,
        backend: str,
        model: Path | str,
        environment: dict[str, str] | None = None,
        pause: bool = False,
        **engine_args: Any,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise PrefixShareError("vLLM is not installed: 'make venv' installs its CPU build.")
        self._pause = pause
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        args = {"model": str(model), "seed": 0, "disable_log_stats": False, **engine_args}
        if backend != STOCK:
            args["attention_backend"] = backend
        self._process = context.Process(target=_serve, args=(theirs, environment or {}, args))
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP if pause else signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # it leads a group, see _serve

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the engine process ended without an answer") from None
        if kind == "refused":
            raise PrefixShareError(value)
        if kind == "failed":
            self.close()  # it serves no more, and would let the next call wait for ever
            raise RuntimeError(value)
        return value

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_tokens: int,
        *,
        chat: bool = False,
        gaps: bool = False,
        progress: bool = False,
        **sampling: Any,
    ) -> Batch:
        """Greedy completions.

        Args:
            prompts: texts, or token ids.
            chat: put each text into the model's chat template as a user's message.
            gaps: fill ``Answer.top2_gaps``.
            progress: show vLLM's progress bar.
            sampling: further ``SamplingParams``.
        """
        settings = {"max_tokens": max_tokens, "temperature": 0.0, **sampling}
        if gaps:
            settings["logprobs"] = 2
        if not self._process.is_alive():
            raise RuntimeError("the engine process has ended")
        self._signal(signal.SIGCONT)
        self._pipe.send((list(prompts), chat, progress, settings))
        batch: Batch = self._receive()
        if self._pause:
            self._signal(signal.SIGSTOP)
        return batch

    def close(self) -> None:
        """Stop the engine with all the processes it started."""
        if self._process.is_alive():
            self._signal(signal.SIGCONT)
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(30)
        self._signal(signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _serve(pipe: Connection, environment: dict[str, str], engine_args: dict[str, Any]) -> None:
    os.setpgid(0, 0)  # so that close() also reaches what vLLM spawns
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)
    try:
        from vllm import LLM

        try:
            llm = LLM(**engine_args)
        except PrefixShareError:
            raise
        except ValueError as e:  # vLLM's own checks of the arguments
            raise PrefixShareError(f"vLLM refused its configuration: {e}") from e
        pipe.send(("ready", None))
        while (request := pipe.recv()) is not None:
            pipe.send(("batch", _generate(llm, *request)))
        llm.llm_engine.engine_core.shutdown()
    except PrefixShareError as e:
        pipe.send(("refused", str(e)))
    except Exception:  # crosses a process: the traceback is all the parent can see
        pipe.send(("failed", traceback.format_exc()))


def _generate(
    llm: Any, prompts: list[Any], chat: bool, progress: bool, settings: dict[str, Any]
) -> Batch:
    from vllm import SamplingParams

    params = SamplingParams(**settings)
    shares = "PREFIX_SHARE" in str(llm.llm_engine.vllm_config.attention_config.backend)
    if shares:
        llm.collective_rpc("prefix_share_stats", args=(True,))
    preempted = _preemptions(llm)
    began = time.perf_counter()
    if chat:
        messages = [[{"role": "user", "content": text}] for text in prompts]
        outputs = llm.chat(messages, params, use_tqdm=progress)
    else:
        inputs = [p if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=progress)
    seconds = time.perf_counter() - began
    stats = llm.collective_rpc("prefix_share_stats")[0] if shares else {}

    first = max(o.metrics.first_token_ts for o in outputs)
    last = max(o.metrics.last_token_ts for o in outputs)
    longest = max(len(c.token_ids) for o in outputs for c in o.outputs)
    answers = tuple(
        Answer(
            text=completion.text,
            token_ids=tuple(completion.token_ids),
            num_prompt_tokens=len(output.prompt_token_ids),
            num_cached_tokens=output.num_cached_tokens or 0,
            top2_gaps=_gaps(completion.logprobs),
        )
        for output in outputs
        for completion in output.outputs
    )
    return Batch(
        answers,
        seconds,
        (last - first) / max(1, longest - 1),
        stats,
        _preemptions(llm) - preempted,
    )


def _preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def _gaps(logprobs: Any) -> tuple[float, ...]:
    gaps = []
    for step in logprobs or ():
        best, second = sorted((x.logprob for x in step.values()), reverse=True)[:2]
        gaps.append(best - second)
    return tuple(gaps)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy completions part. gap: how sure stock was of its token there, in nats."""

    answer: int
    position: int
    gap: float


def divergences(ours: Batch, stock: Batch) -> list[Divergence]:
    """First difference of each pair of answers; after it they continue other texts."""
    found = []
    for i, (a, b) in enumerate(zip(ours.answers, stock.answers, strict=True)):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        where = next((p for p, (x, y) in enumerate(pairs) if x != y), None)
        if where is None and len(a.token_ids) != len(b.token_ids):
            where = min(len(a.token_ids), len(b.token_ids)) - 1
        if where is not None:
            gap = b.top2_gaps[where] if b.top2_gaps else float("inf")
            found.append(Divergence(i, where, gap))
    return found
