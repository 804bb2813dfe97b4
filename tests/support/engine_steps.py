"""Functions that are sent to an ``EngineProcess`` and drive its engine step by step.

``EngineProcess.generate`` gives completions. Here the caller controls what happens between two
steps: requests come and go, the cache is reset, tokens are forced, counters are read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.support.engine import EngineProcess, preemptions

#: Value of vLLM's argument ``logits_processors``; a name, because that module imports vLLM.
FORCED_TOKENS = "tests.support.forced_tokens:ForcedTokens"


@contextmanager
def start_engines(*specs: Mapping[str, Any]) -> Iterator[list[EngineProcess]]:
    """Start engines side by side, and close them together.

    Args:
        specs: arguments of ``EngineProcess``. On one GPU each should set ``kv_cache_memory_bytes``,
            because vLLM's measurement of free memory is wrong while other engines start.
    """
    with ExitStack() as stack, ThreadPoolExecutor(len(specs)) as pool:
        started = [pool.submit(EngineProcess, **spec) for spec in specs]
        failures = []
        for future in started:
            try:
                stack.enter_context(future.result())
            except Exception as e:  # any exception: the other engines must be closed first
                failures.append(e)
        if failures:
            raise failures[0]
        yield [future.result() for future in started]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of a request.

    logprobs: log-probability of each of ``token_ids``, in nats, before any temperature.
    top2_gaps: log-probability of the best token minus that of the second best.
    finished: False if the request was aborted. A request aborted before its first token has no
        answer.
    request: index of the answer's prompt in the run.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top2_gaps: tuple[float, ...]
    finished: bool
    request: int


@dataclass(frozen=True, slots=True)
class Run:
    """The results of ``drive``. stats: ``BackendStats`` of the run, empty where the backend has
    none.
    """

    completions: tuple[Completion, ...]
    stats: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0


#: Token ids, or a prompt of vLLM's with ``prompt_token_ids`` and images.
Prompt: TypeAlias = Sequence[int] | Mapping[str, Any]
#: Called before each step with the engine, the step's number and the ids of the requests.
StepHook: TypeAlias = Callable[[Any, int, Sequence[str]], None]


def drive(
    llm: Any,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    hook: StepHook | None = None,
    lora: Sequence[str | None] | None = None,
) -> Run:
    """Run prompts step by step; to be sent with ``EngineProcess.call``.

    Args:
        sampling: ``SamplingParams`` of all requests, or of each; greedy by default.
        hook: called before each step; defined in a module.
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
    preempted = preemptions(llm)
    engine = llm.llm_engine
    adapters = _adapters(lora, len(prompts))
    ids = [f"r{i}" for i in range(len(prompts))]
    for i, (prompt, settings) in enumerate(zip(prompts, each, strict=True)):
        params = SamplingParams(
            **{"temperature": 0.0, "logprobs": 2, "detokenize": False, **settings},
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        engine.add_request(ids[i], _request(prompt), params, lora_request=adapters[i])
    latest: dict[tuple[int, int], Completion] = {}
    steps = 0
    while engine.has_unfinished_requests():
        if hook is not None:
            hook(llm, steps, ids)
        for output in engine.step():
            for answer in output.outputs:
                place = ids.index(output.request_id)
                latest[place, answer.index] = completion_of(output, answer, place)
        steps += 1
    stats = llm.collective_rpc("prefix_share_stats")[0] if shares else {}
    completions = tuple(latest[key] for key in sorted(latest))
    return Run(completions, stats, preemptions(llm) - preempted, steps)


def _request(prompt: Prompt, *more: int) -> dict[str, Any]:
    """A prompt of vLLM's, continued by more token ids."""
    if isinstance(prompt, Mapping):
        return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *more]}
    return {"prompt_token_ids": [*prompt, *more]}


def salted(
    llm: Any, prompts: Sequence[Sequence[int]], salts: Sequence[str | None], tokens: int
) -> tuple[Run, list[int]]:
    """Greedy answers of ``tokens`` tokens to prompts with salts, and the cached tokens of each
    request. For ``EngineProcess.call``.

    Args:
        salts: ``cache_salt`` of each prompt, or None.
    """
    from vllm import SamplingParams

    shares = _counts(llm)
    if shares:
        llm.collective_rpc("prefix_share_stats", args=(True,))
    requests = [
        {"prompt_token_ids": list(prompt), **({} if salt is None else {"cache_salt": salt})}
        for prompt, salt in zip(prompts, salts, strict=True)
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2, detokenize=False
    )
    outputs = llm.generate(requests, params, use_tqdm=False)
    completions = tuple(completion_of(o, o.outputs[0], i) for i, o in enumerate(outputs))
    stats = llm.collective_rpc("prefix_share_stats")[0] if shares else {}
    return Run(completions, stats), [output.num_cached_tokens or 0 for output in outputs]


def score(
    llm: Any, sequences: Sequence[Completion], asked: Sequence[Prompt] | None = None
) -> list[list[float]]:
    """Log-probabilities of the generated tokens of ``sequences``, each read as one prompt: by the
    prefill of the engine, without decode. For ``EngineProcess.call``.

    Args:
        asked: the prompts of the run, if some have images.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompts = [
        _request(s.prompt_ids if asked is None else asked[s.request], *s.token_ids)
        for s in sequences
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output, sequence in zip(outputs, sequences, strict=True):
        first = len(sequence.prompt_ids)
        pairs = zip(sequence.token_ids, output.prompt_logprobs[first:], strict=True)
        found.append([scores[token].logprob for token, scores in pairs])
    return found


#: Adapter numbers for vLLM: a folder has the same number in every call.
_ADAPTERS: dict[str, int] = {}


def _adapters(folders: Sequence[str | None] | None, count: int) -> list[Any]:
    from vllm.lora.request import LoRARequest

    found = []
    for folder in folders or [None] * count:
        number = _ADAPTERS.setdefault(folder, len(_ADAPTERS) + 1) if folder else 0
        found.append(LoRARequest(f"adapter-{number}", number, folder) if folder else None)
    return found


def completion_of(output: Any, answer: Any, place: int) -> Completion:
    """An answer of vLLM's to the prompt with index ``place``, sampled with ``logprobs=2``."""
    tokens = tuple(answer.token_ids)
    steps = list(answer.logprobs or ())
    best = [sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in steps]
    return Completion(
        prompt_ids=tuple(output.prompt_token_ids),
        token_ids=tokens,
        logprobs=tuple(step[t].logprob for t, step in zip(tokens, steps, strict=True)),
        top2_gaps=tuple(pair[0] - pair[1] if len(pair) == 2 else 0.0 for pair in best),
        finished=answer.finish_reason in ("length", "stop"),
        request=place,
    )


def _counts(llm: Any) -> bool:
    # a worker extension is the plugin's, or derived from it
    return bool(llm.llm_engine.vllm_config.parallel_config.worker_extension_cls)
