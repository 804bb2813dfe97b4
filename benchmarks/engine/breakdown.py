"""What a decode step's GPU time is spent on: kernels recorded by torch's profiler, by kind.

The kernels inside CUDA graphs are recorded, too. The profiler makes the host slower, so that the
GPU idles longer in these steps than in timed ones.
"""

import re
from collections.abc import Iterable
from typing import Any

ATTENTION, WRITTEN, PRODUCTS, OTHER = (
    "attention",
    "KV written",
    "matrix products",
    "everything else",
)
KINDS = (ATTENTION, WRITTEN, PRODUCTS, OTHER)
#: kind -> what the name of a kernel has, in lower case; the first that fits decides
_NAMES = (
    # made by torch.compile and named after the operations that are fused; templates are products
    (OTHER, re.compile(r"^triton_(?!tem_)")),
    # before attention: one of vLLM's is reshape_and_cache_flash_kernel
    (WRITTEN, re.compile(r"cache_write|reshape_and_cache|concat_and_cache")),
    # FlashAttention's are in the namespace flash; FlashInfer's samplers are no attention
    (
        ATTENTION,
        re.compile(
            r"flash::|flash_?(attn|fwd|mla)|attention|merge_?(states|stacked|attn)"
            r"|batch(decode|prefill)with|pagedkvcache|fmha|reduce_segments"
        ),
    ),
    (PRODUCTS, re.compile(r"nvjet|gemm|gemv|cublas|cutlass|xmma|triton_tem_|split_?k|fused_moe")),
)
#: decode steps that are not profiled: the first ones make plans
SKIPPED = 3
#: then steps in which the profiler is on but keeps nothing, for its first ones are slow
WARM = 2
#: then those that are profiled
PROFILED = 8
#: names of each kind that a result has, so that a reader can check the kinds, and their length
EXAMPLES, NAME = 5, 120
#: output tokens of a request that give it enough decode steps
TOKENS = SKIPPED + WARM + PROFILED + 3

#: name, start and end in microseconds
Span = tuple[str, float, float]


def kind_of(kernel: str) -> str:
    """One of ``KINDS``."""
    name = kernel.lower()
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), OTHER)


def by_kind(spans: Iterable[Span], steps: int) -> dict[str, Any]:
    """Milliseconds and launches of a step by kind, means over ``steps``, and the names that took
    longest. Empty without spans.

    Where kernels overlap, the time is that of the one that began first, so that the kinds add up to
    the time in which the GPU was busy. idle_ms: the rest, from the first kernel to the last one's
    end.
    """
    ordered = sorted(spans, key=lambda span: span[1:])
    if not ordered or steps < 1:
        return {}
    us, launches = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    named: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    first = until = ordered[0][1]
    for name, start, end in ordered:
        kind = kind_of(name)
        alone = max(0.0, end - max(start, until))
        us[kind] += alone
        named[kind][name] = named[kind].get(name, 0.0) + alone
        launches[kind] += 1
        until = max(until, end)
    return {
        "steps": steps,
        "ms": {kind: t / steps / 1e3 for kind, t in us.items()},
        "launches": {kind: n / steps for kind, n in launches.items()},
        "longest": {
            kind: [name[:NAME] for name in sorted(of, key=lambda n, of=of: -of[n])[:EXAMPLES]]
            for kind, of in named.items()
        },
        "idle_ms": (until - first - sum(us.values())) / steps / 1e3,
    }


def attention_ms(row: dict[str, Any], engine: str) -> tuple[float, float] | None:
    """GPU milliseconds of attention in the decode step that a row's profile has, and of the whole
    step. None without a profile, which rows of older files do not have.
    """
    found = (row.get("breakdown") or {}).get(engine)
    return (found["ms"][ATTENTION], sum(found["ms"].values())) if found else None


class StepProfiler:
    """Profiles steps of a model runner in which each of ``num_reqs`` requests has one token.

    Nothing here raises: a step must not fail because it could not be profiled.
    """

    def __init__(self, runner: Any, num_reqs: int) -> None:
        self._runner, self._num_reqs = runner, num_reqs
        #: decode steps that began, and those that were profiled
        self._seen = self._steps = 0
        self._trace: Any = None
        self._records = self._done = False
        self._failed = ""
        self._own = vars(runner).get("execute_model")  # another method's wrapper
        execute_model = runner.execute_model

        def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._try(self._before, scheduled)
            return execute_model(scheduled, *args, **kwargs)

        runner.execute_model = watched

    def end(self) -> dict[str, Any]:
        """As ``by_kind``, or ``failed`` with a reason. The runner is as it was before."""
        if self._own is None:
            del self._runner.execute_model
        else:
            self._runner.execute_model = self._own
        self._try(self._stop)
        found: dict[str, Any] = {}
        if not self._failed and self._steps:
            found = self._try(lambda: by_kind(self._spans(), self._steps)) or {}
        if not found:
            reason = self._failed or f"no kernels were recorded in {self._steps} steps"
            return {"failed": reason}
        if not found["launches"][ATTENTION]:
            return {"failed": f"no attention among the kernels, but {found['longest']}"}
        return found

    def _try(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as e:
            self._failed, self._done = f"{type(e).__name__}: {e}", True
            return None

    def _before(self, scheduled: Any) -> None:
        """Before a step: begin or end the profile, or neither."""
        if self._done:
            return
        counts = list(scheduled.num_scheduled_tokens.values())
        if counts != [1] * self._num_reqs:
            if self._trace is not None:
                self._stop()
            return
        self._seen += 1
        if self._seen == SKIPPED + 1:
            self._prepare()
        if self._seen == SKIPPED + WARM + 1:
            _wait()
            self._trace.start_trace()
            self._records = True
        if self._seen == SKIPPED + WARM + PROFILED + 1:
            self._stop()
        elif self._records:
            self._steps += 1

    def _prepare(self) -> None:
        import torch

        trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        trace.prepare_trace()
        self._trace = trace

    def _stop(self) -> None:
        """End what was begun. The runner's thread must call it, as it must begin it."""
        if self._trace is None or self._done:
            return
        self._done = True
        if not self._records:  # what is prepared can end only after it has started
            self._trace.start_trace()
        _wait()
        self._trace.stop_trace()

    def _spans(self) -> list[Span]:
        from torch.autograd import DeviceType

        return [
            (event.name, event.time_range.start, event.time_range.end)
            for event in self._trace.events()
            if event.device_type != DeviceType.CPU
            and not getattr(event, "is_user_annotation", False)
        ]


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
