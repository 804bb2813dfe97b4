"""Tables of fidelity, of accuracy with a real model, and of long runs."""

from benchmarks.quality.accuracy import share_interval
from benchmarks.support import published
from benchmarks.support.published import Result, table, versions

#: title of a column of the accuracy table -> file and backend of its results
ACCURACY = (
    ("CPU, CPU_ATTN", "fidelity_cpu", "stock"),
    ("CPU, PREFIX_SHARE", "fidelity_cpu", "PREFIX_SHARE"),
    ("CPU, float32, CPU_ATTN", "fidelity_cpu_float32", "stock"),
    ("CPU, float32, PREFIX_SHARE", "fidelity_cpu_float32", "PREFIX_SHARE"),
    ("GPU, FLASH_ATTN", "fidelity_gpu", "FLASH_ATTN"),
    ("GPU, TRITON_ATTN", "fidelity_gpu", "TRITON_ATTN"),
    ("GPU, PREFIX_SHARE", "fidelity_gpu", "PREFIX_SHARE"),
)
SOAKS = (
    "soak_engine", "soak_lora", "soak_server",
    "soak_engine_gpu", "soak_engine_gpu_shared", "soak_server_gpu", "soak_server_gpu_long",
    "soak_server_gpu_shared", "soak_server_gpu_default",
)  # fmt: skip


def interval(of: list[float], form: str) -> str:
    """A value and its interval."""
    value, low, high = (format(x, form) for x in of)
    return f"{value} ({low} to {high})"


def share(count: int, of: int) -> str:
    """A part of a number, and its interval."""
    return f"{interval(share_interval(count, of), '.0%')} of {of}"


def accuracy_table(_: Result) -> str:
    """One column per backend: the results of ``fidelity.py`` with a real model."""
    lines = {
        "greedy tokens before the text diverges from the baseline's": lambda r: (
            f"{interval(r['agreement'], '.1%')} of {r['greedy_tokens']}"
        ),
        "mean difference of log-probabilities from the baseline's, nats": lambda r: interval(
            r["difference"], ".2g"
        ),
        "largest": lambda r: f"{r['largest_difference']:.2g} of {r['forced_tokens']} tokens",
        "perplexity of the given text": lambda r: interval(r["perplexity"], ".3f"),
        "questions answered right": lambda r: f"{interval(r['right'], '.0%')} of {r['questions']}",
        "copies of a prompt answered right (#22103)": lambda r: share(
            r["copies_right"], r["copies"]
        ),
        "copies answered as the baseline answers a single one": lambda r: share(
            r["copies_same"], r["copies"]
        ),
        "sampled tokens: mean ratio": lambda r: interval(r["sampled"]["ratio"], ".7g"),
        "smallest and largest ratio": lambda r: (
            f"{r['sampled']['smallest_ratio']:.5g}, {r['sampled']['largest_ratio']:.5g} of "
            f"{r['sampled']['tokens']} tokens"
        ),
        "k1": lambda r: interval(r["sampled"]["k1"], ".2g"),
        "k3": lambda r: interval(r["sampled"]["k3"], ".2g"),
    }
    names = dict.fromkeys(name for _, name, _ in ACCURACY)
    runs = {name: published.load(name) for name in names if published.exists(name)}
    found = []
    for _, name, backend in ACCURACY:
        rows = runs[name].get("accuracy", ()) if name in runs else ()
        found.append(next((row for row in rows if row["backend"] == backend), None))
    how = (
        f"{run['device']}, {run['dtype']}; {versions(run)}; {next(iter(run['counters']))}. "
        f"`{run['command']}`\n"
        for run in runs.values()
    )
    header = f" | {' | '.join(title for title, *_ in ACCURACY)}"
    rows = (
        (what, *(text(row) if row else "not run" for row in found)) for what, text in lines.items()
    )
    return "\n".join([*how, *table(header, rows)])


def grown(row: Result, gpu: bool) -> str:
    """By how much memory, open files and a GPU's memory grew in the later part of a run."""
    if row["grown_bytes"] is None:
        return "too short to say"
    said = f"{row['grown_bytes'] / 2**20:+.1f} MiB, {row['grown_files']:+d}"
    if gpu:
        said += f", {row['grown_device_bytes'] / 2**20:+.1f} MiB"
    return said + (f" in {row['grown_seconds']:.0f} s" if "grown_seconds" in row else "")


def soak_table(_: Result) -> str:
    """One line per variant of the engine, and the server: what was tried, and what failed."""
    commands, rows = [], []
    for name in filter(published.exists, SOAKS):
        result = published.load(name)
        on_gpu = result["device"].startswith("NVIDIA")
        note = f", {result['note']}" if "note" in result else ""
        commands.append(f"`{result['command']}`: {result['device']}{note}.\n")
        for row in result["rows"]:
            tried, compared = of_server(row) if "asked" in row else of_engine(row)
            rows.append(
                (
                    row["variant"] + " on a GPU" * on_gpu,
                    tried,
                    compared,
                    len(row["wrong"]),
                    grown(row, on_gpu),
                    f"{row['seconds'] / 60:.1f}",
                )
            )
    header = (
        "what | tried | compared with single requests of the baseline | failed "
        "| grown: memory, files, GPU memory | minutes"
    )
    return "\n".join([*commands, *table(header, rows)])


def of_server(row: Result) -> tuple[str, str]:
    """What a run of a server tried, and what was compared."""
    tried = f"{row['requests']} requests: " + ", ".join(
        f"{count} {kind}" for kind, count in sorted(row["asked"].items())
    )
    if "steps" in row:
        tried += f"; {row['steps']} decode steps, of which {row['shared_steps']} shared KV"
    compared = f"statuses of {len(row['statuses'])} kinds of invalid requests"
    if row["stock_statuses"] is None:
        compared = f"{compared}: none of 500 or more, baseline not queried"
    return tried, compared


def of_engine(row: Result) -> tuple[str, str]:
    """What a run of an engine tried, and what was compared."""
    tried = (
        f"{row['requests']} requests, {row['steps']} steps, of which {row['shared_steps']} shared "
        f"KV, {row['preemptions']} pre-emptions, {row['aborted']} answers aborted"
    )
    compared = f"{row['equal']} of {row['greedy']} greedy answers equal, {row['ties']} diverge at "
    compared += "a tie"
    if row.get("compared"):
        mean = row["total_error"] / row["compared"]
        compared += (
            f"; log-probabilities of {row['compared']} tokens: {mean:.2g} nats apart in the mean, "
            f"{row['largest_error']:.2g} at most"
        )
    return tried, compared
