"""Time per output token of an engine, by ``benchmarks.engine`` (FlashForge, figures 1b and 7)."""

from collections.abc import Iterator
from functools import cache
from itertools import groupby

from benchmarks.engine.breakdown import attention_ms
from benchmarks.papers.experiment import Figures, Point, Results, Series, Setting, span
from benchmarks.support import program
from benchmarks.support.prompt_trees import FLASHFORGE
from benchmarks.support.published import table

#: workloads of benchmarks.engine: one document of growing length
WORKLOADS = ("sweep8k", "sweep32k", "sweep64k", "sweep120k")
#: a document of 120k tokens, own tokens and answers, rounded up
MAX_MODEL_LEN = 123_392
#: no batch of these workloads is larger; fewer CUDA graphs are captured
MAX_NUM_SEQS = 64
#: after which the engines hang: all of a run takes about four minutes
MINUTES = 8
ENGINES = ("stock", "PREFIX_SHARE")


@cache
def run_engines(repeats: int, workloads: tuple[str, ...] = WORKLOADS) -> list[Figures]:
    """Rows of ``benchmarks.engine``, in the order of ``workloads``; or ``failed`` with a reason."""
    arguments = [
        *("--start-together", "--breakdown", "--workloads", ",".join(workloads)),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--repeats", str(min(repeats, 2))),
    ]
    result, reason = program.measured("benchmarks.engine", arguments, MINUTES)
    if result is None:
        return [{"failed": reason}] * len(workloads)
    from benchmarks.engine.bench import is_wrong

    found: dict[str, Figures] = {
        name: {"failed": result["left_out"].get(name, reason)} for name in workloads
    }
    for row in result["rows"]:
        found[row["name"]] = {**row, "right": not is_wrong(row["agreement"], result["max_gap"])}
    return list(found.values())


def time_engines(setting: Setting) -> Iterator[Point]:
    if setting.device != "cuda" or setting.tiny:
        return
    for i, name in enumerate(WORKLOADS):
        yield Point(name, lambda i=i: run_engines(setting.repeats)[i])


def time_sweeps(setting: Setting) -> Iterator[Point]:
    """FlashForge's other sweeps; the engines start once for each."""
    if setting.device != "cuda" or setting.tiny:
        return
    for _, names in groupby(FLASHFORGE, lambda name: name.rstrip("0123456789")):
        of_sweep = tuple(names)
        for i, name in enumerate(of_sweep):
            yield Point(name, lambda i=i, of=of_sweep: run_engines(setting.repeats, of)[i])


def from_engine(engine: dict) -> dict:
    """Results of this experiment from those of ``benchmarks.engine``: shared documents only."""
    found = [
        row
        for row in engine["rows"]
        if row["kind"] == "decode" and (row["host"]["share_factor"] or 1) > 1
    ]
    return {
        **engine,
        "device": engine["gpu"],
        "of_points": len(found),
        "points": {row["workload"]: row for row in found},
    }


def beyond(row: Figures, engine: str) -> float:
    """Milliseconds of a step beyond its floor: other work, and reading every KV token once."""
    return max(0.0, row[engine]["ms"] - row["floor_ms"])


def attention_share(row: Figures, engine: str) -> float | None:
    """Attention's part of the GPU time of a profiled decode step; None if there is no profile."""
    found = attention_ms(row, engine)
    return found[0] / found[1] if found else None


def profiled(results: Results) -> bool:
    """Whether a row has a profile: those of a run without ``--breakdown`` have none."""
    return any(row.get("breakdown") for row in results.values())


def engines_sentence(results: Results) -> str:
    ratio = [row["stock"]["ms"] / row["PREFIX_SHARE"]["ms"] for row in results.values()]
    if profiled(results):
        parts = []
        for engine, title in zip(ENGINES, ("stock's", "ours"), strict=True):
            found = [attention_share(row, engine) for row in results.values()]
            known = [share for share in found if share is not None]
            parts.append(f"{title} {min(known):.0%} to {max(known):.0%}")
        return (
            f"time per output token of stock vLLM over ours: {span(ratio)}; attention's part of a "
            f"decode step's GPU time: {' and '.join(parts)}"
        )
    parts = []
    for engine, title in zip(ENGINES, ("stock's", "ours"), strict=True):
        share = [beyond(row, engine) / row[engine]["ms"] for row in results.values()]
        if min(share) > 0:
            parts.append(f"{title} {min(share):.0%} to {max(share):.0%}")
        else:  # a step below its floor: how little it takes is not known
            parts.append(f"{title} at most {max(share):.0%}")
    return (
        f"time per output token of stock vLLM over ours: {span(ratio)}; part of a step that "
        f"attention takes beyond reading every KV token once: {' and '.join(parts)}, by an estimate"
    )


def engines_table(results: Results) -> list[str]:
    return profiled_table(results) if profiled(results) else estimated_table(results)


def profiled_table(results: Results) -> list[str]:
    lines = []
    for row in results.values():
        times = [f"{row[e]['ms']:.2f}" for e in ENGINES]
        ratio = row["stock"]["ms"] / row["PREFIX_SHARE"]["ms"]
        found = [attention_ms(row, engine) for engine in ENGINES]
        parts = [f"{of[0] / of[1]:.0%} ({of[0]:.2f} of {of[1]:.2f})" if of else "-" for of in found]
        lines.append((row["workload"], *times, f"{ratio:.2f}", f"{row['floor_ms']:.2f}", *parts))
    header = "workload | stock | ours | stock / ours | floor"
    return [
        "Milliseconds per output token. Floor: the time of as many requests with hardly any "
        "context in the stock engine, and of reading every KV token once. Attention: the part that "
        "its kernels have in the GPU time of a decode step, and milliseconds of both, by a "
        "profiler in runs that are not timed; the GPU's idle time does not count.",
        "",
        *table(f"{header} | attention, stock | attention, ours", lines),
    ]


def estimated_table(results: Results) -> list[str]:
    lines = []
    for row in results.values():
        both = [f"{row[e]['ms']:.2f} ({beyond(row, e):.2f})" for e in ENGINES]
        ratio = row["stock"]["ms"] / row["PREFIX_SHARE"]["ms"]
        lines.append((row["workload"], *both, f"{row['floor_ms']:.2f}", f"{ratio:.2f}"))
    return [
        "Milliseconds per output token; in brackets what attention takes beyond the floor, which "
        "is the time of as many requests with hardly any context, and of reading every KV token "
        "once. The first is stock's, whose work on the host is in the floor: ours can be below it, "
        "which is shown as 0.00.",
        "",
        *table("workload | stock | ours | floor | stock / ours", lines),
    ]


def engines_series(results: Results) -> Series:
    values = {
        row["workload"]: {
            "ours": row["PREFIX_SHARE"]["ms"],
            "stock": row["stock"]["ms"],
            "floor": row["floor_ms"],
        }
        for row in results.values()
    }
    return Series("milliseconds per output token", values)
