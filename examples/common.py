"""The common part of the examples: options, engines that take turns, and the table at the end.

Each engine is vLLM's own ``LLM`` in a separate process, because vLLM reads its settings when it is
imported. The baseline engine and the engine with PREFIX_SHARE differ in ``attention_backend`` only.
An example is a function ``work(llm, args)``: it calls ``llm.generate`` as any program would, and
returns the completions and the values to show.
"""

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from examples.embedded_model import embedded_model_path
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.settings import PREFIX, VARIABLES

OURS, BASELINE = "PREFIX_SHARE", "baseline"

#: Defaults of both engines for variables that are not set: no network, and two engines side by side
#: on a machine with few cores.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Tokens may differ where the baseline's two best tokens are at most this many nats apart, because
#: rounding decides between them. bfloat16 logits between 16 and 32 come in steps of 0.125; two
#: steps are rounding.
MAX_GAP = {"float32": 0.05, "bfloat16": 0.26, "float16": 0.05}


@dataclass(frozen=True)
class Pass:
    """The result of one pass of an example over an engine.

    tokens: token ids of every sequence, in order.
    gaps: for each token of a sequence, the log-probability of the best token minus that of the
        second best, in nats; empty where the example requested no gaps.
    shown: the values that the example returned to be shown.
    seconds: duration of the whole call, from text in to text out. ms_per_token: mean time from an
        output token to the next, from vLLM's own metrics; None where no request has two tokens.
    host_seconds: of these seconds, those outside the model's steps; None where the engine runs in
        another process.
    stats: ``prefix_share_stats`` of the pass; empty for the baseline.
    dtype: dtype of the model. note: why sharing may gain no time here, or empty.
    """

    tokens: list[tuple[int, ...]]
    gaps: list[tuple[float, ...]]
    shown: Any
    seconds: float
    ms_per_token: float | None
    host_seconds: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    note: str = ""


#: ``work(llm, args)`` of an example: the completions, and the values to show.
Work = Callable[[Any, argparse.Namespace], tuple[Sequence[Any], Any]]


class Runner(Protocol):
    """An engine or a server that is starting."""

    def wait(self) -> None:
        """Wait until the engine or server can serve."""

    def run(self, work: Any, args: argparse.Namespace) -> Pass:
        """Run one pass."""

    def pause(self) -> None:
        """Stop all processes until the next pass, because even an idle engine uses CPU time."""

    def close(self) -> None:
        """End all processes."""


# ---- options


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options of all examples; ``defaults`` are the example's own defaults."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", help="name on the Hugging Face Hub, or folder (default: embedded model)"
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="default: the checkpoint's; on a CPU without AVX-512 BF16 float32",
    )
    group.add_argument("--max-model-len", type=int, default=8192)
    group.add_argument("--block-size", type=int, help="tokens in a KV block (default: vLLM's)")
    group.add_argument(
        "--share",
        choices=("auto", "always", "never"),
        default="always",
        help="auto lets the cost model decide whether sharing pays (default: always)",
    )
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with vLLM's default backend",
    )
    group.add_argument(
        "--pairs", type=int, default=5, help="timed passes of each engine; 0: no times"
    )
    group.add_argument("--log", type=Path, help="file for what vLLM prints (default: a new one)")
    parser.set_defaults(**defaults)
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Check the options of ``options``; fill in the model and the log file.

    Raises:
        PrefixShareError: an option, or one of our settings, is not usable.
    """
    at_least(args, 0, "pairs")
    at_least(args, 16, "max_model_len")
    if args.block_size is not None:
        at_least(args, 1, "block_size")
    fill_in(args)


def fill_in(args: argparse.Namespace) -> None:
    """Fill in ``args.model`` and ``args.log``, which may be None.

    Raises:
        PrefixShareError: one of them, or one of our settings, is not usable.
    """
    unknown = [name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES]
    if unknown:
        raise PrefixShareError(f"{unknown[0]} is not a known variable: unset it.")
    args.model = find_model(args.model)
    if args.log is None:
        handle, name = tempfile.mkstemp(prefix=f"{Path(sys.argv[0]).stem}-", suffix=".log")
        os.close(handle)
        args.log = Path(name)
    check_writable(args.log, "--log")


def find_model(model: str | None) -> str:
    """The folder of a model, or its name on the Hugging Face Hub; None is the embedded model.

    Raises:
        PrefixShareError: a folder that is not there or holds no checkpoint.
    """
    if model is None:
        return str(embedded_model_path())
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not Path(model).is_dir()
    if is_name:
        os.environ.setdefault("HF_HUB_OFFLINE", "0")  # the other models need no network
    elif not Path(model, "config.json").is_file():
        raise PrefixShareError(
            f"model {model} is not a checkpoint folder, and no name as in ORGANIZATION/MODEL."
        )
    return model


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written; a new one does not stay."""
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as e:
        raise PrefixShareError(f"{option} {path} cannot be written ({e.strerror}).") from None
    if new:
        path.unlink()


def at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse options that are too small."""
    for name in names:
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            raise PrefixShareError(
                f"--{option} must be at least {least}, got {getattr(args, name)}."
            )


def run_example(main: Callable[[], int]) -> None:
    """End the process with ``main``'s status, or with 2 and one sentence for a user's mistake."""
    name = Path(sys.argv[0]).stem
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # a terminal may lack the characters of trees
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting closes engines
    try:
        status = main()
    except PrefixShareError as e:
        print(f"{name}: error: {e}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def read_text(path: Path, what: str) -> str:
    """The text of a file. ``what`` names the file in the error if it is empty or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise PrefixShareError(f"{what} {path} cannot be read ({reason}).") from None
    if not text.strip():
        raise PrefixShareError(f"{what} {path} is empty.")
    return text


def on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build."""
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


# ---- progress

BAR = 30


class Progress:
    """A bar on standard error, where that is a terminal. Counts steps; use it as a context manager,
    which removes the bar at the end.

    Args:
        total: number of steps.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._stream = sys.stderr  # None where it is closed
        self._shown = self._stream is not None and self._stream.isatty()
        self._began = time.monotonic()

    def step(self) -> None:
        """Count a step as done."""
        self.done += 1
        if self._shown:
            full = BAR * self.done // self.total
            left = (time.monotonic() - self._began) * (self.total - self.done) / self.done
            bar = "#" * full + "." * (BAR - full)
            text = f"\r[{bar}] {self.done}/{self.total}, about {left:.0f} s left \x1b[K"
            self._stream.write(text)
            self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


# ---- engines


class Engine:
    """``vllm.LLM`` in a separate process, with its output in ``args.log``.

    Args:
        args: options of ``options``, ``max_num_seqs``, and ``trace``: a file that records the
            batches with PREFIX_SHARE, for ``print_tree``.
        backend: ``OURS`` or ``BASELINE``.
        environment: further variables for this engine.
    """

    def __init__(
        self, args: argparse.Namespace, backend: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = args.log
        _quiet_tracker(args.log)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        variables = {"VLLM_PREFIXSHARE_SHARE": args.share, **(environment or {})}
        if backend == OURS and getattr(args, "trace", None):
            variables["VLLM_PREFIXSHARE_TRACE"] = str(args.trace)
        self._process = context.Process(target=_serve, args=(theirs, args, backend, variables))
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until the engine can serve.

        Raises:
            PrefixShareError: the engine refused its settings.
        """
        self._receive()

    def run(self, work: Work, args: argparse.Namespace) -> Pass:
        """Run one pass of ``work``, which a module must define so that it can be sent by name."""
        self._signal(signal.SIGCONT)
        self._pipe.send((work, args))
        result: Pass = self._receive()
        return result

    def pause(self) -> None:
        """Stop all processes until the next pass."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End all processes."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(20)
        self._signal(signal.SIGKILL)
        self._process.join()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            kind, value = "failed", "its process ended"
        if kind == "failed":
            sys.exit(f"{Path(sys.argv[0]).stem}: the engine failed ({value}); see {self._log}")
        if kind == "refused":
            raise PrefixShareError(value)
        return value

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # this process leads a group, see _serve


def _quiet_tracker(log: Path) -> None:
    """Start Python's tracker of semaphores with ``log`` as its standard error. The tracker warns of
    semaphores that vLLM leaves behind.
    """
    terminal = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _serve(
    pipe: Connection, args: argparse.Namespace, backend: str, variables: dict[str, str]
) -> None:
    """The process of an ``Engine``."""
    os.setpgid(0, 0)  # a group with all processes that vLLM starts, so that one signal reaches them
    with args.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update({**ENVIRONMENT, **os.environ, **variables})
    if on_cpu():  # an engine starts three processes otherwise, each of which imports vLLM
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM

        settings = {"model": args.model, "seed": 0, "disable_log_stats": False}
        settings["dtype"] = args.dtype or default_dtype()
        if on_cpu():  # faster start: an engine warms up with this many tokens
            settings.update(enforce_eager=True, max_num_batched_tokens=1024)
        for name in ("max_model_len", "max_num_seqs", "max_logprobs", "block_size"):
            if getattr(args, name, None) is not None:
                settings[name] = getattr(args, name)
        if backend == OURS:
            settings["attention_backend"] = "PREFIX_SHARE"
        try:
            llm = LLM(**settings)
        except ValueError as e:  # vLLM's own checks of the arguments
            raise PrefixShareError(f"vLLM refused its settings: {e}") from e
        pipe.send(("ready", None))
        while (request := pipe.recv()) is not None:
            pipe.send(("done", _pass(llm, backend, *request)))
        llm.llm_engine.engine_core.shutdown()
    except PrefixShareError as e:
        pipe.send(("refused", " ".join(str(e).split())))
    except EOFError:
        pass  # the example has ended
    except Exception as e:
        traceback.print_exc()
        pipe.send(("failed", f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"))


def default_dtype() -> str:
    """``auto``, or float32 on a CPU that does not multiply bfloat16: the model's matrix products
    take about twice as long in bfloat16 there, and float32 shows that tokens are the same.
    """
    if not on_cpu():
        return "auto"
    from vllm_prefixshare.kernels.cpu.native_executor import processor_flags

    return "auto" if "avx512_bf16" in processor_flags() else "float32"


def note() -> str:
    """Why sharing may gain no time on this CPU: it runs in torch operators, or the baseline has
    AMX; empty on other CPUs, and on GPUs.
    """
    if not on_cpu():
        return ""
    from vllm_prefixshare.config import AttentionConfig
    from vllm_prefixshare.kernels.cpu.executor import cpu_executor
    from vllm_prefixshare.kernels.cpu.native_executor import processor_flags

    notes: list[str] = []
    dtype = "bfloat16" if default_dtype() == "auto" else "float32"
    cpu_executor(AttentionConfig(8, 2, 64, 32, dtype), notes.append)
    if dtype == "bfloat16" and "amx_tile" in processor_flags():
        notes.append(
            "the baseline multiplies in the matrix unit of this processor (AMX), whose KV layout "
            "PREFIX_SHARE cannot read. On a GPU both use tensor cores."
        )
    return " ".join(notes)


def _pass(llm: Any, backend: str, work: Work, args: argparse.Namespace) -> Pass:
    if backend == OURS:
        _host_work(llm.collective_rpc("prefix_share_stats", args=(True,))[0])  # resets them
    before = _latencies(llm)
    with _step_seconds(llm) as steps:
        began = time.perf_counter()
        completions, shown = work(llm, args)
        seconds = time.perf_counter() - began
    total, count = (b - a for a, b in zip(before, _latencies(llm), strict=True))
    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    return Pass(
        tokens=[tuple(c.token_ids) for c in completions],
        gaps=[_gaps(c) for c in completions],
        shown=shown,
        seconds=seconds,
        ms_per_token=total / count * 1e3 if count else None,
        host_seconds=seconds - sum(steps) if steps else None,
        stats=_host_work(llm.collective_rpc("prefix_share_stats")[0]) if backend == OURS else {},
        dtype=dtype,
        note=note() if backend == OURS else "",
    )


@contextlib.contextmanager
def _step_seconds(llm: Any) -> Iterator[list[float]]:
    """A list that gets the duration of each call of the model's executor inside the block, in
    seconds; it stays empty where the engine runs in another process.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    executor, steps = getattr(core, "model_executor", None), list[float]()

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            steps.append(time.perf_counter() - began)
            return result

        return wrapper

    names = ("execute_model", "sample_tokens") if executor else ()
    for name in names:
        setattr(executor, name, timed(getattr(executor, name)))  # for this instance only
    try:
        yield steps
    finally:
        for name in names:
            delattr(executor, name)


def _host_work(stats: dict[str, Any]) -> dict[str, Any]:
    """The worker's counters with this process's own counts of host work on prompts added, which
    start again from zero.
    """
    from vllm_prefixshare import prompt_stats

    for part, counters in prompt_stats(reset=True).items():
        of_worker = stats["prompts"][part]
        for name, value in counters.items():
            of_worker[name] += value
    return stats


def _latencies(llm: Any) -> tuple[float, int]:
    """Sum of the seconds from each token to the next, and the number of such intervals."""
    found = [m for m in llm.get_metrics() if m.name == "vllm:inter_token_latency_seconds"]
    return sum(m.sum for m in found), sum(m.count for m in found)


def _gaps(completion: Any) -> tuple[float, ...]:
    if not isinstance(getattr(completion, "logprobs", None), list):
        return ()
    best = [sorted(x.logprob for x in step.values()) for step in completion.logprobs]
    return tuple(step[-1] - step[-2] for step in best if len(step) > 1)


# ---- both engines in turns


@dataclass(frozen=True)
class Comparison:
    """The passes of the engines. first: one untimed pass of each engine. timed: the timed passes,
    in order.
    """

    first: dict[str, Pass]
    timed: dict[str, list[Pass]]

    @property
    def ours(self) -> Pass:
        """The last pass with PREFIX_SHARE."""
        return (self.timed[OURS] or [self.first[OURS]])[-1]


def compare(
    args: argparse.Namespace, work: Any, start: Callable[[argparse.Namespace, str], Runner] = Engine
) -> Comparison:
    """Run ``work`` with PREFIX_SHARE and, with ``args.compare``, on the baseline engine."""
    backends = [OURS, BASELINE] if args.compare else [OURS]
    if not getattr(args, "base_url", None):
        print(f"starting {' and '.join(backends)}; what vLLM prints goes to {args.log}", flush=True)
    runners: dict[str, Runner] = {}
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(len(backends) * (2 + args.pairs)))
        stack.callback(close_together, runners)
        for backend in backends:
            runners[backend] = start(args, backend)
        for runner in runners.values():
            runner.wait()
            progress.step()
        for runner in runners.values():
            runner.pause()
        return take_turns(runners, args, work, progress)


def close_together(runners: Mapping[str, Runner]) -> None:
    """Close all, each in its thread: an engine takes some seconds to end."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda runner: runner.close(), runners.values()))


def started(
    args: argparse.Namespace,
    backend: str,
    stack: contextlib.ExitStack,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> Engine:
    """An engine that can serve; ``stack`` closes it."""
    engine = Engine(args, backend, environment)
    stack.callback(engine.close)
    engine.wait()
    progress.step()
    return engine


def take_turns(
    runners: dict[str, Runner], args: argparse.Namespace, work: Any, progress: Progress
) -> Comparison:
    """Run a first pass of each engine, then ``args.pairs`` passes in turns, so that other load on
    the machine affects both. The waiting engine is stopped.

    ``args.logprobs`` is 2 in the first pass, for ``SamplingParams`` of greedy examples, and None in
    the timed passes.
    """

    def turn(name: str, logprobs: int | None) -> Pass:
        options = argparse.Namespace(**{**vars(args), "logprobs": logprobs})
        result = runners[name].run(work, options)
        runners[name].pause()
        progress.step()
        return result

    first = {name: turn(name, 2) for name in runners}
    timed: dict[str, list[Pass]] = {name: [] for name in runners}
    for pair in range(args.pairs):
        for name in sorted(runners, reverse=bool(pair % 2)):  # neither engine always runs first
            timed[name].append(turn(name, None))
    return Comparison(first, timed)


# ---- the results


def parted(ours: Pass, baseline: Pass) -> list[float]:
    """For each sequence that differs: the lead of the baseline's token at the first difference, in
    nats; infinite where the lead is not known.
    """
    gaps = []
    for i, (a, b) in enumerate(zip(ours.tokens, baseline.tokens, strict=False)):
        if a != b:
            both = zip(a, b, strict=False)
            place = next((p for p, (x, y) in enumerate(both) if x != y), min(len(a), len(b)))
            known = baseline.gaps[i]
            gaps.append(known[place] if place < len(known) else float("inf"))
    missing = abs(len(ours.tokens) - len(baseline.tokens))
    return gaps + [float("inf")] * missing


def show_gain(found: Comparison) -> int:
    """Print what was read and how long whole calls took.

    Returns:
        exit status: 1 if tokens differ and rounding does not explain it.
    """
    show_reads(found.ours.stats)
    return show_calls(found)


def show_reads(stats: Mapping[str, Any]) -> None:
    """Print the KV tokens that decode read, of ``prefix_share_stats``: counts and no times."""
    print(
        f"\nKV tokens that decode read in each layer, by count: {stats['kv_tokens_read']:,.0f}; "
        f"{stats['kv_tokens_stock']:,.0f} without sharing"
    )


def show_calls(found: Comparison) -> int:
    """Print the whole calls in pairs, and the medians of what they consist of.

    Returns:
        exit status, as ``show_gain``.
    """
    backends = list(found.first)
    calls, ratios = medians(found, lambda result: result.seconds)
    if calls:
        how = ", in pairs that took turns" if ratios else ""
        print(f"\nseconds of whole calls, from text in to text out{how}:")
        print(f"{'':32}{''.join(f'{backend:>14}' for backend in backends)}")
        for i, results in enumerate(zip(*found.timed.values(), strict=True), 1):
            seconds = [f"{result.seconds:.2f}" for result in results]
            _row(f"{'pair' if ratios else 'call'} {i}", seconds, ratios[i - 1 : i])
        _row("median", [f"{calls[b]:.2f}" for b in backends], ratios)
        requests = len(found.ours.tokens)
        _row("answers per second", [f"{requests / calls[b]:.1f}" for b in backends])
        for name, value in (
            ("milliseconds per output token", lambda result: result.ms_per_token),
            ("host milliseconds per request", lambda result: _host_ms(result, requests)),
        ):
            middle, _ = medians(found, value)
            if middle:
                _row(name, [f"{middle[b]:.2f}" if b in middle else "-" for b in backends])
    says, status = same_tokens(found)
    if BASELINE in found.first:
        print(f"{'same tokens':32}{says:>28}")
    show_host_work(found.ours.stats.get("prompts", {}))
    if ratios and statistics.median(ratios) < 1 and found.first[OURS].note:
        print(f"\nsharing gains no time on this machine: {found.first[OURS].note}")
    return status


def _host_ms(result: Pass, requests: int) -> float | None:
    return None if result.host_seconds is None else 1e3 * result.host_seconds / requests


def _row(name: str, cells: Sequence[str], ratios: Sequence[float] = ()) -> None:
    """A line of the table, with the median of ``ratios``: the baseline's time over ours."""
    faster = f"   {statistics.median(ratios):.2f} times as fast" if ratios else ""
    print(f"{name:32}{''.join(f'{cell:>14}' for cell in cells)}{faster}")


def show_host_work(parts: dict[str, dict[str, float]]) -> None:
    """Print what the host did for each prompt in the last pass with PREFIX_SHARE, by part."""
    active = {name: part for name, part in parts.items() if part["requests"]}
    if not active:
        return
    print(f"\nof the host's time per request with {OURS}, and shared with earlier requests:")
    for name, part in active.items():
        shared = part["shared_units"] / max(1, part["units"])
        print(f"  {name:16}{1e3 * part['seconds'] / part['requests']:8.2f} ms{shared:10.0%}")


def medians(
    found: Comparison, value: Callable[[Pass], float | None]
) -> tuple[dict[str, float], list[float]]:
    """The median of each engine of a ``value`` for which smaller is better, and for each pair how
    many times smaller it is with PREFIX_SHARE.
    """
    values = {
        backend: [x for result in results if (x := value(result)) is not None]
        for backend, results in found.timed.items()
    }
    middle = {backend: statistics.median(v) for backend, v in values.items() if v}
    if len(middle) < 2:
        return middle, []
    return middle, [b / a for a, b in zip(values[OURS], values[BASELINE], strict=True)]


def same_tokens(found: Comparison) -> tuple[str, int]:
    """A text that compares the tokens of both engines, and the exit status."""
    if BASELINE not in found.first:
        return "not compared", 0
    ours, baseline = found.first[OURS], found.first[BASELINE]
    gaps = parted(ours, baseline)
    total = len(baseline.tokens)
    if not gaps:
        return f"yes, all {total} sequences", 0
    same = f"{total - len(gaps)} of {total} sequences"
    if max(gaps) <= MAX_GAP[ours.dtype]:
        return f"yes, but for {len(gaps)} ties of {total}", 0
    if ours.dtype != "float32" and max(gaps) == float("inf"):
        return f"{same}; {ours.dtype} rounds", 0  # rounding may change random samples
    return f"NO, {same}", 1


# ---- the prefix tree


def new_trace() -> Path:
    """An empty file for ``args.trace``."""
    handle, name = tempfile.mkstemp(prefix=f"{Path(sys.argv[0]).stem}-", suffix=".jsonl")
    os.close(handle)
    return Path(name)


def print_tree(trace: Path) -> None:
    """Print the prefix tree of the largest batch in ``trace``, and delete ``trace``."""
    from vllm_prefixshare.cli.batches import NULL_BLOCK_ID, read_batch
    from vllm_prefixshare.cli.inspect_plans import forest_lines
    from vllm_prefixshare.planning.sharing import shareable_forest

    batch = read_batch(trace)
    trace.unlink()
    forest = shareable_forest(
        batch.block_table, batch.seq_lens, batch.block_size, null_block_id=NULL_BLOCK_ID
    )
    print(f"\nthe prefix tree of a decode step with {forest.num_reqs} requests:")
    for line in forest_lines(forest, batch.seq_lens):
        print(line)
