"""What the engine tests on a GPU share: settings, prompts, comparison with stock, and functions
that run in an engine's process.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.dummy_model import write_small_llama
from tests.support.engine import PREFIX_SHARE, RUNNERS, STOCK_GPU, EngineProcess
from tests.support.engine_steps import Completion, Prompt, Run, drive, score, start_engines
from vllm_prefixshare.vllm_plugin.observability.stats import PrefixShareWorkerExtension

#: The checkpoint folder of a real model to test with, instead of random weights.
MODEL_VARIABLE = "PREFIXSHARE_TEST_MODEL"
BLOCK_SIZE = 16
#: Tokens of a document, and after it of each request. There are many requests, because on so small
#: a model the planner reads the document more than once for a few.
DOCUMENT, PRIVATE = 1200, [50, 9, 31, 64, 17] * 3
GREEDY = {"ignore_eos": True}

#: float16, because the rounding of bfloat16 would hide a small fault. Several engines run at once,
#: so each gets a fixed amount of memory. kv_cache_memory_bytes: for each GPU.
SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 3072,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}
#: Checks every plan, and raises an error for a layer that is not served.
ENVIRONMENT = {
    "VLLM_PREFIXSHARE_SHARE": "always",
    "VLLM_PREFIXSHARE_CHECK_PLANS": "1",
    "VLLM_PREFIXSHARE_STRICT": "1",
}
#: Lets layers that are not served keep the parent's kernel.
LENIENT = {"VLLM_PREFIXSHARE_STRICT": "0"}
#: Full graphs without compilation: the engine starts in half the time. For tests of a feature, not
#: of the default mode.
QUICK = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
QUICK_BF16: dict[str, Any] = {**QUICK, "dtype": "bfloat16"}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}

#: Scales of queries and of latents, as "0.05,0.03", for layers with latents. vLLM 0.33 loads those
#: of few checkpoints; and what a graph does depends on them, so they must be there before capture.
LATENT_SCALES = "PREFIXSHARE_TEST_LATENT_SCALES"

#: Nats between the log-probability of a token in decode and in stock's prefill: mean over the
#: tokens of a request, and largest. On the small model, float16 alone gives a mean of 0.01 and a
#: largest difference of 0.1; one wrong block of 75 gives a mean of 0.7.
MEAN_ERROR, MAX_ERROR = 0.05, 0.4


def engines(*specs: dict[str, Any]) -> AbstractContextManager[list[EngineProcess]]:
    """Start engines side by side. specs: arguments of ``EngineProcess``, over ``SETTINGS``."""
    return start_engines(*({**SETTINGS, **spec} for spec in specs))


def ours(model: Path, runner: str | None = None, **options: Any) -> dict[str, Any]:
    """Arguments of an engine with PREFIX_SHARE.

    Args:
        runner: key of ``RUNNERS``; None: vLLM chooses the runner.
        options: arguments of ``EngineProcess``; ``env`` adds to ``ENVIRONMENT``.
    """
    environment = {**ENVIRONMENT, **RUNNERS.get(runner or "", {}), **options.pop("env", {})}
    return {"backend": PREFIX_SHARE, "model": model, "environment": environment, **options}


def stock(model: Path, **options: Any) -> dict[str, Any]:
    return {"backend": STOCK_GPU, "model": model, **options}


def extension(of: type) -> dict[str, str]:
    """The option that gives an engine one of the worker extensions below, whose methods
    ``EngineProcess.collective_rpc`` calls.
    """
    return {"worker_extension_cls": f"{of.__module__}.{of.__qualname__}"}


def llama_128(folder: Path) -> Path:
    """Write a small model with heads as wide as most models have."""
    return write_small_llama(folder, head_dim=128)


class Text:
    """Token ids for prompts: a real text for a real model, random ids otherwise."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        self.is_real = str(model) == os.environ.get(MODEL_VARIABLE)
        if self.is_real:
            docs = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
            self._ids = tokenizer.encode("\n\n".join(p.read_text() for p in docs))
        else:
            rng = np.random.default_rng(0)
            # added tokens stand for images
            self._ids = rng.integers(3, tokenizer.vocab_size, 20000).tolist()

    def part(self, start: int, length: int) -> list[int]:
        start %= len(self._ids)
        again = -(-(start + length) // len(self._ids))
        return (self._ids * again)[start : start + length]

    def asking(self, document: int, private: Sequence[int], start: int = 0) -> list[list[int]]:
        """Prompts that begin with the same ``document`` tokens and continue with ``private[i]``
        other tokens.
        """
        first = self.part(start, document)
        return [first + self.part(7000 + 311 * i, n) for i, n in enumerate(private)]


def greedy(count: int) -> dict[str, Any]:
    """Sampling of ``count`` tokens."""
    return {**GREEDY, "max_tokens": count}


def prime(engine: EngineProcess, prompts: Sequence[Prompt]) -> None:
    """Put the document into the prefix cache. Requests that are scheduled at once with an empty
    cache do not share the document.
    """
    engine.call(drive, prompts[:1], greedy(1))


def drive_primed(engine: EngineProcess, prompts: Sequence[Prompt], *rest: Any) -> Run:
    """``drive``, with the document cached beforehand."""
    prime(engine, prompts)
    run: Run = engine.call(drive, prompts, *rest)
    return run


def errors(
    completions: Sequence[Completion],
    reference: EngineProcess,
    asked: Sequence[Prompt] | None = None,
) -> list[np.ndarray]:
    """Absolute difference of the log-probability in decode and in stock's prefill, per token and
    answer.

    Args:
        asked: as for ``score``.
    """
    scores = reference.call(score, completions, asked)
    return [np.abs(np.subtract(c.logprobs, s)) for c, s in zip(completions, scores, strict=True)]


def all_errors(
    run: Run, reference: EngineProcess, asked: Sequence[Prompt] | None = None
) -> np.ndarray:
    """As ``errors``, of all tokens of a run in one array."""
    each = errors(run.completions, reference, asked)
    print("mean errors of answers:", *(f"{error.mean():.3f}" for error in each))
    return np.concatenate(each)


@dataclass(frozen=True)
class Comparison:
    """Runs of PREFIX_SHARE and of stock on the same prompts, and the ``all_errors`` of both.

    bfloat16 and fp8 round more than the limits of ``assert_as_stock`` allow, so the errors in
    decode are compared with those of stock's own decode.
    """

    run: Run
    stock_run: Run
    errors: np.ndarray
    stock_errors: np.ndarray

    def __str__(self) -> str:
        return beside_stock(self.run, self.stock_run, self.errors, self.stock_errors)

    def assert_as_exact(self, max_slack: float = 1e-2) -> None:
        """Assert that errors are about as small as stock's.

        Args:
            max_slack: nats by which the largest error may differ, because kernels round
                differently.
        """
        assert 0 < self.errors.mean() < 1.3 * self.stock_errors.mean() + 1e-3
        assert self.errors.max() < 2 * self.stock_errors.max() + max_slack


def compare(
    both: Sequence[EngineProcess], prompts: Sequence[Prompt], sampling: dict[str, Any]
) -> Comparison:
    """Run stock, the first engine, and PREFIX_SHARE, the second, with the document cached."""
    stock_run, run = (drive_primed(engine, prompts, sampling) for engine in both)
    found = (all_errors(each, both[0], prompts) for each in (run, stock_run))
    return Comparison(run, stock_run, *found)


def assert_as_exact(
    both: Sequence[EngineProcess],
    prompts: Sequence[Sequence[int]],
    note: Callable[[str], None],
    tokens: int = 64,
) -> Run:
    """Assert that PREFIX_SHARE, the second engine, shares and is as exact as stock, the first;
    returns its run.
    """
    found = compare(both, prompts, greedy(tokens))
    note(str(found))
    assert_shared(found.run, factor=2.0)
    assert found.run.stats["decode_steps"] >= tokens - 1
    if found.stock_errors.max() == 0:  # FlashAttention-2 decodes in the order of its prefill
        assert 0 < found.errors.mean() < MEAN_ERROR and found.errors.max() < MAX_ERROR
    else:
        found.assert_as_exact()
    return found.run


def assert_as_stock(run: Run, reference: EngineProcess) -> None:
    """Assert that stock gives every token of ``run`` the log-probability that decode gave it."""
    assert run.completions
    for i, error in enumerate(errors(run.completions, reference)):
        assert len(error), f"answer {i} has no tokens"
        assert error.mean() < MEAN_ERROR, f"answer {i}: mean error {error.mean():.3f} nats"
        assert error.max() < MAX_ERROR, f"answer {i}, token {error.argmax()}: {error.max():.3f}"


def assert_same_texts(run: Run, stock_run: Run) -> None:
    """Assert that greedy answers equal stock's, up to a tie."""
    equal = 0
    for i, (a, b) in enumerate(zip(run.completions, stock_run.completions, strict=True)):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
        same = next((p for p, (x, y) in pairs if x != y), len(b.token_ids))
        if same < len(b.token_ids):
            assert b.top2_gaps[same] < MAX_ERROR, f"answer {i}, token {same}: stock was sure"
        if same:
            error = np.abs(np.subtract(a.logprobs[:same], b.logprobs[:same]))
            assert error.mean() < MEAN_ERROR and error.max() < MAX_ERROR, f"answer {i}"
        equal += same
    assert equal > 8 * len(run.completions), "too little was compared"


def beside_stock(run: Run, stock_run: Run, error: np.ndarray, stock_error: np.ndarray) -> str:
    """Errors of greedy answers and of stock's, and the tokens before an answer parts from stock's.

    Args:
        error, stock_error: of all tokens, as by ``errors``.
    """
    same, leads = 0, [0.0]
    for a, b in zip(run.completions, stock_run.completions, strict=True):
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
        parts = next((place for place, (x, y) in pairs if x != y), None)
        same += len(b.token_ids) if parts is None else parts
        if parts is not None:
            leads.append(b.top2_gaps[parts])
    return (
        f"mean error {error.mean():.4f} nats (stock {stock_error.mean():.4f}), largest "
        f"{error.max():.3f} (stock {stock_error.max():.3f}); {same} of {len(error)} tokens before "
        f"answers part, where stock's leads by at most {max(leads):.3f}"
    )


def assert_shared(run: Run, factor: float = 1.2) -> None:
    assert run.stats["shared_steps"] > 0
    stock, read = run.stats["kv_tokens_stock"], run.stats["kv_tokens_read"]
    assert stock > factor * read, f"{stock / read:.2f} times"


class LayerCounter(PrefixShareWorkerExtension):
    """The plugin's worker extension, which also counts how many layers Python calls."""

    layers_called: int | None = None

    def count_layers(self) -> int:
        """Layers called since the last call; the first call starts counting."""
        from vllm_prefixshare.vllm_plugin.backends.cuda.backend import PrefixShareCUDAImpl

        found = LayerCounter.layers_called
        LayerCounter.layers_called = 0
        if found is None:
            forward = PrefixShareCUDAImpl.forward

            def counting(*args: Any, **kwargs: Any) -> Any:
                LayerCounter.layers_called += 1
                return forward(*args, **kwargs)

            PrefixShareCUDAImpl.forward = counting
        return found or 0


class EveryQuestion(PrefixShareWorkerExtension):
    """The plugin's worker extension, which also lets a small model's short questions be planned."""

    def plan_every_question(self) -> None:
        """Plan short questions however little FLASH_ATTN would read for them."""
        from vllm_prefixshare.vllm_plugin.step import gpu_builder

        for builder in gpu_builder._BUILDERS:
            if builder._first_step is not None:
                builder._first_step = builder._first_step._replace(min_context=0)


def _scale_latents(of_queries: float, of_latents: float) -> None:
    """Let every layer with latents that is loaded from now on have scales of its own."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    original = MLAAttention.process_weights_after_loading
    layers: list[Any] = []

    def loaded(self: Any, *args: Any) -> None:
        original(self, *args)
        larger = 1 + 0.15 * len(layers)
        layers.append(self)
        self._q_scale.fill_(of_queries * larger)
        self._k_scale.fill_(of_latents * larger)
        self._q_scale_float, self._k_scale_float = of_queries * larger, of_latents * larger

    MLAAttention.process_weights_after_loading = loaded


if LATENT_SCALES in os.environ:  # in a worker, whose extension this module has
    _scale_latents(*map(float, os.environ[LATENT_SCALES].split(",")))


class KernelNames(PrefixShareWorkerExtension):
    """The plugin's worker extension, which also says what graphs hold and launch, and with which
    scales.
    """

    def kernels_in_graphs(self) -> list[str]:
        """Names of the kernels that CUDA graphs launch."""
        from vllm_prefixshare.vllm_plugin.step import gpu_builder

        found = [builder.executor for builder in gpu_builder._BUILDERS]
        return [x.name for x in found if x is not None and x.workspace.plan.captured]

    def cache_scales(self) -> dict[str, list[list[float]]]:
        """The scales of queries, keys and values of each layer whose decodes are planned."""
        from vllm_prefixshare.vllm_plugin.step import gpu_builder

        found = {}
        for builder in gpu_builder._BUILDERS:
            context = builder.vllm_config.compilation_config.static_forward_context
            for name in builder.layer_names:
                layer = context[name]
                scales = layer._q_scale, layer._k_scale, layer._v_scale
                found[name] = [scale.flatten().tolist() for scale in scales]
        return found

    def count_flash_mla(self) -> None:
        """Count the calls of FLASHMLA's decode from now on, those of graphs not."""
        from vllm.v1.attention.backends.mla.flashmla import FlashMLAImpl

        self._flash_mla = 0
        original = FlashMLAImpl.forward_mqa

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._flash_mla += 1
            return original(*args, **kwargs)

        FlashMLAImpl.forward_mqa = counted

    def flash_mla_calls(self) -> int:
        return self._flash_mla

    def trace_kernels(self) -> None:
        """Count every kernel from now on."""
        cuda = torch.profiler.ProfilerActivity.CUDA
        self._kernel_trace = torch.profiler.profile(activities=[cuda])
        self._kernel_trace.start()

    def kernels_traced(self) -> dict[str, int]:
        """Launches of each kernel since ``trace_kernels``, those of graphs included."""
        torch.cuda.synchronize()
        self._kernel_trace.stop()
        return {event.key: event.count for event in self._kernel_trace.key_averages()}


# ---- functions that run in an engine's process; sent there by name ----


def count_layers_from(llm: Any, step: int, ids: Sequence[str], *, when: int) -> None:
    """Hook of ``drive``: make ``LayerCounter`` start anew before step ``when``."""
    if step == when:
        llm.collective_rpc("count_layers")


def abort_at(llm: Any, step: int, ids: Sequence[str], *, when: int, which: Sequence[int]) -> None:
    """Hook of ``drive``: abort some requests before step ``when``."""
    if step == when:
        llm.llm_engine.abort_request([ids[i] for i in which])


def reset_at(llm: Any, step: int, ids: Sequence[str], *, when: int) -> None:
    """Hook of ``drive``: reset the prefix cache before step ``when``, while requests run."""
    if step == when:
        assert llm.reset_prefix_cache(reset_running_requests=True)


def uses_v2(llm: Any) -> bool:
    return bool(llm.llm_engine.vllm_config.use_v2_model_runner)


def metric(llm: Any, name: str) -> int:
    """Sum of one of vLLM's counters."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name)


def beam_search(llm: Any, prompts: Sequence[Sequence[int]], width: int, tokens: int) -> Run:
    """The best beams of each prompt, with the log-probabilities of their tokens."""
    from vllm.sampling_params import BeamSearchParams

    llm.collective_rpc("prefix_share_stats", args=(True,))
    params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": list(p)} for p in prompts], params)
    completions = []
    for place, (prompt, output) in enumerate(zip(prompts, found, strict=True)):
        for beam in output.sequences:
            chosen = tuple(beam.tokens[len(prompt) :])
            pairs = zip(chosen, beam.logprobs, strict=True)
            logprobs = tuple(step[token].logprob for token, step in pairs)
            completions.append(Completion(tuple(prompt), chosen, logprobs, (), True, place))
    return Run(tuple(completions), llm.collective_rpc("prefix_share_stats")[0])


def watched(llm: Any, prompts: Sequence[Sequence[int]], tokens: int, steady: int) -> dict[str, Any]:
    """Run prompts in an engine in this process. Synchronising is forbidden while the backend builds
    its metadata and while its layers run.

    Args:
        steady: step from which on all requests decode.

    Returns:
        run: the run. builds: how often metadata was built. layers: how many layers Python called.
        forwards: how many of these from step ``steady`` on, where FULL graphs should be replayed
        instead. caught: whether a call that synchronises raises.
    """
    import torch

    from vllm_prefixshare.vllm_plugin.backends.cuda.backend import PrefixShareCUDAImpl
    from vllm_prefixshare.vllm_plugin.backends.cuda.metadata import PrefixShareMetadataBuilder

    counts = {"builds": 0, "layers": 0, "forwards": 0, "step": 0}
    build, forward = PrefixShareMetadataBuilder.build, PrefixShareCUDAImpl.forward

    def without_sync(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def watched_build(*args: Any, **kwargs: Any) -> Any:
        counts["builds"] += 1
        return without_sync(build, *args, **kwargs)

    def watched_forward(*args: Any, **kwargs: Any) -> Any:
        counts["layers"] += 1
        counts["forwards"] += counts["step"] >= steady
        return without_sync(forward, *args, **kwargs)

    def hook(llm: Any, step: int, ids: Sequence[str]) -> None:
        counts["step"] = step

    caught = False
    try:
        without_sync(torch.ones(1, device="cuda").item)
    except RuntimeError:
        caught = True

    PrefixShareMetadataBuilder.build = watched_build
    PrefixShareCUDAImpl.forward = watched_forward
    try:
        run = drive(llm, prompts, greedy(tokens), hook)
    finally:
        PrefixShareMetadataBuilder.build = build
        PrefixShareCUDAImpl.forward = forward
    return {"run": run, "caught": caught, **counts}
