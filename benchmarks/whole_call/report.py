"""Tables of ``benchmarks.whole_call``, from its JSON to Markdown."""

from collections.abc import Iterator
from typing import Any

from benchmarks.support import published
from benchmarks.support.charts import Chart
from benchmarks.support.published import table as markdown
from benchmarks.support.published import versions

Result = dict[str, Any]

#: Figures of a server's load: key, heading, factor, format.
SERVER_COLUMNS = (
    ("requests_per_second", "requests/s", 1, ".1f"),
    ("latency_p50", "latency p50, s", 1, ".2f"),
    ("latency_p99", "p99", 1, ".2f"),
    ("first_token_p50", "first token p50, s", 1, ".2f"),
    ("first_token_p99", "p99", 1, ".2f"),
    ("between_tokens_p50", "between tokens p50, ms", 1e3, ".1f"),
    ("between_tokens_p99", "p99", 1e3, ".1f"),
)
#: Name of each method in the chart of README.md, in the order of the bars.
METHODS = {
    "flash_attn": "vLLM, FLASH_ATTN",
    "flash_attn_prompts": "FLASH_ATTN + shared host work",
    "prefix_share": "PREFIX_SHARE",
}
#: Calls of the chart. Two larger ones, which gain more, would need another scale.
CALLS = ("cached", "cold", "token_ids", "chat", "multi_turn", "agents", "beams4", "unshared")


def table(result: Result) -> str:
    """Rows by workloads: the measured time, and how many times faster than the baseline. The loads
    of the server have a separate table.
    """
    names = list(result["rows"])
    rows = []
    for workload in result["workloads"]:
        entries = {n: result["rows"][n]["workloads"].get(workload["name"]) for n in names}
        if any(entry and "requests_per_second" not in entry for entry in entries.values()):
            reference = entries.get(result["baseline"])
            cells = (_cell(entry, reference) for entry in entries.values())
            rows.append((workload["title"], *cells))
    return "\n".join(markdown(f"call | {quoted(names)}", rows))


def quoted(names: list[str]) -> str:
    return " | ".join(f"`{name}`" for name in names)


def _cell(entry: Result | None, reference: Result | None) -> str:
    if entry is None:
        return "-"
    unit, factor = ("ms", 1e3) if entry["per_request"] else ("s", 1)
    value = f"{entry['seconds'] * factor:.3g} {unit}"
    if reference is None or entry is reference:
        return value
    return f"{value} ({reference['seconds'] / entry['seconds']:.2f})"


def entries_of(result: Result) -> Iterator[tuple[str, str, Result]]:
    """Title of the workload, name of the row, and figures of every measurement."""
    for workload in result["workloads"]:
        for name, row in result["rows"].items():
            if entry := row["workloads"].get(workload["name"]):
                yield workload["title"], name, entry


def server_table(result: Result) -> str:
    """Figures of ``vllm serve``, a line for each load and row; empty without any."""
    rows = [
        (
            title,
            f"`{name}`",
            *(format(entry[key] * factor, form) for key, _, factor, form in SERVER_COLUMNS),
        )
        for title, name, entry in entries_of(result)
        if "requests_per_second" in entry
    ]
    header = f"load | row | {' | '.join(column[1] for column in SERVER_COLUMNS)}"
    return "\n".join(markdown(header, rows)) if rows else ""


def parts_table(result: Result) -> str:
    """Host time per request by part of VLLM_PREFIXSHARE_PROMPTS; empty where it was not measured.
    ``all`` includes what belongs to no part.
    """
    found = [x for x in entries_of(result) if x[2].get("part_seconds")]
    if not found:
        return ""
    rows = (
        (
            title,
            f"`{name}`",
            *(f"{1e3 * x:.2f}" for x in (entry["seconds"], *entry["part_seconds"].values())),
        )
        for title, name, entry in found
    )
    header = f"ms | row | all | {' | '.join(found[0][2]['part_seconds'])}"
    return "\n".join(markdown(header, rows))


def comparison_table(result: Result) -> str:
    """Shares of equal answers: with the baseline, and with the first row of the same backend."""
    names = [name for name in result["rows"] if name != result["baseline"]]
    rows = []
    for workload in result["workloads"]:
        found = (result["rows"][n]["workloads"].get(workload["name"], {}) for n in names)
        cells = [_shares(entry) for entry in found]
        if any(cell != "-" for cell in cells):
            rows.append((workload["title"], *cells))
    header = f"answers with equal tokens | {quoted(names)}"
    return "\n".join(markdown(header, rows)) if rows else ""


def _shares(entry: Result) -> str:
    compared = [entry[key] for key in ("baseline", "same_backend") if entry.get(key)]
    return ", ".join(f"{c['same_answers']:.0%}" for c in compared) or "-"


def faults(result: Result) -> list[str]:
    """Everything that differs and must not, and rows that failed, in words."""
    found = []
    for name, row in result["rows"].items():
        for workload, entry in row["workloads"].items():
            for key in ("baseline", "same_backend"):
                compared = entry.get(key) or {"faults": []}
                found += [f"{name}, {workload}, {key}: {fault}" for fault in compared["faults"]]
        found += [f"{name}, {what}: {why}" for what, why in row["failed"].items()]
    return found


# -- of the published run


def whole_call_table(result: Result) -> str:
    """Seconds of a user's call, a line for each workload and a column for each configuration."""
    return (
        f"{result['device']}; {result['model']}; {versions(result)}. In brackets: times as fast as "
        f"`{result['baseline']}`. [Command, and equal answers]"
        "(../benchmarks/published/whole_call.md).\n\n"
        f"{table(result)}"
    )


def call_chart() -> Chart:
    """Milliseconds of complete calls, one bar for each method."""
    result = published.load("whole_call")
    titles = {w["name"]: w["title"].replace("`", "") for w in result["workloads"]}
    rows = {name: result["rows"][method]["workloads"] for method, name in METHODS.items()}
    return Chart(
        "Milliseconds of complete calls, vLLM's default backend and PREFIX_SHARE",
        "milliseconds of the whole call (shorter is faster)",
        {
            titles[call]: {name: row[call]["seconds"] * 1e3 for name, row in rows.items()}
            for call in CALLS
        },
    )


def chart_configuration(result: Result) -> str:
    """The configuration under the chart of whole calls."""
    found = result["versions"]
    tokens = [d["tokens"] / 1e3 for d in result["documents"]]
    return (
        f"From prompt texts to answer texts of {result['tokens']} tokens on one "
        f"{result['device'].split(' x')[0]}; {result['model']}; vLLM {found['vllm']}, torch "
        f"{found['torch']}. The single document has {tokens[0]:.0f}k tokens. [Every call, the "
        "command](benchmarks/published/whole_call.md), and [how it works](docs/whole-call.md)."
    )


def whole_call_how(result: Result) -> str:
    """Machine, model and command of a whole-call run, and the rows that it leaves out."""
    left_out = "".join(f" `{row}` left out: {why}." for row, why in result["left_out"].items())
    repeats = result["repeats"]
    runs = f"median of {repeats} runs" if repeats > 1 else "one run after a first one"
    return (
        f"{result['device']}; {result['model']}; {versions(result)}. `{result['command']}`: "
        f"{runs}.{left_out}"
    )


def how_and_calls(result: Result) -> str:
    """How a run was measured, and its calls."""
    return f"{whole_call_how(result)}\n\n{table(result)}"


def equal_answers(result: Result) -> str:
    """The table of equal answers, and what to expect of it."""
    return (
        "Of random weights the first two tokens are often less apart than rounding, after which "
        "answers differ; requests that run in other batches are rounded otherwise, with any "
        "backend. `tests/gpu` compares log-probabilities.\n\n"
        f"{comparison_table(result)}"
    )


def host_table(result: Result) -> str:
    """Host time per request, with the address of its run, and what it is on a quiet machine."""
    quiet = published.load("whole_call_host_cpu")
    before, after = (
        f"{quiet['rows'][name]['workloads']['host']['seconds'] * 1e3:.3g}"
        for name in (quiet["baseline"], "prefix_share")
    )
    return (
        f"Next to an H200, of which another engine used the host as well; {result['model']}. "
        "[Command](../benchmarks/published/whole_call.md#how-host-time-was-measured).\n\n"
        f"{parts_table(result)}\n\n"
        f"Alone on a CPU with {quiet['host_cores']} cores, 64 questions take {after} ms per "
        f"request instead of {before} ([all figures]"
        "(../benchmarks/published/whole_call.md#host-time-on-one-cpu))."
    )
