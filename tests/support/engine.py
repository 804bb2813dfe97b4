"""A real vLLM engine in its own process, for the examples, the tests and the benchmarks.

Each engine has its own process, because two engines that are compared must not share hooks,
environment or memory, and because vLLM's CPU settings are read at import.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_prefixshare.core import PrefixShareError

STOCK = "stock"
STOCK_GPU = "FLASH_ATTN"
PREFIX_SHARE = "PREFIX_SHARE"
#: vLLM's model runners on a GPU, and the variables that choose them.
RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}

#: Defaults for a machine without network and with few cores; variables that are set already win.
DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Variables of this process when it began.
_INHERITED = frozenset(os.environ)
#: How engines are started, as ``multiprocessing`` names it.
_start_method = "spawn"
#: For tests of what an engine computes. It has three processes otherwise, each of which imports
#: vLLM: half a minute of processor time. Servers and some tests have engines as users do.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def fork_engines() -> None:
    """Fork the engines of this process from one that has imported vLLM, which takes each of them
    ten seconds of processor time otherwise. For CPUs: drivers of GPUs do not survive a fork.

    A process has one fork server, whatever it forks. An engine has its own environment, but what
    vLLM reads from it on import is as it was when the server started.
    """
    global _start_method
    _start_method = "forkserver"
    multiprocessing.set_forkserver_preload(["tests.support.engine_imports"])


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion. top2_gaps: per token, log-probability of the best token minus that of
    the second best, in nats (empty unless requested).
    """

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    top2_gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step that produced tokens.

    time: when the engine core had the tokens, in seconds of a monotonic clock.
    num_reqs, num_tokens: number of requests that got tokens, and number of these tokens.
    latency: sum over these requests of the seconds since their last token.
    """

    time: float
    num_reqs: int
    num_tokens: int
    latency: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions of one ``generate`` call.

    seconds: wall time of the call; with ``together`` from the moment all requests are queued.
    seconds_per_token: decode time per output token, from the moment all requests had their first
        token; exact where the answers are equally long and end together.
    steps: all engine steps of the call, in order.
    stats: ``BackendStats`` of the call (empty for stock).
    preemptions: number of pre-emptions during the call.
    """

    answers: tuple[Answer, ...]
    seconds: float
    seconds_per_token: float
    stats: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    steps: tuple[Step, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(a.token_ids) for a in self.answers)

    @property
    def full_batch_seconds_per_token(self) -> float | None:
        """Time per output token while all requests decode: from the step in which the last request
        got its first token to the step in which the first request ends. None without two such steps
        in a row.
        """
        num_reqs = len(self.answers)
        full = [
            (b.time - a.time, b.num_tokens)
            for a, b in pairwise(self.steps)
            if a.num_reqs == b.num_reqs == num_reqs
        ]
        seconds, tokens = (sum(column) for column in zip(*full, strict=True)) if full else (0, 0)
        return seconds * num_reqs / tokens if tokens else None

    @property
    def mean_seconds_per_token(self) -> float:
        """Mean over all output tokens of the time since the previous token of the request, whatever
        else the engine did in between. The first token of a request is not counted.
        """
        tokens = sum(s.num_tokens for s in self.steps) - len(self.answers)
        return sum(s.latency for s in self.steps) / max(1, tokens)


class EngineProcess:
    """``vllm.LLM`` behind a pipe. Use as a context manager.

    Args:
        backend: name of an attention backend, or ``STOCK`` for vLLM's choice. It is passed as
            ``attention_backend``, or in ``attention_config`` where ``engine_args`` have one.
        model: checkpoint folder.
        environment: variables for this engine only.
        pause: stop the engine's processes between calls. Even an idle engine polls, and on few
            cores that slows the engine that it is compared with.
        engine_args: further arguments of ``vllm.LLM``.

    Attributes:
        kv_cache_tokens: capacity of the KV cache.

    Raises:
        PrefixShareError: the engine refused its configuration.
        RuntimeError: another failure; the message has the traceback.
    """

    def __init__(
        self,
        backend: str,
        model: Path | str,
        environment: Mapping[str, str] | None = None,
        pause: bool = False,
        **engine_args: Any,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise PrefixShareError("vLLM is not installed: 'make venv' installs its CPU build.")
        self._pause = pause
        self._shares = backend == PREFIX_SHARE
        context = multiprocessing.get_context(_start_method)
        self._pipe, theirs = context.Pipe()
        args = {"model": str(model), "seed": 0, "disable_log_stats": False, **engine_args}
        if backend != STOCK and "attention_config" not in args:
            args["attention_backend"] = backend
        variables = {**DEFAULT_ENVIRONMENT, **os.environ, **(environment or {})}
        self._process = context.Process(target=_serve, args=(theirs, variables, args))
        self._process.start()
        theirs.close()
        try:
            self.kv_cache_tokens: int = self._receive()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP if pause else signal.SIGCONT)

    @property
    def pid(self) -> int:
        """Id of the process that leads the engine's process group."""
        assert self._process.pid is not None
        return self._process.pid

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)  # this process leads a group, see _serve

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the engine process ended without an answer") from None
        if kind == "refused":
            raise PrefixShareError(value)
        if kind == "failed":
            self.close()  # the engine has ended; without this the next call would wait for ever
            raise RuntimeError(value)
        return value

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        *,
        chat: bool = False,
        gaps: bool = False,
        progress: bool = False,
        together: bool = False,
        **sampling: Any,
    ) -> Batch:
        """Greedy completions.

        Args:
            prompts: texts, or token ids.
            max_tokens: for all answers, or one number per prompt.
            chat: put each text into the model's chat template as a user's message.
            gaps: fill ``Answer.top2_gaps``.
            progress: show vLLM's progress bar.
            together: schedule nothing before all requests are queued. Otherwise the first of many
                long prompts may have its answer before the last one has arrived. Not with ``chat``.
            sampling: further ``SamplingParams``.
        """
        if chat and together:
            raise ValueError("together serves prompts, not chats")
        settings = {"temperature": 0.0, **sampling}
        if gaps:
            settings["logprobs"] = 2
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        batch: Batch = self.call(
            _generate, self._shares, list(prompts), lengths, chat, progress, together, settings
        )
        return batch

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache."""
        if not self.call(_reset_prefix_cache):
            raise RuntimeError("the prefix cache is in use")

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of vLLM's workers or their extension; return the results of all ranks."""
        results: list[Any] = self.call(_collective_rpc, method, args)
        return results

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(llm, *args)`` in the engine's process.

        Args:
            function: defined in a module, so that it can be sent by name.

        Returns:
            the function's result, which must pickle.

        Raises:
            RuntimeError: the function failed, with the traceback; the engine has ended.
        """
        if not self._process.is_alive():
            raise RuntimeError("the engine process has ended")
        self._signal(signal.SIGCONT)
        self._pipe.send((function, args))
        result = self._receive()
        if self._pause:
            self._signal(signal.SIGSTOP)
        return result

    def close(self) -> None:
        """Stop the engine with all the processes that it started."""
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
    _end_with_parent(pipe)
    for name in _INHERITED - environment.keys():  # removed since the fork server has started
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        from vllm import LLM

        try:
            llm = LLM(**engine_args)
        except PrefixShareError:
            raise
        except ValueError as e:  # vLLM's own checks of the arguments
            raise PrefixShareError(f"vLLM refused its configuration: {e}") from e
        cache = llm.llm_engine.vllm_config.cache_config
        pipe.send(("ready", cache.num_gpu_blocks * cache.block_size))
        while (request := pipe.recv()) is not None:
            function, args = request
            pipe.send(("done", function(llm, *args)))
        llm.llm_engine.engine_core.shutdown()
    except PrefixShareError as e:
        pipe.send(("refused", str(e)))
    except Exception:  # another process cannot get the exception, only its text
        pipe.send(("failed", traceback.format_exc()))


def _end_with_parent(pipe: Connection) -> None:
    """Start a process that ends this group once its leader or the other end of ``pipe`` is gone.

    A parent that is killed cannot close its engine. An engine that is paused, or whose interpreter
    is busy, cannot notice. Therefore a process outside the group watches.
    """
    leader = os.getpid()
    if os.fork():  # no thread has been started yet
        return
    os.setpgid(0, 0)
    gone = select.poll()
    gone.register(pipe, 0)  # poll always reports a closed pipe
    gone.register(os.pidfd_open(leader))
    gone.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    os._exit(0)


def _reset_prefix_cache(llm: Any) -> bool:
    return bool(llm.reset_prefix_cache())


def _collective_rpc(llm: Any, method: str, args: tuple[Any, ...]) -> Any:
    return llm.collective_rpc(method, args=args)


def _generate(
    llm: Any,
    shares: bool,
    prompts: list[Any],
    lengths: list[int],
    chat: bool,
    progress: bool,
    together: bool,
    settings: dict[str, Any],
) -> Batch:
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=length, **settings) for length in lengths]
    if shares:
        llm.collective_rpc("prefix_share_stats", args=(True,))
    preempted = preemptions(llm)
    began = time.perf_counter()
    with _recorded_steps(llm) as steps:
        if chat:
            messages = [[{"role": "user", "content": text}] for text in prompts]
            outputs = llm.chat(messages, params, use_tqdm=progress)
        else:
            inputs = [p if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in prompts]
            if together:
                llm.sleep(level=0, mode="keep")
                llm.enqueue(inputs, params, use_tqdm=False)
                began = time.perf_counter()
                llm.wake_up(tags=["scheduling"])  # queued behind the requests
                outputs = llm.wait_for_completion(use_tqdm=progress)
            else:
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
        preemptions(llm) - preempted,
        tuple(steps),
    )


@contextlib.contextmanager
def _recorded_steps(llm: Any) -> Iterator[list[Step]]:
    """Record each engine step as its outputs arrive. vLLM keeps only the first and the last time of
    a request, from which the number of requests in between does not follow.
    """
    steps: list[Step] = []
    processor = llm.llm_engine.output_processor
    original = processor.process_outputs

    def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(outputs, *args, **kwargs)
        if tokens := [len(o.new_token_ids) for o in outputs if o.new_token_ids]:
            latency = sum(kwargs["iteration_stats"].inter_token_latencies_iter)
            steps.append(Step(kwargs["engine_core_timestamp"], len(tokens), sum(tokens), latency))
        return result

    processor.process_outputs = process_outputs  # for this instance only
    try:
        yield steps
    finally:
        del processor.process_outputs


def preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def _gaps(logprobs: Any) -> tuple[float, ...]:
    gaps = []
    for step in logprobs or ():
        best, second = sorted((x.logprob for x in step.values()), reverse=True)[:2]
        gaps.append(best - second)
    return tuple(gaps)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy completions differ. gap: the lead of stock's token there, in nats."""

    answer: int
    position: int
    gap: float


def divergences(ours: Batch, stock: Batch) -> list[Divergence]:
    """First difference of each pair of answers; after a difference they continue other texts."""
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
