"""Bytes that the GPU's memory moves and how busy the GPU is, as its counters have them: layers
under Nsight Compute.

``python -m benchmarks.papers.counters LAYERS`` is the program that is counted: each
of the layers once, in their order. ``LAYERS`` is a list of ``Layer`` as JSON.
"""

import csv
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import groupby

from benchmarks.papers.experiment import Figures
from benchmarks.support import program

BYTES = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
#: a kernel's time, and percentages of what the multiprocessors and the memory could do in it: those
#: that Nsight Compute calls SM and DRAM throughput
USE = {
    "gpu__time_duration.sum": "time",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
}
#: the first kernel of every layer, and the one that may follow; others prepare the tensors
FIRST, SECOND = "partial_attention", "merge_states"
MINUTES = 4

#: title of a method; tree, or FlashForge's workloads and token trees by their names; query heads;
#: KV heads
Layer = tuple[str, str, int, int]
#: values of a kernel's metrics
Kernel = dict[str, float]


def available() -> bool:
    """Whether Nsight Compute is on the path."""
    return shutil.which("ncu") is not None


@cache
def dram_bytes(layers: tuple[Layer, ...]) -> list[Figures]:
    """Bytes that the kernels of each layer read and write, caches empty before each kernel.

    Returns:
        for each layer ``read`` and ``written``, or ``failed`` with a reason.
    """
    found = []
    for kernels in count(layers, BYTES):
        if isinstance(kernels, dict):
            found.append(kernels)
        else:
            found.append({n: round(sum(k[n] for k in kernels)) for n in BYTES.values()})
    return found


@cache
def use(layers: tuple[Layer, ...]) -> list[Figures]:
    """How busy the GPU is in each layer, the mean over the time of its kernels; caches are empty
    before each kernel.

    Returns:
        for each layer ``compute`` and ``memory`` in percent, or ``failed`` with a reason.
    """
    found = []
    for kernels in count(layers, USE):
        if isinstance(kernels, dict):
            found.append(kernels)
            continue
        total = sum(k["time"] for k in kernels)
        shares = {n: sum(k[n] * k["time"] for k in kernels) for n in ("compute", "memory")}
        found.append({n: share / total for n, share in shares.items()})
    return found


def of_methods(
    figures: Callable[[tuple[Layer, ...]], list[Figures]],
    layers: tuple[Layer, ...],
    titles: Iterable[str],
    tree: str,
    heads: tuple[int, int],
) -> Figures:
    """What ``dram_bytes`` or ``use`` counts for each method on one tree of ``layers``; ``failed``
    with a reason if it failed for one.
    """
    counted = dict(zip(layers, figures(layers), strict=True))
    found = {title: counted[(title, tree, *heads)] for title in titles}
    return next((f for f in found.values() if "failed" in f), found)


def count(layers: tuple[Layer, ...], metrics: dict[str, str]) -> list[list[Kernel] | Figures]:
    """Run each layer once under Nsight Compute.

    Returns:
        for each layer its kernels, or ``failed`` with a reason.
    """
    command = [
        *("ncu", "--csv", "--print-units", "base", "--clock-control", "none"),
        *("-k", f"regex:{FIRST}|{SECOND}", "--metrics", ",".join(metrics)),
        *program.module_command("benchmarks.papers.counters", json.dumps(layers)),
    ]
    try:
        done = program.run(command, MINUTES)
    except TimeoutError as e:
        return [{"failed": str(e)}] * len(layers)
    lines = (done.stderr + done.stdout).splitlines()
    said = [line for line in lines if line.strip() and not line.startswith('"')]
    last = said[-1].strip() if said else "it said nothing"
    try:
        found = parse(done.stdout, metrics)
        if done.returncode:
            raise ValueError(f"ncu ended with status {done.returncode}: {last}")
        if len(found) != len(layers):
            raise ValueError(f"ncu counted {len(found)} of {len(layers)} layers: {last}")
    except ValueError as e:
        return [{"failed": str(e)}] * len(layers)
    return [*found]


def parse(text: str, metrics: dict[str, str]) -> list[list[Kernel]]:
    """Each layer's kernels in ncu's table, with their values of ``metrics``; empty if it has none.

    Raises:
        ValueError: the first kernel is not that of a layer, a metric is missing, or a value is no
            number.
    """
    # what ncu and the program say stands between the table's lines
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    found: list[list[Kernel]] = []
    if start is None:
        return found
    for _, of_kernel in groupby(csv.DictReader(lines[start:]), lambda row: row["ID"]):
        rows = list(of_kernel)
        if FIRST in rows[0]["Kernel Name"]:
            found.append([])
        elif not found:
            raise ValueError(f"ncu lists {rows[0]['Kernel Name']} before any {FIRST}")
        values = {
            metrics[row["Metric Name"]]: float(row["Metric Value"].replace(",", ""))
            for row in rows
            if row["Metric Name"] in metrics
        }
        if missing := [metric for metric, name in metrics.items() if name not in values]:
            raise ValueError(f"ncu has no {missing[0]} of {rows[0]['Kernel Name']}")
        found[-1].append(values)
    return found


def main(layers: list[Layer]) -> None:
    import torch

    from benchmarks.kernel.bench import make_case
    from benchmarks.papers import methods
    from benchmarks.papers.timing import layer_options
    from benchmarks.papers.token_trees import token_tree
    from benchmarks.peers import Options
    from benchmarks.support.trees import tree
    from benchmarks.support.workload_sets import flashforge

    by_title = {m.title: m for m in (*methods.COUNTED, *methods.OF_TOKEN_TREES)}
    by_name = {w.name: w for w in flashforge(16)}
    options = Options(torch.device("cuda"), torch.bfloat16, {})
    for (spec, *heads), of_case in groupby(layers, lambda layer: layer[1:]):
        named = re.fullmatch(r"(\d+) tokens x (\d+), context (\d+)", spec)
        if named:
            w = token_tree(*map(int, named.groups()), None)
        else:
            w = by_name[spec] if spec in by_name else tree(spec)
        case = make_case(w, tuple(heads), layer_options("cuda", 1))
        for title, *_ in of_case:
            (launch,) = methods.Planned(by_title[title], options).prepare(case)
            launch.call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
