"""Tables of ``benchmarks.whole_call``, from its JSON to Markdown."""

from typing import Any

Result = dict[str, Any]


def table(result: Result) -> str:
    """Rows by workloads: the measured time, and how many times faster than the baseline."""
    names = list(result["rows"])
    baseline = result["baseline"]
    lines = [
        f"| call | {' | '.join(f'`{name}`' for name in names)} |",
        "|" + "---|" * (1 + len(names)),
    ]
    for workload in result["workloads"]:
        entries = {n: result["rows"][n]["workloads"].get(workload["name"]) for n in names}
        if not any(entries.values()):
            continue
        reference = entries.get(baseline)
        cells = [_cell(entry, reference) for entry in entries.values()]
        lines.append(f"| {workload['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(entry: Result | None, reference: Result | None) -> str:
    if entry is None:
        return "-"
    unit, factor = ("ms", 1e3) if entry["per_request"] else ("s", 1)
    value = f"{entry['seconds'] * factor:.3g} {unit}"
    if reference is None or entry is reference:
        return value
    return f"{value} ({reference['seconds'] / entry['seconds']:.2f})"


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


def server_table(result: Result) -> str:
    """Figures of ``vllm serve``, a line for each load and row; empty without any."""
    lines = [
        f"| load | row | {' | '.join(column[1] for column in SERVER_COLUMNS)} |",
        "|" + "---|" * (2 + len(SERVER_COLUMNS)),
    ]
    for workload in result["workloads"]:
        for name, row in result["rows"].items():
            entry = row["workloads"].get(workload["name"])
            if entry and "requests_per_second" in entry:
                cells = [format(entry[key] * by, form) for key, _, by, form in SERVER_COLUMNS]
                lines.append(f"| {workload['title']} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def parts_table(result: Result) -> str:
    """Host time per request by part of VLLM_PREFIXSHARE_PROMPTS; empty where it was not measured.
    ``all`` includes what belongs to no part.
    """
    lines = []
    for workload in result["workloads"]:
        for name, row in result["rows"].items():
            entry = row["workloads"].get(workload["name"]) or {}
            if parts := entry.get("part_seconds"):
                if not lines:
                    lines = [f"| ms | row | all | {' | '.join(parts)} |"]
                    lines.append("|" + "---|" * (3 + len(parts)))
                cells = [f"{1e3 * value:.2f}" for value in (entry["seconds"], *parts.values())]
                lines.append(f"| {workload['title']} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison_table(result: Result) -> str:
    """Shares of equal answers: with the baseline, and with the first row of the same backend."""
    names = [name for name in result["rows"] if name != result["baseline"]]
    lines = [
        f"| answers with equal tokens | {' | '.join(f'`{name}`' for name in names)} |",
        "|" + "---|" * (1 + len(names)),
    ]
    for workload in result["workloads"]:
        found = [result["rows"][n]["workloads"].get(workload["name"], {}) for n in names]
        cells = [_shares(entry) for entry in found]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {workload['title']} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


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
