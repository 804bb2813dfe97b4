"""Bytes that the GPU's memory moves, as its counters have them: one layer under Nsight Compute.

``python -m papers.counters TITLE TREE HEADS`` is the program that is counted: the layer once.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

from papers.experiment import Figures

METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
#: of the kernels of this project; others prepare the tensors
KERNELS = "regex:partial_attention|merge_states"
MINUTES = 3


def dram_bytes(title: str, spec: str, heads: tuple[int, int]) -> Figures:
    """Bytes read and written by the kernels of one layer, caches empty before each kernel.

    Returns:
        ``read`` and ``written``, or ``failed`` with a reason.
    """
    shape = f"{heads[0]}:{heads[1]}"
    command = [
        *("ncu", "--csv", "--print-units", "base", "--clock-control", "none", "-k", KERNELS),
        *("--metrics", ",".join(METRICS), sys.executable, "-m", "papers.counters"),
        *(title, spec, shape),
    ]
    folder = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"ncu took more than {MINUTES} minutes"}
    found = parse(done.stdout)
    if not found:
        said = (done.stderr + done.stdout).strip().splitlines()
        return {"failed": said[-1] if said else "ncu said nothing"}
    return found


def parse(text: str) -> dict[str, int]:
    """The sums over all kernels of ncu's table; empty if it has none."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    total: dict[str, int] = {}
    if start is None:
        return total
    for row in csv.DictReader(lines[start:]):
        name = METRICS.get(row.get("Metric Name") or "")
        if name:
            total[name] = total.get(name, 0) + round(float(row["Metric Value"].replace(",", "")))
    return total


def main(title: str, spec: str, shape: str) -> None:
    import torch
    from bench_kernel import make_case
    from peers import Options

    from papers import methods
    from papers.timing import layer_options
    from vllm_prefixshare.workloads.trees import tree

    method = {m.title: m for m in (methods.OURS, methods.FLASH_DECODING)}[title]
    first, second = shape.split(":")
    options = Options(torch.device("cuda"), torch.bfloat16, {})
    case = make_case(tree(spec), (int(first), int(second)), layer_options("cuda", 1))
    (launch,) = methods.Planned(method, options).prepare(case)
    launch.call()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
