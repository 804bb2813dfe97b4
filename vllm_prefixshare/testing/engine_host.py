"""A real vLLM engine in a process of its own that runs any function on it.

``EngineProcess`` gives completions; here the caller says what happens between two steps:
requests come and go, the cache is reset, tokens are forced, the backend is watched.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from vllm_prefixshare.testing.engine import DEFAULT_ENVIRONMENT, STOCK, EngineProcess
from vllm_prefixshare.types import PrefixShareError

#: As vLLM's argument ``logits_processors`` names it; a name, because that module imports vLLM.
FORCED_TOKENS = "vllm_prefixshare.testing.forced_tokens:ForcedTokens"


class EngineHost(EngineProcess):
    """``vllm.LLM`` behind a pipe; ``call`` runs functions in its process. A context manager.

    Args:
        backend: name of an attention backend, or ``STOCK`` for vLLM's choice.
        model: checkpoint folder.
        environment: variables for this engine alone.
        engine_args: further arguments of ``vllm.LLM``.

    Raises:
        PrefixShareError: the engine refused its configuration.
        RuntimeError: it failed otherwise; carries the traceback.
    """

    def __init__(
        self,
        backend: str,
        model: Path | str,
        environment: Mapping[str, str] | None = None,
        **engine_args: Any,
    ) -> None:
        self._pause = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        args = {"model": str(model), "seed": 0, "disable_log_stats": False, **engine_args}
        if backend != STOCK:
            args["attention_backend"] = backend
        self._process = context.Process(target=_serve, args=(theirs, dict(environment or {}), args))
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(llm, *args)`` in the engine's process.

        Args:
            function: of a module, so that it can be sent by name.

        Returns:
            what it returns; it must pickle.

        Raises:
            RuntimeError: the function failed, with the traceback; the engine has ended.
        """
        if not self._process.is_alive():
            raise RuntimeError("the engine process has ended")
        self._pipe.send((function, args))
        return self._receive()


@contextmanager
def start_engines(*specs: Mapping[str, Any]) -> Iterator[list[EngineHost]]:
    """Engines started side by side, closed together.

    Args:
        specs: arguments of ``EngineHost``. On one GPU each should set
            ``kv_cache_memory_bytes``: what vLLM measures while others start is not its own.
    """
    with ExitStack() as stack, ThreadPoolExecutor(len(specs)) as pool:
        started = [pool.submit(EngineHost, **spec) for spec in specs]
        failures = []
        for future in started:
            try:
                stack.enter_context(future.result())
            except Exception as e:  # the others are to be closed first, whatever it was
                failures.append(e)
        if failures:
            raise failures[0]
        yield [future.result() for future in started]


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
            function, args = request
            pipe.send(("result", function(llm, *args)))
        llm.llm_engine.engine_core.shutdown()
    except PrefixShareError as e:
        pipe.send(("refused", str(e)))
    except Exception:  # crosses a process: the traceback is all the parent can see
        pipe.send(("failed", traceback.format_exc()))


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of a request.

    logprobs: log-probability of each of ``token_ids``, in nats, before any temperature.
    top2_gaps: that of the best token minus that of the second best.
    finished: False if the request was aborted.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top2_gaps: tuple[float, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What ``drive`` saw. stats: ``BackendStats`` of it, empty where the backend has none."""

    completions: tuple[Completion, ...]
    stats: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0


#: Called before each step with the engine, the step's number and the requests' ids.
StepHook: TypeAlias = Callable[[Any, int, Sequence[str]], None]


def drive(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    hook: StepHook | None = None,
    lora: Sequence[str | None] | None = None,
) -> Run:
    """Run prompts step by step, to be sent with ``EngineHost.call``.

    Args:
        prompts: token ids.
        sampling: ``SamplingParams`` of all requests, or of each; greedy unless it says more.
        hook: called before each step; of a module.
        lora: folder of an adapter, or None, for each prompt.

    Returns:
        completions in the order of the prompts, and of samples within one.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    each = [sampling] * len(prompts) if isinstance(sampling, Mapping) else list(sampling)
    shares = _counts(llm)
    if shares:
        llm.collective_rpc("prefix_share_stats", args=(True,))
    preempted = _preemptions(llm)
    engine = llm.llm_engine
    adapters = _adapters(lora, len(prompts))
    ids = [f"r{i}" for i in range(len(prompts))]
    for i, (prompt, settings) in enumerate(zip(prompts, each, strict=True)):
        params = SamplingParams(
            **{"temperature": 0.0, "logprobs": 2, "detokenize": False, **settings},
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        request = {"prompt_token_ids": list(prompt)}
        engine.add_request(ids[i], request, params, lora_request=adapters[i])
    latest: dict[tuple[str, int], Completion] = {}
    steps = 0
    while engine.has_unfinished_requests():
        if hook is not None:
            hook(llm, steps, ids)
        for output in engine.step():
            for answer in output.outputs:
                latest[output.request_id, answer.index] = _completion(output, answer)
        steps += 1
    stats = llm.collective_rpc("prefix_share_stats")[0] if shares else {}
    order = sorted(latest, key=lambda key: (ids.index(key[0]), key[1]))
    completions = tuple(latest[key] for key in order)
    return Run(completions, stats, _preemptions(llm) - preempted, steps)


def score(llm: Any, sequences: Sequence[Completion]) -> list[list[float]]:
    """Log-probabilities of the generated tokens of ``sequences``, each read as one prompt:
    through the prefill of the engine, without its decode. For ``EngineHost.call``."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": [*s.prompt_ids, *s.token_ids]} for s in sequences]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output, sequence in zip(outputs, sequences, strict=True):
        first = len(sequence.prompt_ids)
        pairs = zip(sequence.token_ids, output.prompt_logprobs[first:], strict=True)
        found.append([scores[token].logprob for token, scores in pairs])
    return found


def _adapters(folders: Sequence[str | None] | None, count: int) -> list[Any]:
    from vllm.lora.request import LoRARequest

    numbers = {folder: i + 1 for i, folder in enumerate(dict.fromkeys(folders or ()))}
    return [
        LoRARequest(f"adapter-{numbers[folder]}", numbers[folder], folder) if folder else None
        for folder in (folders or [None] * count)
    ]


def _completion(output: Any, answer: Any) -> Completion:
    tokens = tuple(answer.token_ids)
    steps = list(answer.logprobs or ())
    best = [sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in steps]
    return Completion(
        prompt_ids=tuple(output.prompt_token_ids),
        token_ids=tokens,
        logprobs=tuple(step[t].logprob for t, step in zip(tokens, steps, strict=True)),
        top2_gaps=tuple(pair[0] - pair[1] if len(pair) == 2 else 0.0 for pair in best),
        finished=answer.finish_reason in ("length", "stop"),
    )


def _counts(llm: Any) -> bool:
    # an extension of the worker is the plugin's, or one made from it
    return bool(llm.llm_engine.vllm_config.parallel_config.worker_extension_cls)


def _preemptions(llm: Any) -> int:
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
