"""Bytes that the GPU's memory moves, as its counters have them: layers under Nsight Compute.

``python -m papers.counters LAYERS`` is the program that is counted: each of the layers once, in
their order. ``LAYERS`` is a list of ``Layer`` as JSON.
"""

import csv
import json
import os
import re
import shutil
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

from papers import program
from papers.experiment import Figures

METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
#: the first kernel of every layer, and the one that may follow; others prepare the tensors
FIRST, SECOND = "partial_attention", "merge_states"
MINUTES = 3

#: title of a method; tree, or token trees as ``token_trees`` names them; query heads; KV heads
Layer = tuple[str, str, int, int]


def available() -> bool:
    """Whether Nsight Compute is on the path."""
    return shutil.which("ncu") is not None


@cache
def dram_bytes(layers: tuple[Layer, ...]) -> list[Figures]:
    """Bytes that the kernels of each layer read and write, caches empty before each kernel.

    Returns:
        for each layer ``read`` and ``written``, or ``failed`` with a reason.
    """
    command = [
        *("ncu", "--csv", "--print-units", "base", "--clock-control", "none"),
        *("-k", f"regex:{FIRST}|{SECOND}", "--metrics", ",".join(METRICS)),
        *(sys.executable, "-m", "papers.counters", json.dumps(layers)),
    ]
    folder = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    try:
        done = program.run(command, MINUTES, {"PYTHONPATH": path})
    except TimeoutError as e:
        return [{"failed": str(e)}] * len(layers)
    lines = (done.stderr + done.stdout).splitlines()
    said = [line for line in lines if line.strip() and not line.startswith('"')]
    last = said[-1].strip() if said else "it said nothing"
    try:
        found = parse(done.stdout)
        if done.returncode:
            raise ValueError(f"ncu ended with status {done.returncode}: {last}")
        if len(found) != len(layers):
            raise ValueError(f"ncu counted {len(found)} of {len(layers)} layers: {last}")
    except ValueError as e:
        return [{"failed": str(e)}] * len(layers)
    return found


def parse(text: str) -> list[Figures]:
    """The sums over each layer's kernels, of ncu's table; empty if it has none.

    Raises:
        ValueError: the first kernel is not that of a layer, or a value is no number.
    """
    # what ncu and the program say stands between the table's lines
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    found: list[Figures] = []
    if start is None:
        return found
    for _, of_kernel in groupby(csv.DictReader(lines[start:]), lambda row: row["ID"]):
        rows = list(of_kernel)
        if FIRST in rows[0]["Kernel Name"]:
            found.append(dict.fromkeys(METRICS.values(), 0))
        elif not found:
            raise ValueError(f"ncu lists {rows[0]['Kernel Name']} before any {FIRST}")
        for row in rows:
            if name := METRICS.get(row["Metric Name"]):
                found[-1][name] += round(float(row["Metric Value"].replace(",", "")))
    return found


def main(layers: list[Layer]) -> None:
    import torch
    from bench_kernel import make_case
    from peers import Options

    from papers import methods
    from papers.timing import layer_options
    from papers.token_trees import token_tree
    from vllm_prefixshare.workloads.trees import tree

    by_title = {m.title: m for m in (*methods.COUNTED, methods.PORTABLE)}
    options = Options(torch.device("cuda"), torch.bfloat16, {})
    for (spec, *heads), of_case in groupby(layers, lambda layer: layer[1:]):
        named = re.fullmatch(r"(\d+) tokens x (\d+), context (\d+)", spec)
        w = token_tree(*map(int, named.groups()), None) if named else tree(spec)
        case = make_case(w, tuple(heads), layer_options("cuda", 1))
        for title, *_ in of_case:
            (launch,) = methods.Planned(by_title[title], options).prepare(case)
            launch.call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
